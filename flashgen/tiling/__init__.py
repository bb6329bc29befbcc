"""How large a kernel's blocks are, for each target; chosen without running anything."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ..emit import parts_of


@dataclass(frozen=True)
class Tiling:
    """Queries and keys of a block, warps of a program, stages of the software pipeline."""

    block_m: int
    block_n: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Target:
    """What kernels are compiled for. `shared`: bytes of shared memory a program may use."""

    backend: str
    arch: str
    shared: int


_SHARED = {"80": 166912, "86": 101376, "89": 101376, "90": 232448, "100": 232448, "120": 101376}
_SHARED["103"] = _SHARED["100"]
_SHARED |= {"gfx90a": 65536, "gfx942": 65536, "gfx950": 163840}


def target_of(backend: str, arch: int | str) -> Target:
    """A target by Triton's names: ("cuda", 90), ("hip", "gfx942"); unknown ones are small."""
    known = str(arch)
    return Target(backend, known, _SHARED.get(known, 65536 if backend == "hip" else 101376))


INTERPRETER = Target("interpret", "cpu", 1 << 30)

# (largest head dimension, candidates from best to smallest); the first that fits is taken.
_Table = tuple[tuple[int, tuple[Tiling, ...]], ...]
_FAMILIES = {"90": "hopper", "100": "blackwell", "103": "blackwell", "120": "blackwell, small"}
_HALF: dict[str, _Table] = {
    "hopper": (
        (64, (Tiling(128, 64, 4, 3),)),
        (128, (Tiling(64, 64, 4, 3),)),
        (192, (Tiling(128, 64, 8, 2),)),
        (256, (Tiling(128, 32, 8, 2),)),
    ),
    # Rows that reach back to the first key: larger tiles, which are cut too seldom to matter.
    "hopper, long rows": (
        (64, (Tiling(128, 64, 4, 3),)),
        (128, (Tiling(128, 128, 8, 3),)),
        (192, (Tiling(128, 64, 8, 2),)),
        (256, (Tiling(128, 32, 8, 2),)),
    ),
    # The rest is chosen by what spills nothing, compiled ahead of time with many masks.
    "blackwell": (
        (128, (Tiling(128, 64, 8, 3),)),
        (192, (Tiling(128, 64, 8, 2),)),
        (256, (Tiling(128, 32, 8, 2),)),
    ),
    "ampere": (
        (64, (Tiling(128, 64, 8, 3),)),
        (128, (Tiling(128, 32, 8, 3),)),
        (256, (Tiling(64, 64, 8, 2), Tiling(64, 32, 8, 2))),
    ),
    "blackwell, small": (
        (64, (Tiling(128, 64, 8, 3),)),
        (128, (Tiling(128, 64, 8, 2),)),
        (256, (Tiling(64, 32, 8, 2),)),
    ),
    "hip": (
        (128, (Tiling(128, 64, 4, 1),)),
        (256, (Tiling(64, 64, 4, 1),)),
    ),
}
# Without tensor cores (CUDA) a thread holds whole rows of a product's operands: small tiles.
_SINGLE: dict[str, _Table] = {
    "cuda": (
        (64, (Tiling(64, 32, 8, 1),)),
        (128, (Tiling(32, 32, 8, 1),)),
        (256, (Tiling(32, 16, 8, 1),)),
    ),
    "hip": (
        (64, (Tiling(64, 64, 4, 1),)),
        (128, (Tiling(64, 32, 4, 1),)),
        (256, (Tiling(32, 32, 4, 1),)),
    ),
}


def choose(
    target: Target, dtype: torch.dtype, head_dim: int, v_head_dim: int, long_rows: bool = False
) -> Tiling:
    """The blocks of the forward kernel. `long_rows`: the last query sees the first key."""
    if target.backend == "interpret":
        return Tiling(64, 64, 4, 1)
    widest = max(head_dim, v_head_dim)
    table = _table(target, dtype, long_rows)
    candidates = next(options for most, options in table if widest <= most)
    for tiling in candidates:
        if _shared_bytes(tiling, dtype.itemsize, head_dim, v_head_dim) <= target.shared:
            return tiling
    return candidates[-1]


@functools.lru_cache(maxsize=1024)
def choose_for(
    target: Target,
    dtype: torch.dtype,
    head_dim: int,
    v_head_dim: int,
    block_size: tuple[int, int],
    pair_bytes: int = 0,
) -> Tiling:
    """The blocks of the forward kernel on a schedule's tiles.

    `pair_bytes`: of the data that is read for each pair, which the pipeline holds in shared memory
    as it does keys and values."""
    if pair_bytes:
        tiling = inside(choose(target, dtype, head_dim, v_head_dim), block_size)
        return _with_pairs(tiling, target, dtype, head_dim, v_head_dim, pair_bytes)
    for long_rows in (False, True):
        tiling = choose(target, dtype, head_dim, v_head_dim, long_rows)
        if (tiling.block_m, tiling.block_n) == block_size:
            return tiling
    return inside(choose(target, dtype, head_dim, v_head_dim), block_size)


def _with_pairs(
    tiling: Tiling,
    target: Target,
    dtype: torch.dtype,
    head_dim: int,
    v_head_dim: int,
    pair_bytes: int,
) -> Tiling:
    """The same with fewer stages, where the data of pairs would not fit."""
    needed = _shared_bytes(tiling, dtype.itemsize, head_dim, v_head_dim)
    needed += tiling.stages * tiling.block_m * tiling.block_n * pair_bytes
    if tiling.stages == 1 or needed <= target.shared:
        return tiling
    fewer = replace(tiling, stages=tiling.stages - 1)
    return _with_pairs(fewer, target, dtype, head_dim, v_head_dim, pair_bytes)


def _table(target: Target, dtype: torch.dtype, long_rows: bool) -> _Table:
    if dtype.itemsize > 2:
        return _SINGLE[target.backend]
    if target.backend == "hip":
        return _HALF["hip"]
    family = _FAMILIES.get(target.arch, "ampere")
    return _HALF[f"{family}, long rows" if long_rows and family == "hopper" else family]


def _shared_bytes(tiling: Tiling, itemsize: int, head_dim: int, v_head_dim: int) -> int:
    """Queries once, keys and values once a stage, as wide as they are padded.

    Without a pipeline keys make place for values."""
    q_dim, v_dim = (sum(p.size for p in parts_of(d)) for d in (head_dim, v_head_dim))
    rows = tiling.stages * (q_dim + v_dim) if tiling.stages > 1 else max(q_dim, v_dim)
    return itemsize * (tiling.block_m * q_dim + tiling.block_n * rows)


def inside(tiling: Tiling, block_size: tuple[int, int]) -> Tiling:
    """The same within a schedule's tiles: the largest powers of two that divide them."""
    m, n = (size & -size for size in block_size)
    if m >= tiling.block_m and n >= tiling.block_n:
        return tiling
    return Tiling(min(m, tiling.block_m), min(n, tiling.block_n), tiling.warps, tiling.stages)


def variations(
    default: tuple[int, ...], choices: Sequence[Iterable[int]], effort: str
) -> Iterator[tuple[int, ...]]:
    """What tuning tries for some numbers, the default first: others for one of them at a time, or
    (`full`) all combinations."""
    yield default
    options = [list(dict.fromkeys(choice)) for choice in choices]
    if effort == "full":
        yield from (n for n in itertools.product(*options) if n != default)
        return
    for place, option in enumerate(options):
        for number in option:
            if number != default[place]:
                yield (*default[:place], number, *default[place + 1 :])
