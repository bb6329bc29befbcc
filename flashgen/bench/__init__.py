"""Measurements that anyone can repeat: `python -m flashgen bench cpu`."""

from __future__ import annotations

import argparse
import importlib
import platform
from collections.abc import Sequence
from pathlib import Path

from .table import Row, print_table, write_json

__all__ = ["Row", "main", "print_table", "write_json"]

# A benchmark is a module here with `run(rounds) -> list[Row]` and `title() -> str`; it may have a
# `show(rows)` of its own, and a `summary(rows) -> str`.
BENCHMARKS = ("cpu", "decode", "gpu", "order", "overhead", "planning")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a benchmark, print its table, and write it as JSON if asked to."""
    parser = argparse.ArgumentParser(prog="flashgen bench", description=__doc__)
    parser.add_argument("name", choices=BENCHMARKS, help="what to measure")
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds; medians are shown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here as well")
    given = parser.parse_args(argv)
    if given.rounds < 1:
        parser.error("--rounds must be at least 1")
    bench = importlib.import_module(f".{given.name}", __name__)
    rows: list[Row] = bench.run(given.rounds)
    if hasattr(bench, "show"):
        bench.show(rows)
    else:
        print_table(rows, bench.title())
    if hasattr(bench, "summary"):
        print(bench.summary(rows))
    if given.json is not None:
        machine = {"benchmark": given.name, "title": bench.title(), "cpu": platform.processor()}
        write_json(rows, given.json, machine)
    return 0
