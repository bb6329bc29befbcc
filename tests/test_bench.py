"""The benchmarks run, compare what they time, and write what they show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from flashgen import bench
from flashgen.bench import cpu, table
from flashgen.bench.measure import Times, check_equal


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LENGTH": 256, "DIM": 16, "HEADS": 2, "WINDOW": 32}.items():
        monkeypatch.setattr(cpu, name, value)


@pytest.mark.usefixtures("small")
def test_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    assert bench.main(["cpu", "--rounds", "1", "--json", str(file)]) == 0
    document = json.loads(file.read_text())
    rows = [table.Row(**row) for row in document["rows"]]
    backends = ["sdpa, dense mask", "flashgen cpu", "sdpa, is_causal"]
    assert [row.backend for row in rows] == backends * 2
    assert all(row.forward_ms > 0 for row in rows)
    assert rows[0].ratio == rows[3].ratio == 1
    assert "flashgen cpu" in capsys.readouterr().out


def test_ratios_compare_with_the_first_backend() -> None:
    times = {"slow": Times(4.0, 8.0), "fast": Times(1.0, 3.0), "forward only": Times(2.0)}
    slow, fast, forward = table.rows_of("work", times)
    assert (slow.forward_ratio, slow.ratio) == (1, 1)
    assert (fast.forward_ratio, fast.ratio) == (4, 3)
    assert forward.backward_ms is None
    assert (forward.forward_ratio, forward.ratio) == (2, 2)


def test_nothing_is_timed_that_differs() -> None:
    q, k, v = leaves = [torch.ones(3, requires_grad=True) for _ in range(3)]
    attends = {"plain": lambda: q + k + v, "squared": lambda: q * q + k + v}
    with pytest.raises(AssertionError, match="dq of squared differs"):
        check_equal(attends, leaves, torch.ones(3), 1e-6)


def test_a_wrong_number_of_rounds() -> None:
    with pytest.raises(SystemExit):
        bench.main(["cpu", "--rounds", "0"])
