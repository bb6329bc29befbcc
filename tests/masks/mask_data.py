"""Random data of each mask: `build(B, H, Sq, Skv, generator)`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

Build = Callable[[int, int, int, int, torch.Generator], dict[str, Any]]


def number(low: int, high: int, generator: torch.Generator) -> int:
    """A random integer in [low, high], or low if that is empty."""
    return int(torch.randint(low, max(low, high) + 1, (), generator=generator))


def numbers(low: int, high: int, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(low, max(low, high) + 1, tuple(shape), generator=generator)


def lengths(n: int, parts: int, generator: torch.Generator) -> list[int]:
    """`parts` lengths of 0 or more that sum to n."""
    cuts = sorted(number(0, n, generator) for _ in range(parts - 1))
    return [end - start for start, end in pairwise([0, *cuts, n])]


def starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:k]) for k in range(len(sizes))]


def spread(sizes: Sequence[int], values: Sequence[int]) -> torch.Tensor:
    """[S]: each value as often as its length says."""
    repeats = torch.tensor(list(sizes), dtype=torch.long)
    return torch.repeat_interleave(torch.tensor(list(values), dtype=torch.int32), repeats)


def documents(batch: int, n: int, generator: torch.Generator) -> list[list[int]]:
    return [lengths(n, number(1, 5, generator), generator) for _ in range(batch)]


def doc_ids(packs: list[list[int]]) -> torch.Tensor:
    return torch.stack([spread(pack, range(len(pack))) for pack in packs])


def nothing(*_: Any) -> dict[str, Any]:
    return {}


def window(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
    return {"window": number(0, n + 2, g)}


def local(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
    return {"left": number(0, n, g), "right": number(0, n // 2, g)}


def dilated(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
    return {"window": number(0, n, g), "dilation": number(1, 5, g)}


def local_strided(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
    reach = number(0, n, g)
    return {"left": reach, "right": reach, "dilation": number(1, 5, g)}


def global_window(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
    return {"window": number(0, n, g), "globals": number(0, n // 2, g)}


def global_local(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
    return local(B, H, q, n, g) | {"globals": number(0, n // 2, g)}


def is_global(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
    return {"is_global": torch.rand(B, n, generator=g) < 0.1}


def longformer(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
    return is_global(B, H, q, n, g) | {"left": n // 8, "right": n // 9}


def prefix_int(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
    return {"prefix": number(0, n, g)}


def prefix_each(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
    return {"prefix": numbers(0, n, (B,), g)}


def doc(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
    return {"doc": doc_ids(documents(B, n, g))}


def doc_shared(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
    return {"doc": doc_ids(documents(1, n, g)).long()}


def doc_unordered(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
    return {"doc": numbers(-2, 3, (B, n), g)}


def prefix_document(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
    packs = documents(B, n, g)
    ends = [
        [start + number(0, size, g) for start, size in zip(starts(pack), pack, strict=True)]
        for pack in packs
    ]
    prefix_end = [spread(pack, end) for pack, end in zip(packs, ends, strict=True)]
    return {"doc": doc_ids(packs), "prefix_end": torch.stack(prefix_end)}


def padding(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
    return {"kv_valid": numbers(0, n, (B,), g), "q_valid": numbers(0, n, (B,), g)}


def padding_int(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
    return {"kv_valid": number(0, n, g), "q_valid": torch.tensor(number(0, n, g))}


def left_padding(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
    return {"kv_start": numbers(0, n, (B,), g)}


def shared_question(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
    packs = documents(B, n, g)
    answers = []
    for pack in packs:
        parts = [lengths(size, number(1, 4, g), g) for size in pack]
        answers.append(torch.cat([spread(part, range(len(part))) for part in parts]))
    return {"doc": doc_ids(packs), "answer": torch.stack(answers)}


def blockwise(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
    packs = documents(B, n, g)
    return {"doc": doc_ids(packs), "test_doc": torch.tensor([len(pack) - 1 for pack in packs])}


def blockwise_int(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
    return {"doc": doc_ids([lengths(n, 3, g) for _ in range(B)]), "test_doc": 2}


def qk_sparse(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
    packs = [lengths(n, 5, g) for _ in range(B)]
    return {"segment": torch.stack([spread(pack, [0, -1, 1, 2, -1]) for pack in packs])}


def staircase(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
    first = numbers(0, n, (B, H, n), g).sort(-1).values
    end = numbers(0, n, (B, H, n), g).sort(-1).values
    return {"first_query": first.int(), "end_query": end.int()}


def eviction(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
    return {"evicted_at": numbers(0, n + 1, (B, H, n), g).int()}


def vectors(count: int, heads: int | None, rows: int, B: int, H: int, n: int, g: Any) -> Any:
    return numbers(0, rows + 1, (B, heads or H, n, count), g).int()


def flashmask(causal: bool, count: int, heads: int | None = None, **more: Any) -> Build:
    def build(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
        columns = vectors(count, heads, n, B, H, n, g)
        return {"columns": columns, "causal": causal, "vectors": count, **more}

    return build


def from_flashmask(causal: bool, count: int, heads: int | None = None) -> Build:
    def build(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
        columns = vectors(count, heads, q, B, H, n, g)
        return {"startend_row_indices": columns, "causal": causal}

    return build


def chunk(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
    return {"chunk": number(1, n + 1, g)}


def blocks(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
    rows, columns = number(1, 9, g), number(1, 9, g)
    table = torch.rand(B, H, math.ceil(n / rows), math.ceil(n / columns), generator=g) < 0.4
    return {"blocks": table, "q_block": rows, "kv_block": columns}


def block_padding(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
    size = number(1, 9, g)
    return {"block_valid": numbers(0, size, (math.ceil(n / size),), g), "kv_block": size}


def parents(nodes: int, g: torch.Generator) -> list[int]:
    """A random tree: each node's parent, which comes before it."""
    return [number(0, node - 1, g) if node else -1 for node in range(nodes)]


