"""Where a function finds the tensors and numbers it captured, so that others in their place are
noticed.

A closure's variable may be assigned anew, a module may get another parameter. What the function
computes itself isn't found, nor what lies deeper than a few attributes, or numbers than one."""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

# (kind, key): one step from an object to one that it holds.
Step = tuple[str, Any]

# Steps to a tensor; and objects that are looked into, steps that are tried to find them all.
_DEEPEST, _MOST_OBJECTS, _MOST_STEPS = 6, 2000, 50_000
_PLAIN = (str, bytes, int, float, bool, type(None), type, types.ModuleType, torch.dtype)


@dataclass(frozen=True)
class Source:
    """The way from a function to a tensor."""

    function: Any
    steps: tuple[Step, ...]

    def now(self) -> Any:
        """What is there now; None if the way has ended."""
        found = self.function
        try:
            for kind, key in self.steps:
                found = _follow(found, kind, key)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError):
            return None
        return found


def _follow(x: Any, kind: str, key: Any) -> Any:
    if kind == "cell":
        return x.__closure__[key].cell_contents
    if kind == "global":
        return x.__globals__[key]
    return getattr(x, key) if kind == "attribute" else x[key]


def look(sources: Iterable[Source]) -> list[Any]:
    """What is there now: numbers, and of tensors which they are."""
    found = [source.now() for source in sources]
    return [id(x) if isinstance(x, torch.Tensor) else x for x in found]


def sources_of(function: Any, tensors: Iterable[torch.Tensor]) -> tuple[Source, ...]:
    """The shortest way to each tensor that can be found, and to numbers that the function reads."""
    return (*_tensors(function, tensors), *_numbers(function))


def _numbers(function: Any) -> Iterator[Source]:
    """Numbers in closures, in globals, and in attributes of a method's object."""
    steps: list[tuple[Step, ...]] = [(step,) for step in _steps(function)]
    if isinstance(function, types.MethodType):
        names = function.__code__.co_names
        steps = [(("attribute", "__self__"), ("attribute", name)) for name in names]
        steps += [(("attribute", "__func__"), step) for step in _steps(function.__func__)]
    for way in steps:
        source = Source(function, way)
        if isinstance(source.now(), (bool, int, float)):
            yield source


def _tensors(function: Any, tensors: Iterable[torch.Tensor]) -> list[Source]:
    missing = {id(x) for x in tensors}
    found: list[Source] = []
    for way, x in itertools.islice(_held(function), _MOST_STEPS if missing else 0):
        if id(x) in missing:
            missing.remove(id(x))
            found.append(Source(function, way))
            if not missing:
                break
    return found


def _held(function: Any) -> Iterator[tuple[tuple[Step, ...], Any]]:
    """What can be reached from a function, the nearest first, and the way there."""
    pending: list[tuple[tuple[Step, ...], Any]] = [((), function)]
    seen = {id(function)}
    for steps, x in pending:
        for step in _steps(x) if len(steps) < _DEEPEST else ():
            way, inner = (*steps, step), Source(x, (step,)).now()
            yield way, inner
            is_seen = id(inner) in seen or isinstance(inner, (*_PLAIN, torch.Tensor))
            if not is_seen and len(pending) < _MOST_OBJECTS:
                seen.add(id(inner))
                pending.append((way, inner))


def _steps(x: Any) -> Iterator[Step]:
    """What an object holds: of a function what it reads, of a container its items."""
    if isinstance(x, types.FunctionType):
        yield from (("cell", i) for i in range(len(x.__closure__ or ())))
        yield from (("global", name) for name in x.__code__.co_names if name in x.__globals__)
    elif isinstance(x, types.MethodType):
        yield from (("attribute", "__self__"), ("attribute", "__func__"))
    elif isinstance(x, functools.partial):
        yield from (("attribute", name) for name in ("keywords", "args", "func"))
    elif isinstance(x, dict):
        yield from (("item", key) for key in x)
    elif isinstance(x, (list, tuple)):
        yield from (("item", i) for i in range(len(x)))
    else:
        if isinstance(x, torch.nn.Module):
            held = (x._parameters, x._buffers, x._modules)
            yield from (("attribute", name) for names in held for name in names)
        yield from (("attribute", name) for name in getattr(x, "__dict__", ()) if name[:1] != "_")
