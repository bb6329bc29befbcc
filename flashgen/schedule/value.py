"""The schedule as a value: printed like a BlockMask, checked before it is used."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from ..order import Ranges, find_ranges
from ..records.tape import Tapes, layouts_of
from ..storage import Packing
from .classify import FULL, PARTIAL
from .documents import Apart, Documents, find_documents
from .queue import queue
from .runs import Runs, Visits, column_capacity, compact, visits


@dataclass(frozen=True, eq=False)
class Schedule:
    """Which tiles of the attention matrix are empty (0), partial (1) or full (2).

    Made once, used by every layer of the same lengths, offset and mask. Counts and indices have
    FlexAttention's names and meaning: `kv_num_blocks` [B|1, H|1, query tiles] and `kv_indices`
    [B|1, H|1, query tiles, key tiles] list the partial tiles of a row, `full_kv_*` the full ones,
    `q_*` and `full_q_*` the same for columns; all int32.
    Packed: `states` [1, H|1, rows, key tiles] has the query tiles of all sequences in one line;
    what is listed and drawn has a batch of sequences, and waits for the device."""

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
    packing: Packing | None = None
    # The mask's data whose ranges kernels may ask for, and along which dimension.
    _sources: tuple[tuple[torch.Tensor, int], ...] = field(default=(), repr=False)
    _q_runs: Runs | None = field(default=None, repr=False)
    _tapes: Tapes = field(default_factory=Tapes, repr=False)
    # Whether it serves one call alone.
    _is_of_one_call: bool = field(default=False, repr=False)
    # Whether it was asked for, to be used more than once: what is found for it pays.
    is_shared: bool = field(default=False, repr=False)

    @property
    def device(self) -> torch.device:
        return self.states.device

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B|1, H|1, Sq, Skv), as a BlockMask has it."""
        batch = self.states.shape[0] if self.packing is None else self.packing.batch
        return (batch, self.states.shape[1], self.q_len, self.kv_len)

    @cached_property
    def fit(self) -> Mapping[str, Any]:
        """What calls must have for it to fit them; of a tensor on a device its shape."""
        packing = self.packing
        return {
            "device": self.device,
            "the mask": self.mask_digest,
            "scalars": dict(self.scalars),
            "Sq =": self.q_len,
            "Skv =": self.kv_len,
            "q_offset": shown(self.q_offset),
            "kv_lens": shown(self.kv_lens),
            "cu_seqlens_q": None if packing is None else shown(packing.cu_q),
            "queries in all": None if packing is None else packing.total_q,
            "groups of": self.group,
            "batch size": self.shape[0],
            "heads": self.shape[1],
        }

    @cached_property
    def fit_text(self) -> str:
        """`fit`, and the tile: alike schedules serve alike calls."""
        return f"{self.block_size} {self.fit}"

    def to_dense(self) -> torch.Tensor:
        """The grid [B|1, H|1, query tiles, key tiles]: 0 empty, 1 partial, 2 full."""
        return self.states.clone() if self.packing is None else self.grid

    @cached_property
    def grid(self) -> torch.Tensor:
        """The states with a batch of sequences, as many tiles as the longest has."""
        if self.packing is None:
            return self.states
        return self.packing.unpack(self.states, self.block_size[0])

    @property
    def q_sequences(self) -> torch.Tensor | None:
        """Packed: int32 [rows], the sequence of each row of the states."""
        return None if self.packing is None else self.packing.sequences(self.block_size[0])

    @property
    def kv_sequences(self) -> torch.Tensor | None:
        """Packed: int32 [rows of `q_runs`], the sequence of each."""
        if self.packing is None:
            return None
        return self.packing.sequences(self.block_size[1], by_key=True)

    def of_sequence(self, b: int, q_len: int, kv_len: int) -> Schedule:
        """One sequence's part of a schedule. Waits for the device."""
        rows, columns = -(-q_len // self.block_size[0]), -(-kv_len // self.block_size[1])
        first, line = 0, b if self.states.shape[0] > 1 else 0
        if self.packing is not None:
            first, line = int(self.packing.first_rows(self.block_size[0])[b]), 0
        return replace(
            self,
            states=self.states[line : line + 1, :, first : first + rows, :columns],
            q_len=q_len,
            kv_len=kv_len,
            kv_lens=None,
            packing=None,
            _kv_runs=None,
        )

    @cached_property
    def kv_runs(self) -> Runs:
        """Runs along the rows: what the forward kernels consume."""
        return self._kv_runs if self._kv_runs is not None else compact(self.states, self._ragged)

    @property
    def made(self) -> tuple[torch.Tensor, ...]:
        """What planning made: the states, and on a GPU the runs along the rows."""
        return (self.states,) if self._kv_runs is None else (self.states, *self._kv_runs.tensors)

    def read_by(
        self,
        *,
        by_key: bool = False,
        hopper: bool = False,
        ordered: bool = False,
        apart: Apart | None = None,
    ) -> tuple[Any, str]:
        """What kernels read of it, and how that is laid out; `by_key`: also along the columns;
        `hopper`: Hopper's own, with sums that are `ordered`; `apart`: with documents that are."""
        queued = hopper and self.packing is not None and self.packing.cu_kv is not None
        late_first = queued and ordered
        name = f"read {by_key} {queued} {late_first} {apart and (apart.batch, apart.block)}"
        made: tuple[Any, str] = self._kept(
            name, lambda: self._read_by(by_key, queued, late_first, apart)
        )
        return made

    def _read_by(
        self, by_key: bool, queued: bool, late_first: bool, apart: Apart | None
    ) -> tuple[Any, str]:
        found = [self.states, self.q_sequences, *self.kv_runs.tensors]
        found += [x for made in self.ranges for x in (made.range, made.order)]
        if by_key:
            found += [self.kv_sequences, *self.q_runs.tensors]
        if queued:
            found += [self.queue(), *([self.queue(True, late_first)] if by_key else [])]
        if apart is not None:
            found += self.documents(apart).read
        return tuple(found), f"{self.block_size} {layouts_of(*found)}"

    def read_by_decoding(self, group: int) -> tuple[Any, str]:
        """What the kernel for few queries reads of it, and how that is laid out."""

        def read() -> tuple[Any, str]:
            made = self.visits(group)
            found = made.counts, made.runs
            return found, f"{self.block_size} {layouts_of(*found)}"

        found: tuple[Any, str] = self._kept(f"read by decoding {group}", read)
        return found

    def visits(self, group: int) -> Visits:
        """Runs along the rows that any of `group` query heads visits; made once."""
        made: Visits = self._kept(f"visits {group}", lambda: self._visits(group))
        return made

    def _visits(self, group: int) -> Visits:
        if self.device.type == "cpu":
            return visits(self.states, group)
        from ..plan import visits as visits_on_device

        def run() -> tuple[torch.Tensor, torch.Tensor]:
            made = visits_on_device(self.states, group)
            return made.counts, made.runs

        return Visits(*self._tapes.run(("visits", group), (), run, (self.states,)))

    @property
    def q_runs(self) -> Runs:
        """Runs along the columns: what gradients of keys and values consume."""
        made: Runs = self._q_runs or self._kept("q_runs", self._transpose)
        return made

    def shared(self) -> Schedule:
        """Itself, for calls that it is given to."""
        self.__dict__["is_shared"] = True
        return self

    def for_call(self) -> Schedule:
        """Itself; in a CUDA graph a copy, which keeps what the call makes of it."""
        if not is_capturing(self.device):
            return self
        made = copy.copy(self)
        made.__dict__["_is_of_one_call"] = True
        return made

    def _kept(self, name: str, make: Callable[[], Any]) -> Any:
        """What was made when it was first asked for; but a CUDA graph's has no contents before the
        graph is replayed, and no other call gets it."""
        made = self.__dict__.get(name)
        if made is None:
            made = make()
            if self._is_of_one_call or not is_capturing(self.device):
                self.__dict__[name] = made
        return made

    def _transpose(self) -> Runs:
        if self.device.type != "cpu":
            from ..plan import compact as compact_on_device

            capacity = column_capacity(-(-self.q_len // self.block_size[0]))
            given = (self.states, self.kv_len, self.kv_lens, self.block_size, capacity)
            tensors = [self.states, self.kv_lens, self.kv_sequences]
            if self.packing is not None:
                tensors += self.packing.starts

            def run() -> tuple[torch.Tensor, ...]:
                made = compact_on_device(*given, by_key=True, packing=self.packing)
                return made.tensors

            return Runs(
                *self._tapes.run(("q_runs", self.block_size, self.kv_len), (), run, tensors)
            )
        if self.packing is not None:
            return self._packed_q_runs(self.packing)
        ragged = None if self._ragged is None else self._ragged.mT
        return compact(self.states.mT, ragged, by_key=True)

    def _packed_q_runs(self, packing: Packing) -> Runs:
        """On the CPU: each tile of keys among its own sequence's rows."""
        size = self.block_size[1]
        b, tile = packing.tiles(size, by_key=True)
        lens = torch.zeros_like(b) if self.kv_lens is None else self.kv_lens.long()[b]
        is_alive = (tile * size < lens) & (tile < self.states.shape[3])
        # A column of zeros behind the last tile: there are none where no sequence has keys.
        grid = torch.nn.functional.pad(self.grid, (0, 1))
        columns = grid.mT[b, :, torch.where(is_alive, tile, -1)].transpose(0, 1)[None]
        ragged = ((tile + 1) * size > lens).reshape(1, 1, -1, 1)
        return compact(columns, ragged, by_key=True)

    def queue(self, by_key: bool = False, late_first: bool = False) -> torch.Tensor:
        """Packed: rows of tiles in the order in which programs of Hopper's kernels take them, as
        `schedule.queue` has them; `by_key`: of key tiles. Made once."""
        name = f"queue {by_key} {late_first}"
        made: torch.Tensor = self._kept(name, lambda: self._queue(by_key, late_first))
        return made

    def _queue(self, by_key: bool, late_first: bool) -> torch.Tensor:
        packing, runs = self.packing, self.q_runs if by_key else self.kv_runs
        assert packing is not None
        if self.device.type == "cpu":
            lying = packing.with_keys(self.kv_lens)
            return queue(runs.counts, lying, self.block_size, by_key, late_first)
        from ..plan import queue as queue_on_device

        sequences = self.kv_sequences if by_key else self.q_sequences
        tensors = [runs.counts, sequences, *packing.starts, self.kv_lens]
        key = ("queue", self.block_size, by_key, late_first)

        def run() -> tuple[torch.Tensor, ...]:
            lying = packing.with_keys(self.kv_lens)
            return (queue_on_device(runs.counts, lying, self.block_size, by_key, late_first),)

        return self._tapes.run(key, (), run, tensors)[0]  # type: ignore[no-any-return]

    def documents(self, apart: Apart) -> Documents:
        """Documents as sequences, each in tiles of its own: found when Hopper's forward asks."""
        name = f"documents {apart.batch} {apart.block}"
        made: Documents = self._kept(name, lambda: find_documents(self, apart, self._tapes))
        return made

    @property
    def ranges(self) -> tuple[Ranges, ...]:
        """Where equal elements of the mask's data lie, for each of `order.tables_of(mask)`: found
        when a kernel that has a form for data in order first asks."""
        found: tuple[Ranges, ...] = self._kept("ranges", self._find_ranges)
        return found

    def _find_ranges(self) -> tuple[Ranges, ...]:
        if self.device.type == "cpu":
            return tuple(find_ranges(tensor, dim) for tensor, dim in self._sources)
        from ..plan import find_ranges as find_on_device

        def run() -> tuple[torch.Tensor, ...]:
            made = [find_on_device(tensor, dim) for tensor, dim in self._sources]
            return tuple(x for ranges in made for x in (ranges.range, ranges.order))

        if not self._sources:
            return ()
        sources = [tensor for tensor, _ in self._sources]
        dims = tuple(dim for _, dim in self._sources)
        found = self._tapes.run(("ranges", dims), (), run, sources)
        return tuple(Ranges(*pair) for pair in zip(found[::2], found[1::2], strict=True))

    @property
    def _ragged(self) -> torch.Tensor | None:
        """Key tiles that stick out of the keys' length."""
        size = self.block_size[1]
        ends = (torch.arange(self.states.shape[3], device=self.device) + 1) * size
        if self.kv_lens is not None:
            lens = self.kv_lens
            if (sequences := self.q_sequences) is not None:
                return ends > lens[sequences.long()].reshape(1, 1, -1, 1)
            return ends > lens.reshape(-1, 1, 1, 1)
        if self.kv_len % size == 0:
            return None
        return (ends > self.kv_len).expand(1, 1, 1, -1)

    @cached_property
    def kv_num_blocks(self) -> torch.Tensor:
        return _count(self.grid, PARTIAL)

    @cached_property
    def kv_indices(self) -> torch.Tensor:
        return _indices(self.grid, PARTIAL)

    @cached_property
    def full_kv_num_blocks(self) -> torch.Tensor:
        return _count(self.grid, FULL)

    @cached_property
    def full_kv_indices(self) -> torch.Tensor:
        return _indices(self.grid, FULL)

    @cached_property
    def q_num_blocks(self) -> torch.Tensor:
        return _count(self.grid.mT, PARTIAL)

    @cached_property
    def q_indices(self) -> torch.Tensor:
        return _indices(self.grid.mT, PARTIAL)

    @cached_property
    def full_q_num_blocks(self) -> torch.Tensor:
        return _count(self.grid.mT, FULL)

    @cached_property
    def full_q_indices(self) -> torch.Tensor:
        return _indices(self.grid.mT, FULL)

    @property
    def density(self) -> float:
        """Non-empty tiles / all tiles. Waits for the device."""
        if not self.states.numel():
            return 0.0
        return float((self.grid != 0).float().mean())

    @property
    def nbytes(self) -> int:
        """Bytes held: the states, and the runs and ranges of data made so far."""
        runs = (
            self.__dict__.get("kv_runs", self._kv_runs),
            self.__dict__.get("q_runs", self._q_runs),
        )
        made: list[Runs] = [r for r in runs if r is not None]
        ranges: tuple[Ranges, ...] = self.__dict__.get("ranges", ())
        return self.states.numel() + sum(x.nbytes for x in made) + sum(x.nbytes for x in ranges)

    def _repr_svg_(self) -> str:
        from ..show import schedule_svg

        return schedule_svg(self)

    def __str__(self) -> str:
        from ..show import schedule_text

        return schedule_text(self)


def shown(value: int | torch.Tensor | None) -> Any:
    """What can be compared without waiting for the device."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.tolist() if value.device.type == "cpu" else f"a tensor {list(value.shape)}"


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being made of what runs now."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _count(states: torch.Tensor, kind: int) -> torch.Tensor:
    return (states == kind).sum(-1, dtype=torch.int32)


def _indices(states: torch.Tensor, kind: int) -> torch.Tensor:
    """Columns of one kind first, ascending, then the others: FlexAttention's order."""
    return torch.argsort((states != kind).to(torch.int8), dim=-1, stable=True).to(torch.int32)
