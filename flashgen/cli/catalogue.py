"""What flashgen.masks holds, read from its source: fast, and without torch."""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import importlib.util
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PACKAGE = "flashgen.masks"


@dataclass(frozen=True)
class Listed:
    """A mask, or a function that makes masks, as its source describes it."""

    name: str
    is_mask: bool
    file: str
    doc: str
    params: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.params)})" if self.params else self.name

    @property
    def brief(self) -> str:
        """Without types, and without what has a default."""
        needed = (param.partition(":")[0] for param in self.params if " = " not in param)
        return f"{self.name}({', '.join(needed)})" if self.params else self.name


@functools.cache
def everything() -> dict[str, Listed]:
    """The masks, and the functions that make masks of other forms, by name."""
    # A package in a folder of another name, perhaps: only the import system knows where.
    spec = importlib.util.find_spec(_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    files = sorted(file for folder in folders or () for file in Path(folder).glob("*.py"))
    trees = {file: ast.parse(file.read_text(encoding="utf-8"), str(file)) for file in files}
    examples = {name for tree in trees.values() for name in _example_names(tree)}
    found = [listed for file, tree in trees.items() for listed in _read(file, tree, examples)]
    return {listed.name: listed for listed in sorted(found, key=lambda listed: listed.name)}


def masks() -> dict[str, Listed]:
    """Every mask of flashgen.masks by its name, in alphabetical order."""
    return {name: listed for name, listed in everything().items() if listed.is_mask}


def load(name: str) -> Any:
    """The mask or function itself, from the one module that defines it."""
    module = importlib.import_module(f"{_PACKAGE}.{Path(everything()[name].file).stem}")
    return getattr(module, name)


def list_masks(given: argparse.Namespace) -> None:
    """`flashgen list`"""
    if given.names:
        print("\n".join(masks()))
        return
    for mask in masks().values():
        _print(mask)
    print("\nFunctions that make a mask:\n")
    for listed in everything().values():
        if not listed.is_mask:
            _print(listed)


def _print(listed: Listed) -> None:
    text = textwrap.fill(str(listed), 100, subsequent_indent="        ")
    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")
    print(f"{bold}{listed.name}{plain}{text.removeprefix(listed.name)}\n    {listed.doc}")


def _example_names(tree: ast.Module) -> Iterator[str]:
    """The keys of a dictionary `EXAMPLES`."""
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "EXAMPLES":
            keys = node.value.keys if isinstance(node.value, ast.Dict) else []
            yield from (str(key.value) for key in keys if isinstance(key, ast.Constant))


def _read(file: Path, tree: ast.Module, examples: set[str]) -> Iterator[Listed]:
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or node.name[0] == "_":
            continue
        is_mask = _is_mask(node)
        if is_mask or node.name in examples or node.name.startswith("from_"):
            doc = (ast.get_docstring(node) or "").partition("\n\n")[0]
            params = tuple(_params(node.args))
            yield Listed(node.name, is_mask, file.name, " ".join(doc.split()), params)


def _is_mask(node: ast.FunctionDef) -> bool:
    decorators = (d.func if isinstance(d, ast.Call) else d for d in node.decorator_list)
    return any(ast.unparse(decorator) in ("fg.mask", "mask") for decorator in decorators)


def _params(arguments: ast.arguments) -> Iterator[str]:
    """The annotated parameters: what isn't annotated is an index symbol."""
    positional = [*arguments.posonlyargs, *arguments.args]
    none: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    defaults = [*none, *arguments.defaults, *arguments.kw_defaults]
    for parameter, default in zip([*positional, *arguments.kwonlyargs], defaults, strict=True):
        if parameter.annotation is not None:
            value = "" if default is None else f" = {ast.unparse(default)}"
            yield f"{parameter.arg}: {ast.unparse(parameter.annotation)}{value}"
