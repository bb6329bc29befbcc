"""A mask's float64 data on a GPU: seconds since 1970 are compared in 64 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.reference import attention_reference

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nan_filled_empty")]
S, D = 700, 64
SINCE, REACH = 1.76e9 + 600.0001, 5999.95


@fg.mask
def lately(b: Any, q_idx: Any, kv_idx: Any, time: fg.Tensor, since: float, reach: float) -> Any:
    age = time[b, q_idx] - time[b, kv_idx]
    return (kv_idx <= q_idx) & (age < reach + 0.1) & (time[b, kv_idx] >= since)


def test_calls_gradients_and_tiles() -> None:
    time = 1.76e9 + torch.arange(S, dtype=torch.float64, device="cuda") * 60
    rows, age = torch.arange(S, device="cuda")[:, None], time[:, None] - time
    allowed = (rows >= rows.T) & (age < REACH + 0.1) & (time >= SINCE)
    attend, given = fg.Attention(lately), {"time": time[None], "since": SINCE, "reach": REACH}
    shape = (1, 4, S, D)
    leaves = [torch.randn(shape, device="cuda").half().requires_grad_() for _ in range(3)]
    right, _ = attention_reference(*leaves, mask=allowed)
    out, grad = attend(*leaves, **given), torch.randn(shape, device="cuda").half()
    torch.testing.assert_close(out.double(), right, rtol=0, atol=4e-3)
    wanted = torch.autograd.grad(right, leaves, grad.double())
    for mine, exact in zip(torch.autograd.grad(out, leaves, grad), wanted, strict=True):
        torch.testing.assert_close(mine, exact, rtol=2e-2, atol=2e-2)
    q, k, v = (x.detach() for x in leaves)
    few = attend(q[:, :, -2:], k, v, **given)
    torch.testing.assert_close(few.double(), right[:, :, -2:].detach(), rtol=0, atol=4e-3)
    tiles = torch.zeros(768, 768, dtype=torch.bool, device="cuda")
    tiles[:S, :S] = allowed
    tiles = tiles.view(6, 128, 12, 64).any(3).any(1)
    found = attend.schedule(q, k, v, **given, block_size=(128, 64)).to_dense()[0, 0]
    assert torch.equal(found > 0, tiles[: found.shape[0], : found.shape[1]])
