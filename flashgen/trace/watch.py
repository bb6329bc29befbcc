"""What runs while a function is traced: code of the user's, and functions of C."""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

# Packages whose own code reads nothing that changes what a mask means.
OURS = ("torch", "flashgen")
# And modules whose functions depend on their arguments alone.
PURE = frozenset(
    (*OURS, "builtins", "math", "cmath", "operator", "_operator", "functools", "_functools")
) | {"itertools", "typing", "enum", "types", "dataclasses", "numbers", "abc", "_abc"}
_IMPURE = frozenset(
    "next input open eval exec globals locals vars getattr hasattr dir id __import__".split()
)
_BY_NAME = ("attrgetter", "methodcaller")
_CONTAINERS = (dict, list, tuple, set, frozenset, str, bytes, int, float, torch.Tensor)
# What tensors answer without a look at their elements.
_FORMS = frozenset(
    "__get__ __len__ size dim ndimension numel nelement stride is_floating_point is_complex".split()
)
_RANDOM = ("rand", "normal", "bernoulli", "multinomial", "poisson", "dropout", "empty")


def root(module: Any) -> str:
    """The package of a module's name."""
    return str(module).partition(".")[0]


@functools.lru_cache(maxsize=4096)
def is_ours(module: str | None) -> bool:
    return root(module) in OURS


@dataclass(frozen=True)
class Named:
    """The names that code reads. `is_open`: what it reads depends on more than those."""

    variables: tuple[str, ...]
    attributes: tuple[str, ...]
    is_open: bool


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> Named:
    """What one function's code names, functions inside it apart."""
    variables: dict[str, None] = {}
    attributes: dict[str, None] = {}
    is_open = False
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            variables[step.argval] = None
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") or step.opname.startswith("LOAD_SUPER"):
            attributes[step.argval] = None
            is_open |= step.argval in _BY_NAME
        elif step.opname == "IMPORT_NAME":
            is_open |= root(step.argval) not in PURE
        # An exception says that something isn't there, which may come.
        is_open |= step.opname in ("PUSH_EXC_INFO", "SETUP_FINALLY", "SETUP_EXCEPT")
    return Named(tuple(variables), tuple(attributes), is_open)


@dataclass
class Watch:
    """What ran: code with the variables of its module; whether something ran whose result may be
    another the next time; tensors that were computed with, and what came of them."""

    code: dict[int, tuple[types.CodeType, dict[str, Any]]] = field(default_factory=dict)
    is_open: bool = False
    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    results: dict[int, torch.Tensor] = field(default_factory=dict)

    def run(self, function: Callable[[], Any]) -> Any:
        """Its result. Notes what this thread runs; nothing where somebody profiles already."""
        if sys.getprofile() is not None:
            self.is_open = True
            return function()
        sys.setprofile(self._event)
        try:
            return function()
        finally:
            sys.setprofile(None)

    def _event(self, frame: types.FrameType, event: str, called: Any) -> None:
        if event == "call":
            if not is_ours(frame.f_globals.get("__name__")):
                self.code[id(frame.f_code)] = (frame.f_code, frame.f_globals)
        elif event == "c_call":
            if not is_ours(frame.f_globals.get("__name__")) and not _is_pure(called):
                self.is_open = True

    def computed(self, function: Any, tensors: list[torch.Tensor], result: Any) -> None:
        """A function of torch ran on plain tensors."""
        made = [x for x in flat(result) if isinstance(x, torch.Tensor)]
        name = getattr(function, "__name__", "")
        if not made and name in _FORMS:
            return
        self.is_open |= any(word in name for word in _RANDOM)
        # What is differentiated once can't be again: such a tensor is made for each call.
        self.is_open |= bool(made) and any(x.requires_grad for x in (*tensors, *made))
        self.inputs.update({id(x): x for x in tensors if id(x) not in self.results})
        self.results.update({id(x): x for x in made if id(x) not in self.inputs})


def _is_pure(called: Any) -> bool:
    """Whether a function of C gives the same again, of what can be looked at."""
    owner = getattr(called, "__self__", None)
    if owner is None:
        owner = getattr(called, "__objclass__", None)
    if owner is None or isinstance(owner, types.ModuleType):
        module = called.__module__ if owner is None else owner.__name__
        return root(module) in PURE and called.__name__ not in _IMPURE
    if isinstance(owner, type):
        return root(owner.__module__) in PURE
    return isinstance(owner, _CONTAINERS) or root(type(owner).__module__) in OURS


def flat(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [x for part in value for x in flat(part)]
    return [value]
