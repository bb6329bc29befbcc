"""Generated modules as Python: every name is somebody's, and nothing of the user's is assigned."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from typing import Any

import jinja2
import pytest
import torch
from cases import CASES

import flashgen as fg
from flashgen import emit, masks
from flashgen.emit import hopper_forward
from flashgen.kernel_names import spell
from flashgen.spec import Program

Q = torch.zeros(2, 2, 64, 16)
K = torch.zeros(2, 2, 64, 16)


def modules(attend: fg.Attention, **data: Any) -> list[ast.Module]:
    """Forward, backward and planning, parsed."""
    text = attend.source(Q, K, K, **data)
    parts = re.split(r"^# /.*\n", text, flags=re.MULTILINE)
    assert len(parts) in (4, 5)
    return [ast.parse(part) for part in parts if part.strip()]


def functions(module: ast.Module) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(module) if isinstance(node, ast.FunctionDef))


def arguments(function: ast.FunctionDef) -> list[str]:
    return [a.arg for a in function.args.args]


def assigned(function: ast.FunctionDef) -> set[str]:
    names = (n for n in ast.walk(function) if isinstance(n, ast.Name))
    return {n.id for n in names if isinstance(n.ctx, ast.Store)}


def read(function: ast.FunctionDef) -> set[str]:
    names = (n for n in ast.walk(function) if isinstance(n, ast.Name))
    return {n.id for n in names if isinstance(n.ctx, ast.Load)}


# Words that kernels use: template's variables, names that lowering makes, functions, arguments.
AWKWARD = """
acc acc_ acc0 q0 k0 v0 m l s p m_ dims_16 tile k_tile rows columns keep valid end runs tl triton
test test_2 kv_mod q_mod q_sub kv_add add_value doc_q doc_kv doc_kv_at doc_row doc_ptr doc_size_0
doc_stride_0 power tanh floor_div floor_mod range float max FLOAT BLOCK_M LOG2E q_ptr out_ptr lse
lse_ptr counts states states_ptr group blocks block masked_runs scale_log2 stride_qs row may must
allowed corner summary q_summary_0 q_summary_0_min jinja2 slope by_score ds dq dk dv minus_delta
""".split()


CAPTURED = ["q", "k", "v", "out", "lse", "sinks", "kv_lens", "scale", "acc", "self"]


@pytest.mark.parametrize(
    ("form", "name"),
    [
        *itertools.product(["scalar", "tensor"], AWKWARD),
        *itertools.product(["captured"], CAPTURED),
    ],
)
def test_names_are_the_users_own(form: str, name: str) -> None:
    kind = {"scalar": f", {name}: int", "tensor": f", {name}: Tensor", "captured": ""}[form]
    use = name if form == "scalar" else f"{name}[kv_idx // 3]"
    # Two of each, so that they may collide with one another as well.
    formula = (
        f"(doc[q_idx] == doc[kv_idx]) & ((q_idx % 5) * (q_idx % 5) < (kv_idx % 7) ** 2 + {use})"
        f" | (q_idx - kv_idx < {use} + other_) & (kv_idx % 7 + q_idx // 3 != {use})"
    )
    values = torch.arange(64)
    scope: dict[str, Any] = {"Tensor": fg.Tensor, name: values}
    exec(f"def odd(q_idx, kv_idx, doc: Tensor, other_: int{kind}): return {formula}", scope)
    data: dict[str, Any] = {"doc": values, "other_": 3}
    data |= {} if form == "captured" else {name: 3 if form == "scalar" else values}
    if name in scope and form != "captured":
        del scope[name]
    attend = fg.Attention(scope["odd"])
    spec = spell(attend._program.bind(data, "test")).spec
    own = set(map(emit.bare, emit.data_arguments(spec, emit.Variant(16, 16))))
    for module in modules(attend, **data):
        for function in functions(module):
            taken = arguments(function)
            assert len(set(taken)) == len(taken)
            assert not assigned(function) & own


@pytest.mark.parametrize("case", CASES[::3], ids=lambda case: case.id)
def test_every_name_is_defined(case: Any) -> None:
    """What a kernel reads is an argument, assigned in it, or the module's."""
    data = case.build(2, 2, 64, 64, torch.Generator().manual_seed(0))
    for module in modules(fg.Attention(case.bound(data))):
        top = {f.name for f in functions(module)} | {"tl", "triton", "range", "float", "max", "min"}
        top |= {n.id for node in module.body for n in ast.walk(node) if isinstance(n, ast.Name)
                and isinstance(n.ctx, ast.Store) and isinstance(node, ast.Assign)}  # fmt: skip
        for function in functions(module):
            known = top | set(arguments(function)) | assigned(function)
            assert read(function) <= known, read(function) - known


