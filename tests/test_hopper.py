"""Hopper's forward kernels as text, and when they are chosen: nothing runs here."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest
import torch
from cases import CASES
from test_emit import AWKWARD, arguments, assigned, functions, read

import flashgen as fg
from flashgen import backends, emit, launch, masks
from flashgen.emit import hopper_forward as emit_hopper
from flashgen.errors import FlashgenError
from flashgen.kernel_names import spell
from flashgen.launch import hopper_forward as launch_hopper
from flashgen.schedule import Schedule
from flashgen.spec import Spec
from flashgen.tiling import hopper as hopper_tiling
from flashgen.tiling import target_of

GPU = torch.device("cuda", 0)
BF16 = torch.bfloat16


def spec_of(attend: fg.Attention, **data: Any) -> Spec:
    return spell(attend._program.bind(data, "test")).spec


def text_of(attend: fg.Attention, head_dim: int = 64, **data: Any) -> str:
    made = emit_hopper.forward(spec_of(attend, **data), emit.Variant(head_dim, head_dim))
    return made.text


def body_of(text: str, name: str) -> str:
    return re.split(r"\n\n\n", text[text.index(f"def {name}(") :])[0]


@pytest.mark.parametrize("case", CASES[::4], ids=lambda case: case.id)
def test_every_name_is_defined(case: Any) -> None:
    """What a function reads is an argument, assigned in it, or the module's."""
    data = case.build(2, 2, 64, 64, torch.Generator().manual_seed(0))
    module = ast.parse(text_of(fg.Attention(case.bound(data))))
    top = {f.name for f in functions(module)} | {"gl", "gluon", "hopper", "range", "float"}
    top |= {"LOG2E", "LN2", "FLOAT", "NEVER"}
    for function in functions(module):
        known = top | set(arguments(function)) | assigned(function)
        assert read(function) <= known, read(function) - known


@pytest.mark.parametrize("name", [*AWKWARD, *"turn slot place first gl hopper".split()])
def test_names_are_the_users_own(name: str) -> None:
    scope: dict[str, Any] = {"Tensor": fg.Tensor}
    formula = f"{name}[kv_idx // 3] < q_idx + other_"
    exec(f"def odd(q_idx, kv_idx, {name}: Tensor, other_: int): return {formula}", scope)
    spec = spec_of(fg.Attention(scope["odd"]), **{name: torch.arange(9), "other_": 3})
    variant = emit.Variant(16, 16)
    own = set(map(emit.bare, emit.data_arguments(spec, variant)))
    for function in functions(ast.parse(emit_hopper.forward(spec, variant).text)):
        taken = arguments(function)
        assert len(set(taken)) == len(taken)
        assert not assigned(function) & own


def test_full_tiles_have_no_mask_code() -> None:
    doc = torch.zeros(1, 64, dtype=torch.int32)
    body = body_of(text_of(fg.Attention(masks.causal_document), doc=doc), "consume")
    cut, full = body.split("# Tiles whose every pair attends.")
    loop = full[: full.index("\n\n")]
    assert "doc_kv" in cut
    for word in ("doc_kv", "kv_idx", "keep"):
        assert word not in loop


def test_data_of_a_row_is_read_once_and_of_a_key_once_a_tile() -> None:
    doc = torch.zeros(1, 64, dtype=torch.int32)
    body = body_of(text_of(fg.Attention(masks.causal_document), doc=doc), "consume")
    loads = re.findall(r"doc_\w+ = gl.load", body)
    # For the first tile, and in the loop of cut tiles; where data is in order they are ranges.
    assert loads.count("doc_q = gl.load") == 1
    assert loads.count("doc_kv = gl.load") == 2
    assert body.count("doc_kv_across = hopper.cross(doc_kv, COLUMN)[None, :]") == 2
    by_range = body[body.index("by ranges where the data is in order") :]
    assert "doc_kv" not in by_range[: by_range.index("# Tiles that the mask cuts.")]


def test_positions_alone_are_compared_where_the_scores_are() -> None:
    text = text_of(fg.Attention(masks.sliding_window), window=3)
    assert "convert_layout(kv" not in text
    assert "lanes" not in text


def test_a_score_function_is_in_both_loops() -> None:
    @fg.attention(mask=masks.causal)
    def bias(score, kv_idx, w: fg.Tensor):  # type: ignore[no-untyped-def]
        return score + w[kv_idx]

    body = body_of(text_of(bias, w=torch.zeros(64)), "consume")
    assert body.count("s = s + w_kv_across") == 3
    assert body.count("w_kv_across = hopper.cross(w_kv, COLUMN)[None, :]") == 3


def test_text_depends_on_the_spec_alone() -> None:
    def text(n: int, window: int) -> str:
        attend = fg.Attention(masks.sliding_window & masks.document)
        return text_of(attend, window=window, doc=torch.full((1, n), 7))

    assert text(10, 3) == text(1000, 999)


DIMS = [(d, d) for d in range(8, 257, 8)] + [(192, 128)]


