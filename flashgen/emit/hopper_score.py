"""What Hopper's backward makes of a score function: it, its derivative, gradients of its data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..differentiate import ZERO
from ..expr import Expr, const, leaves, make, scalar
from ..lower import Lowered
from ..spec import Spec
from .gradients import Wanted, derivatives_of, place_of
from .level import LevelText, at_far, level_of, level_text
from .mask_text import needed
from .sums import Sums, terms_of


@dataclass(frozen=True)
class ScoreMath:
    """The score function and its derivative as statements: `first` for the changed score, `text`,
    `slopes` for its derivative by the score, `slope`.

    `level`: what it is in tiles that read one number. `slant`: what scores rise by, in base 2, for
    each position that a key is ahead of its query, where that is all."""

    key_lines: tuple[str, ...] = ()
    query_lines: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    slopes: tuple[str, ...] = ()
    text: str = ""
    slope: str = "1.0"
    level: LevelText | None = None
    sums: Sums = field(default_factory=Sums)
    helpers: frozenset[str] = frozenset()
    slant: str = ""

    @property
    def is_crowded(self) -> bool:
        """Whether it wants many registers at once: for addresses of each pair's data, for sums."""
        lines = (*self.first, *self.slopes)
        return bool(self.sums.terms) or any("load(" in line for line in lines)

    @property
    def texts(self) -> tuple[str, ...]:
        """All that reads what belongs to keys or to queries."""
        of_level = () if self.level is None else self.level.texts
        lines = (*self.first, *self.slopes, *of_level, *self.sums.texts)
        return (*lines, self.text, self.slope, self.slant)


def score_math(
    spec: Spec, wanted: Wanted, slant: Expr | None, lowered: Callable[[list[Expr]], Lowered]
) -> ScoreMath:
    """`wanted`: gradients of data; `slant`: all that the score function does, if it is that;
    `lowered`: writes expressions."""
    if spec.score is None:
        return ScoreMath()
    if slant is not None:
        found = lowered([make("mul", slant, scalar("log2e", "float"))])
        return ScoreMath(found.statements[0], helpers=found.helpers, slant=found.results[0])
    by_score, level = derivatives_of(spec).score, level_of(spec)
    # None of their derivatives reads what is `level`, or it would change inside a tile (`summed`).
    reads = [read for read in derivatives_of(spec).loads if read[0].attr in wanted.data]
    first = [spec.score, const(1.0) if by_score == ZERO else by_score]
    first += [level.at(spec.score), level.test] if level else []
    far = [level is not None and load in level.loads for load, _ in reads]
    loads = [at_far(load) if is_far else load for (load, _), is_far in zip(reads, far, strict=True)]
    by = [by for _, by in reads]
    tests = [level.far] if level and any(far) else []
    found = lowered([*first, *by, *(place_of(load, wanted) for load in loads), *tests])
    results = iter(found.results)
    texts, values, places = ([next(results) for _ in part] for part in (first, by, by))
    sums = Sums(terms_of(reads, far, values, places, wanted), (), "".join(results))
    return _placed(spec, found, texts, sums)


def _placed(spec: Spec, found: Lowered, texts: list[str], sums: Sums) -> ScoreMath:
    """Statements by what they are for. `texts`: of the score, its derivative, and `level`."""
    keys, queries, pairs = found.statements
    score, slope = texts[:2]
    first = needed(pairs, [score])
    slopes = tuple(line for line in needed(pairs, [slope]) if line not in first)
    level = level_text(pairs, *texts[2:]) if len(texts) > 2 else None
    known = (*first, *slopes, *(level.texts if level else ()))
    rest = tuple(line for line in pairs if line not in known)
    text = score if leaves(spec.score, "score") else f"gl.zeros_like(s) + ({score})"
    return ScoreMath(
        keys, queries, first, slopes, text, slope, level, sums.behind(rest), found.helpers
    )
