"""Searching for blocks: what is measured, kept, read again and refused. No GPU is needed: the times
are made up."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

import flashgen as fg
from flashgen import FlashgenError, config, masks, tune
from flashgen.tiling import Tiling, hopper, target_of
from flashgen.tiling.decode import WHOLE_ROWS, blocks_to_try, choose_blocks

CPU = torch.device("cpu")
DEFAULT = Tiling(64, 64, 4, 2)


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own; what was found before is forgotten, and a CPU counts as a GPU."""
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tune, "_used", {})
    monkeypatch.setattr(tune, "_read", {})
    monkeypatch.setattr(tune, "_may_measure", lambda device: config.tune != "off")
    return tmp_path


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was measured, in order: each takes as long as it says."""
    measured: list[Any] = []

    def milliseconds(run: Callable[[], Any]) -> float:
        measured.append(run())
        return float(measured[-1])

    monkeypatch.setattr(tune, "_ROUNDS", 1)
    monkeypatch.setattr(tune, "_CLEARLY", 1.0)
    monkeypatch.setattr(tune, "milliseconds", milliseconds)
    return measured


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in another process."""
    monkeypatch.setattr(tune, "_used", {})
    monkeypatch.setattr(tune, "_read", {})


def cost(tiling: Tiling) -> float:
    """Of 128 x 32 with 8 warps and 3 stages the least."""
    best = (128, 32, 8, 3)
    given = (tiling.block_m, tiling.block_n, tiling.warps, tiling.stages)
    return 1 + sum(abs(a - b) for a, b in zip(given, best, strict=True))


def test_nothing_is_measured_by_default(times: list[Any]) -> None:
    assert tune.blocks("kernel", CPU, DEFAULT, (128, 128), cost) == DEFAULT
    assert times == []


def test_quick_keeps_the_blocks(times: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    with config.override(tune="quick"):
        found = tune.blocks("kernel", CPU, DEFAULT, (128, 128), cost)
    assert found == Tiling(64, 64, 8, 3)
    assert times[0] == cost(DEFAULT)
    assert len(times) == 8
    shown = capsys.readouterr().err
    assert "(8 of 8)" in shown
    assert shown.splitlines()[-1].startswith("flashgen.tune.use('kernel, tiles of 128 x 128, cpu")


def test_full_tries_all_blocks_that_divide_the_tile(times: list[Any]) -> None:
    with config.override(tune="full"):
        assert tune.blocks("kernel", CPU, DEFAULT, (128, 128), cost) == Tiling(128, 32, 8, 3)
    assert len(times) == 3 * 3 * 2 * 4
    with config.override(tune="full"):
        found = tune.blocks("another", CPU, DEFAULT, (64, 96), cost)
    assert found == Tiling(64, 32, 8, 3)


def test_winners_are_read_by_later_processes(
    times: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with config.override(tune="quick"):
        found = tune.blocks("kernel", CPU, DEFAULT, (128, 128), cost)
        tune.blocks("other", CPU, DEFAULT, (64, 64), cost)
    count = len(times)
    forget(monkeypatch)
    assert tune.blocks("kernel", CPU, DEFAULT, (128, 128), cost) == found
    with config.override(tune="full"):
        assert tune.blocks("kernel", CPU, DEFAULT, (128, 128), cost) == found
    assert len(times) == count
    assert len(tune.winners()) == 2


def test_two_processes_add_to_one_file(times: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with config.override(tune="quick"):
        tune.winners()
        path = tune._path()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"theirs": [64, 64, 4, 1]}))
        tune.blocks("mine", CPU, DEFAULT, (128, 128), cost)
    forget(monkeypatch)
    assert tune.winners()["theirs"] == (64, 64, 4, 1)
    assert len(tune.winners()) == 2


