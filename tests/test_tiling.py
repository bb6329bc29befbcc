"""Which blocks are chosen for a target, and how head dimensions are cut into powers of two."""

from __future__ import annotations

import pytest
import torch

from flashgen.emit import parts_of
from flashgen.tiling import INTERPRETER, Target, Tiling, choose, choose_for, inside, target_of
from flashgen.tiling.shares import Shares, Work, choose_shares

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
ARCHS = [
    *(("cuda", arch) for arch in (75, 80, 86, 89, 90, 100, 103, 120)),
    *(("hip", arch) for arch in ("gfx90a", "gfx942", "gfx950", "gfx1100")),
]
EVERY_HEAD_DIM = range(1, 257)


def test_parts_hold_every_head_dimension():
    for head_dim in EVERY_HEAD_DIM:
        parts = parts_of(head_dim)
        covered = [d for part in parts for d in range(part.first, part.first + part.size)]
        # In order, without holes, each element once.
        assert covered == list(range(len(covered)))
        assert len(covered) >= head_dim
        assert [part[0] for part in parts] == list(range(len(parts)))


def test_parts_are_at_most_two_sizes_that_a_matrix_product_takes():
    for head_dim in EVERY_HEAD_DIM:
        parts = parts_of(head_dim)
        assert len(parts) <= 2
        for part in parts:
            assert part.size >= 16
            assert part.size & (part.size - 1) == 0
            assert part.first < head_dim


def test_padding_is_less_than_a_third_and_said():
    for head_dim in EVERY_HEAD_DIM:
        parts = parts_of(head_dim)
        total = sum(part.size for part in parts)
        assert total - head_dim < max(16, total / 3)
        assert [part.is_cut for part in parts] == [p.first + p.size > head_dim for p in parts]
        # Only the last part is padded.
        assert not any(part.is_cut for part in parts[:-1])


@pytest.mark.parametrize(
    ("head_dim", "sizes"),
    [
        (1, [16]),
        (16, [16]),
        (17, [32]),
        (32, [32]),
        (40, [32, 16]),
        (64, [64]),
        (72, [64, 16]),
        (80, [64, 16]),
        (96, [64, 32]),
        (112, [128]),
        (128, [128]),
        (129, [128, 16]),
        (192, [128, 64]),
        (193, [256]),
        (256, [256]),
    ],
)
def test_sizes_of_parts(head_dim, sizes):
    assert [part.size for part in parts_of(head_dim)] == sizes


@pytest.mark.parametrize("long_rows", [False, True])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32])
@pytest.mark.parametrize(("backend", "arch"), ARCHS)
def test_every_head_dimension_has_a_tiling(backend, arch, dtype, long_rows):
    target = target_of(backend, arch)
    for head_dim in EVERY_HEAD_DIM:
        for v_head_dim in {1, 64, 128, head_dim, 256}:
            tiling = choose(target, dtype, head_dim, v_head_dim, long_rows)
            assert is_sound(tiling)
            assert shared_bytes(tiling, dtype, head_dim, v_head_dim) <= target.shared


def is_sound(tiling: Tiling) -> bool:
    sizes = (tiling.block_m, tiling.block_n, tiling.warps, tiling.stages)
    powers = all(size > 0 and size & (size - 1) == 0 for size in sizes[:3])
    return powers and min(sizes[:2]) >= 16 and max(sizes[:2]) <= 256 and tiling.stages >= 1


def shared_bytes(tiling: Tiling, dtype: torch.dtype, head_dim: int, v_head_dim: int) -> int:
    """Keys and values once for each stage beyond the one in registers."""
    q_dim, v_dim = (sum(part.size for part in parts_of(d)) for d in (head_dim, v_head_dim))
    return dtype.itemsize * max(1, tiling.stages - 1) * tiling.block_n * (q_dim + v_dim)


def test_a_target_says_what_it_has():
    assert target_of("cuda", 90) == Target("cuda", "90", 232448)
    assert target_of("hip", "gfx942") == Target("hip", "gfx942", 65536)
    assert str(target_of("cuda", 90).arch) == "90"


