"""Local attention: so many keys to the left, so many to the right."""

from __future__ import annotations

import flashgen as fg

from .checks import at_least


@fg.mask(check=at_least(left=0, right=0))
def local(q_idx, kv_idx, left: int, right: int):
    """A query sees itself, `left` positions before it and `right` positions after it.

    Allowed iff `i - left <= j <= i + right`: left + 1 + right keys, away from the ends.
    FlashAttention's `window_size=(left, right)` counts the same, but its -1 for "no limit" is
    refused here: leave that side out (`causal` is no limit on the left, nothing on the right) or
    pass the length. It moves with the bottom-right diagonal where Sq differs from Skv.

    Parameters: `left`, `right`, ints, at least 0.

    Source: Longformer (arXiv 2004.05150), section 3.1; xFormers,
    LocalAttentionFromBottomRightMask.

    At N = 10, `local(left=2, right=1)`:

        ██········
        ███·······
        ████······
        ·████·····
        ··████····
        ···████···
        ····████··
        ·····████·
        ······████
        ·······███
    """
    return (q_idx - left <= kv_idx) & (kv_idx <= q_idx + right)
