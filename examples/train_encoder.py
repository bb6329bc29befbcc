"""A bidirectional encoder on a padded batch: bytes are hidden, and guessed from both sides.

Padding costs next to nothing: its tiles are empty, and skipped.

    python examples/train_encoder.py [--device cuda] [--steps N]
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from small_transformer import HIDDEN, Batch, Run, Sizes, race, snippets

import flashgen as fg
from flashgen import masks

attend = fg.Attention(masks.padding)


def batches(sizes: Sizes) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(3)
    pieces = snippets(sizes.length, seed=3)
    place = torch.arange(sizes.length)
    while True:
        rows = [next(pieces) for _ in range(sizes.batch)]
        tokens = torch.zeros(sizes.batch, sizes.length, dtype=torch.long)
        for row, piece in zip(tokens, rows, strict=True):
            row[: len(piece)] = piece
        valid = torch.tensor([len(piece) for piece in rows], dtype=torch.int32)
        is_real = place < valid[:, None]
        is_hidden = is_real & (torch.rand(tokens.shape, generator=generator) < 0.15)
        is_hidden[:, 0] = True
        targets = tokens.masked_fill(~is_hidden, -100)
        # A dense mask that empties a row gives NaN there; for SDPA, padding sees what is real.
        mask = is_real[:, None, None, :].expand(-1, -1, sizes.length, -1)
        data = {"kv_valid": valid, "q_valid": valid}
        hidden = tokens.masked_fill(is_hidden, HIDDEN)
        yield Batch(hidden, place.expand_as(tokens), targets, data, mask)


def main(arguments: list[str] | None = None) -> dict[str, Run]:
    sizes = Sizes.parse(__doc__, arguments)
    return race(sizes, attend, batches(sizes))


if __name__ == "__main__":
    main()
