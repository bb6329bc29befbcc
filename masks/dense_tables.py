"""Any mask at all, from a boolean matrix."""

from __future__ import annotations

from typing import Any

import torch

import flashgen as fg

from .checks import check_rows
from .rows import row_of


def _check(table: Any, q_len: Any = None, kv_len: Any = None, q_offset: Any = None) -> None:
    check_rows(q_len, kv_len, q_offset)
    shape = tuple(getattr(table, "shape", ()))
    if q_len is not None and len(shape) == 4 and shape[2:] != (q_len, kv_len):
        raise ValueError(
            f"the matrix is for Sq = {shape[2]} and Skv = {shape[3]}, and the call has "
            f"Sq = {q_len} and Skv = {kv_len}; write a matrix [..., {q_len}, {kv_len}]"
        )


@fg.mask(check=_check)
def dense_table(b, h, q_idx, kv_idx, q_len, kv_len, table: fg.Tensor):
    """A boolean matrix: row r, the query's row among those given, sees where the matrix is true.

    Allowed iff `table[b, h, r, j]` (the default `q_offset` is assumed). Memory is the matrix's;
    where it lies in tiles is found by reading it once.

    Data: `table`, bool [B or 1, Hq or 1, Sq, Skv].

    Source: the boolean `attn_mask` of PyTorch's scaled_dot_product_attention.

    At N = 10, `from_dense(torch.ones(10, 10, dtype=torch.bool).tril().rot90())`:

        ·········█
        ········██
        ·······███
        ······████
        ·····█████
        ····██████
        ···███████
        ··████████
        ·█████████
        ██████████
    """
    return table[b, h, row_of(q_idx, q_len, kv_len), kv_idx]


def from_dense(matrix: torch.Tensor) -> Any:
    """The mask of a boolean matrix, true where a query may see a key.

    `matrix`: bool [Sq, Skv] for all batches and heads, or [B or 1, Hq or 1, Sq, Skv]. No copy is
    made. Raises FlashgenError for another dtype (an additive mask is a score function) or rank
    (three dimensions could be batches or heads); at the call, for other lengths."""
    if not isinstance(matrix, torch.Tensor):
        raise fg.FlashgenError(
            f"the matrix is a {type(matrix).__name__}",
            call="from_dense(...)",
            write="torch.as_tensor(matrix)",
        )
    call = f"from_dense({list(matrix.shape)} {matrix.dtype})"
    if matrix.dtype != torch.bool:
        raise fg.FlashgenError(
            f"the matrix must be boolean, and is {matrix.dtype}",
            call=call,
            write="Write matrix != 0 for zeros and ones, matrix == 0 for an additive mask of 0 "
            "and -inf, and a score function `score + bias[b, h, q_idx, kv_idx]` for a bias.",
        )
    if matrix.ndim not in (2, 4):
        raise fg.FlashgenError(
            f"the matrix has {matrix.ndim} dimensions",
            call=call,
            write="Write [Sq, Skv] or [B, H, Sq, Skv]; matrix[:, None] or matrix[None] for three.",
        )
    return dense_table(table=matrix if matrix.ndim == 4 else matrix[None, None])
