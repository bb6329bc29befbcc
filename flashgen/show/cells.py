"""Grids of tile states made small enough to draw."""

from __future__ import annotations

from collections.abc import Callable

import torch

EMPTY, PARTIAL, FULL = 0, 1, 2


def size(*lengths: int) -> str:
    """`128\N{MULTIPLICATION SIGN}64`"""
    return "\N{MULTIPLICATION SIGN}".join(f"{length:,}" for length in lengths)


def count(number: int, noun: str) -> str:
    """`1 tile`, `1,024 tiles`"""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def pool(states: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, int]:
    """Fewer, larger cells: at most `rows` x `columns`, each a square of so many (the second value).

    A cell is full only if all in it is full, and empty only if all in it is empty."""
    factor = max(1, -(-states.shape[0] // max(1, rows)), -(-states.shape[1] // max(1, columns)))
    if factor == 1:
        return states.cpu(), 1
    least = _fold(states, factor, FULL, torch.amin)
    most = _fold(states, factor, EMPTY, torch.amax)
    cells = torch.where(least == FULL, FULL, torch.where(most == EMPTY, EMPTY, PARTIAL))
    return cells.to(torch.int8).cpu(), factor


def _fold(
    states: torch.Tensor, factor: int, neutral: int, take: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """The least or the largest state of each square; `neutral` fills the ragged edges."""
    for dim in (0, 1):
        missing = -states.shape[dim] % factor
        padding = (0, 0, 0, missing) if dim == 0 else (0, missing)
        states = torch.nn.functional.pad(states, padding, value=neutral)
        states = take(_split(states, dim, factor), dim=dim + 1)
    return states


def _split(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    return x.reshape(*x.shape[:dim], -1, size, *x.shape[dim + 1 :])


def shares(dense: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The share of allowed pairs in each rectangle of `rows` x `columns` elements."""
    missing = (0, -dense.shape[1] % columns, 0, -dense.shape[0] % rows)
    allowed, inside = (
        _split(_split(torch.nn.functional.pad(x, missing), 1, columns).sum(2), 0, rows).sum(1)
        for x in (dense, torch.ones_like(dense))
    )
    return allowed / inside


def rectangles(member: torch.Tensor) -> list[tuple[int, int, int, int]]:
    """A set of cells as few disjoint rectangles (x, y, width, height): runs, merged downwards."""
    edges = torch.nn.functional.pad(member.to(torch.int8), (1, 1)).diff(dim=1)
    rows, starts = (edges == 1).nonzero(as_tuple=True)
    ends = (edges == -1).nonzero(as_tuple=True)[1]
    found: dict[tuple[int, int], tuple[int, int]] = {}
    done: list[tuple[int, int, int, int]] = []
    for y, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        top, below = found.get((start, end), (y, y))
        if below != y:
            done.append((start, top, end - start, below - top))
            top = y
        found[start, end] = top, y + 1
    done += [(x, top, end - x, below - top) for (x, end), (top, below) in found.items()]
    return sorted(done, key=lambda r: (r[1], r[0]))
