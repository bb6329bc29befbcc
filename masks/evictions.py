"""Eviction: keys that leave the cache at some step."""

from __future__ import annotations

import flashgen as fg


@fg.mask
def random_eviction(b, h_kv, q_idx, kv_idx, evicted_at: fg.Tensor):
    """Causal, and a key is gone from the query at which it was evicted on.

    Allowed iff `j <= i < evicted_at[b, h_kv, j]`. A key that stays has any value past the last
    position; one with `evicted_at <= j` is seen by nobody, not even itself.

    Data: `evicted_at`, integer [B or 1, Hkv or 1, S], per head of the keys.

    Source: FlashMask (arXiv 2410.01359), figure 1(12); H2O (arXiv 2306.14048) for what evicts.

    At N = 10, `random_eviction(evicted_at=torch.tensor([[[10, 4, 8, 6, 10, 7, 10, 9, 10, 10]]]))`:

        █·········
        ██········
        ███·······
        ████······
        █·███·····
        █·████····
        █·█·███···
        █·█·█·██··
        █···█·███·
        █···█·█·██
    """
    return (kv_idx <= q_idx) & (q_idx < evicted_at[b, h_kv, kv_idx])
