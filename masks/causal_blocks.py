"""In-context learning: examples see only themselves, the test example sees all of them."""

from __future__ import annotations

import flashgen as fg


@fg.mask
def causal_blockwise(b, q_idx, kv_idx, doc: fg.Tensor, test_doc: fg.Tensor):
    """Causal; a demonstration sees itself alone, the test example sees every demonstration.

    Allowed iff `j <= i` and (`doc[b, i] == doc[b, j]` or `doc[b, i] == test_doc[b]`).

    Data: `doc`, integer [B or 1, S], S at least the largest position + 1; `test_doc`, the id of
    the test example (the last document): an int for the whole batch, or an integer tensor
    [B or 1].

    Source: FlashMask (arXiv 2410.01359), figure 1(7).

    At N = 10, `causal_blockwise(doc=torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2, 2]]), test_doc=2)`:

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
    inside = doc[b, q_idx] == doc[b, kv_idx]
    return (kv_idx <= q_idx) & (inside | (doc[b, q_idx] == test_doc[b]))
