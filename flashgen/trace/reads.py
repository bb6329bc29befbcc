"""What a function read besides its arguments, and whether the same is there still."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

# What stands for something that isn't there.
MISSING: Any = type("Missing", (), {"__repr__": lambda _: "missing"})()
_EQUAL = (numbers.Number, str, bytes, range, slice, frozenset, torch.dtype, torch.device)


class Check(NamedTuple):
    """One thing that was read: what `fetch(holder, key)` gave then."""

    fetch: Callable[[Any, Any], Any]
    holder: Any
    key: Any
    then: Any


class Reads(NamedTuple):
    """All that a function read. `complete`: nothing was read that can't be looked at again; else
    the function has to be run to know."""

    checks: tuple[Check, ...] = ()
    complete: bool = True

    def are_current(self) -> bool:
        """Whether the function would read the same again. On the way of every call."""
        if not self.complete:
            return False
        try:
            for fetch, holder, key, then in self.checks:
                now = fetch(holder, key)
                if now is not then and not same(now, then):
                    return False
        except Exception:  # of a user's own attribute; the function itself says what is wrong
            return False
        return True

    @staticmethod
    def joined(parts: Iterable[Reads]) -> Reads:
        """What several functions read."""
        parts = list(parts)
        checks = {(c.fetch, id(c.holder), c.key): c for part in parts for c in part.checks}
        return Reads(tuple(checks.values()), all(part.complete for part in parts))


def same(now: Any, then: Any) -> bool:
    """Whether a function can't tell them apart: one object, or numbers and texts that are equal."""
    if now is then:
        return True
    if type(now) is not type(then):
        return False
    if isinstance(now, tuple):
        return len(now) == len(then) and all(map(same, now, then))
    if isinstance(now, (float, complex)):
        # Zeros have signs, and a NaN is another's equal here.
        return repr(now) == repr(then)
    return isinstance(now, _EQUAL) and bool(now == then)


def cell(holder: Any, _: Any) -> Any:
    """A variable of a closure."""
    try:
        return holder.cell_contents
    except ValueError:
        return MISSING


def entry(holder: Any, key: Any) -> Any:
    """An entry of a dictionary: of a module's names, a module's parameters."""
    return holder.get(key, MISSING)


def attribute(holder: Any, key: Any) -> Any:
    return getattr(holder, key, MISSING)


def method(holder: Any, key: Any) -> Any:
    """The function of a method: the method itself is another object each time."""
    return getattr(getattr(holder, key, MISSING), "__func__", MISSING)


def of_type(holder: Any, key: Any) -> Any:
    """A property, unread."""
    return getattr(type(holder), key, MISSING)


def contents(holder: Any, _: Any) -> tuple[Any, ...]:
    """All that a container holds."""
    return (*holder, *holder.values()) if hasattr(holder, "values") else tuple(holder)


def version(holder: Any, _: Any) -> Any:
    """How often a tensor was changed in place."""
    return holder._version
