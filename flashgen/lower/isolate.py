"""Comparisons with the moving position, rewritten so that what is fixed stands alone.

Along a row of tiles the key's position moves and the query's is fixed: `q_idx - kv_idx < window`
becomes `q_idx - window < kv_idx`, one comparison an element against a value computed once a row.
Several in a conjunction become two with the tightest bounds, several in a disjunction one with
the widest: a mask that is an interval of each row is two comparisons."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ..bounds import side
from ..expr import Expr, const, index, leaves, make, substitute, walk
from ..geometry import MAX_POSITION

# Beyond every position.
FAR = MAX_POSITION + 1


class Bounds(NamedTuple):
    """Allowed from `low` up to before `high`; None: without end."""

    low: Expr | None
    high: Expr | None

    def tests(self, moving: Expr) -> list[Expr]:
        """The comparisons that say so."""
        above = [] if self.low is None else [make("le", self.low, moving)]
        return above + ([] if self.high is None else [make("lt", moving, self.high)])


def isolate(mask: Expr, moving: str = "kv_idx") -> Expr:
    """An equal mask whose comparisons with `moving` are `low <= moving` and `moving < high`."""
    position = index(moving)
    simple = substitute(mask, functools.partial(_isolated, position))
    return substitute(simple, functools.partial(_joined, position))


def fewest(mask: Expr, moving: str) -> Expr:
    """The mask with one position alone in its comparisons: `moving`, unless the other one leaves
    fewer of them to each pair: bounds of a key are found once for all queries of a tile."""
    forms = [isolate(mask, name) for name in sorted(("kv_idx", "q_idx"), key=moving.__ne__)]
    return min(forms, key=_pairwise)


def _pairwise(mask: Expr) -> int:
    """Comparisons that are made for each pair."""
    return sum(n.op in ("lt", "le", "eq", "ne") and side(n) == "both" for n in walk(mask))


def _isolated(moving: Expr, node: Expr) -> Expr | None:
    if node.op == "eq":
        return _step(moving, *node.args) or _step(moving, *reversed(node.args))
    if node.op == "not" and _bounds(moving, node.args[0]) is not None:
        # Integers: there is no NaN for which both would be false.
        left, right = node.args[0].args
        return make("lt" if node.args[0].op == "le" else "le", right, left)
    if node.op not in ("lt", "le") or node.args[0].kind != "int":
        return None
    if _bounds(moving, node) is not None and not any(map(_cancels, node.args)):
        return None
    sign, rest = _affine(moving, make("sub", *node.args))
    # sign * moving + rest < 0 (or <= 0)
    if sign == 1:
        return make(node.op, moving, sum_of([(-sign, term) for sign, term in rest]))
    return make(node.op, sum_of(rest), moving) if sign == -1 else None


def _step(moving: Expr, left: Expr, right: Expr) -> Expr | None:
    """`(moving + rest) // size == number` is an interval, whichever sign the size has."""
    if left.op != "floordiv" or left.kind != "int" or not _is_fixed(moving, right):
        return None
    value, size = left.args
    # Scalars were checked on the host; data may be 0, and divides to 0 then.
    if not (size.op == "scalar" or size.is_const and size.attr != 0):
        return None
    sign, rest = _affine(moving, value)
    if sign != 1:
        return None
    start = sum_of([(1, make("mul", right, size)), *((-sign, term) for sign, term in rest)])
    low = make("add", start, make("minimum", make("add", size, const(1)), const(0)))
    high = make("add", start, make("maximum", make("sub", size, const(1)), const(0)))
    return make("and", make("le", low, moving), make("le", moving, high))


def _affine(moving: Expr, expr: Expr) -> tuple[int, list[tuple[int, Expr]]]:
    """How often a sum holds the moving position, and its other terms; 0 if it is in those too."""
    terms = terms_of(expr, 1)
    times = sum(sign for sign, term in terms if term == moving)
    rest = [(sign, term) for sign, term in terms if term != moving]
    return (times if all(_is_fixed(moving, term) for _, term in rest) else 0), rest


def _is_fixed(moving: Expr, expr: Expr) -> bool:
    return moving.attr not in leaves(expr, "index")


def terms_of(expr: Expr, sign: int) -> list[tuple[int, Expr]]:
    """An integer expression as a sum of signed terms."""
    if expr.op == "add":
        return terms_of(expr.args[0], sign) + terms_of(expr.args[1], sign)
    if expr.op == "sub":
        return terms_of(expr.args[0], sign) + terms_of(expr.args[1], -sign)
    if expr.op == "neg":
        return terms_of(expr.args[0], -sign)
    return [(sign, expr)]


def _remaining(terms: list[tuple[int, Expr]]) -> list[tuple[int, Expr]]:
    """Without pairs that cancel."""
    kept: list[tuple[int, Expr]] = []
    for sign, term in terms:
        if (-sign, term) in kept:
            kept.remove((-sign, term))
        else:
            kept.append((sign, term))
    return kept


def _cancels(expr: Expr) -> bool:
    terms = terms_of(expr, 1)
    return len(_remaining(terms)) < len(terms)


def sum_of(terms: list[tuple[int, Expr]]) -> Expr:
    """What is added first."""
    total = const(0)
    for sign, term in sorted(_remaining(terms), key=lambda pair: -pair[0]):
        total = make("add" if sign > 0 else "sub", total, term)
    return total


def _joined(moving: Expr, node: Expr) -> Expr | None:
    if node.kind != "bool" or node.op not in ("and", "or"):
        return None
    parts = _flat(node.op, node)
    joined = (_narrowest if node.op == "and" else _widest)(moving, parts)
    if joined is None and node.op == "or":
        return None
    return _all(node.op, joined or parts)


def _all(op: str, exprs: list[Expr]) -> Expr:
    return functools.reduce(lambda a, b: make(op, a, b), exprs)


def _flat(op: str, expr: Expr) -> list[Expr]:
    if expr.op == op and expr.kind == "bool":
        return [part for arg in expr.args for part in _flat(op, arg)]
    return [expr]


def _narrowest(moving: Expr, parts: list[Expr]) -> list[Expr] | None:
    """Bounds that stand side by side in a conjunction become one each."""
    bounds = [_bounds(moving, part) for part in parts]
    low = _extreme("maximum", [b.low for b in bounds if b])
    high = _extreme("minimum", [b.high for b in bounds if b])
    if low is None and high is None:
        return None
    rest = [p for p, b in zip(parts, bounds, strict=True) if not _is_in(b, low, high)]
    return [*Bounds(low, high).tests(moving), *rest]


def _is_in(bounds: Bounds | None, low: Expr | None, high: Expr | None) -> bool:
    if bounds is None:
        return False
    return bool(bounds.low is not None and low or bounds.high is not None and high)


def _widest(moving: Expr, parts: list[Expr]) -> list[Expr] | None:
    """Bounds of the same end in a disjunction become one; what is fixed lifts one of them."""
    tests = [p for p in parts if _is_fixed(moving, p)]
    found = [(p, _interval(moving, p)) for p in parts if not _is_fixed(moving, p)]
    lows = [b.low for _, b in found if b and b.high is None]
    highs = [b.high for _, b in found if b and b.low is None]
    both = [b for _, b in found if b and b.low is not None and b.high is not None]
    rest = [p for p, b in found if b is None]
    low, high = _outer("minimum", lows), _outer("maximum", highs)
    wide = [Bounds(low, None)] * (low is not None) + [Bounds(None, high)] * (high is not None)
    if len(lows) < 2 and len(highs) < 2 and not (tests and (wide or both)):
        return None
    wide += both
    if tests and wide:
        test = _all("or", tests)
        wide[0] = Bounds(_lifted(test, wide[0].low, -FAR), _lifted(test, wide[0].high, FAR))
        tests = []
    return [*tests, *(_all("and", bounds.tests(moving)) for bounds in wide), *rest]


def _lifted(test: Expr, end: Expr | None, far: int) -> Expr | None:
    return None if end is None else make("where", test, const(far), end)


def _interval(moving: Expr, part: Expr) -> Bounds | None:
    """One bound, or a lower and an upper one."""
    found = [_bounds(moving, p) for p in _flat("and", part)]
    lows = [b.low for b in found if b and b.low is not None]
    highs = [b.high for b in found if b and b.high is not None]
    if len(lows) + len(highs) != len(found) or len(lows) > 1 or len(highs) > 1:
        return None
    return Bounds(lows[0] if lows else None, highs[0] if highs else None)


def _bounds(moving: Expr, part: Expr) -> Bounds | None:
    """What one comparison with the moving position alone says."""
    if part.op not in ("lt", "le") or part.args[0].kind != "int":
        return None
    left, right = part.args
    if right == moving and _is_fixed(moving, left):
        return Bounds(left if part.op == "le" else make("add", left, const(1)), None)
    if left == moving and _is_fixed(moving, right):
        return Bounds(None, right if part.op == "lt" else make("add", right, const(1)))
    return None


def _extreme(op: str, ends: list[Expr | None]) -> Expr | None:
    """The extreme of several ends; a single one stays as it was written."""
    several = sum(end is not None for end in ends) > 1
    return _outer(op, ends) if several else None


def _outer(op: str, ends: list[Expr | None]) -> Expr | None:
    values = [end for end in ends if end is not None]
    return _all(op, values) if values else None
