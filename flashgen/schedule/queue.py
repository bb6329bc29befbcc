"""Rows of packed sequences' tiles in the order in which Hopper's programs take them."""

from __future__ import annotations

import torch

from ..storage import Packing

# What the queue says of a row of tiles: its number among all rows, its sequence, its number in the
# sequence, where its tile begins in the tensor, and how long the sequence is; then of the same
# sequence on the other side, where it begins, how long it is, and its first row of tiles.
COLUMNS = 8


def queue(
    counts: torch.Tensor,
    packing: Packing,
    block: tuple[int, int],
    by_key: bool = False,
    late_first: bool = False,
) -> torch.Tensor:
    """int32 [rows + 1, COLUMNS] on the CPU: how many rows hold a tile, then what these are.

    `counts` [1, H|1, rows, 3] of the runs along rows of queries, or of keys. Sequences whose other
    side is longest come first, as their rows may be long, and within one the longest rows, or with
    `late_first` the last ones; rows of a sequence stay together, so that what they share is read
    from memory once."""
    assert packing.cu_kv is not None
    own, other = packing.cu_q, packing.cu_kv
    if by_key:
        own, other = other, own
    starts, lens = own.tolist(), own.diff().tolist()
    other_starts, other_lens = other.tolist(), other.diff().tolist()
    work = counts[0, 0].sum(-1).tolist()
    sequences, tiles = (x.tolist() for x in packing.tiles(block[by_key], by_key))
    other_rows = packing.first_rows(block[not by_key], not by_key).tolist()
    alive = [
        (-other_lens[b], b, -(tile if late_first else work[row]), row)
        for row, (b, tile) in enumerate(zip(sequences, tiles, strict=True))
        if tile * block[by_key] < lens[b]
    ]
    found = torch.zeros(len(work) + 1, COLUMNS, dtype=torch.int32, device="cpu")
    found[0, 0] = len(alive)
    for place, (_, b, _, row) in enumerate(sorted(alive)):
        first = starts[b] + tiles[row] * block[by_key]
        numbers = (row, b, tiles[row], first, lens[b], other_starts[b], other_lens[b])
        found[place + 1] = torch.tensor((*numbers, other_rows[b]), device="cpu")
    return found
