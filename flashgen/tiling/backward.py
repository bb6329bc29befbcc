"""How large the blocks of the backward kernels are, for each target."""

from __future__ import annotations

import functools

import torch

from . import Target, Tiling, inside

# (largest head dimension, pairs for the queries' and the keys' kernel from large to small): the
# first pair inside a schedule's tiles is taken. Hopper's are measured, the others spill least.
_Pair = tuple[Tiling, Tiling]
_Table = tuple[tuple[int, tuple[_Pair, ...]], ...]
_HOPPER: _Table = (
    (
        64,
        (
            (Tiling(64, 64, 4, 2), Tiling(128, 64, 4, 2)),
            (Tiling(64, 64, 4, 2), Tiling(64, 64, 4, 3)),
        ),
    ),
    (
        128,
        (
            (Tiling(128, 64, 8, 3), Tiling(64, 128, 8, 3)),
            (Tiling(64, 64, 4, 2), Tiling(32, 64, 4, 3)),
        ),
    ),
    (256, ((Tiling(32, 32, 8, 1), Tiling(32, 32, 8, 1)),)),
)
_AMPERE: _Table = (
    (64, ((Tiling(64, 64, 4, 2), Tiling(32, 64, 4, 2)),)),
    (128, ((Tiling(64, 32, 4, 2), Tiling(32, 64, 8, 2)),)),
    (256, ((Tiling(32, 32, 8, 1), Tiling(32, 32, 8, 1)),)),
)
_HIP: _Table = (
    (64, ((Tiling(64, 64, 4, 1), Tiling(64, 64, 4, 1)),)),
    (128, ((Tiling(64, 32, 4, 1), Tiling(32, 64, 4, 1)),)),
    (256, ((Tiling(32, 32, 4, 1), Tiling(32, 32, 4, 1)),)),
)
_INTERPRETED: _Table = ((256, ((Tiling(64, 64, 4, 1), Tiling(64, 64, 4, 1)),)),)
_SINGLE: _Table = (
    (64, ((Tiling(32, 32, 8, 1), Tiling(32, 32, 8, 1)),)),
    (128, ((Tiling(16, 16, 8, 1), Tiling(16, 16, 4, 1)),)),
    (256, ((Tiling(16, 16, 8, 1), Tiling(16, 16, 8, 1)),)),
)


@functools.lru_cache(maxsize=1024)
def tilings(
    target: Target,
    dtype: torch.dtype,
    head_dim: int,
    v_head_dim: int,
    block_size: tuple[int, int],
    has_score: bool = False,
    per_pair: bool = False,
) -> _Pair:
    """The blocks of the two kernels on a schedule's tiles: (block_m queries, block_n keys) each.

    A score function's derivative wants registers, and so does dropout: small blocks for them.
    `per_pair`: the first kernel writes gradients of data for each pair, at addresses that take as
    many as its products."""
    queries, keys = _tilings(target, dtype, head_dim, v_head_dim, block_size, has_score)
    if per_pair and target.backend != "interpret":
        warps = 8 if target.backend == "cuda" else 4
        queries = Tiling(min(queries.block_m, 64), min(queries.block_n, 32), warps, 1)
    return queries, keys


def square(
    target: Target, dtype: torch.dtype, head_dim: int, v_head_dim: int, block_size: tuple[int, int]
) -> Tiling:
    """The blocks of the kernel along diagonals: what each place of them adds up is in registers."""
    by_query, _ = tilings(target, dtype, head_dim, v_head_dim, block_size, has_score=True)
    side = min(by_query.block_m, by_query.block_n)
    return Tiling(side, side, by_query.warps, 1)


def _tilings(
    target: Target,
    dtype: torch.dtype,
    head_dim: int,
    v_head_dim: int,
    block_size: tuple[int, int],
    has_score: bool,
) -> _Pair:
    table = _table(target, dtype)
    widest = max(head_dim, v_head_dim)
    pairs = next(pairs for most, pairs in table if widest <= most)
    for pair in pairs[-1:] if has_score else pairs:
        if all(inside(tiling, block_size) == tiling for tiling in pair):
            return pair
    by_query, by_key = pairs[-1]
    return inside(by_query, block_size), inside(by_key, block_size)


def _table(target: Target, dtype: torch.dtype) -> _Table:
    if target.backend == "interpret":
        return _INTERPRETED
    if dtype.itemsize > 2:
        return _SINGLE
    if target.backend == "hip":
        return _HIP
    return _HOPPER if target.arch in ("90", "100", "103") else _AMPERE
