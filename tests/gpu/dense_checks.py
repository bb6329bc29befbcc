"""Outputs on a GPU against dense float64, with PyTorch's own error as the measure."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from cases import CASES

# One case for each mask; the others differ in data only.
FIRST = list({case.id.split("-")[0].split("[")[0]: case for case in reversed(CASES)}.values())


def to_gpu(data: dict[str, Any]) -> dict[str, Any]:
    return {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in data.items()}


def oracle(q: Any, k: Any, v: Any, allowed: Any, scale: float) -> tuple[Any, Any]:
    """Dense softmax attention in float64, written out."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.where(allowed, q.double() @ k.mT * scale, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
    return weights @ v, lse


def sdpa_error(q: Any, k: Any, v: Any, allowed: Any, exact: Any, scale: float) -> float:
    """PyTorch's own error on rows that see a key (it has no answer for the others)."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=scale)
    seen = allowed.any(-1, keepdim=True).expand_as(exact)
    return (theirs.double() - exact)[seen].abs().max().item() if seen.any() else 0.0


def inputs(B: int, H: int, Hkv: int, S: int, T: int, D: int, Dv: int, dtype: Any) -> list[Any]:
    shapes = ((B, H, S, D), (B, Hkv, T, D), (B, Hkv, T, Dv))
    return [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]


def check_against_sdpa(attend: Any, tensors: list[Any], allowed: Any, **data: Any) -> None:
    q, k, v = tensors
    scale = q.shape[-1] ** -0.5
    out, lse = attend(q, k, v, return_lse=True, **data)
    exact, exact_lse = oracle(q, k, v, allowed, scale)
    empty = ~allowed.expand(*q.shape[:3], k.shape[2]).any(-1)
    assert (out[empty] == 0).all()
    assert (lse[empty] == -torch.inf).all()
    error = (out.double() - exact).abs().max().item()
    # 1e-6: fp32's own rounding, where SDPA happens to be luckier.
    assert error <= 2 * sdpa_error(q, k, v, allowed, exact, scale) + 1e-6
    torch.testing.assert_close(lse[~empty].double(), exact_lse[~empty], rtol=1e-5, atol=1e-5)
