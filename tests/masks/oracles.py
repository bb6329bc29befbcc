"""What each mask means, written by hand: for one query, the keys it may see.

Nothing here uses flashgen. An oracle is `oracle(b, h, i, j, data)`: `i` and `j` hold all the
positions of queries and keys, `b` and `h` the batches and (query = key) heads; the result is a
boolean tensor [B or 1, H or 1, Sq, Skv]. Most are loops over queries that name the visible keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

Oracle = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]], Any]


class Query(NamedTuple):
    """One query: its batch, head, position, row among those given; and the lengths."""

    b: int
    h: int
    i: int
    row: int
    q_len: int
    n: int


def keys(function: Callable[..., Iterable[int]]) -> Oracle:
    """An oracle from a function of (query, data) that gives the visible keys, clipped here."""

    def oracle(b: Any, h: Any, i: Any, j: Any, data: dict[str, Any]) -> torch.Tensor:
        positions, n = [int(x) for x in i.flatten()], j.numel()
        data = {k: Table(v) if isinstance(v, torch.Tensor) else v for k, v in data.items()}
        out = torch.zeros(b.numel(), h.numel(), len(positions), n, dtype=torch.bool)
        for batch in range(b.numel()):
            for head in range(h.numel()):
                for row, position in enumerate(positions):
                    query = Query(batch, head, position, row, len(positions), n)
                    seen = [k for k in function(query, data) if 0 <= k < n]
                    out[batch, head, row, seen] = True
        return out

    return oracle


class Table:
    """A tensor's elements as a list: reading one of a tensor is slow."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.elements = [int(x) for x in tensor.flatten().tolist()]

    def __iter__(self) -> Iterator[int]:
        return iter(self.elements)


def at(values: Any, *index: int) -> int:
    """An element; an int stands for every element, dimensions of size 1 repeat, ends are held."""
    if not isinstance(values, Table):
        return int(values)
    place = 0
    for k, size in zip(index, values.shape, strict=False):
        place = place * size + (0 if k < 0 else size - 1 if k >= size else k)
    return values.elements[place]


def row_of_ids(values: torch.Tensor, b: int, n: int) -> list[int]:
    return [at(values, b, k) for k in range(n)]


@keys
def causal(q: Query, data: dict[str, Any]) -> Iterable[int]:
    return range(q.i + 1)


@keys
def top_left(q: Query, data: dict[str, Any]) -> Iterable[int]:
    return range(q.row + 1)


@keys
def bottom_right(q: Query, data: dict[str, Any]) -> Iterable[int]:
    """The last row sees everything, the one above it one key less, and so on."""
    rows_below = q.q_len - 1 - q.row
    return range(q.n - rows_below)


@keys
def sliding_window(q: Query, data: dict[str, Any]) -> Iterable[int]:
    return [q.i - back for back in range(data["window"])]


@keys
def local(q: Query, data: dict[str, Any]) -> Iterable[int]:
    return range(q.i - data["left"], q.i + data["right"] + 1)


@keys
def dilated_window(q: Query, data: dict[str, Any]) -> Iterable[int]:
    return [q.i - data["dilation"] * back for back in range(data["window"])]


@keys
def strided(q: Query, data: dict[str, Any]) -> Iterable[int]:
    return range(q.i % data["dilation"], q.n, data["dilation"])


@keys
def local_strided(q: Query, data: dict[str, Any]) -> Iterable[int]:
    reach, step = data["left"], data["dilation"]
    return [q.i + step * k for k in range(-reach, reach + 1) if abs(step * k) <= reach]


@keys
def global_window(q: Query, data: dict[str, Any]) -> Iterable[int]:
    recent = [q.i - back for back in range(data["window"])]
    return recent + [g for g in range(data["globals"]) if g <= q.i]


@keys
def global_local(q: Query, data: dict[str, Any]) -> Iterable[int]:
    if q.i < data["globals"]:
        return range(q.n)
    near = range(q.i - data["left"], q.i + data["right"] + 1)
    return [*range(data["globals"]), *near]


