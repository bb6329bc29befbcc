"""Gradients of Hopper's kernels on a GPU, against autograd through dense float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import sm_90
import torch
from gradient_checks import PICKED, check, check_infinities, dense, leaves

import flashgen as fg
from flashgen import masks

# Every test's gradients come from Hopper's kernels, or it fails.
pytestmark = [*sm_90.marks(), pytest.mark.usefixtures("on_hopper")]


def hopper(attend: Any, deterministic: bool = False) -> Any:
    return partial(attend, backend="hopper", deterministic=deterministic)


@pytest.mark.parametrize("case", PICKED[::3], ids=lambda case: case.id)
def test_masks_of_odd_sizes(case: Any, nan_filled_empty: None) -> None:
    B, H, S, T = 2, 2, 278, 391
    data = case.build(B, H, S, T, torch.Generator().manual_seed(0))
    allowed = case.expected(B, H, S, T, data).cuda()
    moved = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in data.items()}
    attend = fg.Attention(mask=case.bound(moved).to("cuda"))
    for deterministic in (False, True):
        inputs = leaves(B, H, H, S, T, 128, 128, torch.bfloat16)
        check(hopper(attend, deterministic), inputs, allowed)


SHAPES = [
    (128, 128, 8, 1, torch.bfloat16),
    (64, 64, 3, 1, torch.float16),
    (96, 96, 2, 2, torch.bfloat16),
    (80, 64, 6, 2, torch.float16),
    (192, 128, 4, 2, torch.bfloat16),
    (256, 256, 2, 2, torch.bfloat16),
    (192, 128, 3, 1, torch.float16),
    (256, 256, 2, 1, torch.float16),
]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dtypes_heads_and_dims(shape: tuple[Any, ...], deterministic: bool) -> None:
    D, Dv, H, Hkv, dtype = shape
    S = 333
    doc = torch.randint(0, 4, (2, S), device="cuda").sort(-1).values
    allowed = torch.ones(S, S, dtype=torch.bool, device="cuda").tril()
    allowed = allowed & (doc[:, None, :, None] == doc[:, None, None, :])
    attend = fg.Attention(mask=masks.causal_document)
    check(hopper(attend, deterministic), leaves(2, H, Hkv, S, S, D, Dv, dtype), allowed, doc=doc)


@pytest.mark.parametrize(
    ("dims", "deterministic"), [((64, 64), False), ((64, 64), True), ((256, 256), False)], ids=str
)
def test_lengths(nan_filled_empty: None, dims: tuple[int, int], deterministic: bool) -> None:
    attend = hopper(fg.Attention(mask=masks.causal), deterministic)
    for S, T in ((1, 1), (1, 500), (130, 1), (128, 256), (257, 129), (1000, 1300)):
        allowed = torch.ones(S, T, dtype=torch.bool, device="cuda").tril(T - S)
        check(attend, leaves(1, 2, 2, S, T, *dims, torch.bfloat16), allowed)


def grads_of(attend: Any, inputs: list[Any], grad: Any, **data: Any) -> tuple[Any, ...]:
    return torch.autograd.grad(attend(*inputs, **data), inputs, grad)


@pytest.mark.parametrize("shape", [(8, 2, 128), (4, 4, 64), (4, 2, 192)], ids=str)
def test_sums_in_order_are_equal_bit_by_bit(shape: tuple[int, int, int]) -> None:
    """More blocks than run at once, with and beside another stream's load; and right."""
    H, Hkv, D = shape
    S = 3000
    doc = torch.randint(0, 5, (2, S), device="cuda").sort(-1).values
    attend = hopper(fg.Attention(mask=masks.document), True)
    inputs = leaves(2, H, Hkv, S, S, D, min(D, 128), torch.bfloat16)
    grad = torch.randn(2, H, S, min(D, 128), device="cuda", dtype=torch.bfloat16)
    first = grads_of(attend, inputs, grad, doc=doc)
    other, load = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda").bfloat16()
    for turn in range(200):
        if turn % 2:
            with torch.cuda.stream(other):
                for _ in range(turn % 5):
                    load @ load
        again = grads_of(attend, inputs, grad, doc=doc)
        for x, y in zip(first, again, strict=True):
            assert torch.equal(x, y), turn
    loose = grads_of(hopper(fg.Attention(mask=masks.document)), inputs, grad, doc=doc)
    for x, y in zip(first, loose, strict=True):
        assert (x.float() - y.float()).norm() <= 3e-3 * y.float().norm()


