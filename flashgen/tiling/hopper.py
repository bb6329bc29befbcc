"""Shapes of Hopper's kernels: what was measured to be fastest, and what else there is to try.

Forward, by head dimensions (those of fp16 are bf16's, and masks matter by their rows alone; padded
to two powers of two); `keys` and `stages` are as many as fit beside the queries:

    head dimensions   rows   queries x keys   stages   warpgroups   registers   rows' queries
    up to 64          long   192 x 128        4        3            160         2 row blocks
    up to 64          short  128 x 128        4        2            232         1
    96                all    128 x 128        4        2            232         1
    128               all    128 x 128        3        2            232         1
    192 / 128         all    128 x 128        2        2            232         1
    192               all    128 x 64         3        2            232         1
    256               all    128 x 64         2        2            232         1

Long rows reach back to the first key, by the mask, in calls of more than 256 queries. Backward:

    head dimensions   queries x keys   stages   heads side by side (in order)
    up to 64          64 x 128         4        what fits in 16 MiB (36 MiB), 8 at most
    up to 128         64 x 128         2        likewise
    up to 256         64 x 64          2        likewise
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace

from ..emit import parts_of
from . import variations

ROWS = (128, 192)
KEYS = (128, 64)
# Bytes for tiles: what a program may have, without barriers and what Triton needs for reductions.
SHARED = 232448 - 2048
_MOST_STAGES = 4
# Of warpgroups: row blocks whose queries are held, registers of a thread that multiplies, and of
# one that copies. Three have no registers to hold queries; those of the next row block come early.
# One is for few queries, on the portable kernels' tiles.
_REGISTERS = {1: (1, 232, 40), 2: (1, 232, 40), 3: (2, 160, 32)}
# Tuning tries so many programs for each multiprocessor of heads that work side by side at the end,
# and percents of the time that sharing a row block has to save.
_SIDES, _SAVINGS = (1, 4, 16, 64), (5, 1, 100)
# Of the L2 cache, what heads side by side may take in the backward: without an order, and with one.
_SIDE_MEBIBYTES = (16, 36)
_TRIED_MEBIBYTES = (1, 16, 36, 64)


@dataclass(frozen=True)
class Shape:
    """Of the forward: warpgroups of 64 rows, keys of a tile, turns of the ring, row blocks whose
    queries are there, registers of a thread that multiplies, and of one that copies.

    `side`: heads at the end work side by side until they are so many programs for each
    multiprocessor; `saving`: percents that sharing a row block between programs has to save."""

    groups: int
    block_n: int
    stages: int
    buffers: int
    registers: int
    producer: int
    side: int = 4
    saving: int = 5

    @property
    def block_m(self) -> int:
        return 64 * self.groups

    @property
    def numbers(self) -> tuple[int, ...]:
        """What tuning chooses; a schedule's tile decides the rest."""
        return self.stages, self.buffers, self.side, self.saving

    def tuned(self, numbers: tuple[int, ...]) -> Shape:
        """The same with what tuning has chosen."""
        stages, buffers, side, saving = numbers
        return replace(self, stages=stages, buffers=buffers, side=side, saving=saving)

    def fits(self, head_dim: int, v_head_dim: int) -> bool:
        """Whether shared memory holds it, and the ring has two turns."""
        q_dim, v_dim = _widths(head_dim, v_head_dim)
        used = self.buffers * self.block_m * q_dim + self.stages * self.block_n * (q_dim + v_dim)
        return self.stages > 1 and 2 * used <= SHARED


def tile_for(head_dim: int, v_head_dim: int, long_rows: bool, q_len: int = 8192) -> tuple[int, int]:
    """Queries and keys of a tile that Hopper's forward kernel works on.

    Three warpgroups of narrow heads keep tensor cores and exponentials busy at the same time, but
    their tiles are cut more often; rows that reach back to the first key don't mind."""
    is_tall = long_rows and q_len > 256 and max(head_dim, v_head_dim) <= 64
    return ROWS[is_tall], shape_for(head_dim, v_head_dim).block_n


