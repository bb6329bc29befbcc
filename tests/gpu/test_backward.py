"""Gradients of the portable kernels on a GPU, against autograd through dense float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import CASES

import flashgen as fg
from flashgen import masks

pytestmark = pytest.mark.gpu

PICKED = [case for case in CASES if case.below_zero][::6]


def leaves(B: int, H: int, Hkv: int, S: int, T: int, D: int, Dv: int, dtype: Any) -> list[Any]:
    shapes = ((B, H, S, D), (B, Hkv, T, D), (B, Hkv, T, Dv))
    return [torch.randn(s, device="cuda").to(dtype).requires_grad_() for s in shapes]


def dense(q: Any, k: Any, v: Any, allowed: Any, change: Any = None) -> tuple[Any, Any]:
    """Dense attention; rows without a key give 0."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = scores if change is None else change(scores)
    seen = allowed.any(-1, keepdim=True)
    scores = torch.where(allowed, scores, -torch.inf)
    lse = torch.logsumexp(torch.where(seen, scores, 0.0), -1)
    weights = torch.where(allowed, torch.exp(scores - lse[..., None]), 0.0)
    return weights @ v, torch.where(seen[..., 0], lse, 0.0)


def check(attend: Any, inputs: list[Any], allowed: Any, **data: Any) -> None:
    """Each gradient's error is at most twice SDPA's own in the same dtype."""
    q, k, v = inputs
    allowed = allowed.expand(*q.shape[:3], k.shape[2])
    out = attend(q, k, v, **data)
    grad = torch.randn_like(out)
    got = torch.autograd.grad(out, inputs, grad)
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    exact = torch.autograd.grad(dense(*exact_inputs, allowed)[0], exact_inputs, grad.double())
    group = q.shape[1] // k.shape[1]
    # SDPA has no answer for rows without a key; they get one, and no gradient.
    seen = allowed.any(-1, keepdim=True)
    theirs = F.scaled_dot_product_attention(
        *(x if i == 0 else x.repeat_interleave(group, 1) for i, x in enumerate(inputs)),
        attn_mask=allowed | ~seen,
    )
    peer = torch.autograd.grad(theirs, inputs, torch.where(seen, grad, 0.0))
    for name, mine, right, other in zip("qkv", got, exact, peer, strict=True):
        error = (mine.double() - right).abs().max().item()
        allowance = 2 * (other.double() - right).abs().max().item() + 1e-5
        assert error <= allowance, f"d{name}: {error} > {allowance}"
    assert (got[0][~seen.expand_as(q)] == 0).all()


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
