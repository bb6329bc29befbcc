"""MagiAttention's slices: a mask as a list of rectangles, each full or cut by diagonals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import flashgen as fg

from .checks import counts_rows
from .rows import row_of

FULL, CAUSAL, INVERSE_CAUSAL, BOTH_CAUSAL = range(4)


@fg.mask(check=counts_rows(first=(1, 1), last=(1, 1)))
def slices(
    q_idx,
    kv_idx,
    q_len,
    kv_len,
    first: fg.Tensor,
    last: fg.Tensor,
    runs: fg.Const[int],
):
    """Each row sees up to `runs` ranges of keys, as `from_slices` makes them.

    Allowed iff `first[n, r] <= j < last[n, r]` for some n < runs; r is the row of the queries
    given (the default `q_offset` is assumed). A row past the table has the table's last one.

    Data: `first`, `last`, integer [runs, rows]; `runs` is baked in.

    Source: MagiAttention (SandAI), AttnSlice: after its lists are sorted by rows.

    At N = 10, `from_slices([[0, 4], [4, 10], [4, 10]], [[0, 4], [0, 3], [4, 10]], [0, 0, 1])`:

        ████······
        ████······
        ████······
        ████······
        ███·█·····
        ███·██····
        ███·███···
        ███·████··
        ███·█████·
        ███·██████
    """
    row = row_of(q_idx, q_len, kv_len)
    seen = False
    for n in range(runs):
        seen = seen | ((first[n, row] <= kv_idx) & (kv_idx < last[n, row]))
    return seen


Ranges = Sequence[Sequence[int]] | torch.Tensor


def from_slices(
    q_ranges: Ranges,
    k_ranges: Ranges,
    mask_types: Sequence[int] | torch.Tensor | None = None,
    *,
    device: torch.device | str | None = None,
) -> Any:
    """The mask of MagiAttention's slices: the union of rectangles, which must not overlap.

    `q_ranges`, `k_ranges` [n, 2] half-open ranges of rows and keys; `mask_types` [n], all full if
    left out. In a slice of n rows and m keys, row i and key j counted inside it:
    0 full: all; 1 causal: `j <= i + m - n` (bottom-right); 2 inverse causal: `j >= i` (top-left);
    3 both: `i <= j <= i + m - n`. Ranges may overlap in rows or in keys, but a cell that lies in
    two slices would be counted twice by a merge, so it is refused. A row in no slice sees no key.

    The list is read on the host (a tensor on a device is copied there first) and becomes tables
    of the ranges each row sees, on `device`, or where `q_ranges` lies; memory is rows x (most
    ranges of a row).
    Raises FlashgenError for ranges or types that make no sense, and for overlap."""
    call = f"from_slices({_count(q_ranges)} slices)"
    q, k = _ranges("q_ranges", q_ranges, call), _ranges("k_ranges", k_ranges, call)
    types = torch.as_tensor([FULL] * len(q) if mask_types is None else mask_types, device="cpu")
    if types.numel() and (types.is_floating_point() or types.dtype == torch.bool):
        raise fg.FlashgenError(
            f"mask_types must be integers, and is {types.dtype}",
            call=call,
            write="Write 0 full, 1 causal, 2 inverse causal, 3 both.",
        )
    types = types.long()
    if not len(q) == len(k) == types.numel() or types.ndim != 1:
        raise fg.FlashgenError(
            f"there are {len(q)} q_ranges, {len(k)} k_ranges and {types.numel()} mask_types",
            call=call,
            write="Write one of each for every slice.",
        )
    if ((types < FULL) | (types > BOTH_CAUSAL)).any():
        raise fg.FlashgenError(
            f"mask_types holds {types.tolist()}",
            call=call,
            write="Write 0 full, 1 causal, 2 inverse causal, 3 both.",
        )
    owner, row, start, end = _row_ranges(q, k, types)
    _refuse_overlap(owner, row, start, end, call)
    row, start, end = _joined(row, start, end)
    tables = _tables(row, start, end, int(q[:, 1].max()) if len(q) else 0)
    if device is None and isinstance(q_ranges, torch.Tensor):
        device = q_ranges.device
    first, last = (table.to(device) for table in tables)
    return slices(first=first, last=last, runs=first.shape[0])


def _count(ranges: Ranges) -> int:
    return len(ranges)


def _ranges(name: str, ranges: Ranges, call: str) -> torch.Tensor:
    table = torch.as_tensor(ranges, device="cpu")
    if table.numel() == 0:
        return torch.zeros(0, 2, dtype=torch.long, device="cpu")
    if table.ndim != 2 or table.shape[1] != 2 or table.is_floating_point():
        raise fg.FlashgenError(
            f"{name} must be integers [n, 2], and is {list(table.shape)} {table.dtype}",
            call=call,
            write=f"Write {name}=[[start, end], ...].",
        )
    if ((table[:, 0] > table[:, 1]) | (table[:, 0] < 0)).any():
        raise fg.FlashgenError(
            f"{name} has a range that ends before it starts, or starts below 0",
            call=call,
            write="Write 0 <= start <= end.",
        )
    return table.long()


def _row_ranges(q: torch.Tensor, k: torch.Tensor, types: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """For each row of each slice the keys it sees, without the empty ones, by row and key."""
    heights = q[:, 1] - q[:, 0]
    owner = torch.repeat_interleave(torch.arange(len(q), device=q.device), heights)
    before = torch.cumsum(heights, 0) - heights
    local = torch.arange(len(owner), device=q.device) - before[owner]
    below = heights[owner] - 1 - local
    kind = types[owner]
    start = k[owner, 0] + torch.where(kind >= INVERSE_CAUSAL, local, 0)
    end = k[owner, 1] - torch.where((kind == CAUSAL) | (kind == BOTH_CAUSAL), below, 0)
    start = torch.minimum(torch.maximum(start, k[owner, 0]), k[owner, 1])
    row = q[owner, 0] + local
    live = start < end
    owner, row, start, end = owner[live], row[live], start[live], end[live]
    order = torch.argsort(start, stable=True)
    order = order[torch.argsort(row[order], stable=True)]
    return owner[order], row[order], start[order], end[order]


def _refuse_overlap(
    owner: torch.Tensor, row: torch.Tensor, start: torch.Tensor, end: torch.Tensor, call: str
) -> None:
    # Sorted by row and start, so that two ranges overlap only if two neighbours do.
    twice = (row[1:] == row[:-1]) & (start[1:] < end[:-1])
    if not twice.any():
        return
    at = int(twice.nonzero()[0])
    raise fg.FlashgenError(
        f"slices {int(owner[at])} and {int(owner[at + 1])} both hold the cell of row "
        f"{int(row[at])} and key {int(start[at + 1])}",
        call=call,
        write="Write slices that share no cell; cut one of the two.",
    )


def _joined(
    row: torch.Tensor, start: torch.Tensor, end: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ranges of a row that touch become one, so that rows need fewer."""
    touches = (row[1:] == row[:-1]) & (start[1:] == end[:-1])
    begins = torch.ones_like(row, dtype=torch.bool)
    begins[1:] = ~touches
    ends = torch.ones_like(begins)
    ends[:-1] = begins[1:]
    return row[begins], start[begins], end[ends]


def _tables(
    row: torch.Tensor, start: torch.Tensor, end: torch.Tensor, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [most ranges of a row, rows + 1] each; the last row is for all that come after."""
    position = torch.arange(len(row), device=row.device)
    fresh = torch.ones_like(row, dtype=torch.bool)
    fresh[1:] = row[1:] != row[:-1]
    rank = position - torch.cummax(torch.where(fresh, position, 0), 0).values
    runs = int(rank.max()) + 1 if len(row) else 1
    first = torch.zeros(runs, rows + 1, dtype=torch.int32, device=row.device)
    last = torch.zeros_like(first)
    first[rank, row] = start.int()
    last[rank, row] = end.int()
    return first, last
