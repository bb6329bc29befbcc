"""Builders of example data, by the kind of data."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

Builder = Callable[[int, torch.Generator | None], dict[str, Any]]


def number(low: int, high: int, generator: torch.Generator | None) -> int:
    return int(torch.randint(low, max(low + 1, high), (), generator=generator))


def part_lengths(n: int, generator: torch.Generator | None, parts: int = 0) -> list[int]:
    """Positive lengths that sum to n, about four of them."""
    parts = min(n, parts or max(3, min(6, n // 64)))
    cuts = torch.randperm(max(0, n - 1), generator=generator)[: parts - 1].sort().values + 1
    edges = [0, *cuts.tolist(), n]
    return [end - start for start, end in pairwise(edges)]


def spread(lengths: list[int], values: list[int] | None = None) -> torch.Tensor:
    """[1, S]: each value as often as its length says; the values are 0, 1, ... if left out."""
    numbers = torch.arange(len(lengths)) if values is None else torch.tensor(values)
    return torch.repeat_interleave(numbers, torch.tensor(lengths)).to(torch.int32)[None]


def part_starts(lengths: list[int]) -> list[int]:
    return [sum(lengths[:k]) for k in range(len(lengths))]


def doc(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    return {"doc": spread(part_lengths(n, generator))}


def prefix_document(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    lengths = part_lengths(n, generator)
    ends = [start + size // 3 for start, size in zip(part_starts(lengths), lengths, strict=True)]
    return {"doc": spread(lengths), "prefix_end": spread(lengths, ends)}


def shared_question(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    lengths = part_lengths(n, generator, 2)
    doc, answer = [], []
    for number, size in enumerate(lengths):
        parts = part_lengths(size, generator, 4)
        doc += [number] * size
        answer += spread(parts)[0].tolist()
    return {"doc": torch.tensor([doc]), "answer": torch.tensor([answer])}


def blockwise(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    doc = spread(part_lengths(n, generator))
    return {"doc": doc, "test_doc": int(doc[0, -1]) if n else 0}


def qk_sparse(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    lengths = part_lengths(n, generator, 5)
    return {"segment": spread(lengths, [-1, 0, -1, 1, -1][: len(lengths)])}


def hash_sparse(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    lengths = part_lengths(n, generator)
    first = spread(lengths, part_starts(lengths))
    last = torch.roll(first, -max(1, n // 16), dims=1)
    return {
        "first_query": first[None],
        "end_query": torch.cummax(torch.maximum(last, first + 1), 1).values[None] + n // 8,
    }


def eviction(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    position = torch.arange(n)
    step = position + 1 + torch.randint(1, max(2, n), (n,), generator=generator)
    return {"evicted_at": torch.where(step < n, step, n).to(torch.int32)[None, None]}


def document_ends(n: int, generator: torch.Generator | None) -> torch.Tensor:
    """The end of each key's document: causal documents as one column vector."""
    lengths = part_lengths(n, generator)
    ends = [start + size for start, size in zip(part_starts(lengths), lengths, strict=True)]
    return spread(lengths, ends)[:, None, :, None]


