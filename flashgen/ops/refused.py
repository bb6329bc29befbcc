"""Calls that a declaration refuses while `torch.compile` makes a graph: refused when it runs.

An exception that Dynamo meets comes out as one of its own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import CallText, FlashgenError, SourceLine


@dataclass(frozen=True)
class Refused:
    """What is wrong with a call, and how the operator's lists are read to restate it."""

    problem: str
    line: SourceLine | None
    write: str | None
    name: str
    static: tuple[tuple[str, Any], ...]
    tensors: tuple[str, ...]
    ints: tuple[str, ...]

    def error(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        others: Sequence[torch.Tensor],
        ints: Sequence[int],
    ) -> FlashgenError:
        given = {"q": q, "k": k, "v": v, **dict(self.static)}
        given |= zip(self.tensors, others, strict=True)
        given |= zip(self.ints, ints, strict=True)
        text = CallText(self.name, given)
        return FlashgenError(self.problem, call=text, line=self.line, write=self.write)


_refused: dict[str, Refused] = {}
_lock = threading.Lock()


def keep(refused: Refused) -> str:
    """What an operator names it by."""
    with _lock:
        known = next((name for name, kept in _refused.items() if kept == refused), None)
        name = known or f"refused {len(_refused)}"
        _refused[name] = refused
    return name


def find(name: str) -> Refused | None:
    return _refused.get(name)
