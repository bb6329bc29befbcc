"""How many programs share a row block of Hopper's forward, so that all processors end together."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """Row blocks of a call: of so many queries, with so many tiles each, and the dimensions.

    `uniform`: all have as many tiles; otherwise those are the most that one has."""

    row_blocks: int
    rows: int
    tiles: int
    keys: int
    dims: tuple[int, int]
    uniform: bool


@dataclass(frozen=True)
class Shares:
    """Row blocks from `whole` on are shared by `splits` programs each."""

    whole: int
    splits: int = 1


# On an H200, in a microsecond: operations of one processor, and bytes that all write and read
# again. What the start and the end of a share cost, in tiles; and one more kernel, in microseconds.
_OPERATIONS, _BYTES, _ENDS, _KERNEL = 5.2e6, 1.2e6, 2, 5
# Most programs of a row block.
_MOST = 64


@functools.lru_cache(maxsize=1024)
def choose_shares(work: Work, processors: int, saving: int = 5) -> Shares:
    """What ends first, as far as one can say before; whole row blocks unless sharing saves so many
    percents: where processors have nothing to do at the end of many rounds, the power that they
    leave makes the others as much faster.

    Where row blocks differ, all are shared or none; those of a mask without long rows never."""
    all_whole = Shares(work.row_blocks)
    rounds, more = divmod(work.row_blocks, processors)
    if not more or (rounds and not work.uniform):
        return all_whole
    tile = 2 * work.rows * work.keys * sum(work.dims) / _OPERATIONS

    def time(splits: int) -> float:
        """How long the last round takes, in microseconds."""
        turns = math.ceil(more * splits / processors)
        time = turns * (math.ceil(work.tiles / splits) + _ENDS) * tile
        if splits > 1:
            time += _KERNEL + 4 * more * splits * work.rows * work.dims[1] / _BYTES
        return time

    best = min(range(1, min(work.tiles, _MOST) + 1), key=time)
    saved = time(1) - time(best)
    if saved < saving / 100 * (rounds * work.tiles * tile + time(1)):
        return all_whole
    return Shares(work.row_blocks - more, best)
