"""Chunked attention: causal inside fixed chunks of positions."""

from __future__ import annotations

import flashgen as fg

from .checks import at_least


@fg.mask(check=at_least(chunk=1))
def chunked(q_idx, kv_idx, chunk: int):
    """Positions fall into chunks of `chunk`; a query sees itself and what its chunk has before it.

    Allowed iff `j <= i` and `i // chunk == j // chunk`. The first query of a chunk sees one key,
    the last sees `chunk`. For chunks both ways use `document` with `doc = positions // chunk`.

    Parameters: `chunk`, int, at least 1.

    Source: Llama 4 (Hugging Face transformers, `attention_chunk_size`).

    At N = 10, `chunked(chunk=4)`:

        █·········
        ██········
        ███·······
        ████······
        ····█·····
        ····██····
        ····███···
        ····████··
        ········█·
        ········██
    """
    return (kv_idx <= q_idx) & (q_idx // chunk == kv_idx // chunk)
