"""Ten masks at head dimensions and lengths: what `bench gpu` measures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ..errors import FlashgenError
from .flex import TILE

Chosen = TypeVar("Chosen")
LENGTHS, TOKENS = (8192,), 32768
SHAPES = ((128, 16), (64, 32), (256, 8))
# The masks that are measured at the largest head dimension.
DENSE, LARGE = ("full", "causal"), 256
WINDOW, GLOBALS = 1024, 256
DEVICE = "cuda"


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

    @property
    def device(self) -> torch.device:
        return torch.device(DEVICE)

    def tensors(self) -> list[torch.Tensor]:
        """q, k and v, [B, H, S, D]."""
        shape = (self.batch, self.heads, self.length, self.head_dim)
        return [torch.randn(shape, device=self.device, dtype=torch.bfloat16) for _ in range(3)]

    def flops(self, pairs: float) -> float:
        """Operations of the two products of a forward, if so many pairs of a head attend."""
        return 4.0 * pairs * self.head_dim * self.batch * self.heads


def works(only: Sequence[str], lengths: Sequence[int]) -> list[Work]:
    """All head dimensions, lengths and masks, as far as they are asked for."""
    names = masks(16, torch.device("cpu"))
    every = (Work(*shape, length, name) for shape in SHAPES for length in lengths for name in names)
    return chosen((w for w in every if w.head_dim != LARGE or w.mask in DENSE), only, lengths)


def chosen(every: Iterable[Chosen], only: Sequence[str], lengths: Sequence[int]) -> list[Chosen]:
    """Work whose name contains one of these texts; `$` stands for the end of a name.

    Raises FlashgenError where there is none, and for lengths that aren't whole tiles."""
    if odd := [length for length in lengths if length < TILE or length % TILE]:
        raise FlashgenError(f"a length of {odd[0]}", write=f"--lengths: multiples of {TILE}")
    every = list(every)
    found = [work for work in every if not only or any(text in f"{work}$" for text in only)]
    if not found:
        names = ", ".join(map(str, every[:3]))
        raise FlashgenError(f"no work is called like {', '.join(only)}", write=f"--only: {names} …")
    return found


def edges(length: int) -> torch.Tensor:
    """Where documents begin, and the end: at least four of random lengths."""
    generator = torch.Generator().manual_seed(0)
    documents = max(4, length // 1024)
    cuts = torch.randperm(length - 1, generator=generator)[: documents - 1].sort().values + 1
    return torch.cat([torch.zeros(1, dtype=torch.long), cuts, torch.tensor([length])])


def masks(length: int, device: torch.device) -> dict[str, Any]:
    """Ten masks as FlexAttention functions; both sides get the very same ones."""
    cuts, positions = edges(length), torch.arange(length)
    ids = torch.bucketize(positions, cuts[1:], right=True)
    start, end = cuts[ids].int().to(device), cuts[ids + 1].int().to(device)
    doc, here = ids.int().to(device), positions.int().to(device)
    prefix = start + (end - start) // 3
    answer = ((here - prefix).clamp(min=0) * 3 // (end - prefix).clamp(min=1)).int()
    question = here < prefix
    uniform = torch.rand(length, generator=torch.Generator().manual_seed(1)).to(device)
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
