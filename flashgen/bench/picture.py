"""Ratios of a benchmark as a picture: bars, in SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from xml.sax.saxutils import escape

from .table import Row

_LEFT, _WIDTH, _BAR, _GAP, _TOP = 230, 460, 11, 12, 58
# Longer bars are cut, so that one of them doesn't make all others small.
_LONGEST = 3.0
_COLOURS = ("#8a94a3", "#2f6fe0", "#ee8b2c", "#4a9d5b", "#9a5fc0")


def picture(rows: Sequence[Row], title: str) -> str:
    """How many times faster each backend is than the first one of its work: the forward dark, the
    backward pale below it. An SVG document."""
    backends = list(dict.fromkeys(row.backend for row in rows))
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(backends)}
    most = min(_LONGEST, max((max(_ratios(rows, row)) for row in rows), default=1.0))
    parts: list[str] = [_text(16, 24, title, "font-weight='bold'")]
    parts += _legend(colours)
    y = float(_TOP)
    for work, group in groupby(rows, lambda row: row.work):
        own = list(group)
        bars = [bar for row in own for bar in _bars(rows, row, colours[row.backend])]
        parts.append(_text(_LEFT - 8, y + len(bars) * _BAR / 2 + 4, work, "text-anchor='end'"))
        for ratio, colour, opacity in bars:
            width = min(ratio, most) / most * _WIDTH
            parts.append(
                f"<rect x='{_LEFT}' y='{y:g}' width='{width:.1f}' height='{_BAR - 1}' "
                f"fill='{colour}' fill-opacity='{opacity}'/>"
            )
            parts.append(
                _text(_LEFT + width + 4, y + _BAR - 2, _label(ratio, most), "font-size='9'")
            )
            y += _BAR
        y += _GAP
    one = _LEFT + _WIDTH / most
    parts.append(
        f"<line x1='{one:.1f}' x2='{one:.1f}' y1='{_TOP - 6}' y2='{y:g}' stroke='#333' "
        "stroke-dasharray='3 3'/>"
    )
    width, height = _LEFT + _WIDTH + 60, y + 8
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height:g}' "
        f"width='{width}' height='{height:g}' font-family='sans-serif' font-size='12'>"
    )
    ground = "<rect width='100%' height='100%' fill='white'/>"
    return "\n".join([head, ground, *parts, "</svg>"]) + "\n"


def _label(ratio: float, most: float) -> str:
    return f"{ratio:.2f}" if ratio <= most else f"… {ratio:.2f}"


def _ratios(rows: Sequence[Row], row: Row) -> tuple[float, ...]:
    """How many times as long a row takes forward, and backward where both have a backward."""
    base = next(other for other in rows if other.work == row.work)
    if base.backward_ms is None or row.backward_ms is None:
        return (row.forward_ratio,)
    return row.forward_ratio, base.backward_ms / row.backward_ms


def _bars(rows: Sequence[Row], row: Row, colour: str) -> Iterator[tuple[float, str, float]]:
    for ratio, opacity in zip(_ratios(rows, row), (1.0, 0.5), strict=False):
        yield ratio, colour, opacity


def _legend(colours: dict[str, str]) -> Iterator[str]:
    x = 16.0
    for name, colour in colours.items():
        yield f"<rect x='{x:g}' y='36' width='10' height='10' fill='{colour}'/>"
        yield _text(x + 14, 45, name)
        x += 34 + 6.6 * len(name)


def _text(x: float, y: float, words: str, more: str = "") -> str:
    return f"<text x='{x:g}' y='{y:g}' {more}>{escape(words)}</text>"
