"""The cpu backend's score functions, softcap and sinks, gradients, and what garbage may reach."""

from __future__ import annotations

import math

import pytest
import torch
from cpu_calls import (
    INF,
    MASKS,
    assert_same,
    causal,
    causal_document,
    every_other_query,
    gradients,
    inputs,
    oracle,
    positions,
    run,
    window,
)

from flashgen import FlashgenError
from flashgen.trace import Tensor


def alibi(score, h, q_idx, kv_idx, slope: Tensor):
    return score + slope[h] * (kv_idx - q_idx)


def test_score_function_and_the_gradient_of_its_data() -> None:
    leaves = inputs(2, 4, 2)
    slope = torch.rand(4, dtype=torch.float64, requires_grad=True)
    i, j, h, _ = positions(4, 2, 50, 50)
    ours = run(*leaves, causal, score=alibi, data={"slope": slope})
    theirs = oracle(*leaves, j <= i, score=lambda s: s + slope[h] * (j - i))
    assert_same(ours, theirs, (*leaves, slope))


def test_a_bias_for_each_distance_is_clamped_at_the_ends() -> None:
    def relative(score, b, h, q_idx, kv_idx, bias: Tensor, gate: Tensor):
        return score * gate + bias[b, h, q_idx - kv_idx + 5]

    leaves = inputs(2, 2, 2)
    bias = torch.randn(2, 2, 11, dtype=torch.float64, requires_grad=True)
    gate = torch.randn((), dtype=torch.float64, requires_grad=True)
    i, j, h, _ = positions(2, 2, 50, 50)
    b = torch.arange(2)[:, None, None, None]
    distance = (i - j + 5).clamp(0, 10)
    ours = run(*leaves, causal, score=relative, data={"bias": bias, "gate": gate})
    theirs = oracle(*leaves, j <= i, score=lambda s: s * gate + bias[b, h, distance])
    assert_same(ours, theirs, (*leaves, bias, gate))


def test_data_in_half_precision_sums_in_float32() -> None:
    leaves = inputs(1, 2, 2, 200, 200, dtype=torch.float32)
    slope = torch.tensor([0.1, 0.2], dtype=torch.bfloat16, requires_grad=True)
    i, j, h, _ = positions(2, 2, 200, 200)
    ours = run(*leaves, causal, score=alibi, data={"slope": slope}, block_size=(16, 16))
    theirs = oracle(*leaves, j <= i, score=lambda s: s + slope.double()[h] * (j - i))
    (mine,), (right,) = gradients(ours, (slope,)), gradients(theirs, (slope,))
    assert mine.dtype == torch.bfloat16
    torch.testing.assert_close(mine, right, rtol=1e-2, atol=1e-2)


def test_a_score_function_that_ignores_the_score() -> None:
    def only_bias(score, kv_idx, bias: Tensor):
        return bias[kv_idx]

    def nearest(score, q_idx, kv_idx):
        return (kv_idx - q_idx) / 8

    leaves = inputs()
    bias = torch.randn(50, dtype=torch.float64, requires_grad=True)
    i, j, *_ = positions(2, 2, 50, 50)
    ours = run(*leaves, causal, score=only_bias, data={"bias": bias})
    theirs = oracle(*leaves, j <= i, score=lambda s: 0 * s + bias)
    assert_same(ours, theirs, (*leaves, bias))
    ours = run(*leaves, causal, score=nearest)
    assert_same(ours, oracle(*leaves, j <= i, score=lambda s: 0 * s + (j - i) / 8), leaves)


def test_data_of_the_user_is_not_written_to() -> None:
    def constant(score, bias: Tensor):
        return bias

    leaves = inputs(1, 1, 1, 1, 1)
    bias = torch.tensor(3.0, dtype=torch.float64)
    run(*leaves, causal, score=constant, data={"bias": bias})
    assert bias == 3


@pytest.mark.parametrize("name", ["causal", "rows_without_keys"])
def test_softcap_and_sinks(name: str) -> None:
    pattern, formula = MASKS[name]
    leaves = inputs(2, 4, 2, 30, 30)
    sinks = torch.tensor([0.5, -INF, 30.0, -30.0], dtype=torch.float64, requires_grad=True)
    allowed = formula(*positions(4, 2, 30, 30))
    ours = run(*leaves, pattern, softcap=1.5, sinks=sinks, scale=3.0)
    theirs = oracle(*leaves, allowed, softcap=1.5, sinks=sinks, scale=3.0)
    assert_same(ours, theirs, (*leaves, sinks))


def test_the_lse_of_a_row_without_keys_is_the_sink() -> None:
    leaves = inputs()
    sinks = torch.tensor([0.25, -7.0], dtype=torch.float64, requires_grad=True)
    out, lse = run(*leaves, every_other_query, sinks=sinks)
    assert torch.equal(lse[:, :, 1::2], sinks[:, None].expand(2, 2, 25))
    assert torch.equal(out[:, :, 1::2], torch.zeros(2, 2, 25, 8, dtype=torch.float64))
    (grad,) = torch.autograd.grad(lse[:, :, 1::2].sum(), sinks)
    assert torch.equal(grad, torch.full((2,), 50.0, dtype=torch.float64))


def test_minus_infinity_stays_through_the_softcap() -> None:
    def every_third(score, kv_idx, bias: Tensor):
        return score + bias[kv_idx]

    leaves = inputs()
    bias = torch.zeros(50, dtype=torch.float64)
    bias[::3] = -INF
    ours = run(*leaves, causal, score=every_third, data={"bias": bias}, softcap=2.0)
    i, j, *_ = positions(2, 2, 50, 50)
    allowed = (j <= i) & (j % 3 != 0)
    assert_same(ours, oracle(*leaves, allowed, softcap=2.0), leaves)
    assert (ours[1][:, :, 0] == -INF).all()


