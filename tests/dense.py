"""Dense attention in float64, written by hand from its formula: what results are compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

INF = float("inf")


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    allowed: Any = True,
    *,
    score: Callable[[np.ndarray], np.ndarray] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [B, Hq, Sq, Dv] and the natural-log LSE [B, Hq, Sq], as float64 tensors.

    `allowed` broadcasts to [B, Hq, Sq, Skv]. A value counts only where its pair is allowed, so
    NaN and infinities reach just the rows that see them."""
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    Q, K, V = (x.detach().double().numpy() for x in (q, k, v))
    K, V = (np.repeat(x, group, axis=1) for x in (K, V))
    with np.errstate(all="ignore"):
        s = np.matmul(Q, np.swapaxes(K, -1, -2)) * (q.shape[3] ** -0.5 if scale is None else scale)
        if score is not None:
            s = score(s)
        if softcap is not None:
            s = np.where(s == -INF, s, softcap * np.tanh(s / softcap))
        s = np.where(np.asarray(allowed), s, -INF)
        sink = np.full(1, -INF) if sinks is None else sinks.detach().double().numpy()
        column = np.broadcast_to(sink.reshape(1, -1, 1, 1), (*s.shape[:3], 1))
        every = np.concatenate([s, column], -1)
        most = every.max(-1, keepdims=True)
        weights = np.exp(every - np.where(most == -INF, 0, most))
        total = weights.sum(-1, keepdims=True)
        lse = np.where(total == 0, -INF, np.log(total) + most)[..., 0]
        weights = weights[..., :-1] / np.where(total == 0, 1, total)
        out = np.matmul(weights, np.where(np.isfinite(V), V, 0))
        for b, h, j in zip(*np.nonzero(~np.isfinite(V).all(-1)), strict=True):
            seen = s[b, h, :, j] != -INF
            out[b, h, seen] += weights[b, h, seen, j, None] * np.where(
                np.isfinite(V[b, h, j]), 0, V[b, h, j]
            )
    return torch.from_numpy(out), torch.from_numpy(lse)