def ancestors(nodes: int, g: torch.Generator) -> torch.Tensor:
    table = torch.eye(nodes, dtype=torch.bool)
    for node, parent in enumerate(parents(nodes, g)):
        if parent >= 0:
            table[node] |= table[parent]
    return table


def tree(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
    prefix = numbers(0, n // 2, (B,), g)
    table = torch.stack([ancestors(n, g) for _ in range(B)])
    return {"prefix": prefix, "ancestors": table}


def depth_first(nodes: int, g: torch.Generator) -> list[int]:
    """A random tree in depth-first order: each node's parent."""
    path, found = [], []
    for node in range(nodes):
        path = path[: number(1, len(path), g)] if path else []
        found.append(path[-1] if path else -1)
        path.append(node)
    return found


def subtree_ends(up: list[int]) -> list[int]:
    ends = [node + 1 for node in range(len(up))]
    for node in reversed(range(len(up))):
        if up[node] >= 0:
            ends[up[node]] = max(ends[up[node]], ends[node])
    return ends


def tree_dfs(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
    return {"subtree_end": torch.tensor([subtree_ends(depth_first(n, g)) for _ in range(B)])}


def shared_prefix(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
    packs = [lengths(n, 4, g) for _ in range(B)]
    return {
        "doc": doc_ids(packs),
        "offsets": torch.tensor([[*starts(pack), n] for pack in packs]),
        "prefix_doc": torch.tensor([[number(0, d, g) for d in range(4)] for _ in range(B)]),
    }


def block_diffusion(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
    return {"length": max(1, n // 2), "block": number(1, max(1, n // 3), g)}


def draft_block(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
    return prefix_each(B, H, q, n, g) | {"block": number(1, 9, g)}


def spatial(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
    return {"prompt": number(0, 4, g), "reach": number(0, n // 2, g), "sink": number(0, 9, g)}


def temporal(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
    return {"prompt": number(0, 4, g), "frame": number(1, 20, g), "reach": number(0, 4, g)}


def flamingo(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
    size = number(1, max(1, n // 2), g)
    images = math.ceil(n / size)
    return {"intervals": numbers(0, n, (B, images, 2), g), "image_tokens": size}


def sides(n: int, axes: int) -> list[int]:
    """Extents that hold n tokens."""
    found: list[int] = []
    for left in range(axes, 1, -1):
        found.append(max(1, round(n ** (1 / left))))
        n = math.ceil(n / found[-1])
    return [*found, max(1, n)]


NAMES = {"d": "depth", "h": "height", "w": "width", "": "length"}


def natten(axes: str) -> Build:
    def build(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
        data: dict[str, Any] = {}
        letters = list(axes) or [""]
        for letter, side in zip(letters, sides(n, len(letters)), strict=True):
            suffix = f"_{letter}" if letter else ""
            dilation = number(1, min(3, side), g)
            kernel = number(1, min(side // dilation, 9), g)
            data |= {NAMES[letter]: side, f"kernel{suffix}": kernel}
            data |= {f"stride{suffix}": number(1, kernel, g), f"dilation{suffix}": dilation}
            data |= {f"causal{suffix}": bool(number(0, 1, g))}
        return data

    return build


def natten_ordered(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
    return natten("dhw")(B, H, q, n, g) | {"order": torch.randperm(n, generator=g)}


def tiles(axes: str) -> Build:
    def build(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
        text = number(0, n // 4, g)
        data: dict[str, Any] = {"text": text}
        for letter, side in zip(axes, sides(max(1, n - text), len(axes)), strict=True):
            tile = number(1, max(1, side // 3), g)
            count = max(1, side // tile)
            data |= {NAMES[letter]: count * tile, f"tile_{letter}": tile}
            data |= {f"kernel_{letter}": number(1, count, g) * tile}
        return data

    return build


def slices(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
    """A grid of rectangles of all types, some left out."""
    rows, columns = lengths(q, 3, g), lengths(n, 4, g)
    data: dict[str, Any] = {"q_ranges": [], "k_ranges": [], "mask_types": []}
    for r0, height in zip(starts(rows), rows, strict=True):
        for c0, width in zip(starts(columns), columns, strict=True):
            if number(0, 3, g):
                data["q_ranges"].append([r0, r0 + height])
                data["k_ranges"].append([c0, c0 + width])
                data["mask_types"].append(number(0, 3, g))
    return data


def slice_tables(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
    bounds = numbers(0, n, (2, 3, q), g)
    return {"first": bounds[0], "last": bounds[1], "runs": 3}


def packed(layout: str = "packed", **more: Any) -> Build:
    """Lengths for from_seqlens, keys packed, padded or gappy; all rows and keys of the call."""

    def build(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
        parts = number(1, 4, g)
        data: dict[str, Any] = {"q_seqlen": lengths(q, parts, g), **more}
        if layout == "packed":
            data["kv_seqlen"] = lengths(n, parts, g)
        elif layout == "padded":
            data["kv_seqlen"] = [number(0, n // parts, g) for _ in range(parts)]
            data["kv_start"] = n // parts
        else:
            data["kv_start"] = [number(0, n, g) for _ in range(parts)]
            data["kv_seqlen"] = [number(0, n - start, g) for start in data["kv_start"]]
        return data

    return build


def cu_seqlens(**more: Any) -> Build:
    def build(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
        def cumulated(total: int) -> torch.Tensor:
            return torch.tensor([0, *lengths(total, 4, g)], dtype=torch.int32).cumsum(0)

        return {"cu_seqlens_q": cumulated(q), "cu_seqlens_kv": cumulated(n), **more}

    return build


def dense(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
    return {"matrix": torch.rand(B, H, q, n, generator=g) < 0.5}


def dense_flat(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
    return {"matrix": torch.rand(q, n, generator=g) < 0.5}


def merged(*builds: Build) -> Build:
    def build(B: int, H: int, q: int, n: int, g: torch.Generator) -> dict[str, Any]:
        return {name: value for b in builds for name, value in b(B, H, q, n, g).items()}

    return build
