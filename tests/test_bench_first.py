"""First calls side by side, and processes that compile beside each other, without a GPU."""

from __future__ import annotations

import sys

import pytest
import torch

from flashgen import bench
from flashgen.bench import (
    first,
    gpu,
)
from flashgen.bench.workers import deal, in_turns


def test_first_calls(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Medians of both sides, with empty caches and then with the same ones."""
    taken = {
        "FlexAttention": iter([3e3, 1e3, 5e3, 2e3]),
        "flashgen": iter([1e3, 250.0, 1e3, 250.0]),
    }
    folders: list[str] = []

    def times(side: str, folder: str) -> tuple[float, float, str]:
        folders.append(folder)
        return next(taken[side]), 500.0, "attention_forward 0.10 s"

    monkeypatch.setattr(first, "_times", times)
    monkeypatch.setattr(first, "title", lambda: "here")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert bench.main(["first", "--rounds", "2"]) == 0
    assert len(folders) == 2 * len(set(folders)) == 8
    told = capsys.readouterr()
    assert "empty caches, flashgen: 1000 and 500 ms; attention_forward 0.10 s" in told.err
    assert "empty caches: 1.00 s and 0.50 s, 4.0 and 3.0 (both) times as fast as Flex" in told.out
    assert "caches: 0.25 s and 0.50 s, 6.0 and 2.7 (both) times as fast as Flex" in told.out


def test_what_is_alike_stays_together() -> None:
    works = gpu.works(["full$", "causal$", "D=64 S=2048"], (2048, 8192))
    shares = deal(works, 5, gpu.alike)
    assert sorted(n for share in shares for n in share) == list(range(len(works)))
    assert max(map(len, shares)) - min(map(len, shares)) <= 2
    at = {n: i for i, share in enumerate(shares) for n in share}
    kinds = {(gpu.alike(work), at[n]) for n, work in enumerate(works)}
    assert len(kinds) == len({gpu.alike(work) for work in works})
    assert deal([1, 2, 3], 0, None) == [[0, 1, 2]]


def prepare(number: int) -> int:
    if number == 3:
        raise ValueError("three")
    return 10 * number


def measure(prepared: int, rounds: int) -> int:
    if prepared == 20:
        sys.exit(1)
    return prepared + rounds


@pytest.mark.slow
def test_processes_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that raises and one that dies: what others do is not lost."""
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    found = list(in_turns([1, 2, 3, 4, 5], prepare, measure, 7, most=3))
    assert [f.work for f in found] == [1, 2, 3, 4, 5]
    assert [f.value for f in found] == [17, None, None, 47, None]
    assert [f.problem for f in found][1:3] == ["crashed", "ValueError: three"]
    # The process of 2 had 5 as well.
    assert found[4].problem.startswith("not prepared")
