"""flashgen: an attention compiler. A mask is a line of Python; the kernel is made for it."""

from __future__ import annotations

import importlib
from typing import Any

# `config` is the object, not its module, whichever of the two is asked for first.
from .config import config
from .errors import FlashgenError

__version__ = "0.1.0"

# Loaded on first use, so that `import flashgen` doesn't load torch, SymPy or Triton.
_HOME = {
    "mask": "spec",
    "Tensor": "trace",
    "Const": "trace",
    "attention": "api",
    "Attention": "api",
    "MLA": "spec",
    "merge": "api",
    **dict.fromkeys(
        "where minimum maximum abs exp exp2 log log2 sqrt rsqrt sin cos tanh sigmoid floor ceil erf "
        "isnan".split(),
        "functions",
    ),
}

__all__ = ["FlashgenError", "__version__", "config", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
