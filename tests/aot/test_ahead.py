"""Kernels are compiled side by side before they are launched, and launches find them."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton import knobs

from flashgen import ahead, binaries, cache, launch
from flashgen.aot import compiling_for
from flashgen.tiling import Tiling

TEXT = """# Adds a number, {number}, of which each module has its own.

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n"])
def add(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(x_ptr + i, x + {number}, mask=i < n)
"""
NAMES = ("x_ptr", "n")


def kernel(number: int) -> Any:
    text = TEXT.format(number=number)
    return cache.module(f"add_{number}", text, launch.key_parts()).add


def launched(made: Any, dtype: torch.dtype = torch.float32) -> None:
    values = {"x_ptr": torch.empty(8, dtype=dtype), "n": 8}
    launch.launch(made, NAMES, values, {"BLOCK": 16}, Tiling(0, 0, 4, 1), 1)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Compiling as if for a GPU; the names of what was compiled."""
    from triton import knobs

    found: list[str] = []
    monkeypatch.setattr(ahead, "_is_watched", lambda device: False)
    monkeypatch.setattr(ahead, "_seen", set())
    monkeypatch.setattr(ahead, "_promised", {})
    monkeypatch.setattr(
        knobs.compilation, "listener", lambda *, src, **_: found.append(src.fn.__module__)
    )
    return found


def test_the_largest_of_those_who_wait_is_next() -> None:
    turns, taken = ahead._Turns(), []

    def take(size: int) -> None:
        with turns.turn(size):
            taken.append(size)

    threads = [threading.Thread(target=take, args=(size,)) for size in (5, 9, 7, 7)]
    with turns.turn(1):
        for thread in threads:
            thread.start()
        while len(turns._waiting) < len(threads):
            time.sleep(0.001)
        assert taken == []
    for thread in threads:
        thread.join()
    assert taken == [9, 7, 7, 5]


def test_kernels_are_parsed_in_turns(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    class Turns(ahead._Turns):
        def turn(self, size: int) -> Any:
            sizes.append(size)
            return super().turn(size)

    monkeypatch.setattr(ahead, "_turns", Turns())
    texts = [TEXT.format(number=number) for number in (11, 1100)]
    first, last = (binaries.Kernels("add", text, launch.key_parts()).add for text in texts)

    def work() -> None:
        with ahead.behind(0):
            launched(last)
        launched(first)

    with compiling_for("sm_90"), knobs.compilation.scope():
        knobs.compilation.always_compile = True
        ahead.once("kind", torch.device("cpu"), work)
        for one in (first, last):
            ahead.wait(one)
    # To begin it, and to parse it.
    assert sorted(sizes) == [0, 0, len(texts[0]), len(texts[0])]


def test_the_largest_begins_first(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that wait until Triton knows what it is, by what counts of their sizes."""
    known: Future[None] = Future()
    monkeypatch.setattr(ahead, "_identify", lambda: (known,))
    begun: list[int] = []

    def work() -> None:
        for size in (5, 9, 7):
            one = SimpleNamespace(size=size, warmup=lambda grid, size=size: begun.append(size))
            with ahead.behind(0.5 if size == 9 else 1):
                ahead.begin(one, (), {}, lambda compiled: True)
        assert not begun
        known.set_result(None)

    ahead.once("kind", torch.device("cpu"), work)
    assert begun == [7, 5, 9]


@pytest.mark.parametrize("searching", [True, False])
def test_no_search_for_cycles(searching: bool) -> None:
    """While a kernel is parsed; then as before."""
    if not searching:
        gc.disable()
    try:
        with ahead._without_collections():
            assert not gc.isenabled()
        assert gc.isenabled() == searching
    finally:
        gc.enable()


def test_what_work_would_launch_is_compiled(compiled: list[str]) -> None:
    kernels = [kernel(number) for number in (1, 2, 3)]
    with compiling_for("sm_90"):
        ahead.once("kind", torch.device("cpu"), lambda: [launched(x) for x in kernels])
        assert len(ahead._promised) == 3
        for one in kernels:
            ahead.wait(one)
        assert not ahead._promised
        assert sorted(compiled) == sorted(x.fn.__module__ for x in kernels)
        for one in kernels:
            found = one.warmup(torch.empty(8), 8, BLOCK=16, grid=(1,), num_warps=4, num_stages=1)
            assert b"add" in found.asm["cubin"]
        assert len(compiled) == 3, "a launch compiled again"


def test_a_kind_is_gone_through_once(compiled: list[str]) -> None:
    turns: list[int] = []
    for turn in range(3):
        ahead.once("kind", torch.device("cpu"), lambda turn=turn: turns.append(turn))
    assert turns == [0]


def test_a_compiler_that_fails_says_so_where_its_kernel_is_launched(compiled: list[str]) -> None:
    text = TEXT.format(number=4).replace("i < n", "i < nowhere")
    broken = cache.module("broken", text, launch.key_parts()).add
    with compiling_for("sm_90"):
        ahead.once("kind", torch.device("cpu"), lambda: launched(broken))
        with pytest.raises(Exception, match="nowhere"):
            ahead.wait(broken)


def test_nothing_is_gathered_afterwards(compiled: list[str]) -> None:
    def fail() -> None:
        raise ValueError("work that fails")

    with pytest.raises(ValueError, match="work that fails"):
        ahead.once("kind", torch.device("cpu"), fail)
    assert not ahead.is_gathering()


def test_memory_that_is_short_is_no_error(compiled: list[str]) -> None:
    def fill() -> None:
        raise torch.OutOfMemoryError

    ahead.once("kind", torch.device("cpu"), fill)
    assert not ahead.is_gathering()
