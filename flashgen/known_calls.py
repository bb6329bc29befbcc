"""Calls that were checked before: what is the same in the next one needs no second look."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .call import Call, CallText
from .schedule import Schedule
from .spec import Bound

# Shapes and scalars seen lately; a call costs a few hundred bytes.
_MOST = 64
_PLAIN = (int, float, bool, str)


@dataclass(eq=False)
class Known:
    """A checked call without its tensors, and what followed from its shapes."""

    call: Call
    # Of the call's data: the shapes they are read in, where a dimension of 1 stands for many.
    expanded: Mapping[str, torch.Size | None]
    blocks: dict[Any, tuple[int, int]] = field(default_factory=dict)
    _fits: Callable[[], Schedule | None] = lambda: None

    def block(self, asked: Any, choose: Callable[[], tuple[int, int]]) -> tuple[int, int]:
        """The tile for what is asked of it: a backend, a batch that doesn't matter."""
        if asked not in self.blocks:
            self.blocks[asked] = choose()
        return self.blocks[asked]

    def fits(self, schedule: Schedule) -> bool:
        """Whether this very schedule was found to fit before."""
        return self._fits() is schedule

    def found_to_fit(self, schedule: Schedule) -> None:
        self._fits = weakref.ref(schedule)

    def again(self, text: CallText, q: Any, k: Any, v: Any, sinks: Any, data: Any) -> Call:
        """The same call of other tensors."""
        tensors = dict(self.call.bound.tensors)
        for name, shape in self.expanded.items():
            tensors[name] = data[name] if shape is None else data[name].expand(shape)
        bound = Bound(self.call.bound.spec, self.call.bound.scalars, tensors)
        sinks = None if sinks is None else sinks.contiguous()
        same = self.call
        return Call(
            text, q, k, v, same.geometry, bound, same.scale, same.softcap, sinks, same.dropout
        )


class KnownCalls:
    """What an attention's calls have in common, by shapes, dtypes, devices and scalars."""

    def __init__(self) -> None:
        self._known: dict[Any, Known] = {}

    def find(self, key: Any) -> Known | None:
        return None if key is None else self._known.get(key)

    def keep(self, key: Any, call: Call, data: Mapping[str, Any]) -> Known:
        """Remember a checked call; tensors of the declaration itself stay, those given don't."""
        given = {n: x for n, x in data.items() if isinstance(x, torch.Tensor)}
        read = call.bound.tensors
        expanded = {
            n: None if read[n].shape == x.shape else read[n].shape
            for n, x in given.items()
            if n in read
        }
        own = {n: x for n, x in read.items() if n not in given}
        none: Any = None
        bare = replace(
            *(call,),
            text=none, q=none, k=none, v=none, sinks=None, bound=replace(call.bound, tensors=own),
        )  # fmt: skip
        known = Known(bare, expanded)
        if key is not None:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[key] = known
        return known


def key_of(q: Any, k: Any, v: Any, arguments: Mapping[str, Any], data: Mapping[str, Any]) -> Any:
    """What a check looks at; None where it looks at a tensor's elements, or would cast."""
    if not isinstance(q, torch.Tensor) or torch.is_autocast_enabled(q.device.type):
        return None
    parts: list[Any] = []
    for x in (q, k, v):
        if not isinstance(x, torch.Tensor):
            return None
        parts += (x.shape, x.dtype, x.device)
    for name, x in arguments.items():
        if isinstance(x, torch.Tensor):
            if name != "sinks":
                return None
            x = (x.shape, x.dtype, x.device)
        elif x is not None and type(x) not in _PLAIN:
            return None
        parts += (type(x), x)
    for name, x in data.items():
        if isinstance(x, torch.Tensor):
            if x.ndim == 0 or x.layout != torch.strided:
                return None
            parts += (name, x.shape, x.dtype, x.device)
        elif type(x) in _PLAIN:
            parts += (name, type(x), x)
        else:
            return None
    return tuple(parts)
