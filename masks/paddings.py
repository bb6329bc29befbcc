"""Padded batches: rows of different length in one rectangle."""

from __future__ import annotations

import flashgen as fg


@fg.mask
def padding(b, q_idx, kv_idx, kv_valid: fg.Tensor, q_valid: fg.Tensor):
    """The first `kv_valid` keys and the first `q_valid` queries are real, what follows is padding.

    Allowed iff `j < kv_valid[b]` and `i < q_valid[b]`, in positions. A padding query sees no key
    (output 0, LSE -inf) and a padding key is seen by none, so no gradient passes through either.
    For queries that are all real pass the length: `padding(q_valid=Skv)`.

    Data: `kv_valid`, `q_valid`: an int for the whole batch, or an integer tensor [B or 1].

    Source: "Attention Is All You Need" (arXiv 1706.03762), its implementations' padding mask.

    At N = 10, `padding(kv_valid=7, q_valid=7)`:

        ███████···
        ███████···
        ███████···
        ███████···
        ███████···
        ███████···
        ███████···
        ··········
        ··········
        ··········
    """
    return (kv_idx < kv_valid[b]) & (q_idx < q_valid[b])


@fg.mask
def left_padding(b, kv_idx, kv_start: fg.Tensor):
    """The keys before `kv_start` are padding, as in batches that are padded on the left.

    Allowed iff `j >= kv_start[b]`; compose with `causal`. The padding queries then see no key.

    Data: `kv_start`, an int for the whole batch, or an integer tensor [B or 1].

    Source: Hugging Face transformers, `padding_side="left"`; the skipped keys of xFormers'
    PagedBlockDiagonalGappyKeysMask.

    At N = 10, `causal & left_padding(kv_start=3)`:

        ··········
        ··········
        ··········
        ···█······
        ···██·····
        ···███····
        ···████···
        ···█████··
        ···██████·
        ···███████
    """
    return kv_idx >= kv_start[b]
