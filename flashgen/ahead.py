"""Compiling the kernels of a call side by side, before the first of them runs.

Triton compiles a kernel when it is launched, so a call whose kernels are all new would wait for one
after the other. Here the call is first gone through with nothing launched: each kernel that it
would launch is handed to a thread, which compiles it or loads what another process has compiled,
and builds what launches it. Launches then wait for their own kernel alone, so gradients' kernels
may be compiled while the forward runs already."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import torch

from .config import config, log
from .records import tape

# More threads than this wait for the interpreter's lock rather than for compilers.
_MOST_THREADS = 12

# The device for which launches are gathered.
_gathering: ContextVar[torch.device | None] = ContextVar("flashgen_gathering", default=None)
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
    identify().result()
    made, active = modes
    mode = active.set(made(_pool()))
    gathering = _gathering.set(device)
    try:
        work()
    except torch.OutOfMemoryError:
        # Gone through ahead, a backward holds its buffers when less may be free than later.
        log("launch").info(
            "no memory to compile side by side; kernels compile as they are launched"
        )
    finally:
        _gathering.reset(gathering)
        active.reset(mode)


def _is_watched(device: torch.device) -> bool:
    """Whether something would see what is done in passing, or compiles in a way of its own."""
    if device.type != "cuda" or config.debug or config.tune != "off":
        return True
    if tape.recorder() is not None or torch._C._are_functorch_transforms_active():
        return True
    return torch.cuda.is_current_stream_capturing()


def begin(kernel: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Compile a kernel as a launch with these arguments would, in a thread."""
    promised = kernel.warmup(*arguments, grid=(1,), **options)
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
def identify() -> Future[Any]:
    """Read, in a thread, what Triton is: its cache asks for a hash of the whole library, which
    takes as long as loading many kernels."""

    def read() -> None:
        with contextlib.suppress(ImportError, AttributeError):
            from triton.runtime.cache import triton_key

            triton_key()

    return _pool().submit(read)


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
        return super().submit(_loaded, function, _gathering.get())


def _loaded(compile_it: Callable[[], Any], device: torch.device | None) -> Any:
    compiled = compile_it()
    if device is not None and device.type == "cuda":
        # What doesn't fit on the GPU is said by the launch, again.
        with torch.cuda.device(device), contextlib.suppress(Exception):
            compiled.run  # noqa: B018  (builds what launches it, and loads it)
    return compiled
