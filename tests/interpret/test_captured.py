"""What functions captured may be replaced, also where calls are done again by what is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashgen as fg

S = 20


@pytest.mark.parametrize("learned", [False, True])
def test_a_tensor_and_a_number_of_a_closure(learned: bool) -> None:
    slope, window = torch.rand(2), 3

    def near(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx <= q_idx) & (q_idx - kv_idx < window)

    def tilt(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + slope[h] * kv_idx

    attend = fg.Attention(near, tilt)
    slopes = [torch.rand(2).requires_grad_(learned) for _ in range(2)]
    # Each thrice: the first is checked, the second recorded, the third played.
    for number in (0, 0, 0, 1, 1, 1, 0):
        slope, window = slopes[number], 3 + number
        x = torch.randn(1, 2, S, 16, requires_grad=learned)
        away = torch.arange(S)[:, None] - torch.arange(S)
        scores = (x @ x.mT) / 4 + slope[:, None, None] * torch.arange(S)
        allowed = (away >= 0) & (away < window)
        right = torch.where(allowed, scores, -torch.inf).softmax(-1) @ x
        out = attend(x, x, x, backend="interpret")
        torch.testing.assert_close(out, right, rtol=1e-4, atol=1e-5)
        if learned:
            leaves = (x, slope)
            grads = (torch.autograd.grad(y.square().sum(), leaves) for y in (out, right))
            for mine, wanted in zip(*grads, strict=True):
                torch.testing.assert_close(mine, wanted, rtol=1e-3, atol=1e-4)


def test_a_captured_parameter_has_its_gradient_after_calls_without() -> None:
    slope = torch.nn.Parameter(torch.rand(2))

    def tilt(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + slope[h] * kv_idx

    attend = fg.Attention(None, tilt)
    q, k, v = torch.randn(3, 1, 2, S, 16)
    with torch.no_grad():
        plain = [attend(q, k, v, backend="interpret") for _ in range(4)]
    for _ in range(4):
        out = attend(q, k, v, backend="interpret")
        torch.testing.assert_close(out, plain[0])
        assert torch.autograd.grad(out.sum(), slope)[0].abs().min() > 0
