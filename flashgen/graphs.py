"""What `torch.compile` leaves out of its graphs: declarations, schedules, explanations.

`torch.compiler.disable` says so too, and imports all of Dynamo for it; here that waits until
something is compiled."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame

_F = TypeVar("_F", bound=Callable[..., Any])
_SKIP = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)


def outside_graphs(reason: str) -> Callable[[_F], _F]:
    """Decorates what runs as it is, between two graphs: a graph breaks there, and one that must
    not is refused by Dynamo, which shows the reason."""

    def decorate(function: _F) -> _F:
        found: list[Callable[..., Any]] = []

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            if not found:
                made = torch.compiler.disable(function, reason=reason)  # type: ignore[no-untyped-call]
                found.append(made)
            return found[0](*args, **kwargs)

        # What `disable` marks its own functions with; and Dynamo compiles no frame of `run`.
        run._torchdynamo_disable = True  # type: ignore[attr-defined]
        run._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        eval_frame.set_code_exec_strategy(run.__code__, _SKIP)  # type: ignore[attr-defined]
        return run  # type: ignore[return-value]

    return decorate
