"""Gradients of data that is fixed for a block of keys of a head, as `slopes[h]`: sums that Hopper's
backward makes along with the others."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ..expr import Expr, leaves, walk
from ..spec import Spec
from . import Variant, reads_score
from .gradients import Wanted, derivatives_of, how_added

# What a program's positions change with.
_MOVING = {"q_idx", "kv_idx"}
NO_DATA = Wanted(False, False, False)


@dataclass(frozen=True)
class Sum:
    """A read's gradient: `value` of each pair's, added up, and then at `place` in its buffer.

    `how` it gets there: `add` or `add_exactly`."""

    name: str
    value: str
    place: str
    how: str
    total: str


@dataclass(frozen=True)
class Sums:
    """Sums of a key block.

    `pair_lines`: what their values want beside what the score's statements give."""

    terms: tuple[Sum, ...] = ()
    pair_lines: tuple[str, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        """All that a step reads, and where sums go."""
        terms = (text for term in self.terms for text in (term.value, term.place))
        return (*self.pair_lines, *terms)

    def reads(self, name: str) -> bool:
        """Whether a text reads a name."""
        return any(re.search(rf"\b{name}\b", text) for text in self.texts)

    def behind(self, pair_lines: tuple[str, ...]) -> Sums:
        """The same with these statements."""
        return replace(self, pair_lines=pair_lines)


def summed(spec: Spec, wanted: Wanted, variant: Variant) -> Wanted:
    """What is wanted of data, but for what only the portable kernels add up.

    Sums of head dimensions up to 64, beside a third warpgroup, have not run on a GPU."""
    if not 64 < max(variant.head_dim, variant.v_head_dim) <= 128:
        return NO_DATA
    names = tuple(name for name in wanted.data if _is_summed(spec, name))
    return replace(NO_DATA, data=names, exact=wanted.exact)


def _is_summed(spec: Spec, name: str) -> bool:
    """Whether a block of keys of a head reads one element of the data, and data of queries has no
    part in its gradient."""
    reads = [(load, by) for load, by in derivatives_of(spec).loads if load.attr == name]
    of_queries = [
        node
        for _, by in reads
        for node in walk(by)
        if node.op == "load" and leaves(node, "index") & _MOVING == {"q_idx"}
    ]
    return not of_queries and not any(
        leaves(load, "index") & _MOVING or reads_score(load) for load, _ in reads
    )


def terms_of(
    reads: list[tuple[Expr, Expr]],
    by: list[str],
    places: list[str],
    wanted: Wanted,
) -> tuple[Sum, ...]:
    """`reads`: data and the derivatives by it, `by` as text; `places` in buffers."""
    return tuple(
        Sum(
            load.attr,
            "pull" if text == "1.0" else f"pull * ({text})",
            place,
            how_added(load.attr, wanted),
            f"{load.attr}_total_{number}",
        )
        for number, ((load, _), text, place) in enumerate(zip(reads, by, places, strict=True))
    )
