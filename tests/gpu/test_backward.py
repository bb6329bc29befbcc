"""Gradients of the portable kernels on a GPU, against autograd through dense float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gradient_checks import PICKED, check, check_infinities, dense, leaves

import flashgen as fg
from flashgen import masks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", PICKED, ids=lambda case: case.id)
def test_masks_in_bf16(case: Any, nan_filled_empty: None) -> None:
    B, H, S, T = 2, 2, 150, 201
    data = case.build(B, H, S, T, torch.Generator().manual_seed(0))
    allowed = case.expected(B, H, S, T, data).cuda()
    moved = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in data.items()}
    attend = fg.Attention(mask=case.bound(moved).to("cuda"))
    check(attend, leaves(B, H, H, S, T, 64, 64, torch.bfloat16), allowed)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(64, 64, 4, 4), (128, 128, 6, 2), (192, 128, 2, 1)], ids=str)
def test_dtypes_heads_and_dims(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    D, Dv, H, Hkv = shape
    S = 333
    doc = torch.randint(0, 4, (2, S), device="cuda").sort(-1).values
    allowed = torch.ones(S, S, dtype=torch.bool, device="cuda").tril()
    allowed = allowed & (doc[:, None, :, None] == doc[:, None, None, :])
    attend = fg.Attention(mask=masks.causal_document)
    check(attend, leaves(2, H, Hkv, S, S, D, Dv, dtype), allowed, doc=doc)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_an_infinity_that_is_seen_beside_a_nan_that_is_not(head_dim: int) -> None:
    check_infinities("portable", head_dim)


def test_score_functions_and_the_lse_have_gradients() -> None:
    S, H = 200, 4

    @fg.attention(mask=masks.causal)
    def alibi(score: Any, h: Any, q_idx: Any, kv_idx: Any, slope: fg.Tensor) -> Any:
        return score + slope[h] * (kv_idx - q_idx)

    inputs = leaves(2, H, 2, S, S, 64, 64, torch.float32)
    slope = torch.rand(H, device="cuda", requires_grad=True)
    out, lse = alibi(*inputs, slope=slope, return_lse=True)
    grad, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    got = torch.autograd.grad((out, lse), [*inputs, slope], (grad, grad_lse))
    exact = [x.detach().double().requires_grad_() for x in (*inputs, slope)]
    i = torch.arange(S, device="cuda")
    away = (i[None, :] - i[:, None]).double()
    wanted = dense(
        *exact[:3], (away <= 0)[None, None], lambda s: s + exact[3][:, None, None] * away
    )
    right = torch.autograd.grad(wanted, exact, (grad.double(), grad_lse.double()))
    for mine, theirs in zip(got, right, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max())


def test_deterministic_bit_by_bit() -> None:
    inputs = leaves(2, 4, 2, 500, 500, 64, 64, torch.bfloat16)
    attend = fg.Attention(mask=masks.sliding_window(window=100))
    grad = torch.randn(2, 4, 500, 64, device="cuda", dtype=torch.bfloat16)
    runs = [
        torch.autograd.grad(attend(*inputs, deterministic=True), inputs, grad) for _ in range(5)
    ]
    for again in runs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(runs[0], again, strict=True))
