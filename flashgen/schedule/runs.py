"""What kernels consume: for each row of tiles, maximal runs of tiles to mask and of full ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .classify import FULL, PARTIAL


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs of tiles along each row, int32, on the device.

    `counts` [B|1, H|1, rows, 2]: how many tiles are masked, and how many are full.
    `masked`, `full` [B|1, H|1, rows, R + 1, 2]: (first, past the last) tile of each run,
    ascending, zeros after the last run. Masked are the PARTIAL tiles, and a FULL one at the
    ragged end of the keys."""

    counts: torch.Tensor
    masked: torch.Tensor
    full: torch.Tensor

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.counts, self.masked, self.full))


def compact(states: torch.Tensor, ragged: torch.Tensor | None) -> Runs:
    """Turn states [B|1, H|1, rows, tiles] into runs.

    `ragged` (bool, broadcasting to states) marks tiles that stick out of the keys' length."""
    full = states == FULL
    masked = states == PARTIAL
    if ragged is not None:
        masked, full = masked | (full & ragged), full & ~ragged
    counts = torch.stack([masked.sum(-1), full.sum(-1)], dim=-1).to(torch.int32)
    return Runs(counts, _runs_of(masked), _runs_of(full))


def _runs_of(members: torch.Tensor) -> torch.Tensor:
    """Starts and ends of the runs of True along the last dimension."""
    padded = torch.nn.functional.pad(members, (1, 1))
    starts = padded[..., 1:] & ~padded[..., :-1]
    ends = padded[..., :-1] & ~padded[..., 1:]
    most = int(starts.sum(-1).max()) if starts.numel() else 0
    runs = torch.zeros((*members.shape[:-1], most + 1, 2), dtype=torch.int32, device=members.device)
    for column, marks in enumerate((starts, ends)):
        where = marks.nonzero(as_tuple=True)
        rank = marks.cumsum(-1)[where] - 1
        runs[(*where[:-1], rank, torch.full_like(rank, column))] = where[-1].to(torch.int32)
    return runs
