"""Comparisons with the key's position, rewritten so that what is fixed for a row stands alone.

`q_idx - kv_idx < window` becomes `q_idx - window < kv_idx`: one comparison an element, against a
value computed once a row. A conjunction of several becomes two, with the tightest bounds."""

from __future__ import annotations

from ..bounds import side
from ..expr import Expr, const, index, leaves, make, substitute

KEY = index("kv_idx")


def isolate(mask: Expr) -> Expr:
    """An equal mask whose comparisons with `kv_idx` are `low <= kv_idx` and `kv_idx < high`."""
    return _tighten(substitute(mask, _isolated))


def _isolated(node: Expr) -> Expr | None:
    if node.op not in ("lt", "le") or node.args[0].kind != "int":
        return None
    left, right = node.args
    if side(left) in ("", "q") and right == KEY or left == KEY and side(right) in ("", "q"):
        return None
    terms = _terms(make("sub", left, right), 1)
    keys = sum(sign for sign, term in terms if term == KEY)
    rest = [(sign, term) for sign, term in terms if term != KEY]
    if abs(keys) != 1 or any("kv_idx" in leaves(term, "index") for _, term in rest):
        return None
    # keys * kv_idx + rest < 0 (or <= 0)
    if keys == 1:
        return make(node.op, KEY, _sum([(-sign, term) for sign, term in rest]))
    return make(node.op, _sum(rest), KEY)


def _terms(expr: Expr, sign: int) -> list[tuple[int, Expr]]:
    """An integer expression as a sum of signed terms."""
    if expr.op == "add":
        return _terms(expr.args[0], sign) + _terms(expr.args[1], sign)
    if expr.op == "sub":
        return _terms(expr.args[0], sign) + _terms(expr.args[1], -sign)
    if expr.op == "neg":
        return _terms(expr.args[0], -sign)
    return [(sign, expr)]


def _sum(terms: list[tuple[int, Expr]]) -> Expr:
    total = const(0)
    for sign, term in sorted(terms, key=lambda pair: -pair[0]):
        total = make("add" if sign > 0 else "sub", total, term)
    return total


def _tighten(mask: Expr) -> Expr:
    """Bounds of the key that stand side by side in a conjunction become one each."""
    parts = _conjuncts(mask)
    lows = _if_several([_low(part) for part in parts])
    highs = _if_several([_high(part) for part in parts])
    low = _extreme("maximum", [x for x in lows if x is not None])
    high = _extreme("minimum", [x for x in highs if x is not None])
    rest = [p for p, x, y in zip(parts, lows, highs, strict=True) if x is None and y is None]
    bounds = [] if low is None else [make("le", low, KEY)]
    bounds += [] if high is None else [make("lt", KEY, high)]
    result = const(True)
    for part in [*bounds, *rest]:
        result = make("and", result, part)
    return result


def _if_several(bounds: list[Expr | None]) -> list[Expr | None]:
    """A single bound stays as it was written."""
    several = sum(bound is not None for bound in bounds) > 1
    return bounds if several else [None] * len(bounds)


def _conjuncts(expr: Expr) -> list[Expr]:
    if expr.op == "and" and expr.kind == "bool":
        return [part for arg in expr.args for part in _conjuncts(arg)]
    return [expr]


def _low(part: Expr) -> Expr | None:
    """x where the part says x <= kv_idx."""
    if part.op not in ("lt", "le") or part.args[1] != KEY or part.args[0].kind != "int":
        return None
    return part.args[0] if part.op == "le" else make("add", part.args[0], const(1))


def _high(part: Expr) -> Expr | None:
    """x where the part says kv_idx < x."""
    if part.op not in ("lt", "le") or part.args[0] != KEY or part.args[1].kind != "int":
        return None
    return part.args[1] if part.op == "lt" else make("add", part.args[1], const(1))


def _extreme(op: str, values: list[Expr]) -> Expr | None:
    if not values:
        return None
    result = values[0]
    for value in values[1:]:
        result = make(op, result, value)
    return result
