"""The cpu backend's calls, and a dense float64 oracle of them written by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from flashgen.geometry import Geometry
from flashgen.ops import attention, engine
from flashgen.schedule.make import make_schedule
from flashgen.spec import Program, mask
from flashgen.spec.data import fit_data
from flashgen.spec.leaf import Leaf
from flashgen.trace import Tensor

CPU = torch.device("cpu")
INF = math.inf


@mask
def causal(q_idx, kv_idx):
    return kv_idx <= q_idx


@mask
def window(q_idx, kv_idx, width: int):
    return (kv_idx <= q_idx) & (q_idx - kv_idx < width)


@mask
def causal_document(b, q_idx, kv_idx, doc: Tensor):
    return (kv_idx <= q_idx) & (doc[b, q_idx] == doc[b, kv_idx])


@mask
def head_window(h, q_idx, kv_idx):
    return (kv_idx <= q_idx) & (q_idx - kv_idx <= 3 * h)


@mask
def key_head_parity(h_kv, q_idx, kv_idx):
    return (q_idx + kv_idx + h_kv) % 2 == 0


@mask
def checkers(q_idx, kv_idx):
    return (q_idx // 5 + kv_idx // 7) % 2 == 0


@mask
def every_other_query(q_idx, kv_idx):
    return (q_idx % 2 == 0) & (kv_idx % 3 != 1)


@mask
def nothing(q_idx, kv_idx):
    return kv_idx < 0 * q_idx


# Name: the mask, its formula on tensors i, j, h, and whether it needs documents.
MASKS: dict[str, tuple[Any, Callable[..., torch.Tensor]]] = {
    "full": (None, lambda i, j, h, hk: (i == i) & (j == j)),
    "causal": (causal, lambda i, j, h, hk: j <= i),
    "window": (window(width=9), lambda i, j, h, hk: (j <= i) & (j > i - 9)),
    "head_window": (head_window, lambda i, j, h, hk: (j <= i) & (i - j <= 3 * h)),
    "key_head_parity": (key_head_parity, lambda i, j, h, hk: (i + j + hk) % 2 == 0),
    "checkers": (checkers, lambda i, j, h, hk: (i // 5 + j // 7) % 2 == 0),
    "rows_without_keys": (every_other_query, lambda i, j, h, hk: (i % 2 == 0) & (j % 3 != 1)),
    "nothing": (nothing, lambda i, j, h, hk: (j < 0) & (i < 0)),
}


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: Any = None,
    *,
    score: Any = None,
    data: dict[str, Any] | None = None,
    block_size: tuple[int, int] = (16, 16),
    planner: Any = "auto",
    q_offset: Any = None,
    kv_lens: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = None if score is None else Leaf.of(score, "score")
    program = Program(pattern, leaf, softcap, sinks is not None)
    geometry = Geometry(
        q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], CPU, q_offset, kv_lens
    )
    bound = fit_data(program.bind(data or {}, "test"), geometry.extents, CPU, "test")
    made = engine(
        "cpu",
        bound,
        geometry=geometry,
        schedule=make_schedule(bound, geometry, block_size, planner, "test"),
        scale=q.shape[3] ** -0.5 if scale is None else scale,
        softcap=softcap,
    )
    return attention(made, q, k, v, sinks, [bound.tensors[t.name] for t in bound.spec.tensors])


def oracle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    allowed: torch.Tensor,
    *,
    score: Callable[[torch.Tensor], torch.Tensor] | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense, in float64. `allowed` broadcasts to [B, Hq, Sq, Skv]."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = torch.einsum("bhid,bhjd->bhij", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    if score is not None:
        s = score(s)
    if softcap is not None:
        s = torch.where(s == -INF, s, softcap * torch.tanh(s / softcap))
    s = s.masked_fill(~allowed, -INF)
    most = s.detach().amax(-1)
    if sinks is not None:
        most = torch.maximum(most, sinks.detach().double().reshape(1, -1, 1))
    most = torch.where(most == -INF, 0.0, most)
    weights = torch.exp(s - most[..., None])
    total = weights.sum(-1)
    if sinks is not None:
        total = total + torch.exp(sinks.double().reshape(1, -1, 1) - most)
    some = total > 0
    out = torch.einsum("bhij,bhjd->bhid", weights, v) / torch.where(some, total, 1.0)[..., None]
    lse = torch.where(some, torch.log(torch.where(some, total, 1.0)) + most, -INF)
    return out, lse


def positions(heads: int, kv_heads: int, q_len: int, kv_len: int, offset: int | None = None) -> Any:
    """i, j, h and h_kv, to broadcast to [1, H, Sq, Skv]."""
    i = torch.arange(q_len)[:, None] + (kv_len - q_len if offset is None else offset)
    h = torch.arange(heads)[:, None, None]
    return i, torch.arange(kv_len), h, h // (heads // kv_heads)


def inputs(
    batch: int = 2,
    heads: int = 2,
    kv_heads: int = 2,
    q_len: int = 50,
    kv_len: int = 50,
    dim: int = 8,
    v_dim: int = 8,
    dtype: torch.dtype = torch.float64,
) -> list[torch.Tensor]:
    shapes = (heads, q_len, dim), (kv_heads, kv_len, dim), (kv_heads, kv_len, v_dim)
    return [torch.randn(batch, *shape, dtype=dtype, requires_grad=True) for shape in shapes]


def gradients(outputs: Any, leaves: Any) -> tuple[torch.Tensor, ...]:
    """Of a loss that weighs every output, and the LSE where it is finite."""
    out, lse = outputs
    generator = torch.Generator().manual_seed(1)
    loss = (out.double() * torch.randn(out.shape, generator=generator)).sum()
    weights = torch.randn(lse.shape, generator=generator)
    loss = loss + (torch.where(lse == -INF, 0, lse).double() * weights).sum()
    return torch.autograd.grad(loss, leaves)


def assert_same(ours: Any, theirs: Any, leaves: Any, tolerance: float = 1e-10) -> None:
    for mine, right in zip(
        (*ours, *gradients(ours, leaves)), (*theirs, *gradients(theirs, leaves)), strict=True
    ):
        torch.testing.assert_close(
            mine.double(), right.double(), rtol=tolerance, atol=tolerance, check_stride=False
        )
