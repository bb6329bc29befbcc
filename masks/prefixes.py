"""Prefix language model: a prefix seen by all, causal after it."""

from __future__ import annotations

import flashgen as fg


@fg.mask
def prefix_lm(b, q_idx, kv_idx, prefix: fg.Tensor):
    """The first `prefix` positions see each other and are seen by all; the rest is causal.

    Allowed iff `j < prefix[b]` or `j <= i`. The prefix is a length: position `prefix` is not part
    of it. 0 is `causal`, Skv is everything.

    Data: `prefix`, an int for the whole batch, or an integer tensor [B or 1].

    Source: T5 (arXiv 1910.10683), section 3.2.1; FlashMask (arXiv 2410.01359), figure 1(9).

    At N = 10, `prefix_lm(prefix=5)`:

        █████·····
        █████·····
        █████·····
        █████·····
        █████·····
        ██████····
        ███████···
        ████████··
        █████████·
        ██████████
    """
    return (kv_idx < prefix[b]) | (kv_idx <= q_idx)
