"""Compiling the kernels of a call side by side, before the first of them runs.

Triton compiles a kernel when it is launched, so a call whose kernels are all new would wait for one
after the other. Here the call is first gone through with nothing launched: each kernel that it
would launch is handed to a thread, which compiles it or loads what another process has compiled,
and builds what launches it. Launches then wait for their own kernel alone, so gradients' kernels
may be compiled while the forward runs already."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import torch

from .config import config, log
from .records import tape

# More threads than this wait for the interpreter's lock rather than for compilers.
_MOST_THREADS = 12

# How much of a kernel's size counts, and what counts of the one that is begun.
_share: ContextVar[float] = ContextVar("flashgen_share", default=1.0)
_size: ContextVar[float] = ContextVar("flashgen_size", default=0.0)
# The device for which launches are gathered.
_gathering: ContextVar[torch.device | None] = ContextVar("flashgen_gathering", default=None)
# What keeps what the launch's kernel is compiled to.
_keep: ContextVar[Callable[[Any], bool] | None] = ContextVar("flashgen_keep", default=None)
# Kernels that are to be compiled once Triton knows what it is: sizes of texts, and what begins it.
_Waiting = list[tuple[float, Callable[[], None]]]
_waiting: ContextVar[_Waiting] = ContextVar("flashgen_waiting")
_lock = threading.Lock()
_seen: set[Any] = set()
# What Triton promised of each kernel, by its id: modules keep kernels for good.
_promised: dict[int, list[Any]] = {}


def is_gathering() -> bool:
    """Whether launches only begin to compile."""
    return _gathering.get() is not None


def once(key: Any, device: torch.device, work: Callable[[], Any]) -> None:
    """Begin to compile what `work()` launches; nothing if that was done for an equal key before.

    `work` runs with nothing launched, so buffers that kernels would fill hold anything: it must
    leave nothing behind, and look at no element."""
    modes = None if _is_watched(device) else _modes()
    if modes is None:
        return
    with _lock:
        if key in _seen:
            return
        _seen.add(key)
    made, active = modes
    mode, gathering = active.set(made(_pool())), _gathering.set(device)
    waiting = _waiting.set([])
    try:
        work()
        _begin_all(_waiting.get())
    except torch.OutOfMemoryError:
        # Gone through ahead, a backward holds its buffers when less may be free than later.
        log("launch").info(
            "no memory to compile side by side; kernels compile as they are launched"
        )
    finally:
        _waiting.reset(waiting)
        _gathering.reset(gathering)
        active.reset(mode)


def _is_watched(device: torch.device) -> bool:
    """Whether something would see what is done in passing, or compiles in a way of its own."""
    if device.type != "cuda" or config.debug or config.tune != "off":
        return True
    if tape.recorder() is not None or torch._C._are_functorch_transforms_active():
        return True
    return torch.cuda.is_current_stream_capturing()


@contextlib.contextmanager
def behind(share: float) -> Iterator[None]:
    """Kernels that are begun here stand behind those that are larger than such a share of theirs;
    0: behind all."""
    before = _share.set(share * _share.get())
    try:
        yield
    finally:
        _share.reset(before)


def begin(
    kernel: Any,
    arguments: Sequence[Any],
    options: Mapping[str, Any],
    keep: Callable[[Any], bool],
) -> None:
    """Compile a kernel as a launch with these arguments would, in a thread.

    There, `keep(compiled)` says whether that is all a launch needs."""
    waiting = _waiting.get()
    size = _share.get() * getattr(kernel, "size", 1)
    waiting.append((size, functools.partial(_begin, kernel, arguments, options, keep, size)))
    if all(one.done() for one in _identify()):
        _begin_all(waiting)


def _begin_all(waiting: _Waiting) -> None:
    """Compile what waits for Triton to know itself, the largest first."""
    for one in _identify() if waiting else ():
        one.result()
    waiting.sort(key=lambda one: one[0])
    while waiting:
        size, work = waiting.pop()
        # Importing a text and binding its arguments is Python too.
        with _turns.turn(size):
            work()


def _begin(
    kernel: Any,
    arguments: Sequence[Any],
    options: Mapping[str, Any],
    keep: Callable[[Any], bool],
    size: float,
) -> None:
    keeping, sizing = _keep.set(keep), _size.set(size)
    try:
        promised = kernel.warmup(*arguments, grid=(1,), **options)
    finally:
        _size.reset(sizing)
        _keep.reset(keeping)
    # What is compiled already is no promise.
    if isinstance(getattr(promised, "future", None), Future):
        with _lock:
            _promised.setdefault(id(kernel), []).append(promised)


def wait(kernel: Any) -> None:
    """Until what was begun of a kernel is there. Raises what its compiler raised."""
    if not _promised:
        return
    with _lock:
        promised = list(_promised.get(id(kernel), ()))
    for one in promised:
        one.result()
    with _lock:
        _promised.pop(id(kernel), None)


@functools.cache
def _identify() -> tuple[Future[Any], ...]:
    """Read, in threads, what Triton is: its cache asks for a hash of the whole library, which
    takes as long as all texts of a call."""
    return tuple(_pool().submit(read) for read in (_read_library, _start_driver))


# Whatever is wrong in these two, compiling says so.
def _read_library() -> None:
    with contextlib.suppress(Exception):
        from triton.runtime.cache import triton_key

        triton_key()


def _start_driver() -> None:
    """It is compiled, where the cache is empty; and the backend asks for ptxas' version."""
    with contextlib.suppress(Exception):
        from triton.compiler.compiler import make_backend
        from triton.runtime import driver

        make_backend(driver.active.get_current_target()).hash()


