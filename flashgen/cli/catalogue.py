"""What flashgen.masks exports, read from its source: fast, and without torch."""

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
from typing import Any, Literal, TypeAlias

_PACKAGE = "flashgen.masks"
Kind: TypeAlias = Literal["mask", "maker", "helper"]
_TITLES: dict[Kind, str] = {
    "mask": "",
    "maker": "\nFunctions that make a mask:\n",
    "helper": "\nFunctions that make data for one:\n",
}


@dataclass(frozen=True)
class Listed:
    """A mask, a function that makes masks, or one that makes data, as its source describes it."""

    name: str
    kind: Kind
    file: str
    doc: str
    params: tuple[str, ...]

    @property
    def brief(self) -> str:
        """Without types, and without what has a default."""
        needed = (param.partition(":")[0] for param in self.params if " = " not in param)
        return f"{self.name}({', '.join(needed)})" if self.params else self.name


@functools.cache
def everything() -> dict[str, Listed]:
    """The functions that flashgen.masks exports, masks among them, in alphabetical order."""
    # A package in a folder of another name, perhaps: only the import system knows where.
    spec = importlib.util.find_spec(_PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin)
    exported: dict[Path, list[ast.alias]] = {}
    for node in _parse(package).body:
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module is not None:
            exported.setdefault(package.with_name(f"{node.module}.py"), []).extend(node.names)
    found = [listed for file, aliases in exported.items() for listed in _read(file, aliases)]
    return {listed.name: listed for listed in sorted(found, key=lambda listed: listed.name)}


def masks() -> dict[str, Listed]:
    """Every mask of flashgen.masks by its name, in alphabetical order."""
    return {name: listed for name, listed in everything().items() if listed.kind == "mask"}


def makers() -> dict[str, Listed]:
    """The functions that make a mask, by name, in alphabetical order."""
    return {name: listed for name, listed in everything().items() if listed.kind == "maker"}


def load(name: str) -> Any:
    """The mask or function itself."""
    return getattr(importlib.import_module(_PACKAGE), name)


def list_masks(given: argparse.Namespace) -> None:
    """`flashgen list`"""
    if given.names:
        print("\n".join(masks()))
        return
    for kind, title in _TITLES.items():
        listed = [one for one in everything().values() if one.kind == kind]
        if title and listed:
            print(title)
        for one in listed:
            _print(one)


def _print(listed: Listed) -> None:
    # Lines break between parameters only.
    params = ", ".join(param.replace(" ", "\N{NO-BREAK SPACE}") for param in listed.params)
    text = f"{listed.name}({params})" if params else listed.name
    text = textwrap.fill(text, 100, subsequent_indent=" " * 8).replace("\N{NO-BREAK SPACE}", " ")
    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")
    print(f"{bold}{listed.name}{plain}{text.removeprefix(listed.name)}\n    {listed.doc}")


def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def _read(file: Path, aliases: list[ast.alias]) -> Iterator[Listed]:
    """The functions among what is imported from a file; constants aren't listed."""
    defined = {node.name: node for node in _parse(file).body if isinstance(node, ast.FunctionDef)}
    for alias in aliases:
        if alias.name in defined:
            node = defined[alias.name]
            doc = (ast.get_docstring(node) or "").partition("\n\n")[0]
            params = tuple(_params(node.args))
            name = alias.asname or alias.name
            yield Listed(name, _kind(node), file.name, " ".join(doc.split()), params)


def _kind(node: ast.FunctionDef) -> Kind:
    """A mask is decorated; a function that gives a tensor gives data."""
    decorators = (d.func if isinstance(d, ast.Call) else d for d in node.decorator_list)
    if any(ast.unparse(decorator).rpartition(".")[2] == "mask" for decorator in decorators):
        return "mask"
    gives_data = node.returns is not None and ast.unparse(node.returns) == "torch.Tensor"
    return "helper" if gives_data else "maker"


def _params(arguments: ast.arguments) -> Iterator[str]:
    """The annotated parameters: what isn't annotated is an index symbol."""
    positional = [*arguments.posonlyargs, *arguments.args]
    none: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    defaults = [*none, *arguments.defaults, *arguments.kw_defaults]
    for parameter, default in zip([*positional, *arguments.kwonlyargs], defaults, strict=True):
        if parameter.annotation is not None:
            value = "" if default is None else f" = {ast.unparse(default)}"
            yield f"{parameter.arg}: {ast.unparse(parameter.annotation)}{value}"
