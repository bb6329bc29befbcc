"""Hash-sparse: tokens sorted by bucket, a staircase of blocks."""

from __future__ import annotations

import flashgen as fg


@fg.mask
def hash_sparse(b, h, q_idx, kv_idx, first_query: fg.Tensor, end_query: fg.Tensor):
    """A key is seen by one range of queries: those that fell into its bucket.

    Allowed iff `first_query[b, h, j] <= i < end_query[b, h, j]`. With tokens sorted by bucket
    both vectors rise, but any values are right; `first >= end` is a key that nobody sees. Not
    causal by itself: put the limit into `first_query`, or compose with `causal`. FlashMask's
    vectors are UTE (`first_query`) and LTS (`end_query`).

    Data: `first_query`, `end_query`, integer [B or 1, H or 1, S], per query head.

    Source: "Faster Causal Attention Over Large Sequences Through Sparse Flash Attention" (arXiv
    2306.01160), Hash-sparse; FlashMask (arXiv 2410.01359), figure 1(11).

    At N = 10, `hash_sparse(first_query=torch.tensor([[[0, 0, 1, 3, 4, 4, 5, 7, 8, 9]]]),
    end_query=torch.tensor([[[2, 2, 4, 5, 5, 8, 8, 9, 10, 10]]]))`:

        ██········
        ███·······
        ··█·······
        ··██······
        ···███····
        ·····██···
        ·····██···
        ·····███··
        ·······██·
        ········██
    """
    return (first_query[b, h, kv_idx] <= q_idx) & (q_idx < end_query[b, h, kv_idx])
