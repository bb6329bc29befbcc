"""Documents in order are sequences: each with tiles of its own, from its first position on.

A mask that lets documents see nothing but themselves cuts a tile at each end of a document. Where
equal ids lie together, documents are sequences one after another, and a schedule of such, of the
mask without the ids, has none of these cuts. Whether they do is known on the device only."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..expr import Expr, leaves, make, walk
from ..geometry import Geometry
from ..order import Ranges, Table, apart
from ..records.tape import Tapes
from ..spec import Bound, Spec
from ..storage import Packing
from .runs import Runs

# Positions of a document on average, at least: shorter ones fill their tiles badly.
FEWEST = 128
# Queries of all heads, at least: one more kernel is launched, which looks whether there is work.
ROWS = 1 << 17


@dataclass(frozen=True, eq=False)
class Apart:
    """A call whose documents may be sequences: the rest of its mask, without data; where the ids
    are; how many elements of the batch have so many positions each; and the tile."""

    bound: Bound
    table: Table
    places: tuple[Expr, ...]
    batch: int
    length: int
    block: tuple[int, int]

    @property
    def most(self) -> int:
        """Documents of one element, at most."""
        return max(1, self.length // FEWEST)

    def geometry(self, cu: torch.Tensor) -> Geometry:
        """That of the sequences that begin at `cu`, of one head: their masks read none."""
        total = self.batch * self.length
        packing = Packing(cu, cu, total, total)
        size = packing.batch, 1, 1, self.length, self.length
        return Geometry(*size, cu.device, 0, cu.diff(), packing)


def apart_of(bound: Bound, geometry: Geometry, block: tuple[int, int]) -> Apart | None:
    """A call's documents as sequences on tiles of a size: if queries and keys are the same
    positions, in dense tensors, and a pair needs, beside equal ids, what its distance decides."""
    is_square = geometry.q_len == geometry.kv_len and geometry.q_offset in (None, 0)
    is_long = geometry.batch * geometry.heads * geometry.q_len >= ROWS
    if not (geometry.is_dense and is_square and is_long) or geometry.has_lens:
        return None
    found = _rest_of(bound.spec)
    if found is None:
        return None
    rest, table, places = found
    scalars = {s.name: bound.scalars[s.name] for s in rest.scalars}
    own = Bound(rest, scalars, {})
    return Apart(own, table, places, geometry.batch, geometry.q_len, block)


@functools.lru_cache(maxsize=1024)
def _rest_of(spec: Spec) -> tuple[Spec, Table, tuple[Expr, ...]] | None:
    found = apart(spec.mask)
    if found is None or spec.score is not None or spec.heads is not None:
        return None
    node, table, others = found
    places = tuple(p for d, p in enumerate(node.args[0].args) if d != table.dim)
    is_read = any(p.op == "index" and p.attr != "b" for p in places)
    rest = functools.reduce(lambda a, b: make("and", a, b), others) if others else None
    if is_read or (rest is not None and _moves(rest) != 0):
        return None
    names = leaves(rest, "scalar")
    scalars = tuple(s for s in spec.scalars if s.name in names)
    return replace(spec, mask=rest, tensors=(), scalars=scalars), table, places


def _moves(expr: Expr) -> int | None:
    """How an expression grows if queries and keys move on together by one; None: who knows."""
    grows: dict[Expr, int | None] = {}
    for node in walk(expr):
        grows[node] = _grows(node, [grows[arg] for arg in node.args])
    return grows[expr]


_BETWEEN = ("lt", "le", "eq", "ne", "minimum", "maximum")


def _grows(node: Expr, args: list[int | None]) -> int | None:
    if node.op in ("const", "scalar"):
        return 0
    if node.op == "index":
        return 1 if node.attr in ("q_idx", "kv_idx") else None
    if node.op in ("load", "size", "score") or None in args:
        return None
    first, *rest = (arg or 0 for arg in args)
    if node.op in ("add", "sub") and node.kind == "int":
        return first + rest[0] if node.op == "add" else first - rest[0]
    if node.op in _BETWEEN and first == rest[0]:
        return first if node.op in ("minimum", "maximum") else 0
    return 0 if not any(args) else None


@dataclass(frozen=True, eq=False)
class Documents:
    """The `runs` of documents as sequences, whose rows stand in a `queue`; `holds`: int32 [], 0
    where they don't lie together, and are no sequences: then there is no row."""

    runs: Runs
    queue: torch.Tensor
    holds: torch.Tensor

    @property
    def read(self) -> tuple[torch.Tensor, ...]:
        """What kernels read of it."""
        return self.holds, self.queue, *self.runs.tensors


def find_documents(schedule: Any, apart: Apart, tapes: Tapes) -> Documents:
    """A schedule's documents as sequences."""
    from .make import make_schedule

    (ranges,) = schedule.ranges

    def run() -> tuple[torch.Tensor, ...]:
        cu, holds = cut(ranges, apart)
        made = make_schedule(apart.bound, apart.geometry(cu), apart.block, "auto", None)
        return holds, made.queue(), *made.kv_runs.tensors

    key = ("documents", apart.block, apart.batch)
    holds, queue, *runs = tapes.run(key, (ranges.range, ranges.order), run)
    return Documents(Runs(*runs), queue, holds)


def cut(found: Ranges, apart: Apart) -> tuple[torch.Tensor, torch.Tensor]:
    """Where documents begin, and the last one ends, int32 [batch * most + 1], one element's after
    the other's, as many as there may be; and whether they lie together, int32 [].

    Those that there aren't are empty; if not all lie together, all are."""
    first, order = _along(found.range[0], apart), found.order
    position = torch.arange(min(first.shape[-1], apart.length), device=first.device)
    is_first = first[..., : len(position)].clamp(min=0) == position
    rank = is_first.cumsum(-1) - 1
    holds = (order != 0).all() & (rank[..., -1] < apart.most).all()
    slot = rank.masked_fill(~(is_first & (rank < apart.most)), apart.most)
    starts = torch.full((len(slot), apart.most + 1), apart.length, device=first.device)
    starts = starts.scatter(1, slot, position.expand(slot.shape))[:, : apart.most]
    before = apart.length * torch.arange(apart.batch, device=first.device)
    whole = (starts + before[:, None]).reshape(-1)
    past = apart.batch * apart.length
    cu = torch.nn.functional.pad(whole, (0, 1), value=past) * holds
    return cu.to(torch.int32), holds.to(torch.int32)


def _along(numbers: torch.Tensor, apart: Apart) -> torch.Tensor:
    """[elements or 1, positions] of a table's numbers."""
    numbers = numbers.movedim(apart.table.dim, -1)
    for dim in reversed(range(len(apart.places))):
        place = apart.places[dim]
        if place.is_const:
            numbers = numbers.select(dim, min(max(place.attr, 0), numbers.shape[dim] - 1))
    return numbers.reshape(-1, numbers.shape[-1])
