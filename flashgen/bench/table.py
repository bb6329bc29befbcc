"""Measurements as rows: printed as a table, written as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .measure import Times


@dataclass(frozen=True)
class Row:
    """One backend on one piece of work.

    Times are medians in milliseconds. Ratios are how many times faster this is than the first
    backend of the same work: the forward alone, and forward and backward together (the forward
    alone where no backward was measured)."""

    work: str
    backend: str
    forward_ms: float
    backward_ms: float | None
    forward_ratio: float
    ratio: float


class Differs(AssertionError):
    """Results differ, or work failed: the rows that there are, and what is wrong."""

    def __init__(self, rows: Sequence[Row], problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.rows = list(rows)


def rows_of(work: str, times: Mapping[str, Times]) -> list[Row]:
    """A row for each backend; the first one is what the others are compared with."""
    base = next(iter(times.values()))
    return [
        Row(
            work,
            backend,
            own.forward_ms,
            own.backward_ms,
            base.forward_ms / own.forward_ms,
            (base.forward_ms if own.backward_ms is None else base.total_ms) / own.total_ms,
        )
        for backend, own in times.items()
    ]


def print_table(rows: Iterable[Row], title: str | None = None) -> None:
    """Print rows to the terminal, a section for each piece of work."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("work")
    table.add_column("backend", no_wrap=True)
    for name in ("forward ms", "backward ms", "x forward", "x both"):
        table.add_column(name, justify="right", no_wrap=True)
    last = None
    for row in rows:
        if last not in (None, row.work):
            table.add_section()
        table.add_row(row.work if row.work != last else "", *_cells(row))
        last = row.work
    Console().print(table)


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """The lines of a table, as BENCHMARKS.md has them."""
    for line in [header, ["---"] * len(header), *rows]:
        yield f"| {' | '.join(map(str, line))} |"


def print_markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows as a table of Markdown."""
    for line in markdown(header, rows):
        print(line)


def _cells(row: Row) -> list[str]:
    backward = "" if row.backward_ms is None else f"{row.backward_ms:.2f}"
    ratios = (f"{row.forward_ratio:.2f}", f"{row.ratio:.2f}")
    return [row.backend, f"{row.forward_ms:.2f}", backward, *ratios]


def write_json(rows: Iterable[Row], file: Path, machine: Mapping[str, object]) -> None:
    """Write rows, and what they were measured on."""
    document = {"machine": dict(machine), "rows": [asdict(row) for row in rows]}
    file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
