"""Calls that were checked before: what is the same in the next one needs no second look."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from ..call import Call, geometry_of
from ..check_storage import Storage, views
from ..config import config
from ..errors import CallText
from ..records.tape import Tapes, layout_of
from ..schedule import Schedule
from ..spec import Bound

# Shapes and scalars seen lately; a call costs some kilobytes.
_MOST = 64
_PLAIN = (int, float, bool, str)


@dataclass(eq=False)
class Known:
    """A checked call without its tensors, and what followed from its shapes."""

    call: Call
    # The shapes in which the call's data are read: a dimension of 1 may stand for many.
    expanded: Mapping[str, torch.Size | None]
    # Whether tensors say how the others are stored.
    is_stored: bool
    # Names of the tensors among arguments and data, each once, and the declaration's own tensors.
    given: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    own: tuple[torch.Tensor, ...] = ()
    _found: dict[Any, Any] = field(default_factory=dict)
    tapes: Tapes = field(default_factory=Tapes)
    # What was found to be needed for such a call, by what is asked beside (`ready.py`).
    ready: dict[Any, Any] = field(default_factory=dict)
    _fits: str | None = None

    def once(self, asked: Any, find: Callable[[], Any]) -> Any:
        """What follows from the call and from what is asked of it, found once."""
        found = self._found.get(asked)
        if found is None:
            if len(self._found) >= _MOST:
                self._found.clear()
            found = self._found[asked] = find()
        return found

    def fits(self, schedule: Any) -> bool:
        """Whether the schedule, or one just like it, was found to fit before."""
        return self._fits is not None and getattr(schedule, "fit_text", None) == self._fits

    def found_to_fit(self, schedule: Schedule) -> None:
        self._fits = schedule.fit_text

    def read(self, data: Mapping[str, Any]) -> list[torch.Tensor]:
        """What the expressions of the same call read, in the spec's order, of other data."""
        found = []
        for name, shape, own in self._places:
            if own is not None:
                found.append(own)
            else:
                found.append(data[name] if shape is None else data[name].expand(shape))
        return found

    @cached_property
    def _places(self) -> list[tuple[str, torch.Size | None, torch.Tensor | None]]:
        own = self.call.bound.tensors
        names = (tensor.name for tensor in self.call.bound.spec.tensors)
        return [(n, self.expanded.get(n), own.get(n)) for n in names]

    def again(
        self, text: CallText, q: Any, k: Any, v: Any, given: Mapping[str, Any], data: Any
    ) -> Call:
        """The same call of other tensors."""
        same, spec = self.call, self.call.bound.spec
        names = (tensor.name for tensor in spec.tensors)
        tensors = dict(zip(names, self.read(data), strict=True))
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

    def seen(self, key: Any) -> Known | None:
        """What is known of calls with this key, if one was checked before."""
        return None if key is None else self._known.get(key)

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
        known = self.seen(key)
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
        names = [n for n, x in given.items() if isinstance(x, torch.Tensor)]
        is_stored = any(n != "sinks" for n in names)
        if given.get("cu_seqlens_kv") is given.get("cu_seqlens_q"):
            # Whether they are one is a part of the key.
            names = [n for n in names if n != "cu_seqlens_kv"]
        none: Any = None
        bare = replace(
            *(call,),
            text=none, q=none, k=none, v=none, sinks=None, bound=replace(call.bound, tensors=own),
            geometry=none if is_stored else call.geometry,
        )  # fmt: skip
        known = Known(bare, expanded, is_stored, tuple(names), tuple(mine), tuple(own.values()))
        if key is not None:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[key] = known
        return known


def key_of(q: Any, k: Any, v: Any, arguments: Mapping[str, Any], data: Mapping[str, Any]) -> Any:
    """What a check looks at, and how the tensors lie; None where it looks at a tensor's elements,
    or would cast, and of tensors that don't lie anywhere."""
    if not isinstance(q, torch.Tensor) or config.debug:
        return None
    try:
        return _key_of(q, k, v, arguments, data)
    except RuntimeError:
        # Sparse and nested tensors have no strides.
        return None


def _key_of(q: Any, k: Any, v: Any, arguments: Mapping[str, Any], data: Mapping[str, Any]) -> Any:
    device = q.device
    kind = device.type
    if kind == "meta" or torch.is_autocast_enabled(kind):
        return None
    parts: list[Any] = [config.tune]
    for x in (q, k, v):
        part = "none" if x is None else _part_of(x, device)
        if part is None:
            return None
        parts.append(part)
    for name, x in arguments.items():
        if x is None:
            continue
        # Lengths and places on a CPU are read.
        if isinstance(x, torch.Tensor) and kind == "cpu" and name != "sinks":
            return None
        if (part := _part_of(x, device)) is None:
            return None
        parts += (name, part)
    if arguments.get("cu_seqlens_q") is not None:
        parts.append(arguments["cu_seqlens_q"] is arguments["cu_seqlens_kv"])
    for name, x in data.items():
        if isinstance(x, torch.Tensor) and (x.ndim == 0 or x.layout != torch.strided):
            return None
        if (part := _part_of(x, device)) is None:
            return None
        parts += (name, part)
    return tuple(parts)


def _part_of(x: Any, device: torch.device) -> Any:
    """An argument's part of a key; None of what is looked at in each call."""
    if isinstance(x, torch.Tensor):
        if x.is_neg():
            # Kernels read what lies there: such a view is copied first.
            return None
        layout = layout_of(x)
        place, found = layout[3:]
        # A tensor without an address is wrapped by a function transform.
        return None if place is None or found != device else layout
    return (type(x), x) if type(x) in _PLAIN else None
