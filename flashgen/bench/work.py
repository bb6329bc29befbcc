"""Ten masks at head dimensions and lengths: what `bench gpu` measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

LENGTHS, TOKENS = (8192,), 32768
SHAPES = ((128, 16), (64, 32))
WINDOW, GLOBALS = 1024, 256


@dataclass(frozen=True)
class Work:
    """Attention of a head dimension, so many heads, a length, and the name of a mask."""

    head_dim: int
    heads: int
    length: int
    mask: str

    def __str__(self) -> str:
        return f"D={self.head_dim} S={self.length} {self.mask}"

    @property
    def batch(self) -> int:
        return max(1, TOKENS // self.length)

    def tensors(self) -> list[torch.Tensor]:
        """q, k and v."""
        shape = (self.batch, self.heads, self.length, self.head_dim)
        return [
            torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        ]

    def flops(self) -> float:
        """Of the two products of a forward, for the pairs that attend."""
        pairs = pairs_of(masks(self.length, torch.device("cuda"))[self.mask], self.length)
        return 4.0 * pairs * self.head_dim * self.batch * self.heads


def works(only: str, lengths: Sequence[int]) -> list[Work]:
    """All head dimensions, lengths and masks, as far as they are asked for."""
    names = masks(16, torch.device("cpu"))
    every = (Work(*shape, length, name) for shape in SHAPES for length in lengths for name in names)
    return [work for work in every if only in str(work)]


def masks(length: int, device: torch.device) -> dict[str, Any]:
    """Ten masks as FlexAttention functions; both sides get the very same ones."""
    generator = torch.Generator().manual_seed(0)
    documents = max(4, length // 1024)
    cuts = torch.randperm(length - 1, generator=generator)[: documents - 1].sort().values + 1
    edges = torch.cat([torch.zeros(1, dtype=torch.long), cuts, torch.tensor([length])])
    positions = torch.arange(length)
    ids = torch.bucketize(positions, edges[1:], right=True)
    start, end = edges[ids].int().to(device), edges[ids + 1].int().to(device)
    doc, here = ids.int().to(device), positions.int().to(device)
    prefix = start + (end - start) // 3
    answer = ((here - prefix).clamp(min=0) * 3 // (end - prefix).clamp(min=1)).int()
    question = here < prefix
    uniform = torch.rand(length, generator=generator).to(device)
    evicted = (here + 1 + (uniform * (length - here)).int()).int()
    third = length // 3
    return {
        "full": None,
        "causal": lambda b, h, q, k: q >= k,
        "sliding window": lambda b, h, q, k: (q >= k) & (q - k < WINDOW),
        "document": lambda b, h, q, k: doc[q] == doc[k],
        "causal document": lambda b, h, q, k: (doc[q] == doc[k]) & (q >= k),
        "prefix LM": lambda b, h, q, k: (k < third) | (q >= k),
        "prefix document": lambda b, h, q, k: (doc[q] == doc[k]) & ((k < prefix[k]) | (q >= k)),
        "global + window": lambda b, h, q, k: (q >= k) & ((q - k < WINDOW) | (k < GLOBALS)),
        "shared question": lambda b, h, q, k: (
            (doc[q] == doc[k]) & (q >= k) & (question[k] | (answer[q] == answer[k]))
        ),
        "random eviction": lambda b, h, q, k: (q >= k) & (q < evicted[k]),
    }


def pairs_of(mask: Any, length: int) -> int:
    """How many pairs attend, counted in strips of rows."""
    if mask is None:
        return length * length
    keys, zero = torch.arange(length, device="cuda"), torch.tensor(0, device="cuda")
    strips = (keys[first : first + 1024, None] for first in range(0, length, 1024))
    return sum(int(mask(zero, zero, rows, keys[None]).sum()) for rows in strips)
