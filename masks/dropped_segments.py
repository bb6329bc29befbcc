"""QK-sparse: segments of queries and keys that are dropped together."""

from __future__ import annotations

import flashgen as fg


@fg.mask
def qk_sparse(b, q_idx, kv_idx, segment: fg.Tensor):
    """Causal, except that a dropped segment's queries don't see the segment's own keys.

    Allowed iff `j <= i` and not (`segment[b, i] == segment[b, j]` and `segment[b, j] >= 0`). The
    diagonal is dropped too: in a segment that starts at position 0 no query has a key, so its
    rows are 0 with LSE -inf.

    Data: `segment`, integer [B or 1, S]: the number of the dropped segment, negative where a
    position belongs to none. S is at least the largest position + 1.

    Source: "Faster Causal Attention Over Large Sequences Through Sparse Flash Attention" (arXiv
    2306.01160), QK-sparse; FlashMask (arXiv 2410.01359), figure 1(10).

    At N = 10, `qk_sparse(segment=torch.tensor([[-1, -1, 0, 0, 0, 1, 1, 1, -1, -1]]))`:

        █·········
        ██········
        ██········
        ██········
        ██········
        █████·····
        █████·····
        █████·····
        █████████·
        ██████████
    """
    dropped = (segment[b, q_idx] == segment[b, kv_idx]) & (segment[b, kv_idx] >= 0)
    return (kv_idx <= q_idx) & ~dropped
