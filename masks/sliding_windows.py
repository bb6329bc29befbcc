"""Causal sliding window: the last few keys."""

from __future__ import annotations

import flashgen as fg

from .checks import at_least


@fg.mask(check=at_least(window=0))
def sliding_window(q_idx, kv_idx, window: int):
    """A query sees the last `window` positions, its own among them.

    Allowed iff `0 <= i - j < window`. The window counts the query itself: 1 is the diagonal, 0
    is no key. Hugging Face's `sliding_window` counts the same; FlashAttention's
    `window_size=(w - 1, 0)` is `window=w`, attention-gym's `sliding_window(w)` is `window=w + 1`.

    Parameters: `window`, int, at least 0.

    Source: Longformer (arXiv 2004.05150), section 3.1; Mistral 7B (arXiv 2310.06825), section 2.

    At N = 10, `sliding_window(window=3)`:

        █·········
        ██········
        ███·······
        ·███······
        ··███·····
        ···███····
        ····███···
        ·····███··
        ······███·
        ·······███
    """
    return (kv_idx <= q_idx) & (q_idx - kv_idx < window)
