"""The mask in an attention loop: how the pairs of a cut tile are told apart."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..expr import Expr, leaves
from ..lower import Lowered, fewest
from ..order import ordered
from ..spec import Spec


@dataclass(frozen=True)
class Cut:
    """Statements of a row block, statements of a tile, and the test of each pair."""

    row_lines: tuple[str, ...]
    tile_lines: tuple[str, ...]
    keep: str


@dataclass(frozen=True)
class MaskText:
    """A mask as statements. `ordered`: the same where `holds`, for data in order; None without."""

    general: Cut
    ordered: Cut | None = None
    holds: str = ""
    helpers: frozenset[str] = frozenset()

    @property
    def assigned(self) -> frozenset[str]:
        """Names that the statements give."""
        cuts = [self.general, *([self.ordered] if self.ordered else [])]
        lines = [line for cut in cuts for part in (cut.row_lines, cut.tile_lines) for line in part]
        return frozenset(line.partition(" = ")[0] for line in lines)


def mask_text(
    spec: Spec, fixed: str, lower: Callable[[list[Expr]], Lowered], by_range: bool = True
) -> MaskText:
    """The mask for a kernel whose rows are fixed along `fixed`: `q_idx` or `kv_idx`.

    `lower` writes expressions in two stages, (row block, tile); `by_range`: with the form for
    data in order, whose tables the spec names."""
    if spec.mask is None:
        return MaskText(Cut((), (), ""))
    moving = "kv_idx" if fixed == "q_idx" else "q_idx"
    cheaper = ordered(spec.mask, fixed) if by_range else None
    exprs = [fewest(spec.mask, moving)]
    exprs += [fewest(cheaper.mask, moving), cheaper.holds] if cheaper else []
    lowered = lower(exprs)
    keep = lowered.results[0]
    rows, tile = lowered.statements
    if cheaper is None:
        return MaskText(Cut(rows, tile, keep), helpers=lowered.helpers)
    general_tile = needed(tile, [keep])
    general_rows = needed(rows, [keep, *general_tile])
    other = tuple(line for line in rows if line not in general_rows)
    ranges = Cut(other, needed(tile, [lowered.results[1]]), lowered.results[1])
    general = Cut(general_rows, general_tile, keep)
    return MaskText(general, ranges, lowered.results[2], lowered.helpers)


def needed(lines: Iterable[str], texts: Iterable[str]) -> tuple[str, ...]:
    """The statements that some texts need, in their order."""
    lines = tuple(lines)
    words = {word for text in texts for word in re.findall(r"\w+", text)}
    kept = []
    for line in reversed(lines):
        name, _, value = line.partition(" = ")
        if name in words:
            words.update(re.findall(r"\w+", value))
            kept.append(line)
    return tuple(reversed(kept))


def keep_by_key(spec: Spec, keep: str) -> str:
    """A test shaped like the keys at least, so that it can be selected by key."""
    if not keep:
        return "kv_idx >= 0"
    return keep if "kv_idx" in leaves(spec.mask, "index") else f"(kv_idx >= 0) & ({keep})"
