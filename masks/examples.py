"""Data to draw each mask with: `getattr(masks, name)(**EXAMPLES[name](n, generator))`."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

Builder = Callable[[int, torch.Generator | None], dict[str, Any]]


def _number(low: int, high: int, generator: torch.Generator | None) -> int:
    return int(torch.randint(low, max(low + 1, high), (), generator=generator))


def _lengths(n: int, generator: torch.Generator | None, parts: int = 0) -> list[int]:
    """Positive lengths that sum to n, about four of them."""
    parts = min(n, parts or max(3, min(6, n // 64)))
    cuts = torch.randperm(max(0, n - 1), generator=generator)[: parts - 1].sort().values + 1
    edges = [0, *cuts.tolist(), n]
    return [end - start for start, end in pairwise(edges)]


def _spread(lengths: list[int], values: list[int] | None = None) -> torch.Tensor:
    """[1, S]: each value as often as its length says; the values are 0, 1, ... if left out."""
    numbers = torch.arange(len(lengths)) if values is None else torch.tensor(values)
    return torch.repeat_interleave(numbers, torch.tensor(lengths)).to(torch.int32)[None]


def _starts(lengths: list[int]) -> list[int]:
    return [sum(lengths[:k]) for k in range(len(lengths))]


def _doc(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    return {"doc": _spread(_lengths(n, generator))}


def _prefix_document(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    lengths = _lengths(n, generator)
    ends = [start + size // 3 for start, size in zip(_starts(lengths), lengths, strict=True)]
    return {"doc": _spread(lengths), "prefix_end": _spread(lengths, ends)}


def _shared_question(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    lengths = _lengths(n, generator, 2)
    doc, answer = [], []
    for number, size in enumerate(lengths):
        parts = _lengths(size, generator, 4)
        doc += [number] * size
        answer += _spread(parts)[0].tolist()
    return {"doc": torch.tensor([doc]), "answer": torch.tensor([answer])}


def _blockwise(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    doc = _spread(_lengths(n, generator))
    return {"doc": doc, "test_doc": int(doc[0, -1]) if n else 0}


def _qk_sparse(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    lengths = _lengths(n, generator, 5)
    return {"segment": _spread(lengths, [-1, 0, -1, 1, -1][: len(lengths)])}


def _hash_sparse(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    lengths = _lengths(n, generator)
    first = _spread(lengths, _starts(lengths))
    last = torch.roll(first, -max(1, n // 16), dims=1)
    return {
        "first_query": first[None],
        "end_query": torch.cummax(torch.maximum(last, first + 1), 1).values[None] + n // 8,
    }


def _eviction(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    position = torch.arange(n)
    step = position + 1 + torch.randint(1, max(2, n), (n,), generator=generator)
    return {"evicted_at": torch.where(step < n, step, n).to(torch.int32)[None, None]}


def _columns(n: int, generator: torch.Generator | None) -> torch.Tensor:
    """The end of each key's document: causal documents as one column vector."""
    lengths = _lengths(n, generator)
    ends = [start + size for start, size in zip(_starts(lengths), lengths, strict=True)]
    return _spread(lengths, ends)[:, None, :, None]