def test_gradcheck() -> None:
    leaves = inputs(1, 2, 1, 9, 11, 3, 2)
    slope = torch.rand(2, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def function(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slope: torch.Tensor, sinks: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        data = {"slope": slope, "width": 4}
        return run(
            q, k, v, window, score=alibi, data=data, softcap=2.0, sinks=sinks, block_size=(8, 8)
        )

    assert torch.autograd.gradcheck(function, (*leaves, slope, sinks))


def test_only_some_inputs_ask_for_gradients() -> None:
    q, k, v = inputs(dtype=torch.float32)
    slope = torch.rand(2)
    out, _ = run(q.detach(), k, v.detach(), causal, score=alibi, data={"slope": slope})
    (grad,) = torch.autograd.grad(out.sum(), k)
    assert grad.isfinite().all()
    out, lse = run(q.detach(), k.detach(), v.detach(), causal)
    assert not out.requires_grad
    assert not lse.requires_grad


def test_a_second_derivative_is_one_clear_error() -> None:
    q, k, v = inputs()
    out, _ = run(q, k, v, causal)
    (grad,) = torch.autograd.grad((out * out).sum(), q, create_graph=True)
    with pytest.raises(FlashgenError, match="differentiated again"):
        grad.sum().backward()


def test_a_change_between_forward_and_backward_is_noticed() -> None:
    leaves = inputs()
    doc = torch.zeros(2, 50, dtype=torch.int64)
    out, _ = run(*leaves, causal_document, data={"doc": doc})
    doc += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("garbage", [math.nan, INF, -INF])
@pytest.mark.parametrize("block_size", [(16, 16), (64, 64)])
def test_garbage_behind_a_mask(garbage: float, block_size: tuple[int, int]) -> None:
    """Whatever a key, a value or a query holds, it reaches only the pairs that see it."""
    dirty = 20
    for which in range(3):
        clean = inputs()
        spoiled = [x.detach().clone() for x in clean]
        spoiled[which][:, :, dirty] = garbage
        spoiled = [x.requires_grad_() for x in spoiled]
        rows, keys = torch.arange(50), torch.arange(50)
        if which == 0:
            untouched, unseen = rows != dirty, keys > dirty
        else:
            untouched, unseen = rows < dirty, keys < 0
        results = []
        for leaves in (clean, spoiled):
            out, lse = run(*leaves, causal, block_size=block_size)
            grads = torch.autograd.grad(
                out[:, :, untouched].sum() + lse[:, :, untouched].sum(), leaves
            )
            whole = torch.autograd.grad(run(*leaves, causal)[0].sum(), leaves)
            results.append(
                [x[:, :, untouched] for x in (out, lse, grads[0])]
                + [x[:, :, keys[unseen]] for x in whole[1:]]
            )
        for mine, right in zip(*results[::-1], strict=True):
            assert torch.equal(mine, right)


def test_an_infinity_that_is_seen_beside_a_nan_that_is_not() -> None:
    """In one channel of one block, so that one product holds both."""
    q, k, v = (x.detach() for x in inputs())
    v[:, :, 5, 0], v[:, :, 9, 0], v[:, :, 30, 0] = INF, -INF, math.nan
    out, _ = run(q, k, v, causal)
    assert out[..., :5, 0].isfinite().all()
    assert (out[..., 5:9, 0] == INF).all()
    assert out[..., 9:, 0].isnan().all()
    assert out[..., 1:].isfinite().all()


@pytest.mark.parametrize("garbage", [math.nan, INF])
def test_garbage_beyond_a_length(garbage: float) -> None:
    clean = inputs(2, 2, 1, 20, 64)
    lens = torch.tensor([37, 0])
    spoiled = [x.detach().clone() for x in clean]
    for x in spoiled[1:]:
        x[0, :, 37:] = garbage
        x[1] = garbage
    spoiled = [x.requires_grad_() for x in spoiled]
    results = []
    for leaves in (clean, spoiled):
        outputs = run(*leaves, causal, kv_lens=lens)
        results.append((*outputs, *gradients(outputs, leaves)))
    for right, mine in zip(*results, strict=True):
        assert torch.equal(mine, right)


@pytest.mark.parametrize("garbage", [math.nan, INF])
def test_garbage_in_the_gradient_of_a_row_without_keys(garbage: float) -> None:
    sinks = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    leaves = inputs()
    results = []
    for value in (0.0, garbage):
        out, lse = run(*leaves, every_other_query, sinks=sinks)
        grad_out, grad_lse = torch.ones_like(out), torch.ones_like(lse)
        grad_out[:, :, 1::2] = value
        results.append(torch.autograd.grad((out, lse), (*leaves, sinks), (grad_out, grad_lse)))
    for right, mine in zip(*results, strict=True):
        assert torch.equal(mine, right)


def test_garbage_from_the_derivative_of_a_score_function() -> None:
    """Behind the mask the score function may have no value, and no derivative."""

    def logarithm(score, q_idx, kv_idx, table: Tensor):
        return score * (q_idx - kv_idx + 1) ** 0.5 + table[q_idx - kv_idx].log()

    leaves = inputs()
    table = torch.rand(50, dtype=torch.float64)
    table[7] = 0  # log 0 = -inf: such a pair takes no part
    table.requires_grad_()
    ours = run(*leaves, causal, score=logarithm, data={"table": table})
    i, j, *_ = positions(2, 2, 50, 50)
    distance = (i - j).clamp(0)
    kept = (j <= i) & (distance != 7)
    safe = torch.where(kept, table[distance], 1.0)
    theirs = oracle(*leaves, kept, score=lambda s: s * (distance + 1).double() ** 0.5 + safe.log())
    assert_same(ours, theirs, (*leaves, table))
