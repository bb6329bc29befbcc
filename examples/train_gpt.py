"""A small GPT on packed documents: several in a row of the batch, none sees another.

The text is this repository's own files. The same model, from the same start, is trained with
PyTorch's attention and the dense mask: the losses agree step by step.

    python examples/train_gpt.py [--device cuda] [--steps N]
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from small_transformer import Batch, Run, Sizes, race, snippets

import flashgen as fg
from flashgen import masks

attend = fg.Attention(masks.causal_document)


def pack(length: int, pieces: Iterator[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Documents one after the other until a row is full: tokens and document numbers [length]."""
    tokens, doc = torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.int32)
    for number, piece in enumerate(pieces):
        tokens = torch.cat([tokens, piece])
        doc = torch.cat([doc, torch.full((len(piece),), number, dtype=torch.int32)])
        if len(tokens) >= length:
            break
    return tokens[:length], doc[:length]


def batches(sizes: Sizes) -> Iterator[Batch]:
    pieces = snippets(sizes.length // 2, seed=1)
    while True:
        rows = [pack(sizes.length, pieces) for _ in range(sizes.batch)]
        tokens, doc = (torch.stack(parts) for parts in zip(*rows, strict=True))
        # A document's last token is followed by nothing.
        is_last = torch.ones_like(doc, dtype=torch.bool)
        is_last[:, :-1] = doc[:, 1:] != doc[:, :-1]
        targets = tokens.roll(-1, 1).masked_fill(is_last, -100)
        first = torch.searchsorted(doc, doc)
        positions = torch.arange(sizes.length) - first
        mask = (doc[:, None, :, None] == doc[:, None, None, :]).tril()
        yield Batch(tokens, positions, targets, {"doc": doc}, mask)


def main(arguments: list[str] | None = None) -> dict[str, Run]:
    sizes = Sizes.parse(__doc__, arguments)
    return race(sizes, attend, batches(sizes))


if __name__ == "__main__":
    main()
