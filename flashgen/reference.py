"""The dense float64 oracle: what every kernel is compared with. Memory is Sq x Skv."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from .dropout import Dropout, check_dropout
from .expr import Env, evaluate
from .spec import Bound, Program
from .spec.data import fit_data

if TYPE_CHECKING:
    from .spec import Mask


def dense_mask(
    mask: Mask,
    q_len: int,
    kv_len: int,
    batch: int,
    heads: int,
    q_offset: int | torch.Tensor | None,
    data: Mapping[str, Any],
) -> torch.Tensor:
    """`Mask.dense`: the boolean matrix [B|1, H|1, Sq, Skv]."""
    call = f"{mask.name}.dense({q_len}, {kv_len}, ...)"
    lengths = {"q_len": q_len, "kv_len": kv_len}
    if not isinstance(q_offset, torch.Tensor):
        lengths["q_offset"] = kv_len - q_len if q_offset is None else q_offset
    bound = Program(mask=mask).bind(data, call, lengths=lengths)
    tensors = [*bound.tensors.values(), *([q_offset] if isinstance(q_offset, torch.Tensor) else [])]
    device = tensors[0].device if tensors else torch.device("cpu")
    offset = kv_len - q_len if q_offset is None else q_offset
    last = q_len + offset if isinstance(offset, int) else None
    extents = {"b": batch, "h": heads, "h_kv": heads, "q_idx": last, "kv_idx": kv_len}
    bound = fit_data(bound, extents, device, call)
    env = dense_env(bound, (batch, heads, heads, q_len, kv_len), offset, device)
    shape = (
        batch if bound.spec.uses("b") or _varies(offset) else 1,
        heads if bound.spec.uses("h", "h_kv") else 1,
        q_len,
        kv_len,
    )
    if bound.spec.mask is None:
        return torch.ones(shape, dtype=torch.bool, device=device)
    return evaluate(bound.spec.mask, env).expand(shape)


def dense_masks(
    mask: Mask,
    q_lens: int | torch.Tensor,
    kv_lens: int | torch.Tensor,
    heads: int,
    q_offset: int | torch.Tensor | None,
    data: Mapping[str, Any],
) -> torch.Tensor:
    """`Mask.dense` of sequences of different lengths: [B, H|1, longest, longest]."""
    batch = max(x.numel() for x in (q_lens, kv_lens) if isinstance(x, torch.Tensor))
    queries, keys = (
        x.tolist() if isinstance(x, torch.Tensor) else [x] * batch for x in (q_lens, kv_lens)
    )
    call = f"{mask.name}.dense({queries}, {keys}, ...)"
    bound = Program(mask=mask).bind(data, call)
    devices = [x.device for x in (q_lens, kv_lens) if isinstance(x, torch.Tensor)]
    extents = {"b": batch, "h": heads, "h_kv": heads, "q_idx": None, "kv_idx": max(keys)}
    bound = fit_data(bound, extents, devices[0], call)
    shape = (batch, heads if bound.spec.uses("h", "h_kv") else 1, max(queries), max(keys))
    found = torch.zeros(shape, dtype=torch.bool, device=devices[0])
    for b, (n, m) in enumerate(zip(queries, keys, strict=True)):
        offset = m - n if q_offset is None else q_offset
        if isinstance(offset, torch.Tensor):
            offset = int(offset.reshape(-1)[b if offset.numel() > 1 else 0])
        env = dense_env(bound, (1, shape[1], shape[1], n, m), offset, devices[0])
        env.index["b"] = env.index["b"] + b
        own = torch.ones((), dtype=torch.bool, device=devices[0])
        own = own if bound.spec.mask is None else evaluate(bound.spec.mask, env)
        found[b, :, :n, :m] = own.expand(1, shape[1], n, m)[0]
    return found


def _varies(offset: int | torch.Tensor) -> bool:
    return isinstance(offset, torch.Tensor) and offset.numel() > 1


def dense_env(
    bound: Bound,
    shape: tuple[int, int, int, int, int],
    offset: int | torch.Tensor,
    device: torch.device,
    float_dtype: torch.dtype = torch.float32,
) -> Env:
    """Indices laid out as [B, H, Sq, Skv]; `shape` is (B, Hq, Hkv, Sq, Skv)."""
    batch, heads, kv_heads, q_len, kv_len = shape

    def line(size: int, dim: int) -> torch.Tensor:
        view = [1, 1, 1, 1]
        view[dim] = size
        return torch.arange(size, device=device).reshape(view)

    start = offset.reshape(-1, 1, 1, 1).long() if isinstance(offset, torch.Tensor) else offset
    h = line(heads, 1)
    index = {
        "b": line(batch, 0),
        "h": h,
        "h_kv": h // max(1, heads // max(1, kv_heads)),
        "q_idx": line(q_len, 2) + start,
        "kv_idx": line(kv_len, 3),
        "q_len": torch.tensor(q_len, device=device),
        "kv_len": torch.tensor(kv_len, device=device),
    }
    return Env(index, dict(bound.scalars), dict(bound.tensors), float_dtype=float_dtype)


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    score: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    q_offset: int | torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense softmax attention in float64.

    q [B, Hq, Sq, D], k [B, Hkv, Skv, D], v [B, Hkv, Skv, Dv]; `mask` broadcasts to
    [B, Hq, Sq, Skv]; `score` maps the scaled scores [B, Hq, Sq, Skv] to new ones; `sinks` [Hq].
    `dropout_p` and `seed` drop the weights that a call drops; `q_offset` serves them alone.
    Returns out [B, Hq, Sq, Dv] and the natural-log LSE [B, Hq, Sq], which includes the sink. A
    row without keys gives 0 and -inf (the sink, if there is one)."""
    group = q.shape[1] // max(1, k.shape[1])
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if score is not None:
        scores = score(scores)
    if softcap is not None:
        capped = softcap * torch.tanh(scores / softcap)
        scores = torch.where(scores == -torch.inf, scores, capped)
    allowed = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask
    scores = torch.where(allowed, scores, -torch.inf)
    if sinks is not None:
        # inf counts as the largest number.
        most = torch.finfo(torch.float64).max
        column = sinks.double().clamp(max=most).reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    lse = torch.logsumexp(scores, dim=-1)
    safe = torch.where(lse == -torch.inf, 0.0, lse)
    weights = torch.exp(scores - safe[..., None])[..., : k.shape[2]]
    dropout = check_dropout(dropout_p, seed, "attention_reference(...)")
    if dropout is not None:
        weights = _drop(weights, dropout, q_offset)
    if torch.isfinite(v).all():
        return weights @ v, lse
    # Selected, not multiplied: garbage in a value that a row doesn't see must not reach it.
    weights = weights.unsqueeze(-1)
    terms = torch.where(weights == 0, 0.0, weights * v.unsqueeze(2))
    return terms.sum(dim=3), lse


def _drop(
    weights: torch.Tensor, dropout: Dropout, q_offset: int | torch.Tensor | None
) -> torch.Tensor:
    q_len, kv_len = weights.shape[2:]
    b, h, rows, kv_idx = (
        torch.arange(n, device=weights.device).view([-1 if d == dim else 1 for d in range(4)])
        for dim, n in enumerate(weights.shape)
    )
    offset = kv_len - q_len if q_offset is None else q_offset
    first = offset.reshape(-1, 1, 1, 1) if isinstance(offset, torch.Tensor) else offset
    dropped = dropout.dropped(b, h, rows + first, kv_idx)
    return torch.where(dropped, 0.0, weights * dropout.scale)
