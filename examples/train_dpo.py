"""Preferences (DPO, arXiv 2305.18290): two answers share one question in one row.

`masks.shared_question` lets each answer see the question and itself, so that the question is
computed once for both. Here the better answer is how a text really goes on.

    python examples/train_dpo.py [--device cuda] [--steps N]
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from small_transformer import Batch, Run, Sizes, documents, race

import flashgen as fg
from flashgen import masks

attend = fg.Attention(masks.shared_question)
# Of an answer's mean over its tokens (as in SimPO, arXiv 2405.14734): sums over answers of 2048
# tokens would be too far apart to learn from.
BETA = 2.0


def batches(sizes: Sizes) -> Iterator[Batch]:
    """Rows of a question (half of the length) and two answers of a quarter each."""
    generator = torch.Generator().manual_seed(4)
    text = torch.cat(documents())
    question, reply = sizes.length // 2, sizes.length // 4
    answer = torch.tensor([0] * question + [1] * reply + [2] * reply, dtype=torch.int32)
    place = torch.arange(sizes.length)
    # Both answers follow the question directly.
    positions = torch.where(answer == 2, place - reply, place)
    shared = (answer == 0) | (answer[:, None] == answer)
    mask = (shared & (place <= place[:, None])).expand(sizes.batch, 1, -1, -1)
    # An answer's last token is followed by nothing, and the question is given.
    is_learned = (answer > 0) & (answer == answer.roll(-1))
    while True:
        starts = torch.randint(len(text) - sizes.length, (2, sizes.batch, 1), generator=generator)
        told, other = text[starts + place]
        tokens = torch.cat([told[:, : question + reply], other[:, :reply]], 1)
        targets = tokens.roll(-1, 1).masked_fill(~is_learned, -100)
        data = {"doc": torch.zeros_like(tokens, dtype=torch.int32), "answer": answer[None]}
        yield Batch(tokens, positions.expand_as(tokens), targets, data, mask)


def dpo_loss(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """-log sigmoid of how much more likely the better answer is; the reference model, which would
    be subtracted, knows nothing here: it finds all answers equally likely."""
    flat = F.cross_entropy(
        logits.flatten(0, 1).float(), batch.targets.flatten(), reduction="none"
    ).reshape_as(batch.targets)
    answer = batch.data["answer"]
    learned = batch.targets >= 0
    better, worse = (
        (flat * here).sum(1) / here.sum(1) for here in (learned & (answer == n) for n in (1, 2))
    )
    return -F.logsigmoid(BETA * (worse - better)).mean()


def main(arguments: list[str] | None = None) -> dict[str, Run]:
    sizes = Sizes.parse(__doc__, arguments)
    return race(sizes, attend, batches(sizes), dpo_loss)


if __name__ == "__main__":
    main()
