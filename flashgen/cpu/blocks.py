"""Blocks of a schedule: the rows and columns that one matrix product computes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..geometry import Geometry
from ..schedule import Schedule, compact

# Elements of scores held at a time: they stay in the caches between the passes over them.
_ELEMENTS = 1 << 21
# What a block costs apart from its elements, in elements: calling some thirty operations.
_OVERHEAD = 1 << 17


@dataclass(frozen=True)
class Block:
    """Some rows of queries and all columns they visit, for some sequences and heads.

    The first `full` columns, in the order of `columns`, are allowed to every row."""

    batch: slice
    heads: slice
    kv_heads: slice
    rows: slice
    columns: tuple[slice, ...]
    full: int

    @property
    def queries(self) -> tuple[slice, slice, slice]:
        """Where its rows lie in [B, Hq, Sq, ...]."""
        return self.batch, self.heads, self.rows

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of its scores: [B, Hq, rows, columns]."""
        return *map(_size, self.queries), sum(map(_size, self.columns))  # type: ignore[return-value]

    def by_kv_head(self, x: torch.Tensor) -> torch.Tensor:
        """[B, Hq, rows, n] as [B, Hkv, group * rows, n]: heads that share keys in one product."""
        heads = _size(self.kv_heads)
        return x if x.shape[1] == heads else x.reshape(x.shape[0], heads, -1, x.shape[3])

    def by_head(self, x: torch.Tensor) -> torch.Tensor:
        """[B, Hkv, group * rows, n] as [B, Hq, rows, n]."""
        return x.reshape(*self.shape[:3], x.shape[3])

    def gather(self, keys: torch.Tensor) -> torch.Tensor:
        """The visited columns of [B, Hkv, Skv, ...]; a view where they are one run."""
        own = keys[self.batch, self.kv_heads]
        parts = [own[:, :, columns] for columns in self.columns]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def scatter_add(self, total: torch.Tensor, part: torch.Tensor) -> None:
        """Add gathered columns back to where they came from."""
        own = total[self.batch, self.kv_heads]
        sizes = [_size(columns) for columns in self.columns]
        for columns, piece in zip(self.columns, torch.split(part, sizes, dim=2), strict=True):
            own[:, :, columns] += piece


def split(schedule: Schedule, geometry: Geometry) -> list[Block]:
    """The blocks of a schedule; rows that visit nothing are in none."""
    if not geometry.batch * geometry.heads:
        return []
    batch, heads = schedule.states.shape[:2]
    states = schedule.states.cpu()
    if geometry.varies_by_batch and batch == 1:
        states = states.expand(geometry.batch, -1, -1, -1)
    states, rows = _coarsen(states, schedule.block_size, geometry)
    runs = compact(states, None)
    full, masked = runs.full.tolist(), runs.masked.tolist()
    tile = schedule.block_size[1]
    blocks: list[Block] = []
    for b, h, row in itertools.product(*map(range, states.shape[:3])):
        length = _kv_length(geometry, b)
        free = _columns(full[b][h][row], tile, length)
        columns = _columns(full[b][h][row] + masked[b][h][row], tile, length)
        if columns:
            whole = Block(
                slice(b, b + 1) if states.shape[0] > 1 else slice(0, geometry.batch),
                slice(h, h + 1) if heads > 1 else slice(0, geometry.heads),
                slice(0, 0),
                slice(row * rows, min((row + 1) * rows, geometry.q_len)),
                columns,
                sum(map(_size, free)),
            )
            blocks.extend(_pieces(whole, geometry))
    return blocks


def _coarsen(
    states: torch.Tensor, block_size: tuple[int, int], geometry: Geometry
) -> tuple[torch.Tensor, int]:
    """Join rows of tiles in pairs while fewer blocks outweigh the columns added to each.

    Returns the states and the number of queries of a row."""
    rows = block_size[0]
    cells = max(1, states.shape[0] * states.shape[1])
    together = geometry.batch * geometry.heads / cells

    def cost(states: torch.Tensor, rows: int) -> float:
        visited = states != 0
        elements = int(visited.sum()) * rows * block_size[1] * together
        return elements + _OVERHEAD * int(visited.any(-1).sum())

    while states.shape[2] > 1:
        coarser = _join_pairs(states)
        if cost(coarser, rows * 2) > cost(states, rows):
            break
        states, rows = coarser, rows * 2
    return states, rows


def _join_pairs(states: torch.Tensor) -> torch.Tensor:
    """Two rows of tiles as one: full where both are, empty where both are, else partial."""
    upper, lower = states[:, :, 0::2], states[:, :, 1::2]
    if upper.shape[2] > lower.shape[2]:
        lower = torch.cat([lower, upper[:, :, -1:]], dim=2)
    return torch.where(upper == lower, upper, 1)


def _kv_length(geometry: Geometry, b: int) -> int:
    if geometry.kv_lens is None:
        return geometry.kv_len
    return min(int(geometry.kv_lens[b]), geometry.kv_len)


def _columns(runs: Sequence[Sequence[int]], tile: int, length: int) -> tuple[slice, ...]:
    """Runs of tiles as columns, cut at the keys' length; neighbours are joined."""
    columns: list[slice] = []
    for first, last in runs:
        start, stop = first * tile, min(last * tile, length)
        if start >= stop:
            continue
        if columns and columns[-1].stop == start:
            start = columns.pop().start
        columns.append(slice(start, stop))
    return tuple(columns)


def _pieces(whole: Block, geometry: Geometry) -> Iterator[Block]:
    """Cut a block by sequences, heads and, if it must be, rows, to what is held at a time."""
    group = geometry.group if _size(whole.heads) > 1 else 1
    _, heads, rows, columns = whole.shape
    head = rows * columns * group
    batches = max(1, _ELEMENTS // (head * (heads // group)))
    heads = max(1, _ELEMENTS // head) * group
    rows = max(1, min(rows, _ELEMENTS // (columns * group)))
    for b, h, row in itertools.product(
        _chunks(whole.batch, batches), _chunks(whole.heads, heads), _chunks(whole.rows, rows)
    ):
        kv_heads = slice(h.start // geometry.group, -(-h.stop // geometry.group))
        yield Block(b, h, kv_heads, row, whole.columns, whole.full)


def _chunks(whole: slice, size: int) -> list[slice]:
    starts = range(whole.start, whole.stop, size)
    return [slice(start, min(start + size, whole.stop)) for start in starts]


def _size(part: slice) -> int:
    return int(part.stop - part.start)
