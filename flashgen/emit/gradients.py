"""What the backward kernels compute of a score function: its derivatives, and where they go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..differentiate import ZERO, Derivatives, differentiate
from ..expr import Expr, const, leaves, make
from ..spec import Spec
from . import Variant, reads_score
from .distance import is_by_distance
from .mask_text import MaskText

# Of a sum that `add_exactly` makes (templates/functions.j2): its 64-bit integers.
EXACT_WORDS = 14


@dataclass(frozen=True)
class Wanted:
    """Which gradients are computed: of q, k and v, and of data by name; whether the LSE has one.

    Of `data`, those in `stored` have no element that two pairs read: they are written, the others
    added up. `exact`: in integers, so that the order of adding changes nothing. `far`: those of
    which another kernel adds up what is read at the largest distance (`sums.py`)."""

    q: bool = True
    k: bool = True
    v: bool = True
    data: tuple[str, ...] = ()
    lse: bool = False
    stored: tuple[str, ...] = ()
    exact: bool = False
    far: tuple[str, ...] = ()

    @property
    def by_key(self) -> bool:
        """Whether the kernel along the queries runs."""
        return self.k or self.v

    def renamed(self, name: Callable[[str], str]) -> Wanted:
        """The same with other names of data."""
        data, stored, far = (tuple(map(name, x)) for x in (self.data, self.stored, self.far))
        return replace(self, data=data, stored=stored, far=far)


@dataclass(frozen=True)
class Math:
    """Mask, score function and its derivative as statements of one kernel."""

    row_lines: tuple[str, ...]
    mask: MaskText
    score_lines: tuple[str, ...]
    slope_lines: tuple[str, ...]
    score: str
    slope: str
    helpers: frozenset[str]
    terms: tuple[Term, ...] = ()
    place_lines: tuple[tuple[str, ...], ...] = ((), ())
    far_lines: tuple[str, ...] = ()
    is_far: str = ""


@dataclass(frozen=True)
class Term:
    """The gradient of data where the score function reads it.

    `axes`: along which of queries and keys the place in the data changes; `total` names the sum
    that is kept over a row block where it doesn't change along the keys, or over a diagonal of
    blocks where it changes with the `distance` alone. `how` it gets to its `offset` in
    the buffer: `store`, `add`, or `add_exactly`."""

    name: str
    value: str
    offset: str
    axes: str
    how: str
    total: str = ""


def derivatives_of(spec: Spec) -> Derivatives:
    """The score function's; a score that isn't changed has 1."""
    if spec.score is None:
        return Derivatives(const(1.0), ())
    return differentiate(spec.score)


def ignores_score(spec: Spec) -> bool:
    """Whether queries and keys have no influence, so that their gradients are 0."""
    return derivatives_of(spec).score == ZERO


def how_added(name: str, wanted: Wanted) -> str:
    if name in wanted.stored:
        return "store"
    return "add_exactly" if wanted.exact else "add"


def place_of(load: Expr, wanted: Wanted) -> Expr:
    """Where a load's gradient lies in a contiguous buffer of the data's shape."""
    place = const(0)
    for dim, position in enumerate(load.args):
        size = Expr("size", "int", (), (load.attr, dim))
        if not (position.op == "index" and position.attr in ("b", "h", "h_kv")):
            inside = make("maximum", position, const(0))
            position = make("minimum", inside, make("sub", size, const(1)))
        place = make("add", make("mul", place, size), position)
    if how_added(load.attr, wanted) == "add_exactly":
        place = make("mul", place, const(EXACT_WORDS))
    return place


def reads_of(
    found: Derivatives, wanted: Wanted, variant: Variant, by_distance: bool
) -> list[tuple[Expr, Expr]]:
    """What is read of the data whose gradients are wanted, and the derivatives by it: where the
    distance of a pair alone says what, or elsewhere."""
    reads = [(load, by) for load, by in found.loads if load.attr in wanted.data]
    alone = [
        not variant.packed
        and how_added(load.attr, wanted) != "store"
        and is_by_distance(place_of(load, wanted))
        for load, _ in reads
    ]
    return [read for read, is_alone in zip(reads, alone, strict=True) if is_alone == by_distance]


def term_of(load: Expr, by: str, offset: str, number: int, how: str) -> Term:
    indices = leaves(load, "index")
    sides = [side for side in ("q", "kv") if f"{side}_idx" in indices]
    axes = "both" if len(sides) == 2 or reads_score(load) else (*sides, "none")[0]
    total = f"{load.attr}_total_{number}" if axes in ("q", "none") else ""
    return Term(load.attr, "ds" if by == "1.0" else f"ds * ({by})", offset, axes, how, total)