@keys
def global_tokens(q: Query, data: dict[str, Any]) -> Iterable[int]:
    marked = row_of_ids(data["is_global"], q.b, q.n)
    if at(data["is_global"], q.b, q.i):
        return range(q.n)
    return [k for k, mark in enumerate(marked) if mark]


@keys
def longformer(q: Query, data: dict[str, Any]) -> Iterable[int]:
    if at(data["is_global"], q.b, q.i):
        return range(q.n)
    near = range(q.i - data["left"], q.i + data["right"] + 1)
    return [k for k in range(q.n) if at(data["is_global"], q.b, k) or k in near]


@keys
def prefix_lm(q: Query, data: dict[str, Any]) -> Iterable[int]:
    return range(max(at(data["prefix"], q.b), q.i + 1))


@keys
def document(q: Query, data: dict[str, Any]) -> Iterable[int]:
    ids, mine = row_of_ids(data["doc"], q.b, q.n), at(data["doc"], q.b, q.i)
    return [k for k, other in enumerate(ids) if other == mine]


@keys
def causal_document(q: Query, data: dict[str, Any]) -> Iterable[int]:
    mine = at(data["doc"], q.b, q.i)
    return [k for k in range(min(q.i + 1, q.n)) if at(data["doc"], q.b, k) == mine]


@keys
def prefix_document(q: Query, data: dict[str, Any]) -> Iterable[int]:
    mine = at(data["doc"], q.b, q.i)
    mates = [k for k in range(q.n) if at(data["doc"], q.b, k) == mine]
    return [k for k in mates if k <= q.i or k < at(data["prefix_end"], q.b, k)]


@keys
def padding(q: Query, data: dict[str, Any]) -> Iterable[int]:
    return range(at(data["kv_valid"], q.b)) if q.i < at(data["q_valid"], q.b) else ()


@keys
def left_padding(q: Query, data: dict[str, Any]) -> Iterable[int]:
    return range(at(data["kv_start"], q.b), q.n)


@keys
def causal_padding(q: Query, data: dict[str, Any]) -> Iterable[int]:
    real = q.i < at(data["q_valid"], q.b)
    return range(min(q.i + 1, at(data["kv_valid"], q.b))) if real else ()


@keys
def shared_question(q: Query, data: dict[str, Any]) -> Iterable[int]:
    mine, answer = at(data["doc"], q.b, q.i), at(data["answer"], q.b, q.i)
    before = [k for k in range(min(q.i + 1, q.n)) if at(data["doc"], q.b, k) == mine]
    return [k for k in before if at(data["answer"], q.b, k) in (0, answer)]


@keys
def causal_blockwise(q: Query, data: dict[str, Any]) -> Iterable[int]:
    mine = at(data["doc"], q.b, q.i)
    if mine == at(data["test_doc"], q.b):
        return range(q.i + 1)
    return [k for k in range(min(q.i + 1, q.n)) if at(data["doc"], q.b, k) == mine]


@keys
def qk_sparse(q: Query, data: dict[str, Any]) -> Iterable[int]:
    mine = at(data["segment"], q.b, q.i)
    hidden = [mine >= 0 and at(data["segment"], q.b, k) == mine for k in range(q.n)]
    return [k for k in range(min(q.i + 1, q.n)) if not hidden[k]]


@keys
def hash_sparse(q: Query, data: dict[str, Any]) -> Iterable[int]:
    first, end = data["first_query"], data["end_query"]
    return [k for k in range(q.n) if q.i in range(at(first, q.b, q.h, k), at(end, q.b, q.h, k))]


@keys
def random_eviction(q: Query, data: dict[str, Any]) -> Iterable[int]:
    return [k for k in range(q.n) if q.i in range(k, at(data["evicted_at"], q.b, q.h, k))]


