"""Searching for blocks: what is measured, kept, read again and refused. No GPU is needed: the times
are made up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

from flashgen import FlashgenError, config, tune
from flashgen.tiling import Tiling

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
        with pytest.raises(FlashgenError, match="don't divide"):
            tune.blocks("kernel", CPU, DEFAULT, (64, 64), cost)


def test_a_damaged_file_is_told_of(times: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    path = tune._path()
    path.parent.mkdir(parents=True)
    path.write_text("{")
    assert tune.winners() == {}
    assert "isn't what tuning writes" in caplog.text
