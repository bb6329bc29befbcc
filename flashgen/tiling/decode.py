"""Blocks of the kernels for few queries, and into how many splits their keys are cut."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..emit import parts_of
from . import Target, Tiling, variations

# Most queries of a call that the kernel for decoding is for: speculative decoding has up to 16.
MOST_QUERIES = 16
# Tiles of a schedule of latent heads: queries, keys.
LATENT_TILE = (16, 64)
# Stands for the tile of a call that needs no schedule.
WHOLE_ROWS = (1 << 30, 1 << 30)
# Keys of a split where results must not depend on the batch.
INVARIANT_KEYS = 2048
# A split of fewer keys isn't worth its start and its part of the merging; of sequences that may
# differ in length, one of more leaves the longest's programs running alone for too long.
_FEWEST_KEYS, _MOST_KEYS = 256, 8192
# How full a GPU's slots should be, all rounds of programs together.
_GOOD = 0.9
_TRIED_KEYS, _TRIED_WARPS, _TRIED_STAGES, _TRIED_RESIDENT = (32, 64, 128), (4, 8), (2, 3, 4), (1, 2)


@dataclass(frozen=True)
class Blocks:
    """A program's block: `tiling.block_m` packed rows, `group` heads to a query.

    `resident`: programs that a multiprocessor has room for."""

    tiling: Tiling
    group: int
    resident: int

    @property
    def queries(self) -> int:
        """Queries of a block."""
        return self.tiling.block_m // self.group

    @property
    def numbers(self) -> tuple[int, ...]:
        """What tuning chooses."""
        return self.tiling.block_n, self.tiling.warps, self.tiling.stages, self.resident

    def tuned(self, numbers: tuple[int, ...]) -> Blocks:
        """The same rows with what tuning has chosen."""
        return Blocks(Tiling(self.tiling.block_m, *numbers[:3]), self.group, numbers[3])

    def count(self, q_len: int, group: int) -> int:
        """Blocks that hold all heads of a group, for all queries."""
        return math.ceil(group / self.group) * math.ceil(q_len / self.queries)


@functools.lru_cache(maxsize=1024)
def choose_blocks(
    target: Target,
    dtype: torch.dtype,
    dims: tuple[int, int],
    rows: tuple[int, int],
    tile: tuple[int, int],
    *,
    latent: bool = False,
    page_size: int | None = None,
    plain: bool = True,
    pair_bytes: int = 0,
) -> Blocks:
    """The blocks of a call. `dims`: of keys and values; `rows`: queries, and heads that share keys;
    `tile`: queries and keys of a schedule's tile. `latent`: values are part of the keys.
    `page_size`: keys of a page, if they are in pages. `plain`: no function changes a score, and a
    program has one sequence. `pair_bytes`: of the data that is read for each pair."""
    block_m, packed = _rows(_most_rows(dtype, latent), *rows, tile[0])
    largest = tile[1] & -tile[1]
    block_n = min(_keys(target, dtype, dims, latent), largest)
    warps = 8 if latent and block_m > 32 else 4
    deepest = 4
    # Threads have up to 255 registers, so this is also how many programs have room.
    most = 8 // warps
    if not latent and block_m == 16 and largest >= 128 and _is_roomy(target, dtype, dims):
        # One program on a multiprocessor: fewer splits fill a GPU, and fewer are merged. Four warps
        # have no registers for a page of each key, nor for much else.
        is_lean = plain and (page_size or 128) % 128 == 0
        block_n, warps, most = 128, 4 if is_lean else 8, 1
        if page_size and page_size % 128 == 64:
            # A tile has one page. With a sixth stage too little is left of the L1.
            block_n, warps, deepest = 64, 4, 5
    fixed, stage = _bytes(dtype, dims, block_m, block_n, latent, pair_bytes)
    stages = _stages(target, dtype, stage, fixed, most, deepest)
    used = fixed + stage * max(1, stages)
    return Blocks(
        Tiling(block_m, block_n, warps, stages), packed, max(1, min(most, target.shared // used))
    )


def _bytes(
    dtype: torch.dtype, dims: tuple[int, int], block_m: int, block_n: int, latent: bool, pairs: int
) -> tuple[int, int]:
    """Bytes of shared memory: for the queries, and for each stage of keys and values."""
    keys, values = (sum(part.size for part in parts_of(dim)) for dim in dims)
    stage = block_n * (keys if latent else keys + values) * dtype.itemsize
    return block_m * keys * dtype.itemsize, stage + block_m * block_n * pairs


def blocks_to_try(
    default: Blocks,
    target: Target,
    dtype: torch.dtype,
    dims: tuple[int, int],
    tile: tuple[int, int],
    effort: str,
    *,
    latent: bool = False,
    pair_bytes: int = 0,
) -> Iterator[Blocks]:
    """Blocks that tuning tries for the same rows: keys, warps, stages, and how many programs of a
    multiprocessor the splits are made for. `quick` changes one of these."""
    choices = (_TRIED_KEYS, _TRIED_WARPS, _TRIED_STAGES, _TRIED_RESIDENT)
    for numbers in variations(default.numbers, choices, effort):
        block_n, _, stages, resident = numbers
        fixed, stage = _bytes(dtype, dims, default.tiling.block_m, block_n, latent, pair_bytes)
        if tile[1] % block_n == 0 and resident * (fixed + stage * stages) <= target.shared:
            yield default.tuned(numbers)


def _is_roomy(target: Target, dtype: torch.dtype, dims: tuple[int, int]) -> bool:
    """Whether wgmma takes keys of 128 rows, three stages of which fill a multiprocessor."""
    return target.arch == "90" and dtype.itemsize == 2 and 64 < max(dims) <= 128


def _most_rows(dtype: torch.dtype, latent: bool) -> int:
    if dtype.itemsize > 2:
        return 16
    return 64 if latent else 32


def _rows(most: int, q_len: int, group: int, tile_m: int) -> tuple[int, int]:
    """Packed rows of a block, and heads to a query. A block lies in one row of tiles."""
    packed = min(power_of_two(group), most)
    queries = min(power_of_two(q_len), most // packed)
    if q_len > tile_m:
        queries = min(queries, tile_m & -tile_m)
    # A matrix product has 16 rows at least: filled with heads that don't exist, not with queries.
    return max(16, packed * queries), max(packed, 16 // queries)


def power_of_two(n: int) -> int:
    """The smallest one that isn't below n."""
    return 1 << (n - 1).bit_length()


