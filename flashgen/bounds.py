"""The tile rule: may any pair of a tile attend, must every pair?

Sub-expressions of one side only (queries or keys) are summarised per tile by their minimum and
maximum; where the sides meet, intervals are propagated. What intervals can't decide is left
open, so imprecision costs time and never truth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .expr import FLOATS, Expr, const, extent, leaves, make, walk

Side = Literal["", "q", "kv", "both"]
Interval = tuple["Expr | None", "Expr | None"]

TRUE, FALSE = const(True), const(False)
# Increasing, and correctly rounded on every device (exp and its kin are only approximately so).
_INCREASING = frozenset({"floor", "ceil"})
_AFFINE = frozenset({"index", "const", "scalar", "add", "sub", "neg", "size"})


@dataclass(frozen=True)
class TileRule:
    """Two predicates over a tile. `min[q](x)` is the least value of x over the tile's queries."""

    may: Expr
    must: Expr

    @property
    def summaries(self) -> tuple[Expr, ...]:
        """The per-tile summaries that have to be computed from data or positions."""
        nodes = dict.fromkeys(n for e in (self.may, self.must) for n in walk(e) if n.op == "tile")
        return tuple(n for n in nodes if n.args[0].op != "index")

    def __str__(self) -> str:
        return f"may attend   {_brief(self.may)}\nmust attend  {_brief(self.must)}"


# Ranges are shared by what uses them: as text, each nested `where` would double.
_LONGEST = 1000


def _brief(expr: Expr) -> str:
    size, _ = extent(expr)
    return str(expr) if size <= _LONGEST else f"a rule of {size} operations"


def side(expr: Expr) -> Side:
    """Which positions an expression varies with."""
    used = leaves(expr, "index")
    if {"q_idx", "kv_idx"} <= used:
        return "both"
    return "q" if "q_idx" in used else "kv" if "kv_idx" in used else ""


def tile_rule(mask: Expr | None) -> TileRule:
    """Derive the rule of a mask (None: every key is allowed)."""
    if mask is None:
        return TileRule(TRUE, TRUE)
    may, must = _Rules().truth(mask)
    return TileRule(may, must)


