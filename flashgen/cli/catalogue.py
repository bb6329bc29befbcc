"""What flashgen.masks holds, read from its source: fast, and without torch."""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PACKAGE = "flashgen.masks"


@dataclass(frozen=True)
class Listed:
    """A mask as its source describes it."""

    name: str
    file: str
    line: int
    doc: str
    params: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.params)})" if self.params else self.name


@functools.cache
def masks() -> dict[str, Listed]:
    """Every mask of flashgen.masks by its name, in alphabetical order."""
    # A package in a folder of another name, perhaps: only the import system knows where.
    spec = importlib.util.find_spec(_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    files = sorted(file for folder in folders or () for file in Path(folder).glob("*.py"))
    found = [mask for file in files for mask in _read(file)]
    return {mask.name: mask for mask in sorted(found, key=lambda mask: mask.name)}


def load(name: str) -> Any:
    """The mask itself, from the one module that defines it."""
    module = importlib.import_module(f"{_PACKAGE}.{Path(masks()[name].file).stem}")
    return getattr(module, name)


def list_masks(given: argparse.Namespace) -> None:
    """`flashgen list`"""
    if given.names:
        print("\n".join(masks()))
        return
    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")
    for mask in masks().values():
        shown = str(mask).removeprefix(mask.name)
        print(f"{bold}{mask.name}{plain}{shown}\n    {mask.doc}")


def _read(file: Path) -> Iterator[Listed]:
    for node in ast.parse(file.read_text(encoding="utf-8"), str(file)).body:
        if isinstance(node, ast.FunctionDef) and _is_mask(node) and node.name[0] != "_":
            doc = (ast.get_docstring(node) or "").partition("\n\n")[0]
            params = tuple(_params(node.args))
            yield Listed(node.name, file.name, node.lineno, " ".join(doc.split()), params)


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