def test_rows_without_keys_and_unseen_keys_get_zeros(nan_filled_empty: None) -> None:
    @fg.mask
    def some(q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx % 3 != 0) & (kv_idx % 5 != 0) & (kv_idx < q_idx) & (kv_idx < 256)

    inputs = leaves(1, 2, 2, 400, 400, 128, 128, torch.bfloat16)
    grad = torch.randn_like(inputs[0])
    dq, dk, dv = grads_of(hopper(fg.Attention(mask=some)), inputs, grad)
    i = torch.arange(400, device="cuda")
    empty_row = (i % 3 == 0) | (i < 2)
    unseen = (i % 5 == 0) | (i >= 256)
    assert (dq[:, :, empty_row] == 0).all()
    assert (dk[:, :, unseen] == 0).all()
    assert (dv[:, :, unseen] == 0).all()
    allowed = (~empty_row)[:, None] & (~unseen)[None] & (i[None] < i[:, None])
    check(hopper(fg.Attention(mask=some)), inputs, allowed[None, None])


@pytest.mark.parametrize("head_dim", [64, 256])
def test_slots_beyond_the_valid_keys_may_hold_anything(head_dim: int) -> None:
    S, T = 150, 300
    lens = torch.tensor([300, 41, 177], device="cuda", dtype=torch.int32)
    inputs = leaves(3, 2, 1, S, T, head_dim, head_dim, torch.bfloat16)
    beyond = torch.arange(T, device="cuda") >= lens[:, None]
    with torch.no_grad():
        for x, poison in ((inputs[1], torch.nan), (inputs[2], torch.inf)):
            x.masked_fill_(beyond[:, None, :, None], poison)
    attend = hopper(fg.Attention(mask=masks.sliding_window(window=64)))
    grad = torch.randn_like(inputs[0])
    got = grads_of(attend, inputs, grad, kv_lens=lens, q_offset=0)
    with torch.no_grad():
        clean = [torch.nan_to_num(x, 0.0, 0.0, 0.0).requires_grad_() for x in inputs]
    i, j = torch.arange(S, device="cuda")[:, None], torch.arange(T, device="cuda")
    allowed = (i >= j) & (i - j < 64) & ~beyond[:, None, None]
    exact = [x.detach().double().requires_grad_() for x in clean]
    right = torch.autograd.grad(dense(*exact, allowed)[0], exact, grad.double())
    for mine, theirs in zip(got, right, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=0.03, atol=0.03)
    assert (got[1].mT[beyond[:, None, None].expand_as(got[1].mT)] == 0).all()