@keys
def chunked(q: Query, data: dict[str, Any]) -> Iterable[int]:
    start = math.floor(q.i / data["chunk"]) * data["chunk"]
    return range(start, q.i + 1)


@keys
def block_sparse(q: Query, data: dict[str, Any]) -> Iterable[int]:
    table, rows, size = data["blocks"], data["q_block"], data["kv_block"]
    mine = math.floor(q.i / rows)
    return [k for k in range(q.n) if at(table, q.b, q.h, mine, math.floor(k / size))]


@keys
def block_padding(q: Query, data: dict[str, Any]) -> Iterable[int]:
    size = data["kv_block"]
    real = [range(c * size, c * size + int(v)) for c, v in enumerate(data["block_valid"])]
    return [k for block in real for k in block]


@keys
def tree(q: Query, data: dict[str, Any]) -> Iterable[int]:
    prefix = at(data["prefix"], q.b)
    if q.i < prefix:
        return range(q.i + 1)
    nodes = range(prefix, q.n)
    path = [k for k in nodes if at(data["ancestors"], q.b, q.i - prefix, k - prefix)]
    return [*range(prefix), *path]


@keys
def tree_dfs(q: Query, data: dict[str, Any]) -> Iterable[int]:
    return [k for k in range(q.n) if k <= q.i < at(data["subtree_end"], q.b, k)]


@keys
def shared_prefix(q: Query, data: dict[str, Any]) -> Iterable[int]:
    def span(doc: int) -> range:
        return range(at(data["offsets"], q.b, doc), at(data["offsets"], q.b, doc + 1))

    mine = at(data["doc"], q.b, q.i)
    prefix = at(data["prefix_doc"], q.b, mine)
    own = range(span(mine).start, q.i + 1)
    return own if prefix == mine else [*own, *span(prefix)]


@keys
def block_diffusion(q: Query, data: dict[str, Any]) -> Iterable[int]:
    half, block = data["length"], data["block"]

    def place(x: int) -> tuple[bool, int]:
        return x >= half, x % half // block

    clean, part = place(q.i)
    seen = []
    for k in range(q.n):
        other_clean, other = place(k)
        if not clean and not other_clean:
            seen += [k] if part == other else []
        elif not clean:
            seen += [k] if other < part else []
        elif other_clean:
            seen += [k] if other <= part else []
    return seen


@keys
def draft_block(q: Query, data: dict[str, Any]) -> Iterable[int]:
    prefix, block = at(data["prefix"], q.b), data["block"]
    if q.i < prefix:
        return range(q.i + 1)
    start = prefix + (q.i - prefix) // block * block
    return [*range(prefix), *range(start, q.i + 1)]


@keys
def spatial_head(q: Query, data: dict[str, Any]) -> Iterable[int]:
    if q.i < data["prompt"]:
        return range(q.n)
    reach = data["reach"]
    return [*range(data["prompt"] + data["sink"]), *range(q.i - reach + 1, q.i + reach)]


@keys
def temporal_head(q: Query, data: dict[str, Any]) -> Iterable[int]:
    prompt, frame, reach = data["prompt"], data["frame"], data["reach"]
    if q.i < prompt:
        return range(q.n)
    place = (q.i - prompt) % frame
    places = range(place - reach + 1, place + reach)
    video = [k for k in range(prompt, q.n) if (k - prompt) % frame in places]
    return [*range(prompt), *video]


@keys
def flamingo(q: Query, data: dict[str, Any]) -> Iterable[int]:
    size, table = data["image_tokens"], data["intervals"]
    images = [
        m for m in range(table.shape[1]) if at(table, q.b, m, 0) <= q.i < at(table, q.b, m, 1)
    ]
    seen = [k for m in images for k in range(m * size, (m + 1) * size)]
    # Keys past the last image belong to it: indices are held at the table's end.
    if table.shape[1] - 1 in images:
        seen += range(table.shape[1] * size, q.n)
    return seen


