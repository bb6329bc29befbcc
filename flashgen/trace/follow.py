"""What a function read, from what it holds and what ran.

From the function, and the variables that its code and its helpers' code name, objects are followed
through attributes of the names that occur there, and through all that containers hold. That is
more than was read, and costs a comparison each; what can't be compared leaves the reads open."""

from __future__ import annotations

import enum
import functools
import inspect
import numbers
import types
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from . import reads
from .reads import MISSING, Check, Reads
from .watch import PURE, Watch, is_ours, names_in, root

# Beyond these, running a function costs less than looking.
_MOST_CHECKS, _MOST_ITEMS = 200, 64
_PLAIN = (
    *(numbers.Number, str, bytes, range, slice, type(None), type(...), enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, types.CodeType),
)
_HOLDERS = (
    *(torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential),
    *(torch.nn.ParameterList, torch.nn.ParameterDict),
)
# Methods of C, and what would be computed now.
_UNBOUND = (
    *(types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType),
    *(types.BuiltinFunctionType, functools.cached_property),
)


def find_reads(function: Any, watch: Watch, captured: Iterable[torch.Tensor]) -> Reads:
    """What `function` read when it ran, which captured these tensors."""
    if watch.is_open:
        return Reads(complete=False)
    walk = _Walk(watch)
    walk.run(function)
    known = walk.tensors | watch.results.keys()
    if not all(id(x) in known for x in captured) or not watch.inputs.keys() <= walk.tensors:
        return Reads(complete=False)
    for tensor in watch.inputs.values():
        if tensor.is_inference():
            return Reads(complete=False)
        walk.check(reads.version, tensor, None)
    return Reads(tuple(walk.checks), walk.complete)


class _Walk:
    def __init__(self, watch: Watch) -> None:
        self.checks: list[Check] = []
        self.complete = True
        self.tensors: set[int] = set()
        self._watch = watch
        self._pending: deque[Any] = deque()
        # Objects by their address, and so kept.
        self._seen: dict[int, Any] = {}
        named = [names_in(code) for code, _ in watch.code.values()]
        self.complete = not any(names.is_open for names in named)
        self._names = list(dict.fromkeys(n for names in named for n in names.attributes))

    def run(self, function: Any) -> None:
        self._pending.append(function)
        for code, variables in self._watch.code.values():
            for name in names_in(code).variables:
                self.check(reads.entry, variables, name)
        while self._pending and self.complete:
            x = self._pending.popleft()
            if id(x) not in self._seen:
                self._seen[id(x)] = x
                self._visit(x)
            self.complete = self.complete and len(self.checks) <= _MOST_CHECKS

    def check(self, fetch: Any, holder: Any, key: Any) -> Any:
        """Note what is there now, and follow it."""
        try:
            now = fetch(holder, key)
        except Exception:  # of a user's own attribute
            self.complete, now = False, ()
        self.checks.append(Check(fetch, holder, key, now))
        self._pending.append(now)
        return now

    def _visit(self, x: Any) -> None:
        if isinstance(x, _PLAIN) or x is MISSING:
            return
        if isinstance(x, torch.Tensor):
            self.tensors.add(id(x))
            self._entries(vars(x))
        elif isinstance(x, types.ModuleType):
            if root(x.__name__) not in PURE:
                self._entries(vars(x))
        elif isinstance(x, types.FunctionType):
            self._function(x)
        elif isinstance(x, types.MethodType):
            self._pending += (x.__self__, x.__func__)
        elif isinstance(x, functools.partial):
            self._pending += (x.func, x.args, x.keywords)
        elif isinstance(x, (types.BuiltinFunctionType, property)) or inspect.ismethoddescriptor(x):
            # What they do is seen when they run.
            pass
        elif isinstance(x, type):
            self._class(x)
        else:
            self._object(x)

    def _entries(self, held: Mapping[str, Any]) -> None:
        """What a module holds, or a class, or what is set on a tensor or a function."""
        for name in self._names if held else ():
            if name in held:
                self.check(reads.entry, held, name)

    def _function(self, x: types.FunctionType) -> None:
        for cell in x.__closure__ or ():
            self.check(reads.cell, cell, None)
        if not is_ours(x.__module__):
            self.check(reads.attribute, x, "__code__")
            self.check(reads.attribute, x, "__defaults__")
            self.check(reads.attribute, x, "__kwdefaults__")
        self._pending += (x.__defaults__, x.__kwdefaults__)
        self._entries(vars(x))

    def _class(self, x: type) -> None:
        if root(x.__module__) in PURE or issubclass(x, enum.Enum):
            return
        for owner in x.__mro__:
            if root(owner.__module__) not in PURE:
                self._entries(vars(owner))

    def _object(self, x: Any) -> None:
        holds = isinstance(x, (list, tuple, set, frozenset, Mapping))
        if holds:
            self._contents(x)
        own = getattr(x, "__dict__", {})
        slots = any("__slots__" in vars(owner) for owner in type(x).__mro__)
        if not (holds or slots or hasattr(x, "__dict__")):
            self.complete = False
        if isinstance(x, _HOLDERS):
            self._pending += (x._modules, x._parameters)
        # A mask that is called inside a mask, and functions in a wrapper.
        for leaf in x.leaves if is_ours(type(x).__module__) and hasattr(type(x), "leaves") else ():
            self._pending += (leaf.function.function, *leaf.bound.values())
        self._pending.append(own.get("__wrapped__"))
        for name in self._names:
            self._attribute(x, name, own)

    def _contents(self, x: Any) -> None:
        if len(x) > _MOST_ITEMS:
            self.complete = False
        elif isinstance(x, (tuple, frozenset)):
            self._pending += x
        else:
            self._pending += self.check(reads.contents, x, None)

    def _attribute(self, x: Any, name: str, own: Mapping[str, Any]) -> None:
        """One attribute, if the object has it, without running what computes it."""
        owners = (vars(owner) for owner in type(x).__mro__)
        found = next((held[name] for held in owners if name in held), MISSING)
        if isinstance(found, property):
            self.check(reads.of_type, x, name)
        elif isinstance(found, (types.FunctionType, classmethod)) and name not in own:
            inner = found.__func__ if isinstance(found, classmethod) else found
            if not is_ours(inner.__module__):
                self.check(reads.method, x, name)
        elif isinstance(found, _UNBOUND) and name not in own:
            pass
        elif name in own or found is not MISSING:
            self.check(reads.attribute, x, name)
        elif isinstance(x, torch.nn.Module):
            for held in (x._parameters, x._buffers, x._modules):
                if name in held:
                    self.check(reads.entry, held, name)
        elif hasattr(type(x), "__getattr__"):
            self.check(reads.attribute, x, name)
