"""One schedule, many layers.

A schedule says which tiles the mask empties, cuts or fills. It depends on the mask, its data and
the lengths, not on queries, keys or scores: make it once a step, and give it to every layer.

    python examples/share_schedule.py
"""

from __future__ import annotations

import time
from typing import Any

import torch
from document_lists import ids, read
from torch import nn

import flashgen as fg
from flashgen import masks

LAYERS, HEADS, HEAD_DIM = 4, 4, 32
WIDTH = HEADS * HEAD_DIM


@fg.attention(mask=masks.causal_document)
def attend(score, h, q_idx, kv_idx, slope: fg.Tensor):
    return score + slope[h] * (kv_idx - q_idx)


class Layer(nn.Module):
    """Attention with a residual. Each layer has slopes of its own, and the mask is the same."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)
        self.slope = nn.Parameter(torch.logspace(-1, -3, HEADS, base=2))

    def qkv(self, x: torch.Tensor) -> list[torch.Tensor]:
        heads = self.inputs(x).unflatten(-1, (3, HEADS, HEAD_DIM))
        return [part.transpose(1, 2) for part in heads.unbind(2)]

    def forward(self, x: torch.Tensor, doc: torch.Tensor, schedule: Any = None) -> torch.Tensor:
        out = attend(*self.qkv(x), doc=doc, slope=self.slope, schedule=schedule)
        return x + self.output(out.transpose(1, 2).flatten(2))


def main(length: int = 2048) -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(Layer() for _ in range(LAYERS))
    x = torch.randn(1, length, WIDTH)
    doc = ids(read(8192)[-1])[:, :length]

    # Data of the score function may be left out: a schedule doesn't depend on it.
    start = time.perf_counter()
    schedule = attend.schedule(*layers[0].qkv(x), doc=doc)
    print(f"{schedule}\nplanned in {1e3 * (time.perf_counter() - start):.1f} ms\n")

    start = time.perf_counter()
    shared = alone = x
    for layer in layers:
        shared = layer(shared, doc, schedule)
    shared.square().mean().backward()
    print(f"{LAYERS} layers, forward and backward: {time.perf_counter() - start:.2f} s")

    # Without one, each call plans for itself: the same result.
    for layer in layers:
        alone = layer(alone, doc)
    torch.testing.assert_close(shared, alone, rtol=0, atol=0)

    # A schedule that doesn't fit is refused.
    try:
        layers[0](x[:, :-1], doc, schedule)
    except fg.FlashgenError as error:
        print(f"\n{error}")


if __name__ == "__main__":
    main()
