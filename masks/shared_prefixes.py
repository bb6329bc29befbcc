"""Packed documents that share other documents as their prefix."""

from __future__ import annotations

import flashgen as fg


@fg.mask
def shared_prefix(b, q_idx, kv_idx, doc: fg.Tensor, offsets: fg.Tensor, prefix_doc: fg.Tensor):
    """Causal inside a document, which also sees all of the document that is its prefix.

    Allowed iff `offsets[d] <= j <= i`, or `p != d` and `offsets[p] <= j < offsets[p + 1]`, with
    `d = doc[b, i]` and `p = prefix_doc[b, d]` (all per b). A document without a prefix names
    itself. Only one step is taken: the prefix's own prefix is not seen.

    Data: `doc`, integer [B or 1, S], S at least the largest position + 1; `offsets`, integer
    [B or 1, n + 1], first positions of the documents and the end; `prefix_doc`, integer
    [B or 1, n].

    Source: attention-gym, `shared_prefix`; Hydragen (arXiv 2402.05099) for the use.

    At N = 10, `shared_prefix(doc=torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2, 2]]),
    offsets=torch.tensor([[0, 4, 7, 10]]), prefix_doc=torch.tensor([[0, 0, 0]]))`:

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
    own = doc[b, q_idx]
    before = prefix_doc[b, own]
    inside = (offsets[b, own] <= kv_idx) & (kv_idx <= q_idx)
    prefix = (offsets[b, before] <= kv_idx) & (kv_idx < offsets[b, before + 1])
    return inside | ((before != own) & prefix)
