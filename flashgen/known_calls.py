"""Calls that were checked before: what is the same in the next one needs no second look."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .call import Call, CallText, geometry_of
from .check_storage import Storage, views
from .config import config
from .schedule import Schedule
from .spec import Bound
from .tape import Tapes, place_of

# Shapes and scalars seen lately; a call costs some kilobytes.
_MOST = 64
_PLAIN = (int, float, bool, str)


@dataclass(eq=False)
class Known:
    """A checked call without its tensors, and what followed from its shapes."""

    call: Call
    # Of the call's data: the shapes they are read in, where a dimension of 1 stands for many.
    expanded: Mapping[str, torch.Size | None]
    # Whether tensors say how the others are stored.
    is_stored: bool
    _found: dict[Any, Any] = field(default_factory=dict)
    tapes: Tapes = field(default_factory=Tapes)
    _fits: Callable[[], Schedule | None] = lambda: None

    def once(self, asked: Any, find: Callable[[], Any]) -> Any:
        """What follows from the call and from what is asked of it, found once."""
        found = self._found.get(asked)
        if found is None:
            if len(self._found) >= _MOST:
                self._found.clear()
            found = self._found[asked] = find()
        return found

    def fits(self, schedule: Schedule) -> bool:
        """Whether this very schedule was found to fit before."""
        return self._fits() is schedule

    def found_to_fit(self, schedule: Schedule) -> None:
        self._fits = weakref.ref(schedule)

    def again(
        self, text: CallText, q: Any, k: Any, v: Any, given: Mapping[str, Any], data: Any
    ) -> Call:
        """The same call of other tensors."""
        same, spec = self.call, self.call.bound.spec
        tensors = dict(same.bound.tensors)
        for name, shape in self.expanded.items():
            tensors[name] = data[name] if shape is None else data[name].expand(shape)
        bound = Bound(spec, same.bound.scalars, tensors)
        if spec.heads is not None:
            v = k[..., : spec.heads.rank]
        geometry = same.geometry
        if self.is_stored:
            storage = Storage.take(dict(given))
            q, k, v = views(storage, q, k, v)
            geometry = geometry_of(text, q, k, v, given["q_offset"], storage)
        sinks = given["sinks"]
        sinks = None if sinks is None else sinks.contiguous()
        return Call(text, q, k, v, geometry, bound, same.scale, same.softcap, sinks, same.dropout)


class KnownCalls:
    """What an attention's calls have in common, by shapes, strides, dtypes and scalars."""

    def __init__(self) -> None:
        self._known: dict[Any, Known] = {}

    def checked(
        self,
        key: Any,
        text: CallText,
        q: Any,
        k: Any,
        v: Any,
        given: Mapping[str, Any],
        data: Any,
        check: Callable[..., Call],
    ) -> tuple[Known, Call]:
        """The call, by `check(storage=..., **arguments)` if none like it was checked before, and
        what is known of those."""
        known = None if key is None else self._known.get(key)
        if known is not None:
            return known, known.again(text, q, k, v, given, data)
        arguments = dict(given)
        storage = Storage.take(arguments)
        call = check(storage=storage, **arguments)
        return self._keep(key, call, given, data), call

    def _keep(self, key: Any, call: Call, given: Mapping[str, Any], data: Any) -> Known:
        """Remember a checked call; tensors of the declaration itself stay, those given don't."""
        mine = {n: x for n, x in data.items() if isinstance(x, torch.Tensor)}
        read = call.bound.tensors
        expanded = {
            n: None if read[n].shape == x.shape else read[n].shape
            for n, x in mine.items()
            if n in read
        }
        own = {n: x for n, x in read.items() if n not in mine}
        is_stored = any(isinstance(x, torch.Tensor) for n, x in given.items() if n != "sinks")
        none: Any = None
        bare = replace(
            *(call,),
            text=none, q=none, k=none, v=none, sinks=None, bound=replace(call.bound, tensors=own),
            geometry=none if is_stored else call.geometry,
        )  # fmt: skip
        known = Known(bare, expanded, is_stored)
        if key is not None:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[key] = known
        return known


def key_of(q: Any, k: Any, v: Any, arguments: Mapping[str, Any], data: Mapping[str, Any]) -> Any:
    """What a check looks at, and how the tensors lie; None where it looks at a tensor's elements,
    or would cast."""
    if not isinstance(q, torch.Tensor) or torch.is_autocast_enabled(q.device.type):
        return None
    if config.debug:
        return None
    device = q.device
    parts: list[Any] = [device, config.tune]
    for x in (q, k, v):
        if isinstance(x, torch.Tensor) and x.device == device:
            parts += (x.shape, x.stride(), x.dtype, place_of(x))
        elif x is None:
            parts.append("none")
        else:
            return None
    for name, x in arguments.items():
        if x is None:
            continue
        if isinstance(x, torch.Tensor):
            # Lengths and places on a CPU are read.
            if x.device != device or (name != "sinks" and device.type == "cpu"):
                return None
            parts += (name, x.shape, x.stride(), x.dtype, place_of(x))
        elif type(x) in _PLAIN:
            parts += (name, type(x), x)
        else:
            return None
    if arguments.get("cu_seqlens_q") is not None:
        parts.append(arguments["cu_seqlens_q"] is arguments["cu_seqlens_kv"])
    for name, x in data.items():
        if isinstance(x, torch.Tensor):
            if x.ndim == 0 or x.layout != torch.strided or x.device != device:
                return None
            parts += (name, x.shape, x.stride(), x.dtype, place_of(x))
        elif type(x) in _PLAIN:
            parts += (name, type(x), x)
        else:
            return None
    # What lies nowhere is wrapped by a function transform.
    return None if None in parts else tuple(parts)
