"""Packed sequences of queries and keys: block-diagonal masks."""

from __future__ import annotations

from typing import Any

import flashgen as fg

from .checks import at_least, both, counts_rows
from .rows import row_of


def _inside(row: Any, kv_idx: Any, sequence: Any, kv_start: Any, kv_size: Any) -> Any:
    """Whether a key belongs to the row's sequence."""
    s = sequence[row]
    return (kv_start[s] <= kv_idx) & (kv_idx < kv_start[s] + kv_size[s])


def _diagonal_key(row: Any, sequence: Any, q_start: Any, kv_start: Any, diagonal: Any) -> Any:
    """The key on the row's diagonal: one number a row, so that tiles are bounded tightly."""
    s = sequence[row]
    return row - q_start[s] + diagonal[s] + kv_start[s]


@fg.mask(check=counts_rows(sequence=(0, 1)))
def block_diagonal(
    q_idx,
    kv_idx,
    q_len,
    kv_len,
    sequence: fg.Tensor,
    kv_start: fg.Tensor,
    kv_size: fg.Tensor,
):
    """Packed sequences: a query sees all keys of its own sequence.

    With s = sequence[r] of the query's row r, allowed iff `kv_start[s] <= j < kv_start[s] +
    kv_size[s]`. Where the sequences' keys lie is free: one behind the other (packed), at fixed
    distances (padded), anywhere, even overlapping (gappy). `from_seqlens` and `from_cu_seqlens`
    make the data. Rows count from the first query given; the default `q_offset` is assumed.

    Data, integer: `sequence` [rows + 1], the sequence of each row, n past the last; `kv_start`,
    `kv_size` [n + 1], of which the last is 0.

    Source: xFormers, BlockDiagonalMask, its PaddedKeys and GappyKeys forms.

    At N = 10, `from_seqlens([4, 3, 3])`:

        ████······
        ████······
        ████······
        ████······
        ····███···
        ····███···
        ····███···
        ·······███
        ·······███
        ·······███
    """
    return _inside(row_of(q_idx, q_len, kv_len), kv_idx, sequence, kv_start, kv_size)


@fg.mask(check=counts_rows(sequence=(0, 1)))
def block_diagonal_causal(
    q_idx,
    kv_idx,
    q_len,
    kv_len,
    sequence: fg.Tensor,
    q_start: fg.Tensor,
    kv_start: fg.Tensor,
    kv_size: fg.Tensor,
    diagonal: fg.Tensor,
):
    """Packed sequences, causal inside each.

    `block_diagonal`, and with i and j counted inside the sequence `j <= i + diagonal[s]`. The
    diagonal is 0 for top-left alignment, and keys - queries of the sequence for bottom-right.

    Data, integer: as for `block_diagonal`; `q_start`, `diagonal` [n + 1].

    Source: xFormers, BlockDiagonalCausalMask and BlockDiagonalCausalFromBottomRightMask.

    At N = 10, `from_seqlens([4, 3, 3], causal=True)`:

        █·········
        ██········
        ███·······
        ████······
        ····█·····
        ····██····
        ····███···
        ·······█··
        ·······██·
        ·······███
    """
    row = row_of(q_idx, q_len, kv_len)
    own = _diagonal_key(row, sequence, q_start, kv_start, diagonal)
    return _inside(row, kv_idx, sequence, kv_start, kv_size) & (kv_idx <= own)


@fg.mask(check=both(at_least(window=0), counts_rows(sequence=(0, 1))))
def block_diagonal_window(
    q_idx,
    kv_idx,
    q_len,
    kv_len,
    sequence: fg.Tensor,
    q_start: fg.Tensor,
    kv_start: fg.Tensor,
    kv_size: fg.Tensor,
    diagonal: fg.Tensor,
    window: int,
):
    """Packed sequences, a causal sliding window inside each.

    `block_diagonal`, and with i and j counted inside the sequence `0 <= i + diagonal[s] - j <
    window`: the window counts the query itself, as xFormers' `_window_size` does.

    Data as for `block_diagonal_causal`; `window`, int, at least 0.

    Source: xFormers, BlockDiagonalCausalLocalAttentionMask and its FromBottomRight form.

    At N = 10, `from_seqlens([4, 3, 3], window=2)`:

        █·········
        ██········
        ·██·······
        ··██······
        ····█·····
        ····██····
        ·····██···
        ·······█··
        ·······██·
        ········██
    """
    row = row_of(q_idx, q_len, kv_len)
    own = _diagonal_key(row, sequence, q_start, kv_start, diagonal)
    near = (own - window < kv_idx) & (kv_idx <= own)
    return _inside(row, kv_idx, sequence, kv_start, kv_size) & near


@fg.mask(check=both(at_least(left=0, right=0), counts_rows(sequence=(0, 1))))
def block_diagonal_local(
    q_idx,
    kv_idx,
    q_len,
    kv_len,
    sequence: fg.Tensor,
    q_start: fg.Tensor,
    kv_start: fg.Tensor,
    kv_size: fg.Tensor,
    diagonal: fg.Tensor,
    left: int,
    right: int,
):
    """Packed sequences, a window to both sides inside each.

    `block_diagonal`, and with i and j counted inside the sequence `i + diagonal[s] - left <= j <=
    i + diagonal[s] + right`: left + 1 + right keys, away from the ends. (xFormers' docstrings of
    the padded and gappy forms say fewer; its code counts as here.)

    Data as for `block_diagonal_causal`; `left`, `right`, ints, at least 0.

    Source: xFormers, BlockDiagonalLocalAttentionPaddedKeysMask and its Gappy form.

    At N = 10, `from_seqlens([4, 3, 3], window=(1, 1))`:

        ██········
        ███·······
        ·███······
        ··██······
        ····██····
        ····███···
        ·····██···
        ·······██·
        ·······███
        ········██
    """
    row = row_of(q_idx, q_len, kv_len)
    own = _diagonal_key(row, sequence, q_start, kv_start, diagonal)
    near = (own - left <= kv_idx) & (kv_idx <= own + right)
    return _inside(row, kv_idx, sequence, kv_start, kv_size) & near
