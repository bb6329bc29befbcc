"""Errors of causal documents against dense attention in float64, for causal_documents.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashgen.reference import attention_reference

# Rows at a time: 512 x 8192 scores of a head are 32 MiB.
ROWS = 512


@dataclass(frozen=True)
class Check:
    """The largest errors of a result, and what is allowed of the output and of the LSE."""

    what: str
    out: float
    lse: float
    allowed: tuple[float, float]

    @property
    def passes(self) -> bool:
        # Written so that a NaN doesn't pass.
        return self.out <= self.allowed[0] and self.lse <= self.allowed[1]

    def __str__(self) -> str:
        numbers = (self.out, self.allowed[0], self.lse, self.allowed[1])
        columns = "".join(f"{number:>11.1e}" for number in numbers)
        return f"{self.what:<48}{columns}  {'ok' if self.passes else 'TOO LARGE'}"


HEADING = f"{'':<48}{'out':>11}{'allowed':>11}{'LSE':>11}{'allowed':>11}"


def inputs(length: int, heads: int, kv_heads: int, head_dim: int, **to: Any) -> list[torch.Tensor]:
    """Random q, k, v: [1, heads, length, D], the same on every device; `to`: dtype, device."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, n, length, head_dim) for n in (heads, kv_heads, kv_heads))
    return [torch.randn(shape, generator=generator).to(**to) for shape in shapes]


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, doc: torch.Tensor
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Rows, their output and their LSE. The mask is written by hand, apart from flashgen."""
    positions = torch.arange(q.shape[2], device=q.device)
    for start in range(0, q.shape[2], ROWS):
        rows, seen = slice(start, start + ROWS), slice(0, start + ROWS)
        same = doc[0, rows, None] == doc[0, seen]
        keep = same & (positions[seen] <= positions[rows, None])
        yield rows, *attention_reference(q[:, :, rows], k[:, :, seen], v[:, :, seen], mask=keep)


def errors(
    tensors: Sequence[torch.Tensor], doc: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
) -> tuple[float, float]:
    """The largest absolute errors of the output and of the LSE."""
    worst = torch.zeros(2, dtype=torch.float64)
    for rows, right, log in reference(*tensors, doc):
        found = (out[:, :, rows] - right).abs().max()
        other = log.new_zeros(()) if lse is None else (lse[:, :, rows] - log).abs().max()
        # `torch.maximum` keeps a NaN.
        worst = torch.maximum(worst, torch.stack([found, other]).cpu())
    return tuple(worst.tolist())
