"""FlashMask: for each key, up to two ranges of queries that don't see it."""

from __future__ import annotations

from typing import Any

import torch

import flashgen as fg

from .checks import check_rows
from .rows import row_of

WIDTHS = {True: (1, 2), False: (2, 4)}


def _check(
    columns: Any,
    causal: bool,
    vectors: int,
    by_row: bool = False,
    q_len: Any = None,
    kv_len: Any = None,
    q_offset: Any = None,
) -> None:
    check_width(causal, vectors)
    shape: tuple[int, ...] = tuple(getattr(columns, "shape", ()))
    if len(shape) != 4:
        raise ValueError(f"columns must be [B, Hm, Skv, C], and has shape {list(shape)}")
    if shape[3] != vectors:
        raise ValueError(
            f"vectors is {vectors} and the last dimension of columns is {shape[3]}; "
            f"write vectors={shape[3]}"
        )
    if by_row:
        check_rows(q_len, kv_len, q_offset)
        if kv_len is not None and shape[2] != kv_len:
            raise ValueError(
                f"columns has shape {list(shape)}, vectors of {shape[2]} keys, and there are "
                f"{kv_len}; write [B, Hm, {kv_len}, C]"
            )


def check_width(causal: bool, vectors: int) -> None:
    """Raises ValueError for a number of column vectors that means nothing."""
    if vectors not in WIDTHS[bool(causal)]:
        one, two = WIDTHS[bool(causal)]
        raise ValueError(
            f"with causal={causal} a key has {one} or {two} vectors, not {vectors}; write "
            "causal: start (and end) of the hidden rows below; not causal: start below and end "
            "above, or both starts and ends"
        )


@fg.mask(check=_check)
def flashmask(
    b,
    h,
    h_kv,
    q_idx,
    kv_idx,
    q_len,
    kv_len,
    columns: fg.Tensor,
    causal: fg.Const[bool],
    vectors: fg.Const[int],
    per_query_head: fg.Const[bool] = False,
    by_row: fg.Const[bool] = False,
):
    """A key is hidden from the queries between its `start` and its `end`, both ways or causally.

    With c = columns[b, head, j, :], hidden iff

    | causal | C | c is | hidden from |
    |---|---|---|---|
    | True | 1 | lower start | `c[0] <= i`, and `i < j` |
    | True | 2 | lower start, lower end | `c[0] <= i < c[1]`, and `i < j` |
    | False | 2 | lower start, **upper end** | `c[0] <= i`, and `i < c[1]` |
    | False | 4 | both starts and ends | `c[0] <= i < c[1]`, and `c[2] <= i < c[3]` |

    Ranges are half-open; `start >= end` hides nothing; either pair may hide any rows. The same
    two columns mean different things for causal and for not. i counts positions, so that columns
    made for the whole sequence hold in decoding too; FlashMask itself counts rows of the queries
    given, which is `by_row=True` and what `from_flashmask` binds (the same where Sq = Skv).

    Data: `columns`, integer [B or 1, 1 or Hkv, Skv, C], or with `per_query_head=True`
    [B or 1, Hq, Skv, C]. `causal`, `vectors` (the number C) and the two switches are baked in.

    Source: FlashMask (arXiv 2410.01359), section 4.1 and figure 1.

    At N = 10, `flashmask(columns=torch.tensor([4, 4, 4, 4, 10, 10, 10, 10, 10, 10, 7, 7, 7, 7,
    10, 10, 10, 10, 10, 10]).reshape(2, 10).T[None, None], causal=True, vectors=2)`:

        █·········
        ██········
        ███·······
        ████······
        ····█·····
        ····██····
        ····███···
        ████████··
        █████████·
        ██████████
    """
    head = h if per_query_head else h_kv
    row = row_of(q_idx, q_len, kv_len) if by_row else q_idx
    c = [columns[b, head, kv_idx, v] for v in range(vectors)]
    visible = ~_hidden(row, c, causal)
    return visible & (kv_idx <= q_idx) if causal else visible


def _hidden(row: Any, c: list[Any], causal: bool) -> Any:
    if len(c) == 1:
        return c[0] <= row
    if causal:
        return (c[0] <= row) & (row < c[1])
    if len(c) == 2:
        return (c[0] <= row) | (row < c[1])
    return ((c[0] <= row) & (row < c[1])) | ((c[2] <= row) & (row < c[3]))


def from_flashmask(
    startend_row_indices: torch.Tensor, causal: bool, *, per_query_head: bool = False
) -> Any:
    """The mask of FlashMask's column vectors, as `flashmask_attention` takes them.

    `startend_row_indices`: int32 [B or 1, 1 or Hkv, Skv, C], or one head per query head with
    `per_query_head=True`; C is 1 or 2 with `causal`, 2 or 4 without (see `flashmask`). Rows count
    from the first query given and causal is aligned bottom-right, as there.
    Raises FlashgenError for a wrong rank, dtype or number of vectors."""
    shape = getattr(startend_row_indices, "shape", None)
    call = f"from_flashmask(startend_row_indices={list(shape or ())}, causal={causal})"
    if shape is None or len(shape) != 4:
        raise fg.FlashgenError(
            "startend_row_indices must be a tensor [B, Hm, Skv, C]",
            call=call,
            write="Write indices[:, None, :, None] for one vector [B, Skv].",
        )
    if startend_row_indices.dtype != torch.int32:
        raise fg.FlashgenError(
            f"startend_row_indices must be int32, and is {startend_row_indices.dtype}",
            call=call,
            write="Write startend_row_indices.to(torch.int32).",
        )
    try:
        check_width(causal, shape[3])
    except ValueError as error:
        problem, _, advice = str(error).partition("; write ")
        raise fg.FlashgenError(problem, call=call, write=advice) from None
    return flashmask(
        columns=startend_row_indices,
        causal=bool(causal),
        vectors=shape[3],
        per_query_head=per_query_head,
        by_row=True,
    )
