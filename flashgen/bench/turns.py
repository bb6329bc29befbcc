"""Times of work on a GPU, taken in turns, call by call.

A GPU at its power limit runs at the clock that the last tenth of a second left it: kernels that are
timed one after the other are up to a tenth faster or slower by what ran before them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch

# Milliseconds that each work gets in a round, and how often it runs at least and at most.
_EACH, _FEWEST, _MOST = 40.0, 2, 100
# Bytes written between two calls: more than a GPU's L2 holds.
_FLUSHED = 1 << 28


def medians(works: Mapping[str, Callable[[], Any]], rounds: int = 1) -> dict[str, float]:
    """Milliseconds of each work by a GPU's events, the cache flushed before every call.

    A turn before isn't counted. `rounds` multiplies how many are."""
    cache = torch.empty(_FLUSHED, dtype=torch.int8, device="cuda")
    first = sum(_taken(_turn(works, cache)).values())
    count = min(max(round(rounds * _EACH * len(works) / first), _FEWEST), rounds * _MOST)
    turns = [_turn(works, cache) for _ in range(count)]
    taken = [_taken(turn) for turn in turns]
    return {name: statistics.median(turn[name] for turn in taken) for name in works}


def milliseconds(work: Callable[[], Any], rounds: int = 1) -> float:
    """`medians` of one work."""
    return medians({"": work}, rounds)[""]


_Span = tuple[torch.cuda.Event, torch.cuda.Event]


def _turn(works: Mapping[str, Callable[[], Any]], cache: torch.Tensor) -> dict[str, _Span]:
    """One call of each, between events that nobody waited for yet."""
    spans: dict[str, _Span] = {}
    for name, work in works.items():
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        cache.zero_()
        start.record()
        work()
        end.record()
        spans[name] = start, end
    return spans


def _taken(turn: Mapping[str, _Span]) -> dict[str, float]:
    torch.cuda.synchronize()
    return {name: start.elapsed_time(end) for name, (start, end) in turn.items()}
