"""The typed, immutable expression that a mask or a score function becomes."""

from __future__ import annotations

from .build import (
    cast,
    const,
    index,
    load,
    make,
    scalar,
    score,
)
from .evaluate import Env, evaluate
from .node import INDEX_NAMES, Expr, Kind, extent, leaves, substitute, walk
from .text import format_expr

__all__ = [
    "INDEX_NAMES",
    "Env",
    "Expr",
    "Kind",
    "cast",
    "const",
    "evaluate",
    "extent",
    "format_expr",
    "index",
    "leaves",
    "load",
    "make",
    "scalar",
    "score",
    "substitute",
    "walk",
]
