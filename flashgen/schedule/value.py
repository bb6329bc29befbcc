"""The schedule as a value: printed like a BlockMask, checked before it is used."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from .classify import FULL, PARTIAL
from .runs import MOST_RUNS, Runs, compact


@dataclass(frozen=True, eq=False)
class Schedule:
    """Which tiles of the attention matrix are empty (0), partial (1) or full (2).

    Made once, used by every layer of the same lengths, offset and mask. Counts and indices have
    FlexAttention's names and meaning: `kv_num_blocks` [B|1, H|1, query tiles] and `kv_indices`
    [B|1, H|1, query tiles, key tiles] list the partial tiles of a row, `full_kv_*` the full ones,
    `q_*` and `full_q_*` the same for columns; all int32."""

    states: torch.Tensor
    block_size: tuple[int, int]
    q_len: int
    kv_len: int
    q_offset: int | torch.Tensor | None
    kv_lens: torch.Tensor | None
    mask_name: str
    mask_digest: str
    planner: str
    scalars: tuple[tuple[str, Any], ...] = ()
    _kv_runs: Runs | None = field(default=None, repr=False)
    # Query heads that share one of keys, where the mask tells heads of keys apart.
    group: int | None = None

    @property
    def device(self) -> torch.device:
        return self.states.device

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B|1, H|1, Sq, Skv), as a BlockMask has it."""
        return (self.states.shape[0], self.states.shape[1], self.q_len, self.kv_len)

    def to_dense(self) -> torch.Tensor:
        """The grid [B|1, H|1, query tiles, key tiles]: 0 empty, 1 partial, 2 full."""
        return self.states.clone()

    @cached_property
    def kv_runs(self) -> Runs:
        """Runs along the rows: what the forward kernels consume."""
        return self._kv_runs if self._kv_runs is not None else compact(self.states, self._ragged)

    @cached_property
    def q_runs(self) -> Runs:
        """Runs along the columns: what gradients of keys and values consume."""
        if self.device.type != "cpu":
            from ..plan import compact as compact_on_device

            capacity = min(self.states.shape[2] // 2 + 1, MOST_RUNS)
            lens, size = self.kv_lens, self.block_size[1]
            return compact_on_device(self.states, self.kv_len, lens, size, capacity, by_key=True)
        ragged = None if self._ragged is None else self._ragged.mT
        return compact(self.states.mT, ragged, by_key=True)

    @property
    def _ragged(self) -> torch.Tensor | None:
        """Key tiles that stick out of the keys' length."""
        size = self.block_size[1]
        ends = (torch.arange(self.states.shape[3], device=self.device) + 1) * size
        if self.kv_lens is not None:
            return ends > self.kv_lens.reshape(-1, 1, 1, 1)
        if self.kv_len % size == 0:
            return None
        return (ends > self.kv_len).expand(1, 1, 1, -1)

    @cached_property
    def kv_num_blocks(self) -> torch.Tensor:
        return _count(self.states, PARTIAL)

    @cached_property
    def kv_indices(self) -> torch.Tensor:
        return _indices(self.states, PARTIAL)

    @cached_property
    def full_kv_num_blocks(self) -> torch.Tensor:
        return _count(self.states, FULL)

    @cached_property
    def full_kv_indices(self) -> torch.Tensor:
        return _indices(self.states, FULL)

    @cached_property
    def q_num_blocks(self) -> torch.Tensor:
        return _count(self.states.mT, PARTIAL)

    @cached_property
    def q_indices(self) -> torch.Tensor:
        return _indices(self.states.mT, PARTIAL)

    @cached_property
    def full_q_num_blocks(self) -> torch.Tensor:
        return _count(self.states.mT, FULL)

    @cached_property
    def full_q_indices(self) -> torch.Tensor:
        return _indices(self.states.mT, FULL)

    @property
    def density(self) -> float:
        """Non-empty tiles / all tiles. Waits for the device."""
        if not self.states.numel():
            return 0.0
        return float((self.states != 0).float().mean())

    @property
    def nbytes(self) -> int:
        """Bytes held: the states, and the runs made so far."""
        runs = (self.__dict__.get("kv_runs", self._kv_runs), self.__dict__.get("q_runs"))
        made: list[Runs] = [r for r in runs if r is not None]
        return self.states.numel() + sum(r.nbytes for r in made)

    def _repr_svg_(self) -> str:
        from ..show import schedule_svg

        return schedule_svg(self)

    def __str__(self) -> str:
        from ..show import schedule_text

        return schedule_text(self)


def _count(states: torch.Tensor, kind: int) -> torch.Tensor:
    return (states == kind).sum(-1, dtype=torch.int32)


def _indices(states: torch.Tensor, kind: int) -> torch.Tensor:
    """Columns of one kind first, ascending, then the others: FlexAttention's order."""
    return torch.argsort((states != kind).to(torch.int8), dim=-1, stable=True).to(torch.int32)
