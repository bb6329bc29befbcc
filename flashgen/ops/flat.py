"""A schedule's tensors in one dimension.

The grid of tiles follows from the lengths: of a graph whose lengths vary, each of its dimensions is
a formula that may be 1, and PyTorch asks of every tensor with such dimensions whether they are. The
question would become a guard, and a graph for short sequences apart from that for long ones. So
operators hand schedules on in one dimension, which is never 1."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..schedule import Runs

# Bytes behind the states: so their number is at least 3.
_PADDING = 2
# Integers: each part starts at a multiple of 16 bytes, as an allocation does.
_ALIGNMENT = 4


def flat_states(states: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(states.reshape(-1), (0, _PADDING))


def states_of(flat: torch.Tensor, grid: Sequence[int]) -> torch.Tensor:
    return flat[:-_PADDING].view(tuple(grid))


def states_length(grid: Sequence[int]) -> int:
    batch, heads, rows, columns = grid
    return batch * heads * rows * columns + _PADDING


def flat_runs(runs: Runs) -> torch.Tensor:
    parts = (x.reshape(-1) for x in (runs.counts, runs.masked, runs.full))
    return torch.cat([torch.nn.functional.pad(x, (0, -len(x) % _ALIGNMENT)) for x in parts])


def runs_of(flat: torch.Tensor, rows: Sequence[int], capacity: int) -> Runs:
    """`rows`: batch, heads, and rows of tiles; `capacity`: runs of a row."""
    counts, width = (*rows, 3), (*rows, capacity + 3, 2)
    lengths = _lengths(rows, capacity)
    starts = (0, _aligned(lengths[0]), _aligned(lengths[0]) + _aligned(lengths[1]))
    parts = [flat[start : start + n] for start, n in zip(starts, lengths, strict=True)]
    return Runs(parts[0].view(counts), parts[1].view(width), parts[2].view(width))


def runs_length(rows: Sequence[int], capacity: int) -> int:
    return sum(_aligned(n) for n in _lengths(rows, capacity))


def _lengths(rows: Sequence[int], capacity: int) -> tuple[int, int, int]:
    count = rows[0] * rows[1] * rows[2]
    width = count * (capacity + 3) * 2
    return count * 3, width, width


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT
