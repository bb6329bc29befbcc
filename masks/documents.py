"""Documents packed into one row: attention stays inside each."""

from __future__ import annotations

import flashgen as fg


@fg.mask
def document(b, q_idx, kv_idx, doc: fg.Tensor):
    """A query sees the keys of its own document, both ways.

    Allowed iff `doc[b, i] == doc[b, j]`. Ids are any integers: they need not be ordered (ordered
    ones are scheduled without looking at elements), and equal ids that don't touch are one
    document. Padding is a document like any other: give it an id of its own, or compose with
    `padding`, which also keeps it from attending to itself.

    Data: `doc`, integer [B or 1, S], S at least the largest position + 1.

    Source: FlashMask (arXiv 2410.01359), figure 1(4); attention-gym, `document_mask`.

    At N = 10, `document(doc=torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2, 2]]))`:

        ████······
        ████······
        ████······
        ████······
        ····███···
        ····███···
        ····███···
        ·······███
        ·······███
        ·······███
    """
    return doc[b, q_idx] == doc[b, kv_idx]


@fg.mask
def causal_document(b, q_idx, kv_idx, doc: fg.Tensor):
    """A query sees itself and the earlier keys of its own document.

    Allowed iff `j <= i` and `doc[b, i] == doc[b, j]`: `causal & document`, under one name.

    Data: `doc`, integer [B or 1, S], S at least the largest position + 1.

    Source: FlashMask (arXiv 2410.01359), figure 1(3); attention-gym, `document_mask`.

    At N = 10, `causal_document(doc=torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2, 2]]))`:

        █·········
        ██········
        ███·······
        ████······
        ····█·····
        ····██····
        ····███···
        ·······█··
        ·······██·
        ·······███
    """
    return (kv_idx <= q_idx) & (doc[b, q_idx] == doc[b, kv_idx])
