"""Where queries, keys and values lie if not in a tensor [B, H, S, D] of their own."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch


@dataclass(frozen=True, eq=False)
class Packing:
    """Sequences one after another in tensors [1, H, T, D].

    `cu_q`, `cu_kv`: int32 [B + 1], on the device, where each sequence begins, and the last one
    ends; `cu_kv` is None where keys lie elsewhere. `total_q`, `total_kv`: rows of the tensors.

    Tiles never hold two sequences. Those of sequence b begin at row `cu[b] // tile + b` of all
    tiles: a sequence of n takes at least ceil(n / tile) rows, and `total // tile + B` hold all, so
    the size of a grid is known without the lengths."""

    cu_q: torch.Tensor
    cu_kv: torch.Tensor | None
    total_q: int
    total_kv: int
    _found: dict[tuple[int, bool], torch.Tensor] = field(default_factory=dict, repr=False)

    @property
    def batch(self) -> int:
        return self.cu_q.shape[0] - 1

    @property
    def starts(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`cu_q`, and `cu_kv` unless it is the same tensor: sequences often lie alike."""
        return self.cu_q, None if self.cu_kv is self.cu_q else self.cu_kv

    def copy(self) -> Packing:
        """With tensors of its own."""
        cu_q = self.cu_q.clone()
        cu_kv = self.cu_kv
        if cu_kv is not None:
            cu_kv = cu_q if cu_kv is self.cu_q else cu_kv.clone()
        return Packing(cu_q, cu_kv, self.total_q, self.total_kv)

    def with_keys(self, kv_lens: torch.Tensor | None) -> Packing:
        """As if keys that lie elsewhere, of these lengths, were packed too."""
        if self.cu_kv is not None or kv_lens is None:
            return self
        ends = kv_lens.cumsum(0, dtype=torch.int32)
        return replace(self, cu_kv=torch.nn.functional.pad(ends, (1, 0)))

    @cached_property
    def q_lens(self) -> torch.Tensor:
        """int32 [B]."""
        return self.cu_q.diff()

    def rows(self, tile: int, by_key: bool = False) -> int:
        """Rows of tiles of all queries, or of all keys."""
        total = self.total_kv if by_key else self.total_q
        return total // tile + self.batch if self.batch else 0

    def first_rows(self, tile: int, by_key: bool = False) -> torch.Tensor:
        """int64 [B + 1]: where each sequence's rows of tiles begin, and the last one's end."""
        cu = self.cu_kv if by_key else self.cu_q
        assert cu is not None
        return cu.long() // tile + torch.arange(cu.shape[0], device=cu.device)

    def sequences(self, tile: int, by_key: bool = False) -> torch.Tensor:
        """int32 [rows]: the sequence of each row of tiles; some rows may be beyond its end."""
        key = (tile, by_key)
        if key not in self._found:
            first = self.first_rows(tile, by_key)
            rows = torch.arange(self.rows(tile, by_key), device=first.device)
            found = torch.searchsorted(first, rows, right=True) - 1
            self._found[key] = found.clamp(0, max(0, self.batch - 1)).to(torch.int32)
        return self._found[key]

    def tiles(self, tile: int, by_key: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [rows] each: the sequence of a row of tiles, and its number in the sequence."""
        b = self.sequences(tile, by_key).long()
        rows = torch.arange(b.shape[0], device=b.device)
        return b, rows - self.first_rows(tile, by_key)[b]

    def unpack(self, states: torch.Tensor, tile: int) -> torch.Tensor:
        """[1, H, rows, n] as [B, H, most rows of a sequence, n], with zeros. Waits."""
        counts = (self.q_lens.long() + tile - 1) // tile
        most = int(counts.max()) if self.batch else 0
        number = torch.arange(most, device=states.device)
        rows = self.first_rows(tile)[:-1, None] + number
        is_row = number < counts[:, None]
        rows = torch.where(is_row, rows, 0)
        return states[0][:, rows].transpose(0, 1) * is_row[:, None, :, None]


@dataclass(frozen=True, eq=False)
class Pages:
    """A pool of pages [num_pages, H, size, D], and the page of each `size` positions.

    `table` int32 [B, P] on the device: entries from ceil(kv_lens[b] / size) on are never read."""

    table: torch.Tensor
    size: int
    count: int