@pytest.mark.parametrize("head_dim", [128, 192])
def test_hidden_numbers_reach_no_gradient(head_dim: int) -> None:
    """What a pair's mask hides may be NaN or inf: every other gradient stays what it was, but for
    rounding, as another kernel computes these tiles again."""
    S = 300
    doc = (torch.arange(S, device="cuda") // 100)[None]
    attend = hopper(fg.Attention(mask=masks.causal_document))
    inputs = leaves(1, 2, 2, S, S, head_dim, head_dim, torch.bfloat16)
    grad = torch.randn_like(inputs[0])
    clean = grads_of(attend, inputs, grad, doc=doc)
    others = (doc != 1)[0]
    for place in range(4):
        for poison in (torch.nan, torch.inf):
            given = [*(x.detach().clone().requires_grad_() for x in inputs), grad.clone()]
            with torch.no_grad():
                given[place][:, :, 130] = poison
            spoilt = grads_of(attend, given[:3], given[3], doc=doc)
            for before, after in zip(clean, spoilt, strict=True):
                mine, right = after[:, :, others].float(), before[:, :, others].float()
                assert mine.isfinite().all(), (place, poison)
                assert (mine - right).norm() <= 5e-3 * right.norm(), (place, poison)


@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_an_infinity_that_is_seen_beside_a_nan_that_is_not(head_dim: int) -> None:
    check_infinities("hopper", head_dim)


def test_score_functions() -> None:
    S, H = 300, 4

    @fg.attention(mask=masks.causal, softcap=20.0)
    def alibi(score: Any, h: Any, q_idx: Any, kv_idx: Any, slope: fg.Tensor) -> Any:
        return 2.0 * score + slope[h] * (kv_idx - q_idx)

    inputs = leaves(2, H, 2, S, S, 64, 64, torch.float16)
    slope = torch.rand(H, device="cuda")
    out, lse = hopper(alibi)(*inputs, slope=slope, return_lse=True)
    grad, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    got = torch.autograd.grad((out, lse), inputs, (grad, grad_lse))
    exact = [x.detach().double().requires_grad_() for x in inputs]
    i = torch.arange(S, device="cuda")
    away = (i[None, :] - i[:, None]).double()

    def change(s: Any) -> Any:
        return 20.0 * torch.tanh((2.0 * s + slope[:, None, None] * away) / 20.0)

    wanted = dense(*exact, (away <= 0)[None, None], change)
    right = torch.autograd.grad(wanted, exact, (grad.double(), grad_lse.double()))
    for mine, theirs in zip(got, right, strict=True):
        error = (mine.double() - theirs).norm() / theirs.norm()
        assert error < 2e-3


@fg.mask
def lit(b: Any, q_idx: Any, kv_idx: Any, doc: fg.Tensor, near: fg.Tensor, seen: fg.Tensor) -> Any:
    return (doc[b, q_idx] == doc[b, kv_idx]) & seen[near[q_idx]] & (kv_idx <= q_idx)


@fg.attention(mask=lit)
def gated(score: Any, q_idx: Any, kv_idx: Any, gate: fg.Tensor, column: fg.Tensor) -> Any:
    return score * gate[q_idx] + column[kv_idx]


@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_data_of_queries_of_each_type(head_dim: int) -> None:
    S = 300
    doc = torch.randint(0, 3, (2, S), device="cuda").sort().values
    near = torch.randint(0, S, (S,), dtype=torch.int32, device="cuda")
    seen, gate = torch.rand(S, device="cuda") < 0.9, torch.rand(S, device="cuda").bfloat16()
    column = torch.rand(S, device="cuda")
    inputs = leaves(2, 2, 1, S, S, head_dim, min(head_dim, 128), torch.bfloat16)
    grad = torch.randn(2, 2, S, min(head_dim, 128), device="cuda", dtype=torch.bfloat16)
    data = {"doc": doc, "near": near, "seen": seen, "gate": gate, "column": column}
    got = grads_of(hopper(gated), inputs, grad, **data)
    allowed = torch.ones(S, S, dtype=torch.bool, device="cuda").tril()
    allowed = allowed & (doc[:, :, None] == doc[:, None, :]) & seen[near.long()][:, None]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out, _ = dense(*exact, allowed[:, None], lambda s: s * gate.double()[:, None] + column.double())
    for mine, right in zip(got, torch.autograd.grad(out, exact, grad.double()), strict=True):
        assert (mine.double() - right).norm() <= 1e-2 * right.norm()


def test_strides_and_a_gradient_that_is_expanded() -> None:
    B, S, H, D = 2, 200, 4, 128
    packed = torch.randn(B, S, 3, H, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    q, k, v = packed.permute(2, 0, 3, 1, 4)
    out = hopper(fg.Attention(mask=masks.causal))(q, k, v)
    (mine,) = torch.autograd.grad(out.sum(), packed)
    exact = packed.detach().double().requires_grad_()
    allowed = torch.ones(S, S, dtype=torch.bool, device="cuda").tril()[None, None]
    (right,) = torch.autograd.grad(dense(*exact.permute(2, 0, 3, 1, 4), allowed)[0].sum(), exact)
    assert (mine.double() - right).norm() / right.norm() < 1e-2
