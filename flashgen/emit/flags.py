"""A key's truth values as numbers of it, where Hopper's kernel compares pairs.

A predicate of each key would be kept for both rows of a thread: more than there are. A number that
crosses over in its place costs nothing more than the comparison that it goes into."""

from __future__ import annotations

import functools

from ..expr import Expr, const, leaves, make, substitute, walk

# Below what positions and sums of them reach in 32 bits.
_LOWEST = -(2**31)


def without_flags(mask: Expr) -> Expr:
    """An equal mask: `flag | (x <= q_idx)` is one comparison, of the lowest number where the flag
    is set, and `flag | (x == y)` asks for the bits in which they differ, if it isn't."""
    return substitute(mask, _merged)


def _merged(node: Expr) -> Expr | None:
    if node.op != "or" or node.kind != "bool":
        return None
    parts = _flat(node)
    flags = [part for part in parts if _is_flag(part)]
    rest = [part for part in parts if not _is_flag(part)]
    if not flags or len(rest) != 1:
        return None
    flag = functools.reduce(lambda a, b: make("or", a, b), flags)
    return _bounded(flag, rest[0]) or _equal(flag, rest[0])


def _flat(expr: Expr) -> list[Expr]:
    if expr.op == "or" and expr.kind == "bool":
        return [part for arg in expr.args for part in _flat(arg)]
    return [expr]


def _indices(expr: Expr) -> frozenset[str]:
    return leaves(expr, "index") & {"q_idx", "kv_idx"}


def _is_flag(expr: Expr) -> bool:
    return _indices(expr) == {"kv_idx"} and any(node.op == "load" for node in walk(expr))


def _bounded(flag: Expr, test: Expr) -> Expr | None:
    """Of a key's number, and a position."""
    if test.op != "le" or test.args[0].kind != "int":
        return None
    low, high = test.args
    if _indices(low) != {"kv_idx"} or high.op != "index" or high.attr != "q_idx":
        return None
    return make("le", make("where", flag, const(_LOWEST), low), high)


def _equal(flag: Expr, test: Expr) -> Expr | None:
    """Of a key's number, and a query's."""
    if test.op != "eq" or test.args[0].kind != "int" or test.args[1].kind != "int":
        return None
    if sorted(map(sorted, map(_indices, test.args))) != [["kv_idx"], ["q_idx"]]:
        return None
    counts = make("where", flag, const(0), const(-1))
    return make("eq", make("and", make("xor", *test.args), counts), const(0))
