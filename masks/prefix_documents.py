"""Packed documents, each with a prefix of its own that the whole document sees."""

from __future__ import annotations

import flashgen as fg


@fg.mask
def prefix_document(b, q_idx, kv_idx, doc: fg.Tensor, prefix_end: fg.Tensor):
    """Within its document a query sees the document's prefix, and what comes before itself.

    Allowed iff `doc[b, i] == doc[b, j]` and (`j <= i` or `j < prefix_end[b, j]`).
    `prefix_end[b, j]` is the position one past the prefix of j's document: the document's start
    where it has no prefix, its end where all of it is prefix.

    Data: `doc` and `prefix_end`, integer [B or 1, S], S at least the largest position + 1.

    Source: FlashMask (arXiv 2410.01359), figure 1(8).

    At N = 10, `prefix_document(doc=torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2, 2]]),
    prefix_end=torch.tensor([[2, 2, 2, 4, 4, 7, 7, 7, 7, 7]]))`:

        ██········
        ██········
        ███·······
        ···█······
        ···██·····
        ·····██···
        ·····██···
        ·····███··
        ·····████·
        ·····█████
    """
    seen = (kv_idx <= q_idx) | (kv_idx < prefix_end[b, kv_idx])
    return (doc[b, q_idx] == doc[b, kv_idx]) & seen
