"""Expressions that print as the Python of a user, and that NumPy evaluates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import flashgen as fg

KINDS = {"bool": np.bool_, "int": np.int64, "float": np.float32}


@dataclass(frozen=True)
class Tree:
    """An operation on trees; a leaf's `attr` says which index, scalar, constant or tensor."""

    op: str
    kind: str
    args: tuple[Tree, ...] = ()
    attr: Any = None

    def __str__(self) -> str:
        return self.source

    @property
    def source(self) -> str:
        """Python that a mask's author could have written."""
        args = [arg.source for arg in self.args]
        if self.op == "leaf":
            return repr(self.attr) if not isinstance(self.attr, str) else self.attr
        if self.op == "load":
            return f"{self.attr}[{', '.join(args)}]"
        if self.op in OPERATORS and not self.op.isalpha():
            return f"({args[0]} {self.op} {args[1]})"
        if self.op in ("-x", "~x"):
            return f"({self.op[0]}{args[0]})"
        if self.op in ("int", "float"):
            return f"{args[0]}.{self.op}()"
        return f"{self.op}({', '.join(args)})"

    def value(self, env: dict[str, np.ndarray]) -> np.ndarray:
        """What NumPy makes of it. Integers are int64, floats float32; indices clamp."""
        args = [arg.value(env) for arg in self.args]
        with np.errstate(all="ignore"):
            return self._value(args, env).astype(KINDS[self.kind])

    def _value(self, args: list[np.ndarray], env: dict[str, np.ndarray]) -> np.ndarray:
        if self.op == "leaf":
            value = env[self.attr] if isinstance(self.attr, str) else np.asarray(self.attr)
            return value.astype(KINDS[self.kind])
        if self.op == "load":
            table = env[self.attr]
            places = [np.clip(i, 0, n - 1) for i, n in zip(args, table.shape, strict=True)]
            return table[tuple(places)]
        if self.op in COMPARISONS:
            return COMPARISONS[self.op](*_alike(args))
        if self.op == "where":
            return np.where(args[0], *(a.astype(KINDS[self.kind]) for a in args[1:]))
        if len(args) == 1:
            return FUNCTIONS[self.op](args[0])
        left, right = (a.astype(KINDS[self.kind]) for a in args)
        if self.op in ("//", "%"):
            quotient = OPERATORS[self.op](left, np.where(right == 0, 1, right))
            return np.where(right == 0, 0, quotient)
        return OPERATORS[self.op](left, right)


def _alike(args: list[np.ndarray]) -> list[np.ndarray]:
    """Operands of a comparison in one kind: a float beside an integer makes both float32."""
    if any(a.dtype == np.float32 for a in args):
        return [a.astype(np.float32) for a in args]
    return [a.astype(np.int64) for a in args]


COMPARISONS: dict[str, Callable[..., Any]] = {
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
    "==": np.equal,
    "!=": np.not_equal,
}
OPERATORS: dict[str, Callable[..., Any]] = {
    **COMPARISONS,
    "+": np.add,
    "-": np.subtract,
    "*": np.multiply,
    "/": np.divide,
    "//": np.floor_divide,
    "%": np.mod,
    "&": np.bitwise_and,
    "|": np.bitwise_or,
    "^": np.bitwise_xor,
    "<<": np.left_shift,
    ">>": np.right_shift,
    "minimum": np.minimum,
    "maximum": np.maximum,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "-x": np.negative,
    "~x": np.invert,
    "abs": np.abs,
    "isnan": np.isnan,
    "floor": np.floor,
    "ceil": np.ceil,
    "sqrt": np.sqrt,
    "int": np.trunc,
    "float": np.asarray,
}
CALLS = {name: getattr(fg, name) for name in ("minimum", "maximum", "where", "abs")}
