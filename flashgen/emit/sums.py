"""Gradients of data that is fixed for a block of keys of a head, as `slopes[h]`: sums that Hopper's
backward makes along with the others."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ..expr import Expr, leaves, walk
from ..spec import Spec
from . import Variant, reads_score
from .gradients import Wanted, derivatives_of, how_added
from .level import level_of

# What a program's positions change with.
_MOVING = {"q_idx", "kv_idx"}
# Queries and keys of a warpgroup's step.
SIDE = 64
NO_DATA = Wanted(False, False, False)


@dataclass(frozen=True)
class Sum:
    """A read's gradient: `value` of each pair's, added up, and then at `place` in its buffer.

    `how` it gets there: `add` or `add_exactly`. `of_far`: of tiles that are far alone."""

    name: str
    value: str
    place: str
    how: str
    total: str
    of_far: bool = False


@dataclass(frozen=True)
class Sums:
    """Sums of a key block.

    `pair_lines`: what their values want beside what the score's statements give.
    `is_far`: whether a tile's pairs all read what is read at the largest distance."""

    terms: tuple[Sum, ...] = ()
    pair_lines: tuple[str, ...] = ()
    is_far: str = ""

    @property
    def texts(self) -> tuple[str, ...]:
        """All that a step reads, and where sums go."""
        terms = (text for term in self.terms for text in (term.value, term.place))
        return (*self.pair_lines, self.is_far, *terms)

    def reads(self, name: str) -> bool:
        """Whether a text reads a name."""
        return any(re.search(rf"\b{name}\b", text) for text in self.texts)

    def behind(self, pair_lines: tuple[str, ...]) -> Sums:
        """The same with these statements."""
        return replace(self, pair_lines=pair_lines)


def summed(spec: Spec, wanted: Wanted, variant: Variant, side: int = 0) -> Wanted:
    """What is wanted of data, but for what only the portable kernels add up.

    `far`: of these the data of which Hopper's backward adds up what is read at the largest
    distance, in tiles where nothing else is; the kernel along diagonals, whose blocks have `side`
    rows, leaves that out. All that this kernel adds up is in it. Other sums of head dimensions up
    to 64 cost a third warpgroup more than they spare."""
    widest = max(variant.head_dim, variant.v_head_dim)
    if widest > 128:
        return NO_DATA
    names = tuple(name for name in wanted.data if _is_summed(spec, name, frozenset()))
    far = tuple(name for name in wanted.data if name not in names)
    level = level_of(spec) if side == SIDE and not (variant.packed or wanted.stored) else None
    if level is None or not all(_is_far(spec, name, level.loads) for name in far):
        far = ()
    names = names if widest > 64 else ()
    return replace(NO_DATA, data=(*names, *far), far=far, exact=wanted.exact)


def _is_far(spec: Spec, name: str, level: frozenset[Expr]) -> bool:
    """Whether all reads of the data are `level`."""
    reads = {load for load, _ in derivatives_of(spec).loads if load.attr == name}
    return reads <= level and _is_summed(spec, name, level)


def _is_summed(spec: Spec, name: str, level: frozenset[Expr]) -> bool:
    """Whether a block of keys of a head reads one element of the data, or a tile where `level` is
    read, and neither scores nor data of queries or keys have a part in its gradient: of keys that
    nobody sees they may be anything."""
    reads = [(load, by) for load, by in derivatives_of(spec).loads if load.attr == name]
    moving = [
        node
        for _, by in reads
        for node in walk(by)
        if node.op == "load" and leaves(node, "index") & _MOVING
    ]
    return not (moving or any(reads_score(by) for _, by in reads)) and all(
        load in level or not (leaves(load, "index") & _MOVING or reads_score(load))
        for load, _ in reads
    )


def terms_of(
    reads: list[tuple[Expr, Expr]],
    far: list[bool],
    by: list[str],
    places: list[str],
    wanted: Wanted,
) -> tuple[Sum, ...]:
    """`reads`: data and the derivatives by it, `by` as text; `places` in buffers; `far` ones."""
    return tuple(
        Sum(
            load.attr,
            "pull" if text == "1.0" else f"pull * ({text})",
            place,
            how_added(load.attr, wanted),
            f"{load.attr}_total_{number}",
            of_far,
        )
        for number, ((load, _), of_far, text, place) in enumerate(
            zip(reads, far, by, places, strict=True)
        )
    )