def _flashmask(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    return {"columns": _columns(n, generator), "causal": True, "vectors": 1}


def _from_flashmask(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    return {"startend_row_indices": _columns(n, generator), "causal": True}


def _block_sparse(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    size = max(1, n // 8)
    count = math.ceil(n / size)
    blocks = torch.rand(1, 1, count, count, generator=generator) < 0.3
    blocks |= torch.eye(count, dtype=torch.bool)
    return {"blocks": blocks, "q_block": size, "kv_block": size}


def _block_padding(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    size = max(1, n // 8)
    valid = torch.randint(1, size + 1, (math.ceil(n / size),), generator=generator)
    return {"block_valid": valid, "kv_block": size}


def _parents(nodes: int, generator: torch.Generator | None) -> list[int]:
    """A random tree in depth-first order: each node's parent, -1 for the root."""
    parents, path = [-1], [0]
    for node in range(1, nodes):
        path = path[: _number(1, len(path) + 1, generator)]
        parents.append(path[-1])
        path.append(node)
    return parents[:nodes]


def _tree(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    prefix = n // 2
    parents = _parents(n - prefix, generator)
    ancestors = torch.eye(n - prefix, dtype=torch.bool)
    for node, parent in enumerate(parents[1:], 1):
        ancestors[node] |= ancestors[parent]
    return {"prefix": prefix, "ancestors": ancestors[None]}


def _tree_dfs(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    parents = _parents(n, generator)
    end = list(range(1, n + 1))
    for node in range(n - 1, 0, -1):
        end[parents[node]] = max(end[parents[node]], end[node])
    return {"subtree_end": torch.tensor([end], dtype=torch.int32)}


def _shared_prefix(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    lengths = _lengths(n, generator)
    offsets = torch.tensor([[*_starts(lengths), n]], dtype=torch.int32)
    return {
        "doc": _spread(lengths),
        "offsets": offsets,
        "prefix_doc": torch.zeros(1, len(lengths), dtype=torch.int32),
    }


def _flamingo(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    lengths = _lengths(n, generator, 4)
    starts = _starts(lengths)
    intervals = [[s, s + size] for s, size in zip(starts, lengths, strict=True)]
    return {
        "intervals": torch.tensor([intervals], dtype=torch.int32),
        "image_tokens": max(1, math.ceil(n / len(intervals))),
    }


def _sides(n: int, axes: int) -> tuple[int, ...]:
    """Extents that hold n tokens, about equal."""
    sides: list[int] = []
    for left in range(axes, 1, -1):
        sides.append(max(1, round(n ** (1 / left))))
        n = math.ceil(n / sides[-1])
    return (*sides, max(1, n))


def _natten(axes: int) -> Builder:
    def build(n: int, generator: torch.Generator | None) -> dict[str, Any]:
        sides = _sides(n, axes)
        kernel = tuple(max(1, min(side, side // 3 | 1)) for side in sides)
        if axes == 1:
            return {"length": sides[0], "kernel": kernel[0]}
        letters = "dhw"[-axes:]
        names = ("depth", "height", "width")[-axes:]
        extents = dict(zip(names, sides, strict=True))
        return extents | {f"kernel_{c}": k for c, k in zip(letters, kernel, strict=True)}

    return build


def _natten_ordered(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    from .canvases import tile_order

    sides = _sides(n, 2)
    data = _natten(2)(n, generator) | {"depth": 1, "kernel_d": 1}
    return data | {"order": tile_order(sides, (4, 4))}


def _natten_tuple(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    sides = _sides(n, 2)
    return {"extent": sides, "kernel": tuple(max(1, side // 3 | 1) for side in sides)}


def _tiles(axes: int) -> Builder:
    def build(n: int, generator: torch.Generator | None) -> dict[str, Any]:
        text = n // 8
        tile = 2 if n >= 2**axes * 2 else 1
        sides = [max(tile, s // tile * tile) for s in _sides(max(1, n - text), axes)]
        letters = "dhw"[-axes:]
        data: dict[str, Any] = {"text": text}
        for name, letter, side in zip(
            ("depth", "height", "width")[-axes:], letters, sides, strict=True
        ):
            data |= {name: side, f"kernel_{letter}": max(tile, side // 2 // tile * tile)}
            data |= {f"tile_{letter}": tile}
        return data

    return build


def _sliding_tile(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    data = _tiles(2)(n, generator)
    return {
        "canvas": (data["height"], data["width"]),
        "kernel": (data["kernel_h"], data["kernel_w"]),
        "tile": (data["tile_h"], data["tile_w"]),
        "text": data["text"],
    }


def _slices(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    lengths = _lengths(n, generator)
    ranges = [[s, s + size] for s, size in zip(_starts(lengths), lengths, strict=True)]
    first = [ranges[0]] * (len(ranges) - 1)
    q, k = ranges + ranges[1:], ranges + first
    return {"q_ranges": q, "k_ranges": k, "mask_types": [1] * len(ranges) + [0] * len(first)}


def _slice_tables(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    lengths = _lengths(n, generator)
    starts = _spread(lengths, _starts(lengths))
    first = torch.cat([torch.zeros_like(starts), starts])
    return {
        "first": first,
        "last": torch.stack([starts[0] // 2, torch.arange(1, n + 1)]),
        "runs": 2,
    }


def _packed(**more: Any) -> Builder:
    def build(n: int, generator: torch.Generator | None) -> dict[str, Any]:
        from .packed_sequences import from_seqlens

        bound = from_seqlens(_lengths(n, generator), **more)
        return dict(bound.leaves[0].bound)

    return build


def _flex_causal(b, h, q, k):  # type: ignore[no-untyped-def]
    return q >= k


def _block_mask(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    from torch.nn.attention.flex_attention import create_block_mask

    return {"block_mask": create_block_mask(_flex_causal, None, None, n, n, device="cpu")}


def _dense(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    return {"matrix": torch.rand(n, n, generator=generator) < 0.1}


def _global(n: int, generator: torch.Generator | None) -> dict[str, Any]:
    return {"is_global": torch.rand(1, n, generator=generator) < 0.05}


EXAMPLES: dict[str, Builder] = {
    "causal": lambda n, _: {},
    "top_left": lambda n, _: {},
    "bottom_right": lambda n, _: {},
    "sliding_window": lambda n, _: {"window": max(1, n // 4)},
    "local": lambda n, _: {"left": n // 8, "right": n // 16},
    "dilated_window": lambda n, _: {"window": max(1, n // 8), "dilation": 3},
    "strided": lambda n, _: {"dilation": 4},
    "global_window": lambda n, _: {"window": max(1, n // 8), "globals": max(1, n // 16)},
    "global_local": lambda n, _: {"left": n // 8, "right": n // 8, "globals": max(1, n // 16)},
    "global_tokens": _global,
    "prefix_lm": lambda n, _: {"prefix": n // 3},
    "document": _doc,
    "causal_document": _doc,
    "prefix_document": _prefix_document,
    "padding": lambda n, _: {"kv_valid": n - n // 4, "q_valid": n - n // 4},
    "left_padding": lambda n, _: {"kv_start": n // 4},
    "shared_question": _shared_question,
    "causal_blockwise": _blockwise,
    "qk_sparse": _qk_sparse,
    "hash_sparse": _hash_sparse,
    "random_eviction": _eviction,
    "flashmask": _flashmask,
    "from_flashmask": _from_flashmask,
    "chunked": lambda n, _: {"chunk": max(1, n // 4)},
    "block_sparse": _block_sparse,
    "block_padding": _block_padding,
    "tree": _tree,
    "tree_dfs": _tree_dfs,
    "shared_prefix": _shared_prefix,
    "block_diffusion": lambda n, _: {"length": max(1, n // 2), "block": max(1, n // 10)},
    "draft_block": lambda n, _: {"prefix": n // 3, "block": max(1, n // 6)},
    "spatial_head": lambda n, _: {"prompt": n // 8, "reach": max(1, n // 6), "sink": n // 16},
    "temporal_head": lambda n, _: {
        "prompt": n // 8,
        "frame": max(1, n // 6),
        "reach": max(1, n // 24),
    },
    "flamingo": _flamingo,
    "natten_1d": _natten(1),
    "natten_2d": _natten(2),
    "natten_3d": _natten(3),
    "natten_ordered": _natten_ordered,
    "natten": _natten_tuple,
    "sliding_tile_2d": _tiles(2),
    "sliding_tile_3d": _tiles(3),
    "sliding_tile": _sliding_tile,
    "slices": _slice_tables,
    "from_slices": _slices,
    "block_diagonal": _packed(),
    "block_diagonal_causal": _packed(causal=True),
    "block_diagonal_window": _packed(window=8),
    "block_diagonal_local": _packed(window=(4, 4)),
    "from_seqlens": lambda n, g: {"q_seqlen": _lengths(n, g), "causal": True},
    "from_cu_seqlens": lambda n, g: {
        "cu_seqlens_q": torch.tensor([0, *_lengths(n, g)]).cumsum(0),
        "causal": True,
    },
    "dense_table": lambda n, g: {"table": _dense(n, g)["matrix"][None, None]},
    "from_dense": _dense,
    "from_block_mask": _block_mask,
}
