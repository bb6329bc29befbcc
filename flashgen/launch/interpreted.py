"""Triton's interpreter: one launch at a time, and loops that count in Triton's numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

# The interpreter patches Triton's modules while it runs, for all threads.
_lock = threading.Lock()


def interpreting() -> bool:
    """Whether this process runs Triton kernels in Triton's interpreter."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def interpreted(kernel: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """What launches the kernel by `run`, of which the interpreter can do one at a time."""

    def launch(*arguments: Any) -> Any:
        with _lock:
            kernel.fn.__globals__["range"] = _range
            return run(*arguments)

    return launch


def _range(*bounds: Any) -> Iterator[Any]:
    """Python's range, of tensors where a bound is one, as compiled loops have them: the
    interpreter's loops give integers, which have no `.to`, and whose `~` isn't a boolean's."""
    import triton.language as tl

    zero = next((bound * 0 for bound in bounds if isinstance(bound, tl.tensor)), None)
    for number in range(*bounds):
        yield number if zero is None else zero + number
