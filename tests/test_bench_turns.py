"""Times in turns, without a GPU: events of a clock that is written here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashgen.bench import turns


class Clock:
    """Milliseconds that works say they took."""

    now = 0.0

    def event(self, enable_timing: bool) -> Any:
        clock = self

        class Event:
            at = 0.0

            def record(self) -> None:
                self.at = clock.now

            def elapsed_time(self, other: Any) -> float:
                return other.at - self.at  # type: ignore[no-any-return]

        return Event()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    empty = torch.empty
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(turns, "_FLUSHED", 8)
    monkeypatch.setattr(turns.torch, "empty", lambda *s, device, **k: empty(*s, **k))
    return made


def test_calls_alternate_and_medians_leave_the_first_turn_out(clock: Clock) -> None:
    calls: list[str] = []

    def work(name: str, first: float, others: float) -> Any:
        def call() -> None:
            clock.now += others if name in calls else first
            calls.append(name)

        return call

    found = turns.medians({"a": work("a", 50.0, 2.0), "b": work("b", 30.0, 3.0)}, 5)
    assert found == {"a": 2.0, "b": 3.0}
    # 5 rounds of 40 ms for each of two would be 5 turns, by what the first one took.
    assert len(calls) == 2 * (1 + 30)
    assert calls[:2] == ["a", "b"]
    for turn in range(2, len(calls), 4):
        there, back = calls[turn : turn + 2], calls[turn + 2 : turn + 4]
        assert there == back[::-1]
        assert set(there) == {"a", "b"}
    assert calls[2:].count("a") == 30
    assert {calls[n] for n in range(2, len(calls), 4)} == {"a", "b"}


def test_how_many_turns(clock: Clock) -> None:
    def turns_of(ms: float, rounds: int) -> int:
        calls: list[int] = []

        def call() -> None:
            clock.now += ms
            calls.append(0)

        turns.milliseconds(call, rounds)
        return len(calls) - 1

    assert [turns_of(ms, 1) for ms in (0.01, 1.0, 30.0, 999.0, 1001.0)] == [100, 40, 6, 6, 2]
    assert turns_of(0.01, 3) == 300
    assert turns_of(4.9, 3) == 26
    assert turns_of(2000.0, 3) == 6
