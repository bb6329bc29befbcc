"""What rows say: one side beside the best of the others, and means over all work."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import groupby

from .table import Row, markdown

# Masks that other kernels were written for by hand.
_DENSE = ("full", "causal")


def best_peers(rows: Sequence[Row], ours: str) -> list[str]:
    """A table of Markdown: for each work how many times as fast as the best peer, and who it is."""
    lines = []
    for work, group in groupby(rows, lambda row: row.work):
        own = list(group)
        mine = next((row for row in own if row.backend == ours), None)
        others = [row for row in own if row.backend != ours]
        if mine is not None and others:
            forward = min(others, key=lambda row: row.forward_ms)
            cells = (f"{forward.forward_ms / mine.forward_ms:.3f}", forward.backend)
            lines.append((work, *cells, *_backward(mine, others)))
    header = ("work", "forward, x the best peer", "which is", "backward", "which is")
    return list(markdown(header, lines)) if lines else []


def _backward(mine: Row, others: Sequence[Row]) -> tuple[str, str]:
    timed = [(row.backward_ms, row.backend) for row in others if row.backward_ms is not None]
    if mine.backward_ms is None or not timed:
        return "", ""
    ms, backend = min(timed)
    return f"{ms / mine.backward_ms:.3f}", backend


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
