"""`torch.func` around generated kernels, which read memory: a wrapped tensor has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen import masks

S = 20
LENS = torch.tensor([20, 7])
STARTS = torch.tensor([0, 7, 20], dtype=torch.int32)
DOC = torch.tensor([0] * 7 + [1] * 13).repeat(2, 1)


@fg.attention(mask=masks.causal_document)
def learned(score: Any, h: Any, q_idx: Any, kv_idx: Any, slope: fg.Tensor) -> Any:
    return score + slope[h] * (kv_idx - q_idx)


FORMS: dict[str, tuple[fg.Attention, dict[str, Any]]] = {
    "no data": (fg.Attention(masks.causal), {}),
    "lengths": (fg.Attention(masks.causal), {"kv_lens": LENS}),
    "data": (learned, {"doc": DOC, "slope": torch.rand(2)}),
}


@pytest.mark.parametrize("name", FORMS)
def test_gradients_before_and_after_plain_calls(name: str) -> None:
    """What a transform leaves behind, kept schedules above all, serves plain calls."""
    attend, given = FORMS[name]
    x = torch.randn(2, 2, S, 16)

    def loss(x: torch.Tensor, backend: Any) -> torch.Tensor:
        return attend(x, x, x, **given, backend=backend).square().sum()

    leaf = x.clone().requires_grad_()
    (right,) = torch.autograd.grad(loss(leaf, "cpu"), leaf)
    for _ in range(3):
        got = torch.func.grad(lambda x: loss(x, "interpret"))(x)
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-4)
        leaf = x.clone().requires_grad_()
        (plain,) = torch.autograd.grad(loss(leaf, "interpret"), leaf)
        torch.testing.assert_close(plain, right, rtol=1e-4, atol=1e-4)


def test_packed_sequences() -> None:
    attend, x = fg.Attention(masks.causal), torch.randn(S, 2, 16)

    def loss(x: torch.Tensor, backend: Any) -> torch.Tensor:
        out = attend(x, x, x, cu_seqlens_q=STARTS, cu_seqlens_kv=STARTS, backend=backend)
        return out.square().sum()

    got = torch.func.grad(lambda x: loss(x, "interpret"))(x)
    leaf = x.clone().requires_grad_()
    (right,) = torch.autograd.grad(loss(leaf, "cpu"), leaf)
    torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-4)


def test_a_query_that_nobody_differentiates() -> None:
    """One query has a kernel of its own, which a transform can't look into."""
    attend, x = fg.Attention(masks.causal), torch.randn(2, 2, S, 16)

    def loss(w: torch.Tensor) -> torch.Tensor:
        return (attend(x[:, :, -1:], x, x, backend="interpret") * w).sum()

    out = attend(x[:, :, -1:], x, x, backend="cpu")
    torch.testing.assert_close(torch.func.grad(loss)(torch.ones(16)), out.sum((0, 1, 2)))