@pytest.mark.parametrize("block_n", [None, 64])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_shapes_fit_shared_memory(dims: tuple[int, int], block_n: int | None) -> None:
    assert emit_hopper.covers(*dims)
    rows = hopper_tiling.ROWS[max(dims) <= 64]
    shape = hopper_tiling.shape_for(*dims, block_n, rows)
    assert shape.block_m == rows
    q_dim, v_dim = (sum(p.size for p in emit.parts_of(d)) for d in dims)
    used = shape.buffers * rows * q_dim + shape.stages * shape.block_n * (q_dim + v_dim)
    assert shape.stages >= 2
    assert 2 * used + 2048 <= target_of("cuda", 90).shared


@pytest.mark.parametrize("dims", [(64, 128), (128, 192), (100, 100), (128, 60)], ids=str)
def test_dimensions_that_are_not_covered(dims: tuple[int, int]) -> None:
    assert not emit_hopper.covers(*dims)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were an H200."""
    monkeypatch.setattr(launch, "current_target", lambda device: target_of("cuda", 90))


def chosen(backend: str = "auto", tensors: Any = None, **changes: Any) -> backends.Choice:
    x = torch.empty(2, 4, 100, 64, dtype=BF16)
    given = {"device": GPU, "dtype": BF16, "tensors": tensors or (x, x, x), **changes}
    return backends.choose(backend, call="test", **given)


def test_hopper_is_chosen(hopper: None) -> None:
    assert chosen().name == "hopper"
    assert chosen("hopper").name == "hopper"
    assert chosen("portable").name == "portable"


def schedule(*block: int) -> Schedule:
    states = torch.ones(1, 1, 1, 1, dtype=torch.int8)
    return Schedule(states, (block[0], block[1]), 100, 100, None, None, "", "", "auto")


X = torch.empty(2, 4, 100, 64, dtype=BF16)
WHY_NOT: dict[str, tuple[dict[str, Any], str]] = {
    "float32": ({"dtype": torch.float32}, "16-bit floats, not float32"),
    "dims": ({"tensors": (X, X, X[..., :60])}, "don't take head dimensions 64 and 60"),
    "base": ({"tensors": (X.view(-1)[1:][:25600].view(2, 2, 100, 64), X, X)}, "q has data"),
    "strides": ({"tensors": (X, X, torch.empty(2, 4, 100, 65, dtype=BF16)[..., :64])}, "v has str"),
    "expanded": ({"tensors": (X, X[:, :1].expand(-1, 4, -1, -1), X)}, "k has strides of 0"),
    "nothing": ({"tensors": (X[:, :, :0], X, X)}, "q has no elements"),
    "tiles": ({"schedule": schedule(64, 64)}, "don't work on tiles of 64 x 64"),
    "tall": (
        {
            "schedule": schedule(192, 128),
            "tensors": (X.expand(2, 4, 100, 64).repeat(1, 1, 1, 2),) * 3,
        },
        "don't work on tiles of 192 x 128",
    ),
}


@pytest.mark.parametrize("name", WHY_NOT)
def test_why_hopper_is_not_chosen(name: str, hopper: None) -> None:
    changes, why = WHY_NOT[name]
    choice = chosen(**changes)
    assert choice.name == "portable"
    assert why in choice.why
    with pytest.raises(FlashgenError, match=re.escape(why)):
        chosen("hopper", **changes)


@pytest.mark.parametrize("block", [(128, 64), (128, 128), (192, 128)])
def test_schedules_that_fit(block: tuple[int, int], hopper: None) -> None:
    assert chosen(schedule=schedule(*block)).name == "hopper"


def test_other_gpus_are_named(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "current_target", lambda device: target_of("hip", "gfx942"))
    assert "for sm_90, and this is hip gfx942" in chosen().why


def test_tiles_are_tall_where_rows_are_long_and_heads_narrow(hopper: None) -> None:
    def tile(head_dim: int, long_rows: bool, q_len: int = 8192) -> tuple[int, int]:
        return backends.block_size("hopper", GPU, BF16, head_dim, head_dim, long_rows, q_len)

    assert tile(64, True) == tile(40, True) == (192, 128)
    assert tile(64, False) == tile(96, True) == tile(64, True, 256) == (128, 128)


@fg.attention(mask=masks.causal)
def biased(score: Any, h: Any, q_idx: Any, kv_idx: Any, table: fg.Tensor) -> Any:
    return score + table[h, fg.minimum(q_idx - kv_idx, 70)]


def test_what_tall_tiles_serve() -> None:
    """Not packed sequences, nor tiles that read one number, of which pages have none."""
    plain, data = fg.Attention(masks.causal), {"table": torch.ones(4, 71)}
    ends = {f"cu_seqlens_{side}": torch.tensor([0, 100], dtype=torch.int32) for side in ("q", "kv")}
    table = {"page_table": torch.zeros(2, 2, dtype=torch.int32), "kv_lens": torch.tensor([9, 64])}
    pages, packed = torch.zeros(3, 32, 4, 64, dtype=BF16), X[0].transpose(0, 1)

    def serve(attend: fg.Attention, q: torch.Tensor, k: torch.Tensor, **given: Any) -> bool:
        call = attend._check_look(q, k, k, given)
        return launch_hopper.takes_tall_tiles(call.bound, call.geometry, (64, 64))

    assert serve(plain, X, X)
    assert not serve(biased, X, X, **data)
    assert serve(biased, X, pages, **data, **table)
    assert not serve(plain, packed, packed, **ends)