@functools.cache
def shape_for(
    head_dim: int, v_head_dim: int, block_n: int | None = None, block_m: int = 128
) -> Shape:
    """The blocks of Hopper's forward kernel.

    As many stages as fit in shared memory beside the queries, at most four, and two at least.
    Keys of a tile: as asked for, or the most for which that fits."""
    if block_n is None:
        shapes = (shape_for(head_dim, v_head_dim, n, block_m) for n in KEYS)
        return next(s for s in shapes if s.stages > 1)
    q_dim, v_dim = _widths(head_dim, v_head_dim)
    groups = block_m // 64
    buffers, registers, producer = _REGISTERS[groups]
    left, stage = SHARED - 2 * buffers * block_m * q_dim, 2 * block_n * (q_dim + v_dim)
    return Shape(groups, block_n, min(_MOST_STAGES, left // stage), buffers, registers, producer)


def works_on(tile: tuple[int, int], head_dim: int, v_head_dim: int) -> bool:
    """Whether the forward kernel works on a schedule's tiles."""
    rows, keys = tile
    if rows not in ROWS or keys not in KEYS or (rows > 128 and max(head_dim, v_head_dim) > 64):
        return False
    return shape_for(head_dim, v_head_dim, keys, rows).stages > 1


def tiles_to_try(head_dim: int, v_head_dim: int) -> tuple[tuple[int, int], ...]:
    """Tiles of schedules that tuning tries."""
    tiles = itertools.product(ROWS, KEYS)
    return tuple(tile for tile in tiles if works_on(tile, head_dim, v_head_dim))


def shapes_to_try(default: Shape, dims: tuple[int, int], effort: str) -> Iterator[Shape]:
    """Shapes that tuning tries on a tile; `quick` changes one thing at a time."""
    stages, buffers = range(default.stages, 1, -1), (default.buffers, 3 - default.buffers)
    choices = (stages, buffers, (default.side, *_SIDES), (default.saving, *_SAVINGS))
    yield from (default.tuned(n) for n in variations(default.numbers, choices, effort)
                if default.tuned(n).fits(*dims))  # fmt: skip


@dataclass(frozen=True)
class Steps:
    """Of the backward: steps whose queries are in shared memory, mebibytes of the L2 cache that
    heads side by side may take, and whether sums have a fixed order (2) or not (1)."""

    stages: int
    mebibytes: int
    order: int

    def side(self, bytes_of_head: int, lines: int) -> int:
        """How many heads' key blocks are taken side by side; a divisor of all `lines`.

        So the last ones of all are short, and blocks that wait for each other start apart. What is
        read and added to of these heads should stay in the L2 cache."""
        most = max(1, min(8, (self.mebibytes << 20) // bytes_of_head))
        return next(n for n in range(most, 0, -1) if lines % n == 0)


def steps_for(stages: int, ordered: bool) -> Steps:
    """The backward's, where tuning has found no others. Blocks that don't wait for each other gain
    less by being side by side."""
    return Steps(stages, _SIDE_MEBIBYTES[ordered], 1 + ordered)


def steps_to_try(default: Steps, may_order: bool, effort: str) -> Iterator[Steps]:
    """What tuning tries, the default first. `may_order`: a fixed order is tried too."""
    orders = (default.order, 2) if may_order else (default.order,)
    choices = (range(default.stages, 1, -1), (default.mebibytes, *_TRIED_MEBIBYTES), orders)
    yield from (Steps(*numbers) for numbers in variations(astuple(default), choices, effort))


def _widths(head_dim: int, v_head_dim: int) -> tuple[int, int]:
    q_dim, v_dim = (sum(part.size for part in parts_of(d)) for d in (head_dim, v_head_dim))
    return q_dim, v_dim
