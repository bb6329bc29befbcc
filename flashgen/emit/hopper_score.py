"""What Hopper's backward makes of a score function: it, its derivative, gradients of its data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..differentiate import ZERO
from ..expr import Expr, const, leaves
from ..lower import Lowered
from ..spec import Spec
from .gradients import Wanted, derivatives_of, place_of
from .mask_text import needed
from .sums import Sums, terms_of


@dataclass(frozen=True)
class ScoreMath:
    """The score function and its derivative as statements: `first` for the changed score, `text`,
    `slopes` for its derivative by the score, `slope`."""

    key_lines: tuple[str, ...] = ()
    query_lines: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    slopes: tuple[str, ...] = ()
    text: str = ""
    slope: str = "1.0"
    sums: Sums = field(default_factory=Sums)
    helpers: frozenset[str] = frozenset()

    @property
    def texts(self) -> tuple[str, ...]:
        """All that reads what belongs to keys or to queries."""
        lines = (*self.first, *self.slopes, *self.sums.texts)
        return (*lines, self.text, self.slope)


def score_math(spec: Spec, wanted: Wanted, lowered: Callable[[list[Expr]], Lowered]) -> ScoreMath:
    """`wanted`: gradients of data; `lowered`: writes expressions."""
    if spec.score is None:
        return ScoreMath()
    by_score = derivatives_of(spec).score
    reads = [read for read in derivatives_of(spec).loads if read[0].attr in wanted.data]
    first = [spec.score, const(1.0) if by_score == ZERO else by_score]
    by = [by for _, by in reads]
    found = lowered([*first, *by, *(place_of(load, wanted) for load, _ in reads)])
    results = iter(found.results)
    texts, values, places = ([next(results) for _ in part] for part in (first, by, by))
    sums = Sums(terms_of(reads, values, places, wanted))
    return _placed(spec, found, texts, sums)


def _placed(spec: Spec, found: Lowered, texts: list[str], sums: Sums) -> ScoreMath:
    """Statements by what they are for. `texts`: of the score and its derivative."""
    keys, queries, pairs = found.statements
    score, slope = texts
    first = needed(pairs, [score])
    slopes = tuple(line for line in needed(pairs, [slope]) if line not in first)
    rest = tuple(line for line in pairs if line not in (*first, *slopes))
    text = score if leaves(spec.score, "score") else f"gl.zeros_like(s) + ({score})"
    return ScoreMath(keys, queries, first, slopes, text, slope, sums.behind(rest), found.helpers)
