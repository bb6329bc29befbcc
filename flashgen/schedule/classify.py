"""Planning with PyTorch: every tile's state, by the tile rule, by probes, by its elements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import torch

from ..bounds import tile_rule
from ..expr import Env, Expr, evaluate, walk
from ..geometry import Geometry
from ..spec import Bound

Planner = Literal["auto", "bounds", "exact"]
EMPTY, PARTIAL, FULL = 0, 1, 2

# Tiles decided at a time, and elements looked at a time: what bounds the memory of planning.
_TILES, _ELEMENTS = 1 << 19, 1 << 21


def grid_of(bound: Bound, geometry: Geometry, block_size: tuple[int, int]) -> tuple[int, ...]:
    """[B|1, H|1, query tiles, key tiles]: 1 where nothing varies by batch or head.

    Packed: [1, H|1, query tiles of all sequences, key tiles of the longest]."""
    by_batch = geometry.varies_by_batch or bound.spec.uses("b")
    if geometry.packing is not None:
        heads = geometry.heads if bound.spec.uses("h", "h_kv") else 1
        return 1, heads, geometry.packing.rows(block_size[0]), -(-geometry.kv_len // block_size[1])
    return (
        geometry.batch if by_batch else 1,
        geometry.heads if bound.spec.uses("h", "h_kv") else 1,
        -(-geometry.q_len // block_size[0]),
        -(-geometry.kv_len // block_size[1]),
    )


def classify(
    bound: Bound, geometry: Geometry, block_size: tuple[int, int], planner: Planner = "auto"
) -> torch.Tensor:
    """The state of each tile: int8 [B|1, H|1, query tiles, key tiles].

    `bounds` leaves what the tile rule can't decide PARTIAL; `auto` and `exact` look at the
    elements of those tiles, which costs at most Sq x Skv evaluations of the mask."""
    grid = grid_of(bound, geometry, block_size)
    states = torch.zeros(grid, dtype=torch.int8, device=geometry.device)
    if 0 in grid:
        return states
    if geometry.packing is not None:
        first = geometry.packing.first_rows(block_size[0])[:-1].tolist()
        for row, own in zip(first, geometry.sequences(), strict=True):
            found = classify(bound, own, block_size, planner)[0]
            states[0, :, row : row + found.shape[1], : found.shape[2]] = found
        return states
    tiles = _Tiles(bound, geometry, block_size, grid)
    rows = max(1, _TILES // max(1, grid[0] * grid[1] * grid[3]))
    for start in range(0, grid[2], rows):
        part = slice(start, min(start + rows, grid[2]))
        states[:, :, part] = tiles.states(part, planner)
    return states


_REDUCTIONS: dict[tuple[bool, str], Callable[..., torch.Tensor]] = {
    (True, "max"): torch.any,
    (True, "min"): torch.all,
    (False, "max"): torch.amax,
    (False, "min"): torch.amin,
}


class _Tiles:
    """The tiles of one mask on one geometry; positions outside the lengths are clipped away."""

    def __init__(
        self, bound: Bound, geometry: Geometry, block: tuple[int, int], grid: tuple[int, ...]
    ) -> None:
        self.mask, self.bound, self.geometry, self.block = bound.spec.mask, bound, geometry, block
        self.rule = tile_rule(self.mask)
        self.grid, device = grid, geometry.device
        batch, heads = grid[:2]
        self.b = torch.arange(batch, device=device).reshape(-1, 1, 1, 1) + geometry.first
        self.h = torch.arange(heads, device=device).reshape(1, -1, 1, 1)
        offset = geometry.offset
        if isinstance(offset, torch.Tensor):
            offset = offset.long().reshape(-1, 1, 1, 1)
        self.offset: torch.Tensor | int = offset
        lens = geometry.kv_lens
        full = torch.tensor(geometry.kv_len, device=device)
        self.kv_len = full if lens is None else lens.long().reshape(-1, 1, 1, 1)
        self.summaries = {node: self._summary(node) for node in self._tile_nodes()}

    def _tile_nodes(self) -> list[Expr]:
        nodes = (n for e in (self.rule.may, self.rule.must) for n in walk(e) if n.op == "tile")
        return list(dict.fromkeys(nodes))

    def _positions(self, side: str, rows: torch.Tensor) -> torch.Tensor:
        """Positions of rows or columns of elements, clipped to the valid ones."""
        if side == "q":
            return rows.clamp(max=self.geometry.q_len - 1) + self.offset
        return torch.minimum(rows, (self.kv_len - 1).clamp(min=0))

    def _env(self, b: torch.Tensor, h: torch.Tensor, kv_len: torch.Tensor, **index: object) -> Env:
        lengths = {
            "q_len": torch.tensor(self.geometry.q_len, device=self.geometry.device),
            "kv_len": kv_len,
        }
        heads = {"b": b, "h": h, "h_kv": h // self.geometry.group}
        scalars, tensors = dict(self.bound.scalars), dict(self.bound.tensors)
        return Env({**heads, **lengths, **index}, scalars, tensors)  # type: ignore[dict-item]

    def _summary(self, node: Expr) -> torch.Tensor:
        """`min[q](x)` for every tile: [.., query tiles, 1] or [.., 1, key tiles]."""
        side, end = node.attr
        dim = {"q": 2, "kv": 3}[side]
        count, size = self.grid[dim], self.block[dim - 2]
        view = [1, 1, 1, 1]
        view[dim] = count * size
        rows = torch.arange(count * size, device=self.geometry.device).reshape(view)
        symbol = {"q": "q_idx", "kv": "kv_idx"}[side]
        env = self._env(self.b, self.h, self.kv_len, **{symbol: self._positions(side, rows)})
        values = evaluate(node.args[0], env)
        values = values + torch.zeros(view, dtype=values.dtype, device=values.device)
        shape = [*values.shape[:dim], count, size, *values.shape[dim + 1 :]]
        reduce = _REDUCTIONS[node.kind == "bool", end]
        return reduce(values.reshape(shape), dim + 1)

    def states(self, part: slice, planner: Planner) -> torch.Tensor:
        """The states of some rows of tiles."""
        shape = (*self.grid[:2], part.stop - part.start, self.grid[3])
        key_tiles = torch.arange(self.grid[3], device=self.geometry.device)
        alive = (key_tiles * self.block[1] < self.kv_len).expand(shape)
        env = self._env(self.b, self.h, self.kv_len)
        for node, summary in self.summaries.items():
            env.values[node] = summary[:, :, part] if node.attr[0] == "q" else summary
        may = evaluate(self.rule.may, env).expand(shape) & alive
        must = evaluate(self.rule.must, env).expand(shape) & alive
        states = may.to(torch.int8) + (may & must)
        if planner != "bounds" and self.mask is not None:
            self._decide(states, may & ~must, part)
        return states

    def _decide(self, states: torch.Tensor, open_: torch.Tensor, part: slice) -> None:
        """Settle the tiles that the rule left open: corners first, then all elements."""
        where = open_.nonzero(as_tuple=True)
        if not where[0].numel():
            return
        b, h, row, column = where
        corners = self._values(b, h, row + part.start, column, corners=True)
        rest = ~(corners.any(dim=(1, 2)) & ~corners.all(dim=(1, 2)))
        b, h, row, column = (x[rest] for x in where)
        step = max(1, _ELEMENTS // (self.block[0] * self.block[1]))
        for i in _slices(len(b), step):
            values = self._values(b[i], h[i], row[i] + part.start, column[i])
            any_, all_ = values.any(dim=(1, 2)), values.all(dim=(1, 2))
            states[b[i], h[i], row[i], column[i]] = any_.to(torch.int8) + all_

    def _values(
        self,
        b: torch.Tensor,
        h: torch.Tensor,
        row: torch.Tensor,
        column: torch.Tensor,
        corners: bool = False,
    ) -> torch.Tensor:
        """The mask on the elements of some tiles, [n, queries, keys]; or on their corners."""
        b, h, row, column = (x.reshape(-1, 1, 1) for x in (b, h, row, column))
        kv_len = self.kv_len if self.kv_len.ndim == 0 else self.kv_len.reshape(-1)[b]
        offset = self.offset
        if isinstance(offset, torch.Tensor):
            offset = offset.reshape(-1)[b if offset.numel() > 1 else torch.zeros_like(b)]
        q, k = (self._inside(size, corners) for size in self.block)
        q_rows = (row * self.block[0] + q.reshape(1, -1, 1)).clamp(max=self.geometry.q_len - 1)
        columns = column * self.block[1] + k.reshape(1, 1, -1)
        columns = torch.minimum(columns, (kv_len - 1).clamp(min=0))
        first = self.geometry.first
        env = self._env(b + first, h, kv_len, q_idx=q_rows + offset, kv_idx=columns)
        assert self.mask is not None
        shape = (len(b), q.numel(), k.numel())
        return evaluate(self.mask, env).expand(shape)

    def _inside(self, size: int, corners: bool) -> torch.Tensor:
        device = self.geometry.device
        if corners:
            return torch.tensor([0, size - 1], device=device)
        return torch.arange(size, device=device)


def _slices(count: int, step: int) -> Iterator[slice]:
    for start in range(0, count, step):
        yield slice(start, start + step)
