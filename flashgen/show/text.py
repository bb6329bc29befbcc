"""Pictures in characters, and the page that `explain` prints."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from .cells import FULL, PARTIAL, count, pool, shares, size

if TYPE_CHECKING:
    from ..schedule import Schedule

WIDTH = 100
# Most characters of a picture in a line; and up to this many elements, one character for each.
_COLUMNS, _SMALL = 96, 32
_SHADES = "·░▒▓█"
_STATES = "·░█"
_HALVES = {(0, 0): "·", (1, 0): "▀", (0, 1): "▄", (1, 1): "█"}


def mask_text(dense: torch.Tensor) -> str:
    """Draw a boolean matrix [Sq, Skv]: `█` is an allowed pair, `·` one that isn't.

    Up to 32 x 32 a character is a pair; up to 96 x 96 it is two queries, one above the other
    (`▀`, `▄`); beyond, its shade says how much of a square is allowed: `█` all, `·` nothing."""
    length = max(dense.shape)
    if length <= _SMALL:
        return "\n".join("".join("·█"[x] for x in row) for row in dense.long().tolist())
    if length <= _COLUMNS:
        return "\n".join(_half_blocks(dense.long().tolist()))
    factor = -(-length // _COLUMNS)
    return "\n".join(
        "".join(map(_shade, row)) for row in shares(dense, 2 * factor, factor).tolist()
    )


def _half_blocks(rows: list[list[int]]) -> Iterator[str]:
    nothing = [0] * len(rows[0])
    for upper, lower in zip(rows[::2], [*rows[1::2], nothing], strict=False):
        yield "".join(_HALVES[pair] for pair in zip(upper, lower, strict=True))


def _shade(share: float) -> str:
    if share in (0.0, 1.0):
        return _SHADES[4 * int(share)]
    return _SHADES[1 + min(2, int(3 * share))]


def schedule_text(schedule: Schedule, *, groups: int = 4) -> str:
    """Draw a schedule's tiles: `██` full, `░░` partial, `··` empty, for the first few (b, h).

    A large grid is drawn with several tiles in a character: full only if all are full, empty only
    if all are empty. Waits for the device."""
    return "\n".join([*_summary(schedule), *_grids(schedule.to_dense(), groups)])


def _summary(schedule: Schedule) -> Iterator[str]:
    tile = size(*schedule.block_size)
    what = f"{schedule.mask_name}, shape={schedule.shape}, tiles {tile}"
    yield f"Schedule({what}, planner={schedule.planner})"
    empty, partial, full = tile_counts(schedule)
    total = empty + partial + full
    density = 100 * (partial + full) / max(1, total)
    kinds = f"{full:,} full, {partial:,} partial, {empty:,} empty"
    size_in_memory = count(schedule.nbytes, "byte")
    yield f"density {density:.2f} %, {count(total, 'tile')}: {kinds}; {size_in_memory}"


def tile_counts(schedule: Schedule) -> tuple[int, int, int]:
    """How many tiles are empty, partial and full."""
    states = schedule.to_dense()
    partial, full = int((states == PARTIAL).sum()), int((states == FULL).sum())
    return states.numel() - partial - full, partial, full


def _grids(states: torch.Tensor, groups: int) -> Iterator[str]:
    batch, heads = states.shape[:2]
    if 0 in states.shape:
        return
    shown = [(b, h) for b in range(batch) for h in range(heads)][:groups]
    for b, h in shown:
        # Two characters side by side are about a square.
        cells, factor = pool(states[b, h], _COLUMNS // 2, _COLUMNS // 2)
        yield f"({b}, {h})" + (f"  a square is {size(factor, factor)} tiles" if factor > 1 else "")
        for row in cells.tolist():
            yield "".join(2 * _STATES[state] for state in row)
    if len(shown) < batch * heads:
        yield f"... {batch * heads - len(shown)} more (b, h)"


def explain_text(sections: Sequence[tuple[str, str]]) -> str:
    """Compose (title, text) pairs into a page of 100 columns; empty texts are left out.

    Lines that are too long are wrapped at spaces; a path stays whole, to be copied."""
    return "\n\n".join(_section(title, body) for title, body in sections if body.strip())


def _section(title: str, body: str) -> str:
    rule = f"── {title} ".ljust(WIDTH, "─")
    return "\n".join([rule, *wrap(body.strip("\n").splitlines(), WIDTH)])


def wrap(lines: Iterable[str], width: int) -> Iterator[str]:
    """Wrap lines at spaces; what stands behind a label (`mask    a < b`) stays behind it."""
    for line in lines:
        text = line.expandtabs(4).rstrip()
        label = re.match(r" *[^\s#]\S*( \S+)? {2,}", text)
        if label is not None and len(text) > width:
            wrapped = list(wrap_formula(text[label.end() :], width, label.end()))
            yield label.group() + wrapped[0].lstrip()
            yield from wrapped[1:]
        else:
            margin = re.match(r" *#? *", text)
            rest = f"{margin.group() if margin is not None else ''}    "
            yield from _at_spaces(text, width, "", rest) or [""]


def _at_spaces(text: str, width: int, first: str, rest: str) -> list[str]:
    """Words stay whole, however long: a path in pieces can't be copied."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_on_hyphens=False,
        break_long_words=False,
    )


def wrap_formula(text: str, width: int, indent: int = 0, hang: int = 0) -> Iterator[str]:
    """Break a formula where it binds least: before an `|` or `&` outside of brackets, if any."""
    parts = _least_bound(text) if len(text) + indent > width else [text]
    if len(parts) == 1:
        yield from _at_spaces(text, width, " " * indent, " " * (indent + 4))
        return
    line = parts[0]
    for part in parts[1:]:
        if indent + len(line) + 1 + len(part) <= width:
            line = f"{line} {part}"
        else:
            yield from wrap_formula(line, width, indent, 4)
            line, indent, hang = part, indent + hang, 0
    yield from wrap_formula(line, width, indent, 4)


def _least_bound(text: str) -> list[str]:
    """Split before the operators that are in the fewest brackets; `|` binds less than `&`."""
    found: dict[tuple[int, int], list[int]] = {}
    depth = 0
    for position, character in enumerate(text):
        depth += (character in "([") - (character in ")]")
        if character in "|&" and position:
            found.setdefault((depth, "|&".index(character)), []).append(position)
    if not found:
        return [text]
    cuts = [0, *found[min(found)], len(text)]
    return [text[start:end].strip() for start, end in pairwise(cuts)]
