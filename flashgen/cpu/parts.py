"""Dense tensors as one part of a call, packed and paged ones as one for each sequence."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..geometry import Geometry
from ..schedule import Schedule
from ..storage import Pages
from .blocks import Block, split
from .passes import Gradients, Saved

_ALL = slice(None)


@dataclass(frozen=True, eq=False)
class Part:
    """What is computed on dense tensors, and where they lie in those of the call."""

    geometry: Geometry
    blocks: Sequence[Block]
    batch: slice
    rows: slice
    columns: slice
    pages: Pages | None
    kv_len: int

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """A view of its rows of [B, Hq, Sq, ...]."""
        return x[self.batch, :, self.rows]

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """Its keys [B, Hkv, Skv, D]: a view, of pages a copy."""
        if self.pages is None:
            return x[self.batch, :, self.columns]
        used = -(-self.kv_len // self.pages.size)
        own = x[self.pages.table[:, :used].flatten().long()]
        return own.transpose(0, 1).flatten(1, 2)[None, :, : self.kv_len]

    def saved(self, saved: Saved) -> Saved:
        """Its part of what the backward reads."""
        return Saved(
            *(self.queries(saved.q), self.keys(saved.k), self.keys(saved.v)),
            *map(self.queries, (saved.out, saved.lse, saved.grad_out, saved.grad_lse)),
        )

    def gradients(self, total: Gradients) -> Gradients:
        """Views of its part of the sums."""
        return replace(
            total,
            q=self.queries(total.q),
            k=self.keys(total.k),
            v=self.keys(total.v),
            delta=self.queries(total.delta),
        )


def parts_of(schedule: Schedule, geometry: Geometry, is_whole: bool) -> list[Part]:
    """The parts of a call: one, which only dense tensors can be, or one for each sequence."""
    packing, pages = geometry.packing, geometry.pages
    if is_whole:
        return [Part(geometry, split(schedule, geometry), _ALL, _ALL, _ALL, None, geometry.kv_len)]
    q_starts = None if packing is None else packing.cu_q.tolist()
    kv_starts = None if packing is None or packing.cu_kv is None else packing.cu_kv.tolist()
    return [
        Part(
            own,
            split(schedule.of_sequence(b, own.q_len, own.kv_len), own),
            slice(b, b + 1) if packing is None else _ALL,
            _span(q_starts, b),
            _span(kv_starts, b),
            None if pages is None else Pages(pages.table[b : b + 1], pages.size, pages.count),
            own.kv_len,
        )
        for b, own in enumerate(geometry.sequences())
    ]


def _span(starts: Sequence[int] | None, b: int) -> slice:
    return _ALL if starts is None else slice(*itertools.islice(starts, b, b + 2))
