"""Pictures as SVG: small, self-contained, readable on light and on dark pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape, quoteattr

import torch

from .cells import FULL, PARTIAL, count, pool, rectangles, size
from .text import tile_counts, wrap, wrap_formula

if TYPE_CHECKING:
    from ..schedule import Schedule

# The longer side of the matrix, in pixels, and the most cells along it.
_SIDE, _CELLS = 320, 128
_LEFT, _RIGHT, _THIN = 64, 24, 12
# The widths of a character of the two fonts at 11 pixels.
_SANS, _MONO = 6.1, 6.7

_STYLE = """
.fg-card{fill:#fff;stroke:#d0d7de}.fg-ink{fill:#1f2328}.fg-dim{fill:#59636e}
.fg-full{fill:#2f6fde}.fg-partial{fill:#ef8a2b}.fg-masked{fill:#f7d9bb}.fg-empty{fill:#eef1f4}
.fg-line{fill:none;stroke:#8c959f;stroke-opacity:.6}
.fg-swatch{stroke:#8c959f;stroke-opacity:.4}.fg-fine{stroke:#fff;stroke-opacity:.6}
.fg-ink,.fg-dim{font:11px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
.fg-ink.fg-title{font-size:15px;font-weight:600}
.fg-ink.fg-mono{font-family:ui-monospace,Menlo,Consolas,monospace;white-space:pre}
@media(prefers-color-scheme:dark){.fg-card{fill:#0d1117;stroke:#3d444d}.fg-ink{fill:#f0f6fc}
.fg-dim{fill:#9198a1}.fg-full{fill:#4c8dff}.fg-masked{fill:#4f3a26}.fg-empty{fill:#1c222b}
.fg-line{stroke:#7d8590}.fg-fine{stroke:#0d1117}}
""".replace("\n", "")


@dataclass(frozen=True)
class _Matrix:
    """What is drawn.

    `layers` pairs a class of the style with the cells [rows, columns] that it paints. A cell is
    `cell` elements (queries, keys); tiles of `tile` elements are outlined."""

    layers: tuple[tuple[str, torch.Tensor], ...]
    lengths: tuple[int, int]
    q_start: int
    cell: tuple[int, int] = (1, 1)
    tile: tuple[int, int] | None = None

    @property
    def pixel(self) -> float:
        """Pixels of an element."""
        return _SIDE / max(*self.lengths, 1)

    @property
    def width(self) -> float:
        return max(self.lengths[1] * self.pixel, _THIN)

    @property
    def height(self) -> float:
        return max(self.lengths[0] * self.pixel, _THIN)


def schedule_svg(
    schedule: Schedule, *, title: str | None = None, formula: str = "", note: str = ""
) -> str:
    """Draw the tiles of a schedule's first (b, h), full, partial or empty, as an SVG document.

    A large grid is drawn coarser, so the picture of a million positions takes no longer than that
    of a thousand. `formula` is printed below, `note` under the title."""
    cells, factor = pool(schedule.to_dense()[0, 0], _CELLS, _CELLS)
    matrix = _Matrix(
        (("partial", cells == PARTIAL), ("full", cells == FULL)),
        (schedule.q_len, schedule.kv_len),
        _start(schedule),
        (schedule.block_size[0] * factor, schedule.block_size[1] * factor),
        schedule.block_size,
    )
    heading = schedule.mask_name if title is None else title
    return _document(matrix, heading, [*_facts(schedule), note], _legend(schedule), formula)


def mask_svg(
    dense: torch.Tensor,
    schedule: Schedule | None = None,
    *,
    title: str = "",
    formula: str = "",
    note: str = "",
) -> str:
    """Draw a boolean matrix [Sq, Skv] as an SVG document, the schedule's tiles outlined.

    Allowed pairs are blue in full tiles and orange in partial ones, whose other pairs are pale:
    computed, and masked. Without a schedule all allowed pairs are blue. A matrix of more than 128
    on a side is drawn from the schedule alone, or pooled."""
    if schedule is None:
        matrix = _elements(dense)
        return _document(matrix, title, [size(*dense.shape), note], [], formula)
    if max(dense.shape) > _CELLS:
        return schedule_svg(schedule, title=title, formula=formula, note=note)
    matrix = _elements_in_tiles(dense.cpu(), schedule)
    legend = _legend(schedule)
    legend.insert(2, ("masked", "masked there"))
    return _document(matrix, title, [*_facts(schedule), note], legend, formula)


def _elements(dense: torch.Tensor) -> _Matrix:
    cells, factor = pool(dense.to(torch.int8) * FULL, _CELLS, _CELLS)
    layers = (("masked", cells == PARTIAL), ("full", cells == FULL))
    rows, columns = dense.shape
    return _Matrix(layers, (rows, columns), columns - rows, (factor, factor))


def _elements_in_tiles(dense: torch.Tensor, schedule: Schedule) -> _Matrix:
    state = _spread(schedule.to_dense()[0, 0].cpu(), schedule.block_size)
    state = state[: dense.shape[0], : dense.shape[1]]
    layers = (
        ("masked", ~dense & (state == PARTIAL)),
        ("partial", dense & (state == PARTIAL)),
        ("full", dense & (state == FULL)),
    )
    lengths = (schedule.q_len, schedule.kv_len)
    return _Matrix(layers, lengths, _start(schedule), tile=schedule.block_size)


def _spread(states: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    return states.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)


def _start(schedule: Schedule) -> int:
    """The position of the first query; where it varies by batch, the first one's."""
    if schedule.q_offset is None:
        return schedule.kv_len - schedule.q_len
    if isinstance(schedule.q_offset, int):
        return schedule.q_offset
    return int(schedule.q_offset.reshape(-1)[0])


def _facts(schedule: Schedule) -> list[str]:
    batch, heads, rows, columns = schedule.grid.shape
    tiles = f"{count(rows * columns, 'tile')} of {size(*schedule.block_size)}"
    facts = [f"{size(*schedule.shape[2:])}, {tiles}, {100 * schedule.density:.1f} % visited"]
    if batch * heads > 1:
        facts.append(f"b 0 of {batch}, h 0 of {heads}")
    return facts


def _legend(schedule: Schedule) -> list[tuple[str, str]]:
    names = ("empty", "partial", "full")
    counts = zip(names, tile_counts(schedule), strict=True)
    return [(name, f"{name}: {many:,}") for name, many in counts][::-1]


def _document(
    matrix: _Matrix,
    title: str,
    facts: Sequence[str],
    legend: Sequence[tuple[str, str]],
    formula: str,
) -> str:
    width = _LEFT + _SIDE + _RIGHT
    parts = [f'<text class="fg-ink fg-title" x="20" y="30">{escape(title)}</text>']
    lines = list(wrap(filter(None, facts), int((width - 40) / _SANS)))
    parts += [_text("dim", 20, 48 + 15 * i, line) for i, line in enumerate(lines)]
    left, top = _LEFT + (_SIDE - matrix.width) / 2, 77.0 + 15 * len(lines)
    parts += _axes(matrix, left, top)
    parts += _cells(matrix, left, top)
    y = top + matrix.height + 26
    for entries in _legend_lines(legend, width):
        parts += [piece.replace("@y", _number(y)) for piece in entries]
        y += 18
    y += 4
    for line in wrap_formula(formula, int((width - 40) / _MONO)):
        parts.append(_text("ink fg-mono", 20, y, line))
        y += 15
    return _svg(width, y + 2, title, parts)


def _svg(width: float, height: float, title: str, parts: list[str]) -> str:
    label = quoteattr(title or "attention mask")
    view = f"0 0 {_number(width)} {_number(height)}"
    page = f'width="{_number(width)}" height="{_number(height)}"'
    card = f'width="{_number(width - 1)}" height="{_number(height - 1)}" rx="8"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {page} viewBox="{view}" role="img"'
    return "\n".join(
        [
            f"{head} aria-label={label}>",
            f"<style>{_STYLE}</style>",
            f'<rect class="fg-card" x=".5" y=".5" {card}/>',
            *parts,
            "</svg>\n",
        ]
    )


def _cells(matrix: _Matrix, left: float, top: float) -> Iterator[str]:
    """The empty ground, the layers on it, and lines between elements and tiles."""
    width, height = _number(matrix.width), _number(matrix.height)
    rows, columns = (n / size for n, size in zip(matrix.lengths, matrix.cell, strict=True))
    place = f'x="{_number(left)}" y="{_number(top)}" width="{width}" height="{height}"'
    yield f'<rect class="fg-empty" {place}/>'
    # A unit is a cell here. Cells at the ragged ends reach beyond the lengths, and are clipped.
    yield (
        f'<svg {place} viewBox="0 0 {columns:.6g} {rows:.6g}" preserveAspectRatio="none" '
        f'shape-rendering="crispEdges">'
    )
    for name, member in matrix.layers:
        path = "".join(f"M{x} {y}h{w}v{h}h-{w}" for x, y, w, h in rectangles(member))
        if path:
            yield f'<path class="fg-{name}" d="{path}"/>'
    yield "</svg>"
    yield f'<g shape-rendering="crispEdges" transform="translate({_number(left)} {_number(top)})">'
    if matrix.cell == (1, 1) and matrix.pixel >= 8:
        yield _lines(matrix, (1, 1), "fine")
    if matrix.tile is not None and min(matrix.tile) * matrix.pixel >= 6:
        yield _lines(matrix, matrix.tile, "line")
    yield f'<rect class="fg-line" width="{width}" height="{height}"/></g>'


def _lines(matrix: _Matrix, step: tuple[int, int], name: str) -> str:
    """Lines between rows and columns of so many elements."""
    (q_len, kv_len), (width, height) = matrix.lengths, (matrix.width, matrix.height)
    ys = (_number(i * height / q_len) for i in range(step[0], q_len, step[0]))
    xs = (_number(i * width / kv_len) for i in range(step[1], kv_len, step[1]))
    rows = "".join(f"M0 {y}h{_number(width)}" for y in ys)
    columns = "".join(f"M{x} 0v{_number(height)}" for x in xs)
    return f'<path class="fg-{name}" d="{rows}{columns}"/>'


def _axes(matrix: _Matrix, left: float, top: float) -> Iterator[str]:
    """Positions of keys above the matrix, of queries at its left."""
    middle = top + matrix.height / 2
    yield _text("dim", left + matrix.width / 2, top - 20, "keys (kv_idx)", "middle")
    for position, at in _ticks(0, matrix.lengths[1], matrix.width):
        yield _text("dim", left + at, top - 5, position, "middle")
    turned = f' transform="rotate(-90 20 {_number(middle)})"'
    if matrix.height >= 90:
        yield _text("dim", 20, middle, "queries (q_idx)", "middle", turned)
    for position, at in _ticks(matrix.q_start, matrix.lengths[0], matrix.height):
        yield _text("dim", left - 6, top + at + 4, position, "end")


def _ticks(start: int, length: int, pixels: float) -> Iterator[tuple[str, float]]:
    """Positions to write at an axis, powers of two apart, and where: the middle of the element."""
    step = 1
    while length / step > max(1, pixels / 36):
        step *= 2
    for position in range(-(-start // step) * step, start + length, step):
        yield _short(position), (position - start + 0.5) * pixels / length


def _short(position: int) -> str:
    for unit, many in (("M", 1 << 20), ("K", 1 << 10)):
        if abs(position) >= 8 * 1024 and position % many == 0:
            return f"{position // many}{unit}"
    return str(position)


def _legend_lines(legend: Sequence[tuple[str, str]], width: float) -> Iterator[list[str]]:
    """Swatches with their words, in lines of the page's width; `@y` stands for the height."""
    line: list[str] = []
    x = 20.0
    for name, words in legend:
        needed = 16 + _SANS * len(words)
        if line and x + needed > width - 16:
            yield line
            line, x = [], 20.0
        swatch = f'<g transform="translate({_number(x)} @y)">'
        swatch += f'<rect class="fg-{name} fg-swatch" y="-9" width="10" height="10" rx="2"/>'
        line.append(f"{swatch}{_text('dim', 15, 0, words)}</g>")
        x += needed + 12
    if line:
        yield line


def _text(name: str, x: float, y: float, words: str, anchor: str = "start", more: str = "") -> str:
    place = f'x="{_number(x)}" y="{_number(y)}"'
    ends = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text class="fg-{name}" {place}{ends}{more}>{escape(words)}</text>'


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
