"""What masks of other libraries' tables mean, as oracles.py says it of the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from oracles import Query, Table, at, keys


def flashmask(b: Any, h: Any, i: Any, j: Any, data: dict[str, Any]) -> torch.Tensor:
    """Column by column: start from all (or causal), blank the rows the vectors name."""
    columns, causal, count = data["columns"], data["causal"], data["columns"].shape[-1]
    first = int(i.flatten()[0])
    # Vectors count positions; blanking works on rows of the matrix.
    base = 0 if data.get("by_row") else first
    return _blanked(b, h, i, j, columns, causal, count, base)


def from_flashmask(b: Any, h: Any, i: Any, j: Any, data: dict[str, Any]) -> torch.Tensor:
    """The same with rows counted from the first query, as FlashMask counts them."""
    columns = data["startend_row_indices"]
    return _blanked(b, h, i, j, columns, data["causal"], columns.shape[-1], 0)


def _blanked(
    b: Any, h: Any, i: Any, j: Any, columns: Any, causal: bool, count: int, base: int
) -> torch.Tensor:
    q_len, kv_len = i.numel(), j.numel()
    out = torch.ones(b.numel(), h.numel(), q_len, kv_len, dtype=torch.bool)

    def blank(batch: int, head: int, key: int, start: int, end: int) -> None:
        start, end = max(start - base, 0), max(end - base, 0)
        if start < end:
            out[batch, head, start:end, key] = False

    big = 1 << 40
    columns = Table(columns)
    for batch in range(b.numel()):
        for head in range(h.numel()):
            for key in range(kv_len):
                c = [at(columns, batch, head, key, v) for v in range(columns.shape[-1])]
                if causal:
                    blank(batch, head, key, base, base + key - (kv_len - q_len))
                    blank(batch, head, key, c[0], c[1] if count == 2 else big)
                elif count == 2:
                    blank(batch, head, key, c[0], big)
                    blank(batch, head, key, -big, c[1])
                else:
                    blank(batch, head, key, c[0], c[1])
                    blank(batch, head, key, c[2], c[3])
    return out


def slices(b: Any, h: Any, i: Any, j: Any, data: dict[str, Any]) -> torch.Tensor:
    """Paint the slices cell by cell."""
    q_len, kv_len = i.numel(), j.numel()
    painted = torch.zeros(q_len, kv_len, dtype=torch.int32)
    types = data["mask_types"]
    for (q0, q1), (k0, k1), kind in zip(data["q_ranges"], data["k_ranges"], types, strict=True):
        rows, columns = q1 - q0, k1 - k0
        for row in range(rows):
            for column in range(columns):
                below = kind in (1, 3) and column > row + columns - rows
                above = kind in (2, 3) and column < row
                if not below and not above and q0 + row < q_len and k0 + column < kv_len:
                    painted[q0 + row, k0 + column] += 1
    assert painted.max() <= 1
    return (painted == 1)[None, None]


@keys
def slice_tables(q: Query, data: dict[str, Any]) -> Iterable[int]:
    first, last = data["first"], data["last"]
    spans = [range(at(first, n, q.row), at(last, n, q.row)) for n in range(first.shape[0])]
    return [k for span in spans for k in span]


def packed(b: Any, h: Any, i: Any, j: Any, data: dict[str, Any]) -> torch.Tensor:
    """Paint a packed sequence's block row by row; `data` as from_seqlens takes it."""
    q_sizes = data["q_seqlen"]
    kv_sizes = data.get("kv_seqlen") or q_sizes
    starts = data.get("kv_start")
    if starts is None:
        starts = [sum(kv_sizes[:s]) for s in range(len(kv_sizes))]
    elif isinstance(starts, int):
        starts = [starts * s for s in range(len(kv_sizes))]
    out = torch.zeros(1, 1, i.numel(), j.numel(), dtype=torch.bool)
    row = 0
    for rows, columns, start in zip(q_sizes, kv_sizes, starts, strict=True):
        shift = 0 if data.get("top_left") else columns - rows
        for local_row in range(rows):
            low, high = _limits(local_row + shift, data, columns)
            for column in range(max(low, 0), min(high, columns)):
                out[0, 0, row, start + column] = True
            row += 1
    return out


def _limits(diagonal: int, data: dict[str, Any], columns: int) -> tuple[int, int]:
    window = data.get("window")
    if isinstance(window, int):
        return diagonal - window + 1, diagonal + 1
    if window is not None:
        return diagonal - window[0], diagonal + window[1] + 1
    return 0, diagonal + 1 if data.get("causal") else columns


def cu_seqlens(b: Any, h: Any, i: Any, j: Any, data: dict[str, Any]) -> torch.Tensor:
    lengths = dict(data)
    q = data["cu_seqlens_q"].diff().tolist()
    kv = data.get("cu_seqlens_kv", data["cu_seqlens_q"]).diff().tolist()
    lengths |= {"q_seqlen": q, "kv_seqlen": kv}
    return packed(b, h, i, j, lengths)
