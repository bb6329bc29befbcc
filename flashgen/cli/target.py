"""What NAME on the command line stands for, and the data it is shown with."""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import flashgen as fg

from ..errors import FlashgenError, did_you_mean
from ..spec import Program
from ..spec.leaf import Leaf
from . import catalogue
from .loading import attribute, parameter

# Seeds the example data: with this one, documents of 64 positions are of similar lengths.
SEED = 10

_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.BitAnd: lambda left, right: left & right,
    ast.BitOr: lambda left, right: left | right,
    ast.Invert: lambda operand: ~operand,
}


@dataclass(frozen=True)
class Target:
    """A mask, a function that one is made of, or a whole Attention; and the call's data."""

    value: Any
    data: Mapping[str, Any]

    @property
    def attention(self) -> fg.Attention:
        """The value, or the attention with this mask."""
        is_attention = isinstance(self.value, fg.Attention)
        return self.value if is_attention else fg.Attention(mask=self.value)

    @property
    def program(self) -> Program:
        """What is declared of it: the mask and the score function."""
        score = getattr(self.attention, "__wrapped__", None)
        return Program(self.attention.mask, None if score is None else Leaf.of(score, "score"))


def find(given: argparse.Namespace) -> Target:
    """What `given.name` means, with the data that `--param` says and examples for the rest.

    Raises FlashgenError where there is nothing of this name."""
    said = dict(map(parameter, given.param))
    examples = _Examples(given)
    if ":" in given.name:
        value, module = attribute(given.name)
        examples.builders.update(getattr(module, "EXAMPLES", {}))
    elif given.name in catalogue.makers():
        return Target(_made(given.name, {**examples.of(given.name), **said}), {})
    else:
        value = _combined(given.name, examples)
    program = Target(value, {}).program
    known = [argument.name for argument in program.params]
    # A call's own argument; whether the attention wants it is the call's to check.
    known += ["sinks"] if isinstance(value, fg.Attention) else []
    _check_names(program.name, said, known)
    return Target(value, {**_example_data(program, examples, said), **said})


class _Examples:
    """Builders of example data by the name of what they are for, and their arguments."""

    def __init__(self, given: argparse.Namespace) -> None:
        library = importlib.import_module("flashgen.masks.examples").EXAMPLES
        self.builders: dict[str, Callable[..., Mapping[str, Any]]] = dict(library)
        self.length = max(given.n)
        self.seed = SEED if given.seed is None else given.seed

    def of(self, name: str) -> Mapping[str, Any]:
        if name not in self.builders:
            return {}
        return self.builders[name](self.length, torch.Generator().manual_seed(self.seed))


def _example_data(program: Program, examples: _Examples, said: Mapping[str, Any]) -> dict[str, Any]:
    """Examples for the parameters that nothing is said about."""
    data: dict[str, Any] = {}
    for leaf in program.leaves:
        own = {argument.name for argument in leaf.free} - set(said)
        if own:
            example = examples.of(leaf.function.name)
            data.update({name: value for name, value in example.items() if name in own - set(data)})
    return data


def check_complete(owner: str, leaves: Iterable[Leaf], data: Mapping[str, Any]) -> None:
    """Whether all data is there. Raises FlashgenError, with what to write on the command line."""
    wanted = {a.name: a for leaf in leaves for a in leaf.required if a.name not in data}
    if wanted:
        raise FlashgenError(
            f"{owner} also needs {', '.join(map(str, wanted.values()))}",
            write=f"--param {' '.join(f'{name}=...' for name in wanted)}",
        )


def _check_names(owner: str, said: Iterable[str], known: Iterable[str]) -> None:
    for name in said:
        if name not in known:
            problem = f"{owner} has no parameter {name}"
            raise FlashgenError(problem, write=did_you_mean(name, known))


def _made(name: str, data: Mapping[str, Any]) -> Any:
    """A mask with data bound, or what a function of flashgen.masks makes of it."""
    found = catalogue.load(name)
    if name in catalogue.makers():
        parameters = inspect.signature(found).parameters
        _check_names(name, data, parameters)
        needed = [p.name for p in parameters.values() if p.default is p.empty]
        missing = [parameter for parameter in needed if parameter not in data]
        if missing:
            said = " ".join(f"{parameter}=..." for parameter in missing)
            problem = f"{name} also needs {', '.join(missing)}"
            raise FlashgenError(problem, write=f"--param {said}")
    return found(**data)


def _combined(name: str, examples: _Examples) -> Any:
    """Names of flashgen.masks, combined with `&`, `|`, `~`, some with data bound."""
    try:
        tree = ast.parse(name, mode="eval").body
    except SyntaxError:
        raise _unknown(name) from None

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Name) and node.id in catalogue.makers():
            return _made(node.id, examples.of(node.id))
        if isinstance(node, ast.Name) and node.id in catalogue.masks():
            return catalogue.load(node.id)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.operand))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
            bound = dict(parameter(f"{k.arg}={ast.unparse(k.value)}") for k in node.keywords)
            if node.func.id in _known():
                return _made(node.func.id, bound)
        raise _unknown(ast.unparse(node))

    return value(tree)


def _known() -> dict[str, catalogue.Listed]:
    return {**catalogue.masks(), **catalogue.makers()}


def _unknown(name: str) -> FlashgenError:
    advice = did_you_mean(name, _known())
    return FlashgenError(f"there is no mask {name}", write=advice)
