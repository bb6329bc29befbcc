"""Training a drafter: many draft blocks after one prefix."""

from __future__ import annotations

import flashgen as fg

from .checks import at_least


@fg.mask(check=at_least(block=1))
def draft_block(b, q_idx, kv_idx, prefix: fg.Tensor, block: int):
    """After a causal context of `prefix` positions come blocks of `block`, each causal in itself.

    Allowed iff `j <= i` and (`j < prefix[b]`, or both lie in the same block: `(i - prefix) //
    block == (j - prefix) // block`). A block sees the whole context and no other block.

    Data: `prefix`, an int for the whole batch, or an integer tensor [B or 1]. `block`: int, at
    least 1, the anchor among them.

    Source: JetSpec (arXiv 2606.18394), training mask.

    At N = 10, `draft_block(prefix=4, block=3)`:

        █·········
        ██········
        ███·······
        ████······
        █████·····
        ██████····
        ███████···
        ████···█··
        ████···██·
        ████···███
    """
    start = prefix[b]
    inside = (kv_idx - start) // block == (q_idx - start) // block
    return (kv_idx <= q_idx) & ((kv_idx < start) | inside)
