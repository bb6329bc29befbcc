"""Gradients of data that is read by the distance of a query and a key alone."""

from __future__ import annotations

from dataclasses import replace

from ..expr import Expr, leaves
from ..lower import Lowered
from ..spec import Spec
from . import Variant, lower_for, reads_score
from .distance import with_away
from .gradients import Math, Term, Wanted, derivatives_of, how_added, place_of, reads_of, term_of
from .level import level_of
from .mask_text import Cut, MaskText, mask_text, needed


def distance_math(spec: Spec, variant: Variant, wanted: Wanted) -> Math:
    """Statements for a kernel whose programs own a diagonal of blocks, along which the distance of
    each place's pair is fixed."""
    found = derivatives_of(spec)
    reads = reads_of(found, wanted, variant, by_distance=True)
    if not reads or spec.score is None:
        return Math((), MaskText(Cut((), (), "")), (), (), "", "1.0", frozenset())

    def lowered(exprs: list[Expr], taken: frozenset[str]) -> Lowered:
        moving = {"q_idx", "kv_idx"}
        return lower_for(
            [with_away(expr) for expr in exprs],
            spec,
            variant,
            taken,
            stage_of=lambda e: int(bool(leaves(e, "index") & moving) or reads_score(e)),
        )

    mask = mask_text(spec, "q_idx", lambda exprs: lowered(exprs, frozenset()), by_range=False)
    score = lowered([spec.score, *(by for _, by in reads)], mask.assigned)
    places = lower_for(
        [with_away(place_of(load, wanted)) for load, _ in reads],
        spec,
        variant,
        mask.assigned,
        stage_of=lambda e: int("away" in leaves(e, "index")),
    )
    first = needed(score.statements[1], score.results[:1])
    later = tuple(line for line in score.statements[1] if line not in first)
    terms = tuple(
        _distance_term(load, by, place, number, wanted)
        for number, ((load, _), by, place) in enumerate(
            zip(reads, score.results[1:], places.results, strict=True)
        )
    )
    text = score.results[0]
    if not reads_score(spec.score):
        text = f"tl.zeros_like(s) + ({text})"
    rows = (*mask.general.row_lines, *score.statements[0])
    helpers = score.helpers | places.helpers
    level = level_of(spec) if wanted.far else None
    tests = [] if level is None else [level.far]
    far = lower_for(tests, spec, variant, mask.assigned, stages=1, stage_of=lambda e: 0)
    return Math(
        rows, mask, first, later, text, "1.0", helpers, terms, places.statements,
        far.statements[0], "".join(far.results),
    )  # fmt: skip


def _distance_term(load: Expr, by: str, offset: str, number: int, wanted: Wanted) -> Term:
    term = term_of(load, by, offset, number, how_added(load.attr, wanted))
    return replace(term, axes="distance", total=f"{load.attr}_total_{number}")