def test_an_unknown_target_is_taken_for_a_small_one():
    known = {target_of(*arch).shared for arch in ARCHS[1:]}
    assert target_of("cuda", 77).shared <= min(s for s in known if s > 65536)
    assert target_of("hip", "gfx1200").shared == 65536


def test_the_interpreter_has_one_tiling():
    chosen = {choose(INTERPRETER, dtype, 128, 64) for dtype in (FP32, FP64, torch.float16)}
    assert len(chosen) == 1


def test_a_schedule_s_own_tiles_are_worked_on_as_they_are():
    target = target_of("cuda", 90)
    for long_rows in (False, True):
        tiling = choose(target, BF16, 128, 128, long_rows)
        block = (tiling.block_m, tiling.block_n)
        assert choose_for(target, BF16, 128, 128, block) == tiling


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize(("backend", "arch"), ARCHS)
def test_data_of_pairs_fits_beside_keys_and_values(backend, arch, dtype):
    """The pipeline keeps it in shared memory: the largest tiles have no room for it."""
    target = target_of(backend, arch)
    for head_dim in (64, 128, 192, 256):
        for long_rows in (False, True):
            plain = choose(target, dtype, head_dim, head_dim, long_rows)
            block = (plain.block_m, plain.block_n)
            chosen = choose_for(target, dtype, head_dim, head_dim, block, pair_bytes=12)
            width = 2 * sum(part.size for part in parts_of(head_dim)) * dtype.itemsize
            ahead = chosen.block_n * width + chosen.block_m * chosen.block_n * 12
            held = chosen.block_m * width // 2
            assert chosen.stages == 1 or held + chosen.stages * ahead <= target.shared


@pytest.mark.parametrize("block", [(16, 16), (48, 80), (64, 16), (128, 32), (256, 256), (112, 240)])
@pytest.mark.parametrize(("backend", "arch"), ARCHS)
def test_blocks_divide_other_tiles(backend, arch, block):
    chosen = choose_for(target_of(backend, arch), BF16, 64, 64, block)
    assert is_sound(chosen)
    assert block[0] % chosen.block_m == 0
    assert block[1] % chosen.block_n == 0


def test_inside_never_grows_a_tiling():
    tiling = Tiling(64, 32, 4, 2)
    for m in range(16, 257, 16):
        for n in range(16, 257, 16):
            found = inside(tiling, (m, n))
            assert (m % found.block_m, n % found.block_n) == (0, 0)
            assert (found.block_m <= 64, found.block_n <= 32) == (True, True)
            assert (found.warps, found.stages) == (4, 2)


def test_a_tiling_inside_larger_tiles_is_itself():
    tiling = Tiling(64, 32, 4, 2)
    assert inside(tiling, (256, 256)) is tiling
    assert inside(tiling, (64, 32)) is tiling
    assert inside(tiling, (192, 96)) is tiling


def work(row_blocks: int, tiles: int, uniform: bool = True) -> Work:
    return Work(row_blocks, 128, tiles, 128, (128, 128), uniform)


def test_the_last_round_of_row_blocks_is_shared() -> None:
    """Of 268 row blocks, 4 are left for a third round of 132 programs."""
    shares = choose_shares(work(268, 64), 132)
    assert shares.whole == 264
    assert 8 <= shares.splits <= 64


def test_few_row_blocks_fill_a_gpu() -> None:
    for uniform in (True, False):
        shares = choose_shares(work(10, 256, uniform), 132)
        assert shares.whole == 0
        # No more rounds than one, and hardly a processor without work.
        assert 100 <= 10 * shares.splits <= 132


@pytest.mark.parametrize(
    "nothing",
    [
        work(264, 64),
        # The last round is nearly full; is short; is one of many. Row blocks that differ even
        # themselves out.
        work(263, 64),
        work(10, 4),
        work(4096, 64),
        work(268, 64, uniform=False),
    ],
    ids=str,
)
def test_sharing_that_brings_nothing(nothing: Work) -> None:
    assert choose_shares(nothing, 132) == Shares(nothing.row_blocks)
