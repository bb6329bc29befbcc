"""One question, several answers: the answers see the question, not each other."""

from __future__ import annotations

import flashgen as fg


@fg.mask
def shared_question(b, q_idx, kv_idx, doc: fg.Tensor, answer: fg.Tensor):
    """Per document a question and then its answers; an answer sees the question and itself.

    Allowed iff `j <= i`, `doc[b, i] == doc[b, j]`, and (j is in the question or `answer[b, i] ==
    answer[b, j]`).

    Data: `doc`, integer [B or 1, S]; `answer`, integer [B or 1, S]: 0 in the question, else the
    answer's number within its document. S is at least the largest position + 1.

    Source: FlashMask (arXiv 2410.01359), figure 1(5) (reward models and DPO).

    At N = 10, `shared_question(doc=torch.tensor([[0] * 10]),
    answer=torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2, 2]]))`:

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
    shared = (answer[b, kv_idx] == 0) | (answer[b, q_idx] == answer[b, kv_idx])
    return (kv_idx <= q_idx) & (doc[b, q_idx] == doc[b, kv_idx]) & shared
