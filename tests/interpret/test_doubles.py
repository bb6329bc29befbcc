"""float64 data of a mask is compared in 64 bits: seconds since 1970, a tenth of one apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashgen as fg

S, D = 40, 16
TIME = 1.76e9 + torch.arange(S, dtype=torch.float64) * 60
ROWS, COLUMNS = torch.arange(S)[:, None], torch.arange(S)


@fg.mask
def lately(b: Any, q_idx: Any, kv_idx: Any, time: fg.Tensor, since: float, reach: float) -> Any:
    age = time[b, q_idx] - time[b, kv_idx]
    return (kv_idx <= q_idx) & (age < reach + 0.1) & (time[b, kv_idx] >= since)


def fade(score: Any, q_idx: Any, kv_idx: Any, reach: float) -> Any:
    return score + (kv_idx - q_idx) / reach


GIVEN = {"since": 1.76e9 + 120.0001, "reach": 179.95}
AGE = TIME[:, None] - TIME
ALLOWED = (ROWS >= COLUMNS) & (GIVEN["reach"] + 0.1 > AGE) & (GIVEN["since"] <= TIME)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = (q @ k.mT).double() * D**-0.5 + (COLUMNS - ROWS).double() / GIVEN["reach"]
    weights = torch.where(ALLOWED, scores, -torch.inf).softmax(-1)
    return torch.where(ALLOWED.any(-1, keepdim=True), weights.nan_to_num(), 0.0) @ v.double()


@pytest.mark.parametrize("backend", ["cpu", "interpret"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_calls_and_gradients(backend: str, dtype: torch.dtype) -> None:
    """A scalar that the mask and the score function share; few queries, and calls played again."""
    attend, given = fg.Attention(lately, fade), {**GIVEN, "time": TIME[None]}
    leaves = [torch.randn(1, 2, S, D, dtype=dtype, requires_grad=True) for _ in range(3)]
    right, tolerance = attention(*leaves), {"rtol": 1e-4, "atol": 1e-5}
    wanted = torch.autograd.grad(right.square().sum(), leaves)
    out = attend(*leaves, **given, backend=backend)
    torch.testing.assert_close(out.double(), right, **tolerance)
    grads = torch.autograd.grad(out.double().square().sum(), leaves)
    for mine, correct in zip(grads, wanted, strict=True):
        torch.testing.assert_close(mine, correct, rtol=1e-3, atol=1e-4)
    q, k, v = (x.detach() for x in leaves)
    for _ in range(3):
        few = attend(q[:, :, -2:], k, v, **given, backend=backend)
        torch.testing.assert_close(few.double(), right[:, :, -2:], **tolerance)


def test_the_matrix_and_the_schedule() -> None:
    given = {**GIVEN, "time": TIME[None]}
    assert torch.equal(lately.dense(S, S, **given)[0, 0], ALLOWED)
    assert not torch.equal(
        lately.dense(S, S, **{**given, "time": TIME[None].float()})[0, 0], ALLOWED
    )
    x = torch.randn(1, 2, S, D)
    tiles = torch.zeros(48, 48, dtype=torch.bool)
    tiles[:S, :S] = ALLOWED
    tiles = tiles.view(3, 16, 3, 16).any(3).any(1)
    found = fg.Attention(lately).schedule(x, x, x, **given, block_size=16).to_dense()
    assert torch.equal(found[0, 0] > 0, tiles)


def test_captured_tensors() -> None:
    attend = fg.Attention(lambda b, h, q_idx, kv_idx: TIME[q_idx] - TIME[kv_idx] <= 120)
    assert torch.equal(attend.mask.dense(S, S)[0, 0], AGE <= 120)


def test_other_floats_stay_as_they_are() -> None:
    """Masks without such data, and score functions, have floats of the call's precision."""
    x = torch.randn(1, 2, S, D)
    given = {**GIVEN, "time": TIME[None]}
    assert "float64" in fg.Attention(lately).source(x, x, x, **given)
    given["time"] = TIME[None].float()
    assert "float64" not in fg.Attention(lately).source(x, x, x, **given)

    def timed(score: Any, b: Any, kv_idx: Any, time: fg.Tensor) -> Any:
        return score + time[b, kv_idx]

    text = fg.Attention(None, timed).source(x, x, x, time=TIME[None])
    assert ".to(tl.float64)" not in text
