"""What rows say: everybody's times of each work side by side, and means over all work."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import groupby

from .table import Row

# Masks that other kernels were written for by hand.
_DENSE = ("full", "causal")


def matrix(
    ms: Mapping[tuple[str, str], float | None], ours: str, base: str, rates: Mapping[str, str]
) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of a table of works and backends: `ms[work, backend]`.

    Behind the times stand `rates[work]`, the ratio to `base`, and where there are others, to the
    fastest of all: how many times as fast `ours` is."""
    backends = list(dict.fromkeys(backend for _, backend in ms))
    backends.sort(key=lambda backend: backend == ours)
    others = [backend for backend in backends if backend != ours]
    header = ["work", *backends, "TFLOP/s (of matmul)", f"x {base}"]
    header += ["x the best peer"] if len(others) > 1 else []
    lines = []
    for work in dict.fromkeys(work for work, _ in ms):
        own = ms.get((work, ours))
        taken = {name: t for name in others if (t := ms.get((work, name))) is not None}
        times = [ms.get((work, name)) for name in backends]
        line = [work, *("" if t is None else f"{t:.3f}" for t in times), rates.get(work, "")]
        best = min(taken.values(), default=None)
        compared = [taken.get(base), best] if len(others) > 1 else [taken.get(base)]
        line += ["" if own is None or t is None else f"{t / own:.3f}" for t in compared]
        lines.append(line)
    return header, lines


def geometric_means(rows: Sequence[Row], ours: str, peer: str) -> list[str]:
    """For each head dimension and length, beside one peer: means and the least, over all masks and
    over those that aren't full or causal. A work is called `D=64 S=8192 causal`."""
    theirs = {row.work: row for row in rows if row.backend == peer}
    mine = [row for row in rows if row.backend == ours and row.work in theirs]
    lines = []
    for shape, group in groupby(mine, lambda row: " ".join(row.work.split()[:2])):
        pairs = [(row, theirs[row.work]) for row in group]
        sparse = [pair for pair in pairs if pair[0].work.split(maxsplit=2)[2] not in _DENSE]
        lines.append(f"{shape} beside {peer}, {len(pairs)} masks: {_both(pairs)}")
        if 0 < len(sparse) < len(pairs):
            lines.append(f"{shape} beside {peer}, {len(sparse)} sparse masks: {_both(sparse)}")
    return lines


def _both(pairs: Sequence[tuple[Row, Row]]) -> str:
    forward = [theirs.forward_ms / ours.forward_ms for ours, theirs in pairs]
    parts = [f"forward {told(forward)}"]
    backward = [
        theirs.backward_ms / ours.backward_ms
        for ours, theirs in pairs
        if ours.backward_ms is not None and theirs.backward_ms is not None
    ]
    if backward:
        parts.append(f"backward {told(backward)}")
    return "; ".join(parts)


def told(ratios: Sequence[float]) -> str:
    """The geometric mean of ratios, and the least."""
    return f"{statistics.geometric_mean(ratios):.3f}, least {min(ratios):.3f}"