def flashmask(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    return {"columns": document_ends(n, generator), "causal": True, "vectors": 1}


def from_flashmask(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    return {"startend_row_indices": document_ends(n, generator), "causal": True}


def block_sparse(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    size = max(1, n // 8)
    count = math.ceil(n / size)
    blocks = torch.rand(1, 1, count, count, generator=generator) < 0.3
    blocks |= torch.eye(count, dtype=torch.bool)
    return {"blocks": blocks, "q_block": size, "kv_block": size}


def block_padding(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    size = max(1, n // 8)
    valid = torch.randint(1, size + 1, (math.ceil(n / size),), generator=generator)
    return {"block_valid": valid, "kv_block": size}


def random_parents(nodes: int, generator: torch.Generator | None) -> list[int]:
    """A random tree in depth-first order: each node's parent, -1 for the root."""
    parents, path = [-1], [0]
    for node in range(1, nodes):
        path = path[: number(1, len(path) + 1, generator)]
        parents.append(path[-1])
        path.append(node)
    return parents[:nodes]


def tree(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    prefix = n // 2
    parents = random_parents(n - prefix, generator)
    ancestors = torch.eye(n - prefix, dtype=torch.bool)
    for node, parent in enumerate(parents[1:], 1):
        ancestors[node] |= ancestors[parent]
    return {"prefix": prefix, "ancestors": ancestors[None]}


def tree_dfs(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    parents = random_parents(n, generator)
    end = list(range(1, n + 1))
    for node in range(n - 1, 0, -1):
        end[parents[node]] = max(end[parents[node]], end[node])
    return {"subtree_end": torch.tensor([end], dtype=torch.int32)}


def shared_prefix(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    lengths = part_lengths(n, generator)
    offsets = torch.tensor([[*part_starts(lengths), n]], dtype=torch.int32)
    return {
        "doc": spread(lengths),
        "offsets": offsets,
        "prefix_doc": torch.zeros(1, len(lengths), dtype=torch.int32),
    }


def flamingo(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    lengths = part_lengths(n, generator, 4)
    starts = part_starts(lengths)
    intervals = [[s, s + size] for s, size in zip(starts, lengths, strict=True)]
    return {
        "intervals": torch.tensor([intervals], dtype=torch.int32),
        "image_tokens": max(1, math.ceil(n / len(intervals))),
    }


def extents_of(n: int, axes: int) -> tuple[int, ...]:
    """Extents that hold n tokens, about equal."""
    sides: list[int] = []
    for left in range(axes, 1, -1):
        sides.append(max(1, round(n ** (1 / left))))
        n = math.ceil(n / sides[-1])
    return (*sides, max(1, n))


def natten(axes: int) -> Builder:
    def build(n: int, generator: torch.Generator | None) -> dict[str, Any]:
        sides = extents_of(n, axes)
        kernel = tuple(max(1, min(side, side // 3 | 1)) for side in sides)
        if axes == 1:
            return {"length": sides[0], "kernel": kernel[0]}
        letters = "dhw"[-axes:]
        names = ("depth", "height", "width")[-axes:]
        extents = dict(zip(names, sides, strict=True))
        return extents | {f"kernel_{c}": k for c, k in zip(letters, kernel, strict=True)}

    return build


def natten_ordered(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    from .canvases import tile_order

    sides = extents_of(n, 2)
    data = natten(2)(n, generator) | {"depth": 1, "kernel_d": 1}
    return data | {"order": tile_order(sides, (4, 4))}


def natten_tuple(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    sides = extents_of(n, 2)
    return {"extent": sides, "kernel": tuple(max(1, side // 3 | 1) for side in sides)}


def tiles(axes: int) -> Builder:
    def build(n: int, generator: torch.Generator | None) -> dict[str, Any]:
        text = n // 8
        tile = 2 if n >= 2**axes * 2 else 1
        sides = [max(tile, s // tile * tile) for s in extents_of(max(1, n - text), axes)]
        letters = "dhw"[-axes:]
        data: dict[str, Any] = {"text": text}
        for name, letter, side in zip(
            ("depth", "height", "width")[-axes:], letters, sides, strict=True
        ):
            data |= {name: side, f"kernel_{letter}": max(tile, side // 2 // tile * tile)}
            data |= {f"tile_{letter}": tile}
        return data

    return build


def sliding_tile(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    data = tiles(2)(n, generator)
    return {
        "canvas": (data["height"], data["width"]),
        "kernel": (data["kernel_h"], data["kernel_w"]),
        "tile": (data["tile_h"], data["tile_w"]),
        "text": data["text"],
    }


def slices(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    lengths = part_lengths(n, generator)
    ranges = [[s, s + size] for s, size in zip(part_starts(lengths), lengths, strict=True)]
    first = [ranges[0]] * (len(ranges) - 1)
    q, k = ranges + ranges[1:], ranges + first
    return {"q_ranges": q, "k_ranges": k, "mask_types": [1] * len(ranges) + [0] * len(first)}


def slice_tables(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    lengths = part_lengths(n, generator)
    starts = spread(lengths, part_starts(lengths))
    first = torch.cat([torch.zeros_like(starts), starts])
    return {
        "first": first,
        "last": torch.stack([starts[0] // 2, torch.arange(1, n + 1)]),
        "runs": 2,
    }


def packed(**more: Any) -> Builder:
    def build(n: int, generator: torch.Generator | None) -> dict[str, Any]:
        from .sequence_lengths import from_seqlens

        bound = from_seqlens(part_lengths(n, generator), **more)
        return dict(bound.leaves[0].bound)

    return build


def flex_causal(b, h, q, k):  # type: ignore[no-untyped-def]
    return q >= k


def block_mask(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    from torch.nn.attention.flex_attention import create_block_mask

    return {"block_mask": create_block_mask(flex_causal, None, None, n, n, device="cpu")}


def matrix(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    return {"matrix": torch.rand(n, n, generator=generator) < 0.1}


def global_tokens(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    return {"is_global": torch.rand(1, n, generator=generator) < 0.05}