def test_pasted_lines_win(times: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    import flashgen

    with config.override(tune="quick"):
        tune.blocks("kernel", CPU, DEFAULT, (128, 128), cost)
    line = capsys.readouterr().err.splitlines()[-1]
    pasted = line.replace("(64, 64, 8, 3)", "(32, 64, 4, 1)")
    assert pasted != line
    exec(pasted, {"flashgen": flashgen})
    assert tune.blocks("kernel", CPU, DEFAULT, (128, 128), cost) == Tiling(32, 64, 4, 1)


def test_those_that_come_near_are_measured_in_turns(
    times: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock falls, so that what is measured later seems slower."""
    monkeypatch.setattr(tune, "_ROUNDS", 3)
    calls: list[tuple[int, ...]] = []

    def run(numbers: tuple[int, ...]) -> float:
        calls.append(numbers)
        return {1: 10.0, 2: 9.0, 3: 13.5, 4: 9.9}[numbers[0]] * (1 + 0.02 * len(calls))

    tried = [(n,) for n in (1, 2, 3, 4)]
    with config.override(tune="quick"):
        assert tune.numbers("kernel", CPU, tried, (1,), lambda _: True, run) == (2,)
    assert calls == [*tried, *2 * [(1,), (2,), (4,)]]


def test_the_default_stays_unless_another_is_clearly_faster(
    times: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "_CLEARLY", 0.98)
    with config.override(tune="quick"):
        for name, other, best in (("a", 9.9, (1,)), ("b", 9.7, (2,))):
            cost = {(1,): 10.0, (2,): other}.__getitem__
            assert tune.numbers(name, CPU, [(1,), (2,)], (1,), lambda _: True, cost) == best


def test_what_does_not_run_is_left_out(times: list[Any]) -> None:
    def run(tiling: Tiling) -> float:
        if tiling.warps == 8:
            raise OutOfResources(300000, 232448, "shared memory")
        return cost(tiling)

    with config.override(tune="quick"):
        assert tune.blocks("kernel", CPU, DEFAULT, (128, 128), run) == Tiling(64, 64, 4, 3)


def test_errors_of_kernels_are_not_hidden(times: list[Any]) -> None:
    def run(tiling: Tiling) -> float:
        raise RuntimeError("an illegal memory access was encountered")

    with config.override(tune="quick"), pytest.raises(RuntimeError, match="illegal memory"):
        tune.blocks("kernel", CPU, DEFAULT, (128, 128), run)


def test_none_runs(times: list[Any]) -> None:
    def run(tiling: Tiling) -> float:
        raise OutOfResources(300000, 232448, "shared memory")

    with config.override(tune="quick"), pytest.raises(FlashgenError, match="none of 8"):
        tune.blocks("kernel", CPU, DEFAULT, (128, 128), run)


def test_tiles_are_searched_by_full_alone(times: list[Any]) -> None:
    prepared = []

    def prepare(tile: tuple[int, int]) -> Callable[[], float]:
        prepared.append(tile)
        return lambda: tile[0] + tile[1]

    sizes = ((128, 128), (64, 64))
    with config.override(tune="quick"):
        assert tune.tiles("mask", CPU, (128, 64), sizes, prepare) == (128, 64)
    assert prepared == []
    assert tune.tile_known("mask", CPU) is None
    with config.override(tune="full"):
        assert tune.tiles("mask", CPU, (128, 64), sizes, prepare) == (64, 64)
    assert prepared == [(128, 64), (128, 128), (64, 64)]
    assert tune.tile_known("mask", CPU) == (64, 64)


@pytest.mark.parametrize("numbers", [(), (0, 64, 4, 1), (64.0, 64, 4, 1), (-64,)])
def test_numbers_that_are_no_blocks(numbers: tuple[Any, ...]) -> None:
    with pytest.raises(FlashgenError, match="positive integers"):
        tune.use("kernel", numbers)


def test_blocks_that_do_not_divide_the_tile(times: list[Any]) -> None:
    key = tune._key("kernel, tiles of 64 x 64", CPU)
    for numbers in ((128, 64, 4, 1), (64, 64, 4)):
        tune.use(key, numbers)
        with pytest.raises(FlashgenError, match="no blocks of this kernel"):
            tune.blocks("kernel", CPU, DEFAULT, (64, 64), cost)


def test_a_damaged_file_is_told_of(times: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    path = tune._path()
    path.parent.mkdir(parents=True)
    path.write_text("{")
    assert tune.winners() == {}
    assert "isn't what tuning writes" in caplog.text


# Shapes of Hopper's kernels, and splits of decoding.


def test_the_table_of_hopper_s_shapes() -> None:
    """As it is written at the head of `tiling/hopper.py`."""
    wanted = {
        (64, 64, 192): (128, 4, 3, 160, 2),
        (64, 64, 128): (128, 4, 2, 232, 1),
        (96, 96, 128): (128, 4, 2, 232, 1),
        (128, 128, 128): (128, 3, 2, 232, 1),
        (192, 128, 128): (128, 2, 2, 232, 1),
        (192, 192, 128): (64, 3, 2, 232, 1),
        (256, 256, 128): (64, 2, 2, 232, 1),
    }
    for (*dims, rows), numbers in wanted.items():
        shape = hopper.shape_for(*dims, block_m=rows)
        assert (shape.block_n, shape.stages, shape.groups, shape.registers, shape.buffers) == (
            numbers
        )
        for long_rows in (False, True):
            tile = hopper.tile_for(*dims, long_rows)
            assert tile == (192 if long_rows and max(dims) <= 64 else 128, numbers[0])
            assert tile in hopper.tiles_to_try(*dims)


@pytest.mark.parametrize("effort", ["quick", "full"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_shapes_that_are_tried_fit(dims: tuple[int, int], effort: str) -> None:
    for rows, keys in hopper.tiles_to_try(*dims):
        default = hopper.shape_for(*dims, keys, rows)
        tried = list(hopper.shapes_to_try(default, dims, effort))
        assert tried[0] == default
        assert len(set(tried)) == len(tried) > 5
        assert all(shape.fits(*dims) and shape.block_m == rows for shape in tried)
        if effort == "quick":
            assert max(differing(one.numbers, default.numbers) for one in tried) == 1


def differing(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


def test_steps_that_are_tried() -> None:
    default = hopper.steps_for(4, False)
    tried = list(hopper.steps_to_try(default, may_order=True, effort="quick"))
    assert [astuple(steps) for steps in tried] == [
        *((4, 16, 1), (3, 16, 1), (2, 16, 1), (4, 1, 1), (4, 36, 1), (4, 64, 1), (4, 16, 2))
    ]
    ordered = hopper.steps_for(2, True)
    assert all(s.order == 2 for s in hopper.steps_to_try(ordered, may_order=True, effort="full"))
    assert all(s.order == 1 for s in hopper.steps_to_try(default, may_order=False, effort="full"))


def test_heads_side_by_side_divide_all() -> None:
    steps = hopper.Steps(2, 16, 1)
    assert [steps.side(4 << 20, lines) for lines in (1, 6, 7, 8, 64)] == [1, 3, 1, 4, 4]
    assert steps.side(1 << 30, 64) == 1
    assert steps.side(1, 64) == 8


@pytest.mark.parametrize("tile", [WHOLE_ROWS, (128, 64)], ids=str)
def test_blocks_of_decoding_that_are_tried_fit(tile: tuple[int, int]) -> None:
    target, dims = target_of("cuda", 90), (128, 128)
    default = choose_blocks(target, torch.bfloat16, dims, (1, 4), tile)
    tried = list(blocks_to_try(default, target, torch.bfloat16, dims, tile, "full"))
    assert tried[0] == default
    assert len(set(tried)) == len(tried) > 10
    for blocks in tried:
        tiling = blocks.tiling
        used = 2 * 128 * (tiling.block_m + 2 * tiling.stages * tiling.block_n)
        assert used * blocks.resident <= target.shared
        assert tile[1] % tiling.block_n == 0
        assert (tiling.block_m, blocks.group) == (default.tiling.block_m, default.group)


def test_a_kernel_s_numbers_are_known_by_its_name(times: list[Any]) -> None:
    def choose(**given: Any) -> tuple[int, ...]:
        default, tried = (4, 1), [(4, 1), (3, 1), (4, 9)]
        fits, run = lambda numbers: numbers[0] > 1, lambda numbers: sum(numbers)
        return tune.numbers(*("kernel", CPU, tried, default), **{"fits": fits, "run": run} | given)

    assert choose() == (4, 1)
    with config.override(tune="quick"):
        assert choose(run=None) == (4, 1), "nothing is measured where nothing can be run"
        assert choose() == (3, 1)
    assert times == [5, 4, 13]
    for wrong in ((3, 1, 1), (1, 1)):
        tune.use(tune._key("kernel", CPU), wrong)
        with pytest.raises(FlashgenError, match="no blocks of this kernel"):
            choose()


def test_explain_names_the_blocks_in_use() -> None:
    attend, q = fg.Attention(masks.causal), torch.zeros(1, 1, 64, 64)
    page = attend.explain(q, q, q)
    assert "Tiling(block_m=64, block_n=64, warps=4, stages=1)\n" in page
    path = attend.source(q, q, q).partition("\n")[0]
    name = Path(path.removeprefix("# ")).stem
    tune.use(tune._key(f"{name}, float32, tiles of 64 x 64", CPU), (32, 64, 4, 2))
    page = attend.explain(q, q, q)
    assert "Tiling(block_m=32, block_n=64, warps=4, stages=2) (tuned)" in page
