"""Lets the tests here import what they share by its bare name; a fixture that several use."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from flashgen.launch import hopper_backward as launch_hopper_backward

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gradients come from Hopper's kernels, or the test fails."""
    calls: list[int] = []
    real = launch_hopper_backward.backward

    def counted(*args: Any, **keywords: Any) -> Any:
        calls.append(1)
        return real(*args, **keywords)

    monkeypatch.setattr(launch_hopper_backward, "backward", counted)
    yield calls  # type: ignore[misc]
    assert calls, "no backward of Hopper's ran"
