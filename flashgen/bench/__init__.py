"""Measurements that anyone can repeat: `python -m flashgen bench cpu`."""

from __future__ import annotations

import argparse
import importlib
import platform
from collections.abc import Sequence
from pathlib import Path

from .picture import picture
from .table import Row, print_table, write_json

__all__ = ["Row", "main", "print_table", "write_json"]

# A benchmark is a module here with `run(rounds) -> list[Row]` and `title() -> str`; it may have a
# `show(rows)` of its own, and a `summary(rows) -> str`.
BENCHMARKS = ("cpu", "decode", "first", "gpu", "order", "overhead", "planning")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a benchmark, print its table, and write it as JSON if asked to."""
    parser = argparse.ArgumentParser(prog="flashgen bench", description=__doc__)
    parser.add_argument("name", choices=BENCHMARKS, help="what to measure")
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds; medians are shown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here as well")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the ratios into this file")
    parser.add_argument("--only", default="", metavar="TEXT", help="gpu: work that has this name")
    parser.add_argument(
        "--lengths", type=int, nargs="+", metavar="S", help="gpu: sequence lengths (8192)"
    )
    given = parser.parse_args(argv)
    if given.rounds < 1:
        parser.error("--rounds must be at least 1")
    bench = importlib.import_module(f".{given.name}", __name__)
    chosen = {"only": given.only, "lengths": given.lengths}
    chosen = {name: value for name, value in chosen.items() if value}
    if chosen and given.name != "gpu":
        parser.error(f"{given.name} has no --{next(iter(chosen))}")
    rows: list[Row] = bench.run(given.rounds, **chosen)
    if hasattr(bench, "show"):
        bench.show(rows)
    else:
        print_table(rows, bench.title())
    if hasattr(bench, "summary"):
        print(bench.summary(rows))
    if given.json is not None:
        machine = {"benchmark": given.name, "title": bench.title(), "cpu": platform.processor()}
        write_json(rows, given.json, machine)
    if given.svg is not None:
        given.svg.write_text(picture(rows, bench.title()), encoding="utf-8")
    return 0
