"""Gradients on a GPU against autograd through dense float64, and beside SDPA's own error."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from cases import CASES

import flashgen as fg
from flashgen import masks

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


def rounding(x: Any, dtype: Any) -> float:
    """What rounding to a dtype may cost the largest number: half a unit in its last place."""
    mantissa, exponent = math.frexp(x.abs().max().item())
    return float(torch.finfo(dtype).eps) / 2 * 2.0 ** (exponent - 1) if mantissa else 0.0


def check(attend: Any, inputs: list[Any], allowed: Any, **data: Any) -> None:
    """Each gradient's error is at most twice SDPA's own in the same dtype.

    With a mask given as a tensor SDPA may compute in fp32 and round nothing but the results, as it
    does for FlashMask's here: its error, as much of half a unit in the last place as these numbers
    happen to show, then says what rounding costs, and half a unit is what it can cost. Kernels
    that multiply 16-bit numbers round the gradients of scores too, which costs as much again."""
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
        theirs_off = (other.double() - right).abs().max().item()
        allowance = 2 * max(theirs_off, rounding(right, mine.dtype)) + 1e-5
        assert error <= allowance, f"d{name}: {error} > {allowance}"
    assert (got[0][~seen.expand_as(q)] == 0).all()


def check_infinities(backend: str, head_dim: int) -> None:
    """Under a causal mask, gradients of one row that are infinite and of one before that are no
    numbers, or infinite the other way: keys between the two see the one alone."""
    S = 300
    attend = fg.Attention(mask=masks.causal)
    inputs = leaves(1, 4, 2, S, S, head_dim, head_dim, torch.bfloat16)
    grad = torch.randn_like(inputs[0])
    clean = torch.autograd.grad(attend(*inputs, backend=backend), inputs, grad)
    grad[..., 200, 3], grad[..., 70, 3] = math.inf, math.nan
    grad[..., 200, 7], grad[..., 70, 7] = -math.inf, math.inf
    spoilt = torch.autograd.grad(attend(*inputs, backend=backend), inputs, grad)
    expected = clean[2].clone()
    for column, seen in ((3, math.inf), (7, -math.inf)):
        expected[:, :, :201, column] = seen
        expected[:, :, :71, column] = math.nan
    torch.testing.assert_close(spoilt[2], expected, rtol=0.05, atol=0.05, equal_nan=True)
    untouched = [i for i in range(S) if i not in (70, 200)]
    for rows, mine, right in zip((untouched, range(201, S)), spoilt, clean, strict=False):
        found, before = (x[:, :, list(rows)].float() for x in (mine, right))
        assert (found - before).norm() <= 5e-3 * before.norm()
