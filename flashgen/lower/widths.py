"""Which integers need 64 bits, and which can't be negative: ranges in exact arithmetic."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..expr import FLOATS, Expr, walk
from ..geometry import MAX_POSITION

Range = tuple[int, int]

INT32: Range = (-(2**31), 2**31 - 1)
_HUGE = 2**63
_INDEX_RANGES: dict[str, Range] = {
    "b": (0, MAX_POSITION),
    "h": (0, MAX_POSITION),
    "h_kv": (0, MAX_POSITION),
    "q_idx": (-MAX_POSITION, MAX_POSITION),
    "kv_idx": (0, MAX_POSITION),
    "q_len": (0, MAX_POSITION),
    "kv_len": (0, MAX_POSITION),
    # q_idx - kv_idx
    "away": (-2 * MAX_POSITION, MAX_POSITION),
    "least_away": (-2 * MAX_POSITION, MAX_POSITION),
    "most_away": (-2 * MAX_POSITION, MAX_POSITION),
}


def scalar_is_wide(value: int) -> bool:
    """Whether a runtime scalar is passed as 64 bits: positions plus or minus it may overflow 32."""
    return abs(value) > MAX_POSITION


def size_name(tensor: str, dim: int) -> str:
    """The kernel argument that holds the length of one dimension of data."""
    return f"{tensor}_size_{dim}"


class Widths:
    """The range of every integer node, for data of the given dtypes."""

    def __init__(self, dtypes: Mapping[str, torch.dtype], wide_scalars: frozenset[str]) -> None:
        self._dtypes, self._wide = dtypes, wide_scalars
        self._ranges: dict[Expr, Range] = {}

    def range(self, expr: Expr) -> Range:
        for node in walk(expr, known=self._ranges):
            self._ranges[node] = self._range(node)
        return self._ranges[expr]

    def is_wide(self, expr: Expr) -> bool:
        """Whether the node, or what it is computed from, leaves 32 bits."""
        if expr.kind == "int" and not inside(self.range(expr)):
            return True
        if expr.op == "load":
            return not inside(self.range(expr))
        integers = [a for a in expr.args if a.kind == "int"]
        return any(not inside(self.range(a)) for a in integers)

    def _range(self, node: Expr) -> Range:
        if node.kind == "bool":
            return (0, 1)
        if node.kind in FLOATS:
            return (-_HUGE, _HUGE)
        if node.op in ("tile", "index"):
            return self.range(node.args[0]) if node.args else _INDEX_RANGES[node.attr]
        if node.op == "const":
            return (node.attr, node.attr)
        if node.op == "scalar":
            limit = _HUGE if node.attr in self._wide else MAX_POSITION
            return (-limit, limit)
        if node.op == "load":
            info = torch.iinfo(self._dtypes[node.attr])
            return (info.min, info.max)
        if node.op == "size":
            return (0, _HUGE if size_name(*node.attr) in self._wide else INT32[1])
        return _clip(self._computed(node))

    def _computed(self, node: Expr) -> Range:
        a, a_high = self._ranges[node.args[0]]
        b, b_high = self._ranges[node.args[1]] if len(node.args) > 1 else (0, 0)
        if node.op == "add":
            return (a + b, a_high + b_high)
        if node.op == "sub":
            return (a - b_high, a_high - b)
        if node.op == "mul":
            products = [x * y for x in (a, a_high) for y in (b, b_high)]
            return (min(products), max(products))
        if node.op == "neg":
            return (-a_high, -a)
        if node.op == "abs":
            return (max(0, a, -a_high), max(-a, a_high))
        if node.op == "minimum":
            return (min(a, b), min(a_high, b_high))
        if node.op == "maximum":
            return (max(a, b), max(a_high, b_high))
        if node.op == "where":
            c, c_high = self._ranges[node.args[2]]
            return (min(b, c), max(b_high, c_high))
        if node.op == "floordiv":
            largest = max(abs(a), abs(a_high))
            return (min(0, a) if b > 0 else -largest, max(0, a_high) if b > 0 else largest)
        if node.op == "mod":
            return (0 if b >= 0 else b, max(0, b_high - 1))
        if node.op == "shr" and b >= 0:
            return (min(0, a), max(0, a_high))
        if node.op == "and" and (a >= 0 or b >= 0):
            return (0, a_high if b < 0 else b_high if a < 0 else min(a_high, b_high))
        if node.op in ("or", "xor", "and", "not"):
            bits = max((x if x >= 0 else ~x).bit_length() for x in (a, a_high, b, b_high))
            return (0 if min(a, b) >= 0 and node.op != "not" else -(2**bits), 2**bits - 1)
        if node.op == "cast":
            return (0, 1) if node.args[0].kind == "bool" else INT32
        return (-_HUGE, _HUGE)


def inside(found: Range) -> bool:
    """Whether 32 bits hold it."""
    return INT32[0] <= found[0] and found[1] <= INT32[1]


def _clip(found: Range) -> Range:
    return (max(found[0], -_HUGE), min(found[1], _HUGE))