class _Rules:
    """Interval rules, one for each operation; results are shared between equal nodes."""

    def __init__(self) -> None:
        self._truths: dict[Expr, tuple[Expr, Expr]] = {}
        self._intervals: dict[Expr, Interval] = {}

    def truth(self, expr: Expr) -> tuple[Expr, Expr]:
        if expr not in self._truths:
            self._truths[expr] = self._truth(expr)
        return self._truths[expr]

    def interval(self, expr: Expr) -> Interval:
        if expr not in self._intervals:
            self._intervals[expr] = self._interval(expr)
        return self._intervals[expr]

    def _truth(self, expr: Expr) -> tuple[Expr, Expr]:
        where = side(expr)
        if where == "":
            return expr, expr
        if where != "both" and not _is_simple_comparison(expr):
            return _summary(expr, where, "max"), _summary(expr, where, "min")
        rule: Callable[[Expr], tuple[Expr, Expr]] | None = getattr(self, f"_{expr.op}", None)
        return rule(expr) if rule is not None else (TRUE, FALSE)

    def _and(self, expr: Expr) -> tuple[Expr, Expr]:
        (a, all_a), (b, all_b) = map(self.truth, expr.args)
        return make("and", a, b), make("and", all_a, all_b)

    def _or(self, expr: Expr) -> tuple[Expr, Expr]:
        (a, all_a), (b, all_b) = map(self.truth, expr.args)
        return make("or", a, b), make("or", all_a, all_b)

    def _not(self, expr: Expr) -> tuple[Expr, Expr]:
        may, must = self.truth(expr.args[0])
        return make("not", must), make("not", may)

    def _xor(self, expr: Expr) -> tuple[Expr, Expr]:
        same, surely = self._same_truth(*expr.args)
        return make("not", surely), make("not", same)

    def _same_truth(self, left: Expr, right: Expr) -> tuple[Expr, Expr]:
        (a, all_a), (b, all_b) = self.truth(left), self.truth(right)
        none_a, none_b = make("not", a), make("not", b)
        some_not = make("and", make("not", all_a), make("not", all_b))
        may = make("or", make("and", a, b), some_not)
        return may, make("or", make("and", all_a, all_b), make("and", none_a, none_b))

    def _where(self, expr: Expr) -> tuple[Expr, Expr]:
        chosen, yes, no = expr.args
        either = make("or", make("and", chosen, yes), make("and", make("not", chosen), no))
        return self.truth(either)

    def _lt(self, expr: Expr) -> tuple[Expr, Expr]:
        return self._less("lt", "le", *expr.args)

    def _le(self, expr: Expr) -> tuple[Expr, Expr]:
        return self._less("le", "lt", *expr.args)

    def _less(self, op: str, opposite: str, left: Expr, right: Expr) -> tuple[Expr, Expr]:
        if left.kind == "bool":
            return TRUE, FALSE
        (low_a, high_a), (low_b, high_b) = self.interval(left), self.interval(right)
        # `not (b <= a)` rather than `a < b`: a NaN in a bound must leave the tile open.
        unknown = low_a is None or high_b is None
        may = TRUE if unknown else make("not", make(opposite, high_b, low_a))  # type: ignore[arg-type]
        must = FALSE if high_a is None or low_b is None else make(op, high_a, low_b)
        if op == "le" and high_a is not None and low_b is not None and _may_hide_nan(left, right):
            # inf <= inf says nothing of a NaN in between.
            must = make("and", must, make("le", make("sub", high_a, low_b), const(0.0)))
        return may, must

    def _eq(self, expr: Expr) -> tuple[Expr, Expr]:
        left, right = expr.args
        if left.kind == "bool":
            return self._same_truth(left, right)
        (low_a, high_a), (low_b, high_b) = self.interval(left), self.interval(right)
        if low_a is None or high_a is None or low_b is None or high_b is None:
            return TRUE, FALSE
        apart = make("or", make("lt", high_a, low_b), make("lt", high_b, low_a))
        one_value = make("and", make("eq", low_a, high_a), make("eq", low_b, high_b))
        return make("not", apart), make("and", one_value, make("eq", low_a, low_b))

    def _ne(self, expr: Expr) -> tuple[Expr, Expr]:
        may, must = self._eq(expr)
        return make("not", must), make("not", may)

    def _load(self, expr: Expr) -> tuple[Expr, Expr]:
        """A boolean table whose indices are single values over the tile is known exactly."""
        ends = [self.interval(position) for position in expr.args]
        if any(low is None or high is None for low, high in ends):
            return TRUE, FALSE
        point = TRUE
        for low, high in ends:
            assert low is not None
            assert high is not None
            point = make("and", point, make("eq", low, high))
        value = Expr("load", "bool", tuple(low for low, _ in ends if low is not None), expr.attr)
        return make("or", make("not", point), value), make("and", point, value)

    def _interval(self, expr: Expr) -> Interval:
        where = side(expr)
        if where == "":
            return expr, expr
        if expr.op == "index" or (where != "both" and not _is_affine(expr)):
            return _summary(expr, where, "min"), _summary(expr, where, "max")
        rule: Callable[[Expr], Interval] | None = getattr(self, f"_bound_{expr.op}", None)
        if rule is not None:
            return rule(expr)
        if expr.op in _INCREASING:
            low, high = self.interval(expr.args[0])
            return _map(expr.op, low), _map(expr.op, high)
        return None, None

    def _bound_add(self, expr: Expr) -> Interval:
        (a, a_high), (b, b_high) = map(self.interval, expr.args)
        return _join("add", a, b), _join("add", a_high, b_high)

    def _bound_sub(self, expr: Expr) -> Interval:
        (a, a_high), (b, b_high) = map(self.interval, expr.args)
        return _join("sub", a, b_high), _join("sub", a_high, b)

    def _bound_neg(self, expr: Expr) -> Interval:
        low, high = self.interval(expr.args[0])
        return _map("neg", high), _map("neg", low)

    def _bound_abs(self, expr: Expr) -> Interval:
        low, high = self.interval(expr.args[0])
        if low is None or high is None:
            return (None, None) if expr.kind in FLOATS else (const(0), None)
        reach = make("maximum", make("neg", low), high)
        nearest = make("maximum", low, make("neg", high))
        return self._cut(make("maximum", nearest, const(0)), expr), reach

    def _bound_minimum(self, expr: Expr) -> Interval:
        (a, a_high), (b, b_high) = map(self.interval, expr.args)
        return _join("minimum", a, b), self._cut(_join("minimum", a_high, b_high), expr)

    def _bound_maximum(self, expr: Expr) -> Interval:
        (a, a_high), (b, b_high) = map(self.interval, expr.args)
        return self._cut(_join("maximum", a, b), expr), _join("maximum", a_high, b_high)

    _bound_clamp_min, _bound_clamp_max = _bound_maximum, _bound_minimum

    def _cut(self, end: Expr | None, expr: Expr) -> Expr | None:
        """The end at which an operation cuts its operands' range off.

        Where data is infinite, a NaN (inf - inf, 0 * inf) may lie inside a range, whose ends are
        then infinite or NaN. Cutting would lose that, so there the end becomes NaN: it decides
        nothing."""
        for operand in expr.args:
            for limit in self.interval(operand) if _may_hide_nan(operand) else ():
                end = None if limit is None else _join("add", end, make("sub", limit, limit))
        return end

    def _bound_mul(self, expr: Expr) -> Interval:
        (a, a_high), (b, b_high) = map(self.interval, expr.args)
        if a is None or a_high is None or b is None or b_high is None:
            return None, None
        products = list(dict.fromkeys(make("mul", x, y) for x in (a, a_high) for y in (b, b_high)))
        return _fold("minimum", products), _fold("maximum", products)

    def _bound_floordiv(self, expr: Expr) -> Interval:
        low, high = self.interval(expr.args[0])
        if not _is_positive(expr.args[1]):
            return None, None
        return _join("floordiv", low, expr.args[1]), _join("floordiv", high, expr.args[1])

    def _bound_mod(self, expr: Expr) -> Interval:
        low, high = self.interval(expr.args[0])
        divisor = expr.args[1]
        if not _is_positive(divisor) or expr.kind != "int":
            return None, None
        top = make("sub", divisor, const(1))
        if low is None or high is None:
            return const(0), top
        one_turn = make("eq", make("floordiv", low, divisor), make("floordiv", high, divisor))
        return (
            make("where", one_turn, make("mod", low, divisor), const(0)),
            make("where", one_turn, make("mod", high, divisor), top),
        )

    def _bound_where(self, expr: Expr) -> Interval:
        may, must = self.truth(expr.args[0])
        (a, a_high), (b, b_high) = map(self.interval, expr.args[1:])
        ends: list[Expr | None] = []
        for op, x, y in (("minimum", a, b), ("maximum", a_high, b_high)):
            either = _join(op, x, y)
            if either is None or x is None or y is None:
                ends.append(None)
            else:
                ends.append(make("where", must, x, make("where", may, either, y)))
        return ends[0], ends[1]

    def _bound_cast(self, expr: Expr) -> Interval:
        source = expr.args[0]
        if expr.kind == "int" and (leaves(source, "load") or leaves(source, "scalar")):
            # NaN and infinity have no integer that an interval would know of.
            if source.kind in FLOATS:
                return None, None
        low, high = reversed(self.truth(source)) if source.kind == "bool" else self.interval(source)
        return _cast(low, expr), _cast(high, expr)


