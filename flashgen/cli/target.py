"""What NAME on the command line stands for, and the data it is shown with."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import flashgen as fg

from ..errors import FlashgenError, did_you_mean
from ..spec import Program
from . import catalogue

Builder = Callable[[int, torch.Generator], Mapping[str, Any]]
_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.BitAnd: lambda left, right: left & right,
    ast.BitOr: lambda left, right: left | right,
    ast.Invert: lambda operand: ~operand,
}


@dataclass(frozen=True)
class Target:
    """A declaration, and the examples that its data may come from."""

    name: str
    value: Any
    examples: Mapping[str, Builder]

    @property
    def attention(self) -> fg.Attention:
        """The value, or the attention with this mask."""
        is_attention = isinstance(self.value, fg.Attention)
        return self.value if is_attention else fg.Attention(mask=self.value)

    @property
    def program(self) -> Program:
        """The declaration: of an Attention, a Mask, or a function that a mask is made of."""
        declared: Program = self.attention._program
        return declared

    def data(self, given: argparse.Namespace) -> dict[str, Any]:
        """What `--param` says, and example data for the rest."""
        said = dict(map(_parameter, given.param))
        wanted = {argument.name for argument in self.program.params}
        for name in said:
            if name not in wanted:
                problem = f"{self.name} has no parameter {name}"
                raise FlashgenError(problem, write=did_you_mean(name, wanted))
        for leaf in self.program.leaves:
            own = {argument.name for argument in leaf.free}
            if leaf.function.name in self.examples and not own <= set(said):
                generator = torch.Generator().manual_seed(given.seed)
                example = self.examples[leaf.function.name](max(given.n), generator)
                said = {**{k: v for k, v in example.items() if k in wanted & own}, **said}
        return said


def find(name: str) -> Target:
    """The mask or the attention of this name. Raises FlashgenError where there is none."""
    if ":" in name:
        where, _, attribute = name.rpartition(":")
        module = _file(Path(where)) if where.endswith(".py") else _module(where)
        value = getattr(module, attribute, None)
        if value is None:
            advice = did_you_mean(attribute, [n for n in vars(module) if n[0] != "_"])
            raise FlashgenError(f"{where} has no {attribute}", call=name, write=advice)
        examples = {**_examples(), **getattr(module, "EXAMPLES", {})}
        return Target(name, value, examples)
    return Target(name, _combined(name), _examples())


def _combined(name: str) -> Any:
    """Names of flashgen.masks, combined with `&`, `|`, `~`."""
    try:
        tree = ast.parse(name, mode="eval").body
    except SyntaxError:
        raise _unknown(name) from None
    return _evaluate(tree, name)


def _evaluate(node: ast.expr, name: str) -> Any:
    if isinstance(node, ast.Name):
        if node.id not in catalogue.masks():
            raise _unknown(node.id)
        return catalogue.load(node.id)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        sides = (_evaluate(side, name) for side in (node.left, node.right))
        return _OPERATORS[type(node.op)](*sides)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.operand, name))
    if isinstance(node, ast.Call) and not node.args:
        bound = dict(_parameter(f"{k.arg}={ast.unparse(k.value)}") for k in node.keywords)
        return _evaluate(node.func, name)(**bound)
    raise _unknown(name)


def _unknown(name: str) -> FlashgenError:
    advice = did_you_mean(name, catalogue.masks())
    return FlashgenError(f"there is no mask {name}", write=advice)


def _examples() -> Mapping[str, Builder]:
    examples: Mapping[str, Builder] = importlib.import_module("flashgen.masks.examples").EXAMPLES
    return examples


def _file(path: Path) -> ModuleType:
    """A module from a file, its folder importable as when Python runs it."""
    if not path.is_file():
        raise FlashgenError(f"there is no file {path}")
    sys.path.insert(0, str(path.parent.absolute()))
    # Of a name of its own: a user's `types.py` must not replace anybody's `types`.
    name = f"flashgen_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _module(name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not name.startswith(error.name or name):
            raise
        raise FlashgenError(f"there is no module {name}") from None


def _parameter(text: str) -> tuple[str, Any]:
    """`window=8`, `doc=[[0, 0, 1]]`: a Python literal, lists as tensors."""
    name, equals, value = text.partition("=")
    try:
        literal = ast.literal_eval(value)
    except (SyntaxError, ValueError):
        equals = ""
    if not equals:
        problem = f"--param {text} isn't NAME=VALUE with a number or a list"
        raise FlashgenError(problem, write="window=8, or doc=[[0,0,1,1]]")
    is_table = isinstance(literal, (list, tuple))
    return name, torch.tensor(literal) if is_table else literal
