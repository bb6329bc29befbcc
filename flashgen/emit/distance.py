"""What expressions take of positions: their distance alone, or more."""

from __future__ import annotations

from ..expr import Expr, const, leaves, make, substitute
from ..lower.isolate import sum_of, terms_of

_SIDES = {"q_idx": 1, "kv_idx": -1}
# q_idx - kv_idx.
AWAY = Expr("index", "int", (), "away")


def is_by_distance(expr: Expr) -> bool:
    """Whether an expression of both positions takes no more of them than their distance:
    `table[q_idx - kv_idx]`, and what is computed from that alone."""
    if not leaves(expr, "index") >= _SIDES.keys() or leaves(expr, "score"):
        return False
    return not leaves(with_away(expr), "index") & _SIDES.keys()


def with_away(expr: Expr) -> Expr:
    """An equal expression with AWAY in the place of what takes positions by their distance."""
    return substitute(expr, _distance)


def _distance(node: Expr) -> Expr | None:
    if node.op in ("lt", "le", "eq", "ne") and node.args[0].kind == "int":
        difference = _distance(make("sub", *node.args))
        return None if difference is None else make(node.op, difference, const(0))
    if node.op not in ("add", "sub", "neg") or node.kind != "int":
        return None
    terms = terms_of(node, 1)
    sides = [(sign, term) for sign, term in terms if term.op == "index" and term.attr in _SIDES]
    rest = [(sign, term) for sign, term in terms if (sign, term) not in sides]
    signs = {term.attr: sign * _SIDES[term.attr] for sign, term in sides}
    if len(sides) != 2 or len(signs) != 2 or len(set(signs.values())) != 1:
        return None
    if any(leaves(term, "index") & _SIDES.keys() for _, term in rest):
        return None
    return sum_of([(signs["q_idx"], AWAY), *rest])
