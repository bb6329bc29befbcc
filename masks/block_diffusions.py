"""Block diffusion: a noised copy and a clean copy of the text in one row."""

from __future__ import annotations

import flashgen as fg

from .checks import at_least


@fg.mask(check=at_least(length=1, block=1))
def block_diffusion(q_idx, kv_idx, length: int, block: int):
    """Noised half first, then the clean half, each `length` long and cut into blocks of `block`.

    With B(x) = (x % length) // block, allowed iff both are in the same half and the same block;
    or i is noised, j is clean and B(i) > B(j); or both are clean and B(i) >= B(j). A noised block
    sees itself both ways and the clean text before it, never its own clean copy.

    Parameters: `length`, int, at least 1: half of the row; `block`, int, at least 1. The last
    block is shorter where `block` doesn't divide `length`.

    Source: Block Diffusion (arXiv 2503.09573).

    At N = 10, `block_diffusion(length=5, block=2)`:

        ██········
        ██········
        ··██·██···
        ··██·██···
        ····█████·
        ·····██···
        ·····██···
        ·····████·
        ·····████·
        ·····█████
    """
    q_clean, kv_clean = q_idx >= length, kv_idx >= length
    q_part, kv_part = q_idx % length // block, kv_idx % length // block
    inside = (q_clean == kv_clean) & (q_part == kv_part)
    crossed = ~q_clean & kv_clean & (q_part > kv_part)
    return inside | crossed | (q_clean & kv_clean & (q_part >= kv_part))