def test_names_that_need_no_change_are_kept() -> None:
    """A reader finds the mask's own words in the kernel."""
    bound = Program(mask=masks.causal_document & masks.sliding_window).bind(
        {"doc": torch.zeros(1, 4), "window": 3}, "test"
    )
    assert spell(bound) is bound


def test_text_depends_on_the_spec_alone() -> None:
    def text(n: int, window: int) -> str:
        q = torch.zeros(1, 2, n, 16)
        attend = fg.Attention(masks.sliding_window & masks.document)
        return attend.source(q, q, q, window=window, doc=torch.full((1, n), 7))

    assert text(100, 3) == text(1000, 999)


def test_a_header_says_what_and_whence() -> None:
    text = fg.Attention(masks.sliding_window).source(Q, K, K, window=3)
    first = text.splitlines()[1:6]
    assert first[0].startswith("# flashgen ")
    assert "sliding_window" in first[1]
    assert "q_idx - kv_idx < window" in first[2]


def test_only_what_is_used_is_generated() -> None:
    plain = fg.Attention().source(Q, K, K).split("\n\n# /")[0]
    for word in ("keep = q_idx", "floor_div", "sinks", "softcap", "kv_lens"):
        assert word not in plain
    capped = fg.Attention(softcap=2.0, sinks=True).source(Q, K, K, sinks=torch.zeros(2))
    assert "def tanh(x)" in capped
    assert "sinks_ptr" in capped
    padded = fg.Attention().source(Q, K, K, kv_lens=torch.tensor([3, 4]))
    assert "kv_len = tl.minimum(tl.load(kv_lens_ptr" in padded or "kv_lens_ptr" in padded


def test_a_blank_that_nobody_fills_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError):
        emit.environment().from_string("{{ nothing_of_that_name }}").render()


@pytest.mark.parametrize(
    ("test", "bounds", "joins"),
    [
        (lambda b, h, q, k: q >= k, 1, True),
        (lambda b, h, q, k: (q >= k) & (q - k < 1024), 2, True),
        (lambda b, h, q, k: (q >= k) & ((q - k < 1024) | (k < 4)), 3, False),
        (lambda b, h, q, k: (q >= k) & (k % 2 == 0), 0, False),
        (lambda b, h, q, k: k <= q * 0.5, 0, False),
        (lambda b, h, q, k: k + 2**40 > q, 1, False),
    ],
)
def test_positions_that_become_bits_of_keys(test: Any, bounds: int, joins: bool) -> None:
    """Of comparisons of a key's position with integers of the row, and of nothing else. In the
    first tile the length joins an end that there is, or is one more."""
    q = torch.empty(1, 1, 64, 64, dtype=torch.bfloat16)
    spec = spell(fg.Attention(mask=test)._check_look(q, q, q, {}).bound).spec
    text = hopper_forward.forward(spec, emit.Variant(64, 64)).text
    # In the first tile, and in the loop of cut ones.
    assert text.count("hopper.keys_before(") == (2 * bounds + (not joins) if bounds else 0)
    assert ("gl.minimum(" in text and "kv_len - 1)" in text) == joins
    assert ("kv_idx = " in text) == (not bounds)