@functools.cache
def _modes() -> tuple[Any, Any] | None:
    """How Triton is told to compile in threads; None of a Triton that can't."""
    try:
        from triton.runtime._async_compile import AsyncCompileMode, active_mode
    except ImportError:
        log("launch").info("this Triton compiles one kernel after the other")
        return None
    return AsyncCompileMode, active_mode


@functools.cache
def _pool() -> _Pool:
    return _Pool(min(_MOST_THREADS, os.cpu_count() or 1), "flashgen-compile")


class _Pool(ThreadPoolExecutor):
    """Threads that compile; Triton hands over what does it."""

    def submit(self, function: Any, /, *args: Any, **keywords: Any) -> Future[Any]:
        _take_turns(function, _size.get())
        return super().submit(_loaded, function, _gathering.get(), _keep.get())


class _Turns:
    """A lock that goes to the largest of those who wait for it."""

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._waiting: list[float] = []
        self._is_held = False

    @contextlib.contextmanager
    def turn(self, size: float) -> Iterator[None]:
        with self._free:
            self._waiting.append(size)
            self._free.wait_for(lambda: not self._is_held and size == max(self._waiting))
            self._waiting.remove(size)
            self._is_held = True
        try:
            yield
        finally:
            with self._free:
                self._is_held = False
                self._free.notify_all()


_turns = _Turns()


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Parsing makes many objects and drops few, so that Python looks for cycles again and again
    among all that PyTorch and Triton hold: up to a fifth of the time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _take_turns(compile_it: Callable[[], Any], size: float) -> None:
    """Let kernels be parsed one after the other, the largest first: that is done in Python, whose
    lock it takes, so that the longest compilation would begin last if all were parsed at once.

    Where Triton's function is another one than is known here, all are."""
    with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
        source = inspect.getclosurevars(compile_it).nonlocals["src"]
        parse = source.make_ir

        def parse_in_turn(*given: Any, **more: Any) -> Any:
            with _turns.turn(size), _without_collections():
                return parse(*given, **more)

        source.make_ir = parse_in_turn


def _loaded(
    compile_it: Callable[[], Any],
    device: torch.device | None,
    keep: Callable[[Any], bool] | None,
) -> Any:
    compiled = compile_it()
    if device is not None and keep is not None and device.type == "cuda":
        # What doesn't fit on the GPU is said by the launch, again.
        with torch.cuda.device(device), contextlib.suppress(Exception):
            if not keep(compiled):
                compiled.run  # noqa: B018  (builds what launches it, and loads it)
    return compiled
