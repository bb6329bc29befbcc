"""Processes that compile beside each other, and then measure one at a time."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

import torch

Work = TypeVar("Work")
# Seconds that all compiling may take, the measuring of one piece of work, and the end.
PATIENCE, ONE, LAST = 300.0, 120.0, 10.0
MOST = 14


@dataclass(frozen=True)
class Found(Generic[Work]):
    """What `measure` gave for a piece of work, or why it gave nothing."""

    work: Work
    value: Any = None
    problem: str = ""


@dataclass(frozen=True)
class _Worker:
    process: Any
    connection: Connection


def in_turns(
    works: Sequence[Work],
    prepare: Callable[[Work], Any],
    measure: Callable[[Any, int], Any],
    rounds: int,
    most: int = MOST,
    alike: Callable[[Work], Hashable] | None = None,
) -> Iterator[Found[Work]]:
    """For each piece of work what `measure(prepare(work), rounds)` gives, in order.

    All are prepared first, in at most `most` processes that share the machine; then one at a time
    is measured, in the process that prepared it: the same one where `alike` gives the same, so
    that it compiles less. Functions must be importable by name. One that raises, crashes or hangs
    takes its own work with it, or its process's, and no other."""
    shares = deal(works, min(most, (os.cpu_count() or 2) - 1), alike)
    workers = [_start([works[n] for n in share], prepare, measure, rounds) for share in shares]
    places = {n: (workers[i], at) for i, share in enumerate(shares) for at, n in enumerate(share)}
    try:
        start = time.perf_counter()
        ready = _ready(workers)
        seconds = time.perf_counter() - start
        print(f"{len(works)} prepared in {seconds:.0f} s", file=sys.stderr, flush=True)
        for number, work in enumerate(works):
            worker, place = places[number]
            if worker.connection not in ready:
                yield Found(work, problem=f"not prepared after {PATIENCE:.0f} s, or crashed")
                continue
            value, problem = _ask(worker, place)
            if problem in ("crashed", "hangs"):
                ready.remove(worker.connection)
                worker.process.terminate()
            yield Found(work, value, problem)
    finally:
        _stop(workers)


def _stop(workers: Sequence[_Worker]) -> None:
    """A process that is left alone ends, and clears up; one that doesn't is ended."""
    for worker in workers:
        worker.connection.close()
    deadline = time.monotonic() + LAST
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))
        worker.process.terminate()
        worker.process.join()


def deal(
    works: Sequence[Work], most: int, alike: Callable[[Work], Hashable] | None
) -> list[list[int]]:
    """Numbers of works for each process: what is alike stays together, the loads even."""
    groups: dict[Hashable, list[int]] = {}
    for number, work in enumerate(works):
        groups.setdefault(number if alike is None else alike(work), []).append(number)
    shares: list[list[int]] = [[] for _ in range(max(1, min(most, len(groups))))]
    for group in sorted(groups.values(), key=len, reverse=True):
        min(shares, key=len).extend(group)
    return shares


def _start(works: Sequence[Any], *given: Any) -> _Worker:
    spawn = get_context("spawn")
    mine, other = spawn.Pipe()
    process = spawn.Process(target=_work, args=(other, works, *given), daemon=True)
    process.start()
    other.close()
    return _Worker(process, mine)


def _ready(workers: Sequence[_Worker]) -> list[Connection]:
    """Connections of the workers that have prepared everything."""
    deadline = time.monotonic() + PATIENCE
    waiting, ready = [worker.connection for worker in workers], []
    while waiting and (left := deadline - time.monotonic()) > 0:
        for connection in wait(waiting, left):
            assert isinstance(connection, Connection)
            waiting.remove(connection)
            try:
                connection.recv()
            except EOFError:
                continue
            ready.append(connection)
    return ready


def _ask(worker: _Worker, number: int) -> tuple[Any, str]:
    try:
        worker.connection.send(number)
        if not worker.connection.poll(ONE):
            return None, "hangs"
        value, problem = worker.connection.recv()
    except (EOFError, OSError):
        return None, "crashed"
    return value, problem


def _work(
    connection: Connection,
    works: Sequence[Any],
    prepare: Callable[[Any], Any],
    measure: Callable[[Any, int], Any],
    rounds: int,
) -> None:
    """A process: prepare all, say so, then measure what is asked for until nobody asks."""
    # Others compile beside this one.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    torch.set_num_threads(1)
    prepared = [_tried(prepare, work) for work in works]
    connection.send("ready")
    while True:
        try:
            value, problem = prepared[connection.recv()]
        except EOFError:
            return
        connection.send((None, problem) if problem else _tried(measure, value, rounds))


def _tried(function: Callable[..., Any], *given: Any) -> tuple[Any, str]:
    """What a function gives, or what it raises, in a line."""
    try:
        return function(*given), ""
    except Exception as error:
        return None, told(error)


def told(error: BaseException) -> str:
    """An exception in a line."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:300]}"
