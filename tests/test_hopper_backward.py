"""When Hopper's backward runs, what it is made of, and what `source` shows of it."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen import emit, look, masks
from flashgen.backends import Choice
from flashgen.decoding import Kernel
from flashgen.emit.hopper_backward import hopper_backward, stages_of, width_of
from flashgen.kernel_names import spell
from flashgen.launch.hopper_backward import obstacle

HALF = torch.bfloat16


@fg.attention(mask=masks.causal)
def constant(score, q_idx, bias: fg.Tensor):
    return bias[q_idx]


@fg.attention(mask=masks.causal)
def alibi(score, h, q_idx, kv_idx, slope: fg.Tensor):
    return score + slope[h] * (kv_idx - q_idx)


def call_of(attend: Any, head_dim: int = 64, **data: torch.Tensor) -> Any:
    q = torch.empty(2, 2, 40, head_dim, dtype=HALF)
    return attend._check_look(q, q, q, data)


def reason(attend: Any = None, dims: tuple[int, int] = (128, 64), **changes: Any) -> str:
    data = changes.pop("data", {})
    call = call_of(attend or fg.Attention(masks.causal), **data)
    given: dict[str, Any] = {
        "bound": call.bound, "geometry": call.geometry, "head_dims": dims, "dtype": HALF,
        "block_size": (128, 128),
        "scale": 0.1,
    }  # fmt: skip
    return obstacle(**(given | changes))


def test_nothing_is_in_the_way_of_plain_calls() -> None:
    assert reason() == ""
    assert reason(dims=(40, 96), dtype=torch.float16, block_size=(256, 128)) == ""
    assert reason(dims=(192, 128), block_size=(128, 64)) == ""
    assert reason(alibi, data={"slope": torch.ones(2)}, scale=-1.0) == ""


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dropout": True}, "drops"),
        ({"dtype": torch.float32}, "16-bit"),
        ({"dims": (264, 128)}, "264"),
        ({"block_size": (128, 64)}, "128 x 64"),
        ({"dims": (192, 128), "block_size": (128, 32)}, "128 x 32"),
        ({"block_size": (96, 128)}, "96 x 128"),
        ({"dims": (64, 60)}, "16 bytes"),
        ({"scale": 0.0}, "scale"),
        ({"attend": constant, "data": {"bias": torch.zeros(40)}}, "ignores the score"),
    ],
)
def test_what_is_in_the_way(changes: dict[str, Any], why: str) -> None:
    assert why in reason(**changes)


@fg.attention(mask=masks.document)
def shifted(score, b, q_idx, doc: fg.Tensor, gate: fg.Tensor):
    return score * gate[q_idx]


def test_room_for_data_of_queries() -> None:
    doc = torch.zeros(2, 40, dtype=torch.int64)
    attend, data = fg.Attention(mask=masks.document), {"doc": doc}
    assert reason(attend, dims=(256, 256), data=data) == ""
    data["gate"] = torch.ones(40)
    assert "12 bytes" in reason(shifted, dims=(256, 192), data=data)
    assert reason(shifted, dims=(192, 128), data=data) == ""


def test_packed_sequences() -> None:
    q = torch.empty(40, 2, 64, dtype=HALF)
    ends = torch.tensor([0, 30, 40], dtype=torch.int32)
    lens = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    packed = fg.Attention(masks.causal)._check_look(q, q, q, dict(lens))
    given = {"bound": packed.bound, "geometry": packed.geometry}
    assert not reason(**given)
    assert not reason(**given, block_size=(128, 256))
    assert not reason(**given, head_dims=(192, 128))
    text = look.source(packed, Choice("hopper", "asked for"), Kernel("forward", ""))
    for kernel in ("attend", "repair_rows", "queue"):
        assert f"def {kernel}(" in text


def test_steps_of_small_head_dimensions_are_loaded_further_ahead() -> None:
    assert [width_of(d) for d in (1, 64, 65, 128, 129)] == [64, 64, 128, 128, 256]
    assert [stages_of(*d) for d in ((64, 64), (64, 65), (128, 40))] == [4, 2, 2]


def test_source_shows_the_kernels_that_run() -> None:
    on_hopper, kernel = Choice("hopper", "asked for"), Kernel("forward", "")
    text = look.source(call_of(fg.Attention(masks.causal)), on_hopper, kernel)
    assert "def attend(" in text
    assert "spoilt_ptr" in text, "portable kernels repair what isn't finite"
    wide = look.source(call_of(fg.Attention(masks.causal), 192), on_hopper, kernel)
    assert "def attend(" not in wide
    assert "def pull(" in wide
    assert "spoilt_ptr" in wide


@fg.attention(mask=masks.causal)
def tilted(score, h, q_idx, kv_idx, slope: fg.Tensor, table: fg.Tensor):
    return score + slope[h] * (kv_idx - q_idx) + table[q_idx - kv_idx]


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_of_data_are_told_apart(packed: bool) -> None:
    """By whether they are wanted, and by which kernels compute them."""
    on_hopper, kernel = Choice("hopper", "asked for"), Kernel("forward", "")
    q, places = torch.empty(1, 2, 40, 128, dtype=HALF), {}
    if packed:
        q = torch.empty(40, 2, 128, dtype=HALF)
        ends = torch.tensor([0, 40], dtype=torch.int32)
        places = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}

    def told(**learned: bool) -> tuple[str, str]:
        slope, table = (torch.ones(n, requires_grad=learned.get(x, False))
                        for n, x in ((2, "slope"), (40, "table")))  # fmt: skip
        call = tilted._check_look(q, q, q, {**places, "slope": slope, "table": table})
        schedule = fg.Attention(masks.causal).schedule(q, q, q, **places, block_size=128)
        page = look.explain(call, schedule, on_hopper, kernel)
        return page, look.source(call, on_hopper, kernel)

    page, source = told()
    assert "backward: hopper" in page
    assert "gradients of" not in page
    assert "grad_slope_ptr" not in source
    page, source = told(slope=True)
    assert "gradients of slope: with them" in page
    assert source.count("def attention_backward_kv(") == 1
    assert "grad_slope_ptr" in source
    page, source = told(slope=True, table=True)
    assert "grad_table__ptr" in source
    if packed:
        assert "backward: portable; portable kernels compute gradients of packed" in page
        assert "data (table)" in page
        assert "def attend(" not in source
    else:
        assert "gradients of slope: with them" in page
        assert "gradients of table: portable" in page
        assert "def attend(" in source


def test_masks_alone_are_looked_at_in_masked_steps_only() -> None:
    """A changed score is computed in every step, with its slope; a mask's test behind a branch."""
    call = call_of(alibi, slope=torch.ones(2))
    variant = emit.Variant(64, 64)
    text = hopper_backward(call.bound.spec, variant).text
    assert "slopes" not in text, "the slope of an added bias is 1"
    capped = fg.Attention(masks.causal, softcap=5.0)
    assert "slopes" in hopper_backward(call_of(capped).bound.spec, variant).text
    loop = text[text.index("for turn in range(past, end - 1):") :]
    before, _, after = loop.partition("if turn + 1 < masked_end:")
    assert "kv_idx <= q_idx" not in before
    assert "kv_idx <= q_idx" in after