def _keys(target: Target, dtype: torch.dtype, dims: tuple[int, int], latent: bool) -> int:
    """Keys of a block."""
    if target.backend == "interpret":
        return 64
    if dtype.itemsize > 2:
        return 16 if max(dims) > 128 else 32
    # wgmma has 64 rows.
    if latent:
        return 64 if target.arch == "90" else 32
    return 32 if max(dims) > 128 else 64


def _stages(
    target: Target, dtype: torch.dtype, stage: int, fixed: int, programs: int, deepest: int
) -> int:
    """As deep a pipeline as there is room for. AMD's kernels, and fp32's, have none."""
    if target.backend != "cuda" or dtype.itemsize > 2:
        return 1
    room = target.shared - 8192
    for count in range(programs, 0, -1):
        stages = (room // count - fixed) // stage
        if stages >= 2:
            return min(deepest, stages)
    return 1


@dataclass(frozen=True)
class Splits:
    """How the tiles of a row are shared: by `count` programs, `tiles` each (0: in even shares).

    `dealt`: so many programs share the tiles of all sequences, over their ends."""

    count: int
    tiles: int
    dealt: bool = False

    def __str__(self) -> str:
        if self.dealt:
            return f"the tiles of all sequences dealt to {self.count} programs"
        shares = f"{self.tiles} tiles each" if self.tiles else "even shares"
        return f"{self.count} split{'s' if self.count > 1 else ''} of the keys, {shares}"


@functools.lru_cache(maxsize=1024)
def choose_splits(
    blocks: Blocks,
    programs: int,
    capacity: int,
    processors: int,
    *,
    invariant: bool = False,
    even: bool = False,
) -> Splits:
    """`programs`: of one split; `capacity`: keys that a row may have; `processors`: of the device.

    `invariant`: splits of a fixed size, which the batch doesn't change; two at least, so that
    results are always merged. `even`: sequences are equally long."""
    if invariant:
        size = max(1, INVARIANT_KEYS // blocks.tiling.block_n)
        return Splits(max(2, math.ceil(capacity / (size * blocks.tiling.block_n))), size)
    slots = processors * blocks.resident
    most = max(1, capacity // _FEWEST_KEYS)
    long = 1 if even else math.ceil(capacity / _MOST_KEYS)
    least = min(most, max(1, long, slots // max(1, programs)))
    good = (n for n in range(least, most + 1) if _is_good(n * programs, slots))
    return Splits(next(good, least), 0)


@functools.lru_cache(maxsize=1024)
def deal(blocks: Blocks, lines: int, batch: int, capacity: int, processors: int) -> Splits:
    """Splits of sequences that may differ in length, dealt to as many programs as fill the device.

    `lines`: heads of keys, times blocks of their rows, each of which has programs of its own;
    `capacity`: keys that a sequence may have; `processors`: of the device."""
    slots, lines, batch = processors * blocks.resident, max(1, lines), max(1, batch)
    most = batch * max(1, capacity // _FEWEST_KEYS)
    least = min(most, max(1, slots // lines))
    # Where lengths are equal, ends of shares are ends of sequences.
    whole = (n for n in range(least, 0, -1) if n % batch == 0 or batch % n == 0)
    good = (n for n in (*whole, *range(least, most + 1)) if _is_good(n * lines, slots))
    return Splits(next(good, least), 0, dealt=True)


def _is_good(programs: int, slots: int) -> bool:
    return _efficiency(programs, slots) >= _GOOD


def _efficiency(programs: int, slots: int) -> float:
    """How full the slots are, all rounds together."""
    return programs / (math.ceil(programs / slots) * slots)
