"""Times of work on a GPU, taken in turns, call by call.

A GPU at its power limit runs at the clock that the last tenth of a second left it: kernels that are
timed one after the other are up to a tenth faster or slower by what ran before them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import torch

# Milliseconds that each work gets in a round; pairs of turns in one, at least and at most, and of
# turns of so many milliseconds.
_EACH, _FEWEST, _MOST = 40.0, 3, 50
_FEWEST_LONG, _LONG = 1, 1000.0
# Bytes written between two calls: more than a GPU's L2 holds.
_FLUSHED = 1 << 28


def medians(works: Mapping[str, Callable[[], Any]], rounds: int = 1) -> dict[str, float]:
    """Milliseconds of each work by a GPU's events, the cache flushed before every call.

    A turn before isn't counted. `rounds` multiplies how many are. Every other turn has a new order,
    those between them the one before backwards: what runs before a work counts in its time."""
    cache = torch.empty(_FLUSHED, dtype=torch.int8, device="cuda")
    first = sum(_taken(_turn(works, cache)).values())
    fewest = _FEWEST if first < _LONG else _FEWEST_LONG
    pairs = math.ceil(rounds * _EACH * len(works) / first / 2)
    pairs = min(max(pairs, rounds * fewest), rounds * _MOST)
    random, turns = Random(0), []
    for _ in range(pairs):
        order = random.sample(list(works), len(works))
        turns += [_turn({n: works[n] for n in names}, cache) for names in (order, order[::-1])]
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