@fg.mask
def visible(b, q_idx, kv_idx, doc: fg.Tensor, doc_row: fg.Tensor, lit: fg.Tensor):
    return (doc[b, q_idx] == doc_row[kv_idx]) & lit[doc_row[q_idx]] & (kv_idx <= q_idx)


@fg.attention(mask=visible)
def gated(score, q_idx, gate: fg.Tensor):
    return score * gate[q_idx]


def test_what_is_read_of_queries_comes_through_shared_memory() -> None:
    data = {
        "doc": torch.zeros(2, 40, dtype=torch.int64),
        "doc_row": torch.zeros(40, dtype=torch.int32),
        "lit": torch.ones(40, dtype=torch.bool),
        "gate": torch.ones(40, dtype=HALF),
    }
    text = hopper_backward(spell(call_of(gated, **data).bound).spec, emit.Variant(64, 64)).text
    loading, computing = text.split("def attend(")
    stored = re.findall(r"(\w+)_tiles\.index\(stage\)\.store\((\w+)\)", loading)
    assert [name for name, _ in stored] == ["gate_q", "doc_q", "lit_q"]
    for name, loaded in stored:
        assert re.search(rf"{loaded} = gl.load\({name.removesuffix('_q')}_(ptr|row)", loading)
        dtype = f"{name.removesuffix('_q')}_ptr.dtype.element_ty"
        assert re.search(rf"{name}_tiles = gl.allocate_shared_memory\(\s*{dtype}", computing)
    # What it makes of them is made where it is read, and nothing of a query is loaded there: of
    # keys, where the next block begins.
    assert "lit_q = lit_q_tiles.index(coming).load(QUERIES)[None, :] != 0" in computing
    loop = computing[computing.index("for turn in range(past, end - 1):") :]
    loop, _, last = loop[: loop.index("def attention_backward(")].partition("turn = end - 1")
    assert "gl.load(" not in loop
    assert last.count("gl.load(") == 1


def copies(node: ast.AST) -> set[tuple[str, str]]:
    """(name, name it is set to) of plain assignments below a node."""
    return {
        (found.targets[0].id, found.value.id)
        for found in ast.walk(node)
        if isinstance(found, ast.Assign)
        and isinstance(found.targets[0], ast.Name)
        and isinstance(found.value, ast.Name)
    }


@pytest.mark.parametrize("head_dim", [128, 192])
def test_what_loops_carry_has_values_of_its_own_before_them(head_dim: int) -> None:
    """Triton takes a name for constant that a loop sets to another, if it was that before: dQ went
    to the rows of the first step, in what a GPU ran and not in what a CPU walked."""
    spec = call_of(fg.Attention(masks.causal), head_dim).bound.spec
    module = ast.parse(hopper_backward(spec, emit.Variant(head_dim, head_dim)).text)
    functions = {x.name: x for x in module.body if isinstance(x, ast.FunctionDef)}
    for name in ("attend",) if head_dim == 128 else ("weigh", "pull"):
        loops = [node for node in ast.walk(functions[name]) if isinstance(node, ast.For)]
        carried = set().union(*(copies(loop) for loop in loops))
        assert head_dim == 128 or ("last_row", "row") in carried
        for loop in loops:
            loop.body = [ast.Pass()]
        assert not carried & copies(functions[name])
