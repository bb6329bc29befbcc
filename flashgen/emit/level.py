"""Tiles in which data that is read by distance is one number, as `table[clamp(q_idx - kv_idx)]` far
from the diagonal: what a score function is there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce

from ..expr import Expr, const, leaves, make, substitute, walk
from ..geometry import MAX_POSITION
from ..spec import Spec
from .distance import AWAY, with_away
from .mask_text import needed

# Of a tile's pairs.
LEAST = Expr("index", "int", (), "least_away")
MOST = Expr("index", "int", (), "most_away")
FAR = const(MAX_POSITION)
OF_TILES = frozenset((LEAST.attr, MOST.attr))
_POSITIONS = {"q_idx", "kv_idx"}


@dataclass(frozen=True)
class Level:
    """`test`: whether all pairs of a tile read one element of each of these `loads`; `far`: whether
    that is the element at the largest distance; `added`: what all scores of such a tile rise by."""

    test: Expr
    far: Expr
    loads: frozenset[Expr]
    added: Expr

    def at(self, expr: Expr) -> Expr:
        """An expression as it is in such a tile."""
        return substitute(expr, lambda node: _at(node, LEAST) if node in self.loads else None)


def level_of(spec: Spec) -> Level | None:
    """Where the score function adds data that pairs read only at an index that grows, or falls,
    with their distance; None elsewhere."""
    if spec.score is None or spec.softcap or not _adds(spec.score):
        return None
    loads = frozenset(
        node for node in walk(spec.score)
        if node.op == "load" and leaves(node, "index") >= _POSITIONS
    )  # fmt: skip
    if not loads or not all(map(_is_monotone, loads)):
        return None
    args = [
        (load, dim) for load in sorted(loads, key=str) for dim, arg in enumerate(load.args)
        if leaves(arg, "index") & _POSITIONS
    ]  # fmt: skip

    def all_equal(distance: Expr) -> Expr:
        ends = ([_inside(_at(load, x), dim) for x in (LEAST, distance)] for load, dim in args)
        return reduce(lambda a, b: make("and", a, b), [make("eq", *pair) for pair in ends])

    level = Level(all_equal(MOST), all_equal(FAR), loads, spec.score.args[1])
    level = replace(level, added=level.at(level.added))
    return None if leaves(level.added, "index") & _POSITIONS else level


def _adds(score: Expr) -> bool:
    return (
        score.op == "add"
        and score.args[0].op == "score"
        and not any(leaves(arg, "score") for arg in score.args[1:])
    )


def at_far(load: Expr) -> Expr:
    """What is read at the largest distance."""
    return _at(load, FAR)


def _at(node: Expr, distance: Expr) -> Expr:
    return substitute(with_away(node), lambda x: distance if x == AWAY else None)


def _inside(load: Expr, dim: int) -> Expr:
    """An index as it is clamped to the data."""
    last = make("sub", Expr("size", "int", (), (load.attr, dim)), const(1))
    return make("minimum", make("maximum", load.args[dim], const(0)), last)


def _is_monotone(load: Expr) -> bool:
    ways = [_way(with_away(arg)) for arg in load.args]
    return all(way is not None for way in ways)


def _way(expr: Expr) -> int | None:
    """1 where an integer never falls with the distance, -1 where it never grows, 0 where it is
    fixed for a block of a head; None if that isn't known."""
    indices = leaves(expr, "index")
    if indices & _POSITIONS or any(node.op == "load" for node in walk(expr)):
        return None
    if AWAY.attr not in indices:
        return 0
    if expr == AWAY:
        return 1
    ways = [_way(arg) for arg in expr.args]
    if None in ways:
        return None
    if expr.op == "neg":
        return -ways[0]  # type: ignore[operator]
    if expr.op == "sub":
        ways[1] = -ways[1]  # type: ignore[operator]
    if expr.op in ("add", "sub", "minimum", "maximum"):
        signs = {way for way in ways if way}
        return signs.pop() if len(signs) == 1 else None
    if expr.op == "floordiv" and expr.args[1].is_const and expr.args[1].attr > 0:
        return ways[0]
    return None


@dataclass(frozen=True)
class LevelText:
    """The `test` of a tile, and the score where it holds, or what it rises by, with their
    statements."""

    test_lines: tuple[str, ...]
    test: str
    lines: tuple[str, ...]
    score: str

    @property
    def texts(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.test_lines, *self.lines, self.test, self.score)


def level_text(lines: Iterable[str], score: str, test: str) -> LevelText:
    """Data is read before it is known whether that is so, and while other things run."""
    lines = tuple(lines)
    loads = [line.partition(" = ")[0] for line in needed(lines, [score]) if "= tl.load(" in line]
    early = needed(lines, [test, *loads])
    late = tuple(x for x in needed(lines, [score]) if x not in early)
    return LevelText(early, test, late, score)
