"""Causal attention, and its two alignments where there are fewer queries than keys, or more."""

from __future__ import annotations

import flashgen as fg

from .checks import counts_rows
from .rows import row_of


@fg.mask
def causal(q_idx, kv_idx):
    """A query sees itself and every earlier position.

    Allowed iff `j <= i`, in positions. By default the queries are the last positions, so that
    training, chunked prefill and decoding mean the same; with fewer queries than keys the last
    query sees every key (bottom-right), with more the first queries see none. `q_offset=0` gives
    the other alignment, as `top_left` does.

    Source: "Attention Is All You Need" (arXiv 1706.03762), section 3.2.3.

    At N = 10, `causal`:

        █·········
        ██········
        ███·······
        ████······
        █████·····
        ██████····
        ███████···
        ████████··
        █████████·
        ██████████
    """
    return kv_idx <= q_idx


@fg.mask(check=counts_rows())
def bottom_right(q_idx, kv_idx, q_len, kv_len):
    """Causal, the last query aligned with the last key.

    Allowed iff `j <= r + kv_len - q_len` for row r of the queries given. With the default
    `q_offset` this is `causal`. FlashAttention since 2.1 and FlashMask align so; xFormers calls
    it LowerTriangularFromBottomRightMask.

    Source: xFormers, `fmha.attn_bias`.

    At N = 10, `bottom_right`:

        █·········
        ██········
        ███·······
        ████······
        █████·····
        ██████····
        ███████···
        ████████··
        █████████·
        ██████████
    """
    return kv_idx <= row_of(q_idx, q_len, kv_len) + (kv_len - q_len)


@fg.mask(check=counts_rows())
def top_left(q_idx, kv_idx, q_len, kv_len):
    """Causal, the first query aligned with the first key, whatever the lengths.

    Allowed iff `j <= r` for row r of the queries given (the default `q_offset` is assumed).
    PyTorch's `is_causal=True` and xFormers' LowerTriangularMask align so.

    Source: xFormers, `fmha.attn_bias`.

    At N = 10, `top_left`:

        █·········
        ██········
        ███·······
        ████······
        █████·····
        ██████····
        ███████···
        ████████··
        █████████·
        ██████████
    """
    return kv_idx <= row_of(q_idx, q_len, kv_len)
