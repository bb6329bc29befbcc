"""Measurements that anyone can repeat: `python -m flashgen bench cpu`."""

from __future__ import annotations

import argparse
import importlib
import inspect
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from .picture import picture
from .table import Differs, Row, print_table, write_json

__all__ = ["Row", "main", "print_table", "write_json"]

# A benchmark is a module here with `run(rounds) -> list[Row]` and `title() -> str`; it may have a
# `show(rows)` of its own, and a `summary(rows) -> str`. What else `run` takes are options.
BENCHMARKS = (
    *("cpu", "decode", "first", "flashmask", "gpu", "order", "overhead", "planning", "scores"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a benchmark, print its table, and write it as JSON if asked to.

    Returns 1 where results differ or work failed: what there is was printed before."""
    parser = _parser()
    given = parser.parse_args(argv)
    if given.rounds < 1:
        parser.error("--rounds must be at least 1")
    bench = importlib.import_module(f".{given.name}", __name__)
    options: dict[str, Any] = {n: getattr(given, n) for n in ("only", "lengths", "documents")}
    options = {name: value for name, value in options.items() if value}
    for name in options:
        if name not in inspect.signature(bench.run).parameters:
            parser.error(f"{given.name} has no --{name}")
    problems = ""
    try:
        rows: list[Row] = bench.run(given.rounds, **options)
    except Differs as error:
        rows, problems = error.rows, str(error)
    _report(bench, rows, given)
    if problems:
        print(problems, file=sys.stderr)
    return 1 if problems else 0


def _report(bench: ModuleType, rows: list[Row], given: argparse.Namespace) -> None:
    if hasattr(bench, "show"):
        bench.show(rows)
    else:
        print_table(rows, bench.title())
    if hasattr(bench, "summary"):
        print(f"\n{bench.summary(rows)}")
    if given.json is not None:
        machine = {"benchmark": given.name, "title": bench.title(), "cpu": platform.processor()}
        write_json(rows, given.json, machine)
    if given.svg is not None:
        given.svg.write_text(picture(rows, bench.title()), encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flashgen bench", description=__doc__)
    add = parser.add_argument
    add("name", choices=BENCHMARKS, help="what to measure")
    add("--rounds", type=int, default=9, help="timed rounds; medians are shown")
    add("--json", type=Path, metavar="FILE", help="write the rows here as well")
    add("--svg", type=Path, metavar="FILE", help="draw the ratios into this file")
    some = "gpu, flashmask, scores: "
    only = f"{some}work whose name contains one of these; $ is the end of a name"
    add("--only", nargs="+", metavar="TEXT", help=only)
    add("--lengths", type=int, nargs="+", metavar="S", help=f"{some}sequence lengths")
    add("--documents", type=Path, metavar="FILE", help="flashmask: other lists of documents")
    return parser
