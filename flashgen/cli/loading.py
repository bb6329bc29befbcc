"""Values from the command line: a user's module or file, and `name=value`."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ..errors import FlashgenError, did_you_mean


def attribute(name: str) -> tuple[Any, ModuleType]:
    """`module:attribute` or `file.py:attribute`, and its module. Raises FlashgenError."""
    where, _, wanted = name.rpartition(":")
    module = _file(Path(where)) if where.endswith(".py") else _module(where)
    if not hasattr(module, wanted):
        advice = did_you_mean(wanted, [known for known in vars(module) if known[0] != "_"])
        raise FlashgenError(f"{where} has no {wanted}", write=advice)
    return getattr(module, wanted), module


def parameter(text: str) -> tuple[str, Any]:
    """`window=8`, `doc=[[0, 0, 1]]`: a Python literal, lists as tensors. Raises FlashgenError."""
    name, equals, value = text.partition("=")
    try:
        literal = ast.literal_eval(value)
        is_value = bool(equals)
    except (SyntaxError, ValueError):
        is_value = False
    if not is_value:
        problem = f"--param {text} isn't NAME=VALUE with a number or a list"
        raise FlashgenError(problem, write="window=8, or doc=[[0,0,1,1]]")
    return name, torch.tensor(literal) if isinstance(literal, list) else literal


def write(path: Path, text: str) -> None:
    """Write a file. Raises FlashgenError where that can't be done."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        problem = f"{path} can't be written: {error.strerror or error}"
        raise FlashgenError(problem, write="a path where files can be written") from None


def _file(path: Path) -> ModuleType:
    """A module from a file, its folder importable as when Python runs it."""
    if not path.is_file():
        raise FlashgenError(f"there is no file {path}")
    sys.path.insert(0, str(path.parent.absolute()))
    # Under a name of its own: a user's `types.py` must not replace anybody's `types`.
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