def window_of(x: int, extent: int, kernel: int, stride: int, dilation: int, causal: bool) -> set:
    """One axis of neighborhood attention: the coordinates that coordinate x sees."""
    members = list(range(x % dilation, extent, dilation))
    me = members.index(x)
    group = [m for m in range(len(members)) if m // stride == me // stride]
    whole_group_from = me // stride * stride
    if causal:
        leader = group[-1]
        return set(members[max(leader - kernel + 1, 0) : me + 1])
    leader = min(whole_group_from + stride // 2, len(members) - 1)
    start = leader - kernel // 2
    while start + kernel > len(members):
        start -= 1
    while start < 0:
        start += 1
    return set(members[start : start + kernel])


def natten(axes: str) -> Oracle:
    """Neighborhood attention; `axes` are the letters of its parameters, the slowest first."""
    names = {"d": "depth", "h": "height", "w": "width", "": "length"}

    def geometry(data: dict[str, Any], letter: str) -> tuple[Any, ...]:
        suffix = f"_{letter}" if letter else ""
        given = [data.get(f"{name}{suffix}", 1) for name in ("kernel", "stride", "dilation")]
        return data[names[letter]], *given, data.get(f"causal{suffix}", False)

    @keys
    def oracle(q: Query, data: dict[str, Any]) -> Iterable[int]:
        letters = list(axes) or [""]
        shapes = [geometry(data, letter) for letter in letters]
        sizes = [shape[0] for shape in shapes]
        order = data.get("order")
        places = list(range(q.n)) if order is None else [int(p) for p in order]
        here = unravel(places[q.i], sizes)
        windows = [window_of(x, *shape) for x, shape in zip(here, shapes, strict=True)]
        return [
            k
            for k in range(q.n)
            if all(x in w for x, w in zip(unravel(places[k], sizes), windows, strict=True))
        ]

    return oracle


def unravel(place: int, sizes: list[int]) -> list[int]:
    coordinates = []
    for size in reversed(sizes):
        coordinates.append(place % size)
        place //= size
    return coordinates[::-1]


def sliding_tile(axes: str) -> Oracle:
    """Sliding tile attention, by the tiles that a query's tile sees."""
    names = {"d": "depth", "h": "height", "w": "width"}

    @keys
    def oracle(q: Query, data: dict[str, Any]) -> Iterable[int]:
        sizes = [data[names[c]] for c in axes]
        tiles = [data[f"tile_{c}"] for c in axes]
        counts = [size // tile for size, tile in zip(sizes, tiles, strict=True)]
        kernels = [data[f"kernel_{c}"] // tile for c, tile in zip(axes, tiles, strict=True)]
        canvas, numel, end = math.prod(sizes), math.prod(tiles), math.prod(sizes) + data["text"]
        if q.i >= canvas:
            return range(end)
        windows = []
        for x, count, kernel in zip(unravel(q.i // numel, counts), counts, kernels, strict=True):
            start = x - kernel // 2
            start = min(max(start, 0), count - kernel)
            windows.append(range(start, start + kernel))
        vision = [
            k
            for k in range(min(canvas, q.n))
            if all(x in w for x, w in zip(unravel(k // numel, counts), windows, strict=True))
        ]
        return [*vision, *range(canvas, end)]

    return oracle


def dense(b: Any, h: Any, i: Any, j: Any, data: dict[str, Any]) -> torch.Tensor:
    return data["matrix"]


def everything(b: Any, h: Any, i: Any, j: Any, data: dict[str, Any]) -> torch.Tensor:
    return torch.ones(1, 1, i.numel(), j.numel(), dtype=torch.bool)


def inverted(oracle: Oracle) -> Oracle:
    return lambda b, h, i, j, data: ~oracle(b, h, i, j, data)


def both(left: Oracle, right: Oracle) -> Oracle:
    return lambda b, h, i, j, data: left(b, h, i, j, data) & right(b, h, i, j, data)
