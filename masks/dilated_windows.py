"""Windows with gaps: every so-many-th key."""

from __future__ import annotations

import flashgen as fg

from .checks import at_least


@fg.mask(check=at_least(window=0, dilation=1))
def dilated_window(q_idx, kv_idx, window: int, dilation: int):
    """A query sees `window` keys, its own the last of them, `dilation` positions apart.

    Allowed iff `0 <= i - j < window * dilation` and `(i - j) % dilation == 0`. The window counts
    keys, the query itself among them; `dilation=1` is `sliding_window`. attention-gym's two-sided
    `dilated_sliding_window(w, d)` is `local(left=w, right=w) & strided(dilation=d)`.

    Parameters: `window`, int, at least 0; `dilation`, int, at least 1.

    Source: Longformer (arXiv 2004.05150), section 3.1.

    At N = 10, `dilated_window(window=3, dilation=2)`:

        █·········
        ·█········
        █·█·······
        ·█·█······
        █·█·█·····
        ·█·█·█····
        ··█·█·█···
        ···█·█·█··
        ····█·█·█·
        ·····█·█·█
    """
    distance = q_idx - kv_idx
    return (distance >= 0) & (distance < window * dilation) & (distance % dilation == 0)


@fg.mask(check=at_least(dilation=1))
def strided(q_idx, kv_idx, dilation: int):
    """A query sees every `dilation`-th key, before it and after it, its own among them.

    Allowed iff `(i - j) % dilation == 0`; `causal & (sliding_window | strided)` is the strided
    pattern of Sparse Transformers.

    Parameters: `dilation`, int, at least 1.

    Source: "Generating Long Sequences with Sparse Transformers" (arXiv 1904.10509), section 4.3.

    At N = 10, `strided(dilation=3)`:

        █··█··█··█
        ·█··█··█··
        ··█··█··█·
        █··█··█··█
        ·█··█··█··
        ··█··█··█·
        █··█··█··█
        ·█··█··█··
        ··█··█··█·
        █··█··█··█
    """
    return (q_idx - kv_idx) % dilation == 0
