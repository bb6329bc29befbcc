"""A prefix language model: a prompt is read in both directions, its continuation is written.

python examples/train_prefix_lm.py [--device cuda] [--steps N]
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from small_transformer import Batch, Run, Sizes, documents, race

import flashgen as fg
from flashgen import masks

attend = fg.Attention(masks.prefix_lm)


def batches(sizes: Sizes) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(2)
    text = torch.cat(documents())
    place = torch.arange(sizes.length)
    while True:
        starts = torch.randint(len(text) - sizes.length, (sizes.batch, 1), generator=generator)
        tokens = text[starts + place]
        prefix = torch.randint(1, sizes.length // 2, (sizes.batch,), generator=generator)
        # The prompt is given, so only what follows it is learned.
        is_given = place < prefix[:, None] - 1
        targets = tokens.roll(-1, 1).masked_fill(is_given | (place == sizes.length - 1), -100)
        mask = (place < prefix[:, None, None, None]) | (place <= place[:, None])
        yield Batch(tokens, place.expand_as(tokens), targets, {"prefix": prefix.int()}, mask)


def main(arguments: list[str] | None = None) -> dict[str, Run]:
    sizes = Sizes.parse(__doc__, arguments)
    return race(sizes, attend, batches(sizes))


if __name__ == "__main__":
    main()
