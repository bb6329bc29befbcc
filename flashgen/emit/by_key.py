"""Statements for what belongs to a key, read by one thread for all that compute with it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..expr import Expr, leaves, walk
from ..lower import Lowered, with_distances
from ..spec import Spec
from . import Variant, lower_for
from .level import OF_TILES


@dataclass(frozen=True)
class Math:
    """An expression as statements: for a row block, for a tile's keys, for its pairs.

    `crossing` are the names of the keys' statements that the pairs' read."""

    lowered: Lowered
    crossing: tuple[str, ...]

    @property
    def lines(self) -> tuple[tuple[str, ...], ...]:
        return self.lowered.statements

    @property
    def assigned(self) -> frozenset[str]:
        return frozenset(line.partition(" = ")[0] for part in self.lines for line in part)


def lower_by_key(
    given: Sequence[Expr],
    spec: Spec,
    variant: Variant,
    taken: frozenset[str],
    of_rows: frozenset[str] = frozenset(("q_idx",)),
    ahead: str = "",
) -> Math:
    """Statements that load what belongs to a key once a tile, and not once for each score.

    In wgmma's layout each thread holds a quarter of a tile's keys, as scattered as its scores;
    loads are wide and few if each thread reads one key and what it read crosses over.
    `of_rows`: indices that a block's rows have of their own."""
    exprs = [with_distances(expr) if ahead else expr for expr in given]
    stage_of = stages(exprs, of_rows)
    found = lower_for(exprs, spec, variant, taken, stages=3, stage_of=stage_of, ahead=ahead)
    return Math(found, read_of(found.statements[1], (*found.statements[2], *found.results)))


def read_of(lines: Iterable[str], texts: Iterable[str]) -> tuple[str, ...]:
    """The names that statements give and texts read."""
    names, text = [line.partition(" = ")[0] for line in lines], "\n".join(texts)
    return tuple(name for name in names if re.search(rf"\b{name}\b", text))


def across(text: str, names: Iterable[str]) -> str:
    """A text that reads what has crossed over."""
    for name in names:
        text = re.sub(rf"\b{name}\b", f"{name}_across", text)
    return text


def of_lane(text: str) -> str:
    """A statement of one key a thread."""
    return re.sub(r"\bkv_idx\b", "own_kv_idx", text)


def stages(exprs: Sequence[Expr], of_rows: frozenset[str]) -> Callable[[Expr], int]:
    """0: fixed for a row block; 1: read for a key alone; 2: for a pair."""
    nodes = list(dict.fromkeys(node for expr in exprs for node in walk(expr)))
    of_key = {n for n in nodes if _is_of_key(n, of_rows)}
    loads = [n for n in nodes if n.op == "load" and n in of_key]
    by_key = {n for load in loads for n in walk(load) if n in of_key}
    by_key |= {n for n in of_key if any(x in loads for x in walk(n))}

    def stage_of(node: Expr) -> int:
        if node in by_key:
            return 1
        return 2 if leaves(node, "index") & ({"kv_idx"} | OF_TILES) or leaves(node, "score") else 0

    return stage_of


def _is_of_key(node: Expr, of_rows: frozenset[str]) -> bool:
    indices = leaves(node, "index")
    return "kv_idx" in indices and not indices & of_rows and not leaves(node, "score")
