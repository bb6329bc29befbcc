"""Distances of positions as floats: `float(kv_idx - q_idx)` without an integer for each pair."""

from __future__ import annotations

from ..expr import Expr, index, make, substitute

_Q, _KV = index("q_idx"), index("kv_idx")
# How far the key is ahead of the query, as a kernel computes it for all pairs of a tile.
AHEAD = Expr("ahead", "float", (_Q, _KV))


def with_distances(expr: Expr) -> Expr:
    """An equal expression that reads AHEAD where positions are subtracted to become floats."""
    return substitute(expr, _distance)


def _distance(node: Expr) -> Expr | None:
    return _as_float(node.args[0]) if node.op == "cast" and node.kind == "float" else None


def _as_float(value: Expr) -> Expr | None:
    """An integer as a float; signs change nothing of how a number is rounded."""
    if value.op == "sub" and value.args in ((_KV, _Q), (_Q, _KV)):
        return AHEAD if value.args[0] == _KV else make("neg", AHEAD)
    if value.op in ("abs", "neg"):
        inner = _as_float(value.args[0])
        return None if inner is None else make(value.op, inner)
    return None
