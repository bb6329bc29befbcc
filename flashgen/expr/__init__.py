"""The typed, immutable expression that a mask or a score function becomes."""

from __future__ import annotations

from .build import (
    cast,
    const,
    in_double,
    index,
    load,
    make,
    scalar,
    score,
)
from .evaluate import Env, evaluate
from .node import FLOATS, INDEX_NAMES, Expr, Kind, extent, leaves, substitute, walk
from .text import format_expr

__all__ = [
    "FLOATS",
    "INDEX_NAMES",
    "Env",
    "Expr",
    "Kind",
    "cast",
    "const",
    "evaluate",
    "extent",
    "format_expr",
    "in_double",
    "index",
    "leaves",
    "load",
    "make",
    "scalar",
    "score",
    "substitute",
    "walk",
]