def _summary(expr: Expr, where: str, end: str) -> Expr:
    return Expr("tile", expr.kind, (expr,), (where, end))


def _is_affine(expr: Expr) -> bool:
    """Sums of a position that occurs once: the interval rules are exact, no data is read."""
    nodes = list(walk(expr))
    return all(n.op in _AFFINE for n in nodes) and _occurrences(expr) == 1


def _occurrences(expr: Expr) -> int:
    if expr.op == "index":
        return int(expr.attr in ("q_idx", "kv_idx"))
    return sum(_occurrences(arg) for arg in expr.args)


def _is_simple_comparison(expr: Expr) -> bool:
    """A comparison of an affine position with something fixed needs no array of summaries."""
    if expr.op not in ("lt", "le"):
        return False
    return all(side(arg) == "" or _is_affine(arg) for arg in expr.args) and (
        sum(side(arg) != "" for arg in expr.args) == 1
    )


def _may_hide_nan(*operands: Expr) -> bool:
    """A float made of both sides; a summary of one side is NaN itself where a NaN is below it."""
    return any(x.kind in FLOATS and side(x) == "both" for x in operands)


def _is_positive(expr: Expr) -> bool:
    return expr.is_const and expr.kind == "int" and expr.attr > 0


def _map(op: str, value: Expr | None) -> Expr | None:
    return None if value is None else make(op, value)


def _join(op: str, left: Expr | None, right: Expr | None) -> Expr | None:
    return None if left is None or right is None else make(op, left, right)


def _fold(op: str, values: list[Expr]) -> Expr:
    result = values[0]
    for value in values[1:]:
        result = make(op, result, value)
    return result


def _cast(value: Expr | None, like: Expr) -> Expr | None:
    from .expr import cast

    return None if value is None else cast(value, like.kind)
