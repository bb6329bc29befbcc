"""Results while blocks are searched for, and with those that were found."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen import config, masks, tune
from flashgen.calls import routes


@pytest.fixture(autouse=True)
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Each candidate runs twice; the second of a search is the fastest."""
    times: list[float] = []
    turns = itertools.cycle((2.0, 1.0))

    def milliseconds(run: Callable[[], Any]) -> float:
        run()
        run()
        times.append(next(turns))
        return times[-1]

    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tune, "_used", {})
    monkeypatch.setattr(tune, "_read", {})
    monkeypatch.setattr(tune, "milliseconds", milliseconds)
    monkeypatch.setattr(tune, "_WARPS", (4,))
    monkeypatch.setattr(tune, "_STAGES", (1, 2))
    monkeypatch.setattr(tune, "_BLOCKS", (32,))
    monkeypatch.setattr(routes, "_TILES", ((32, 32),))
    monkeypatch.setattr(tune, "_may_measure", lambda device: config.tune != "off")
    return times


@fg.attention(mask=masks.causal_document)
def biased(score: Any, h: Any, q_idx: Any, kv_idx: Any, slope: fg.Tensor, table: fg.Tensor) -> Any:
    return score + slope[h] * table[q_idx - kv_idx]


@pytest.mark.parametrize("effort", ["quick", pytest.param("full", marks=pytest.mark.slow)])
def test_training(effort: Any, measured: list[float]) -> None:
    """Gradients that kernels add to memory count once, however often a kernel was measured."""
    shapes = ((1, 2, 24, 16), (1, 1, 24, 16), (1, 1, 24, 16))
    given = [torch.randn(s, requires_grad=True) for s in shapes]
    slope, table = torch.rand(2).requires_grad_(), torch.rand(24).requires_grad_()
    doc = torch.randint(0, 3, (1, 24)).sort(-1).values.int()
    grad, every = torch.randn(shapes[0]), (*given, slope, table)
    right = biased(*given, doc=doc, slope=slope, table=table, backend="cpu")
    expected = torch.autograd.grad(right, every, grad)
    with config.override(tune=effort):
        for turn in range(3):
            out = biased(*given, doc=doc, slope=slope, table=table, backend="interpret")
            torch.testing.assert_close(out, right, rtol=0, atol=2e-5)
            found = torch.autograd.grad(out, every, grad)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
            if turn == 0:
                count = len(measured)
    # Forward, queries and keys, two candidates each, in turns; with `full` three, and two tiles.
    least = 3 * 2 * tune._ROUNDS
    assert count == least if effort == "quick" else count > least
    assert len(measured) == count, "something was measured again"
    assert len(tune.winners()) == 3 + (effort == "full")


def test_tiles_of_a_schedule_made_apart(measured: list[float]) -> None:
    """The tile that was found is that of `.schedule()` too."""
    attend = fg.Attention(mask=masks.causal)
    q, k, v = (torch.randn(1, 1, 33, 16) for _ in range(3))
    before = attend.schedule(q, k, v)
    assert before.block_size == (64, 64)
    with config.override(tune="full"):
        right = attend(q, k, v, backend="cpu")
        out = attend(q, k, v, backend="interpret")
        torch.testing.assert_close(out, right, rtol=0, atol=2e-5)
    tile = next(n for key, n in tune.winners().items() if key.startswith("tiles of"))
    assert tile != (64, 64)
    again = fg.Attention(mask=masks.causal)
    assert again(q, k, v, backend="interpret").allclose(right, atol=2e-5)


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("name", ["causal", "causal_document"])
def test_a_backward_in_a_thread_of_its_own(measured: list[float], name: str, calls: int) -> None:
    """As autograd runs it on a GPU: what `override` said in the forward holds there too."""
    attend = fg.Attention(mask=getattr(masks, name))
    data = {"doc": torch.zeros(1, 17).int()} if name == "causal_document" else {}
    given = [torch.randn(1, 1, 17, 16, requires_grad=True) for _ in range(3)]
    for _ in range(calls):
        with config.override(tune="quick"):
            out = attend(*given, **data, backend="interpret")
    assert len(tune.winners()) == 1
    thread = threading.Thread(target=torch.autograd.backward, args=(out, torch.ones_like(out)))
    thread.start()
    thread.join()
    assert given[0].grad is not None
    assert len(tune.winners()) == 3
