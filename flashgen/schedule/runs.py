"""What kernels consume: for each row of tiles, maximal runs of tiles to mask and of full ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..bounds import side
from ..expr import Expr, walk
from .classify import FULL, PARTIAL


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs of tiles along each row, int32, on the device.

    `counts` [B|1, H|1, rows, 3]: how many tiles are masked, how many are full, and whether the
    ragged tile, which sticks out of the keys' length, is visited (it is in neither list).
    `masked`, `full` [B|1, H|1, rows, R, 2]: (first, past the last) tile of each run, ascending,
    then zeros (a kernel reads two runs ahead).
    Along columns (rows are key tiles) all visited tiles of a ragged row are masked."""

    counts: torch.Tensor
    masked: torch.Tensor
    full: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.counts, self.masked, self.full

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)


@dataclass(frozen=True, eq=False)
class Visits:
    """Runs of visited tiles along each row, cut or full, int32: what kernels for few queries read.

    `counts` [B|1, Hkv|1, rows]: how many tiles are visited, by any head of a group.
    `runs` [B|1, Hkv|1, rows, R, 2]: as those of `Runs`."""

    counts: torch.Tensor
    runs: torch.Tensor


# Runs that a row of a data-dependent mask has room for.
MOST_RUNS = 512


def run_capacity(mask: Expr | None, tiles: int) -> int:
    """How many runs a row may have, before planning.

    A mask that compares key positions with what is fixed for a query changes few times along a
    row; any other one at most at every second tile. A row with more runs than there is room for
    becomes one masked run, so this costs time and never truth."""
    changes = 0 if mask is None else _changes(mask)
    most = MOST_RUNS if changes is None else min(MOST_RUNS, 2 * changes + 2)
    # In a graph whose lengths vary, the number of tiles is a symbol.
    capacity: int = torch.sym_min(tiles // 2 + 1, most)  # type: ignore[no-untyped-call]
    return capacity


def column_capacity(rows: int) -> int:
    """How many runs a column of so many tiles may have."""
    capacity: int = torch.sym_min(rows // 2 + 1, MOST_RUNS)  # type: ignore[no-untyped-call]
    return capacity


def _changes(mask: Expr) -> int | None:
    """How many comparisons with the key's position a mask has; None if it reads keys otherwise."""
    count = 0
    for node in walk(mask):
        if node.kind != "bool" or side(node) in ("", "q"):
            continue
        if node.op in ("and", "or", "not"):
            continue
        if node.op not in ("lt", "le") or not all(_is_affine_in_key(a) for a in node.args):
            return None
        count += 1
    return count


def _is_affine_in_key(expr: Expr) -> bool:
    if side(expr) in ("", "q"):
        return True
    if expr.op == "index":
        return bool(expr.attr == "kv_idx")
    return expr.op in ("add", "sub", "neg") and all(map(_is_affine_in_key, expr.args))


def compact(states: torch.Tensor, ragged: torch.Tensor | None, by_key: bool = False) -> Runs:
    """Turn states [B|1, H|1, rows, tiles] into runs.

    `ragged` (bool, broadcasting to states) marks tiles that stick out of the keys' length;
    `by_key`: the rows are key tiles."""
    full = states == FULL
    masked = states == PARTIAL
    apart = torch.zeros_like(full)
    if ragged is not None and by_key:
        masked, full = masked | (full & ragged), full & ~ragged
    elif ragged is not None:
        apart = (states != 0) & ragged
        masked, full = masked & ~ragged, full & ~ragged
    counts = torch.stack([x.sum(-1) for x in (masked, full, apart)], dim=-1).to(torch.int32)
    return Runs(counts, _runs_of(masked), _runs_of(full))


def visits(states: torch.Tensor, group: int) -> Visits:
    """The visited tiles of states [B|1, H|1, rows, tiles], for groups of so many heads."""
    visited = states != 0
    if states.shape[1] > 1:
        batch, heads, rows, tiles = states.shape
        visited = visited.view(batch, heads // group, group, rows, tiles).any(2)
    return Visits(visited.sum(-1, dtype=torch.int32), _runs_of(visited))


def _runs_of(members: torch.Tensor) -> torch.Tensor:
    """Starts and ends of the runs of True along the last dimension."""
    padded = torch.nn.functional.pad(members, (1, 1))
    starts = padded[..., 1:] & ~padded[..., :-1]
    ends = padded[..., :-1] & ~padded[..., 1:]
    most = int(starts.sum(-1).max()) if starts.numel() else 0
    runs = torch.zeros((*members.shape[:-1], most + 3, 2), dtype=torch.int32, device=members.device)
    for column, marks in enumerate((starts, ends)):
        where = marks.nonzero(as_tuple=True)
        rank = marks.cumsum(-1)[where] - 1
        index = (*where[:-1], rank, torch.full_like(rank, column))
        runs[index] = where[-1].to(torch.int32)
    return runs
