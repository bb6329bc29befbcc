"""What the training examples share: a byte-level transformer, the repository's text, the race.

A race trains one model twice from the same start, on the same batches: once with a flashgen
attention and once with PyTorch's and the dense mask. Their losses must agree step by step."""

from __future__ import annotations

import argparse
import copy
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import flashgen as fg

ROOT = Path(__file__).parents[1]
# Bytes, and one token more that stands for what is hidden.
HIDDEN, VOCABULARY = 256, 257
# Steps over which the learning rate grows to its height.
WARM_UP = 8

# (q, k, v) to out, all [B, H, S, D].
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Sizes:
    """Of a run: sequences of a batch, their length, the model, and how many steps."""

    batch: int
    length: int
    width: int
    heads: int
    layers: int
    steps: int
    device: torch.device

    @staticmethod
    def parse(description: str | None, arguments: list[str] | None) -> Sizes:
        """Small on a CPU, so that it takes seconds; on a GPU as one would train."""
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
        parser.add_argument("--steps", type=int)
        given = parser.parse_args(arguments)
        is_cuda = given.device == "cuda" or (given.device == "auto" and torch.cuda.is_available())
        if is_cuda:
            return Sizes(4, 8192, 1024, 16, 8, given.steps or 20, torch.device("cuda"))
        return Sizes(2, 256, 64, 4, 2, given.steps or 8, torch.device("cpu"))


@dataclass(frozen=True)
class Batch:
    """Tokens, the position of each in its document, and what each is to be followed by [B, S];
    the mask as data for flashgen and as a boolean matrix [B, 1, S, S] for PyTorch."""

    tokens: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor  # -100 where nothing is to be predicted
    data: dict[str, torch.Tensor]
    mask: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        own = (self.tokens, self.positions, self.targets)
        data = {name: x.to(device) for name, x in self.data.items()}
        return Batch(*(x.to(device) for x in own), data, self.mask.to(device))


class Block(nn.Module):
    """A layer that normalises first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wider, self.narrower = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        parts = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = (part.transpose(1, 2) for part in parts.unbind(2))
        x = x + self.out(attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.narrower(F.gelu(self.wider(self.between(x))))


class Transformer(nn.Module):
    """Tokens and positions [B, S] to logits [B, S, VOCABULARY]."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, sizes.width)
        self.position = nn.Embedding(sizes.length, sizes.width)
        blocks = (Block(sizes.width, sizes.heads) for _ in range(sizes.layers))
        self.blocks = nn.ModuleList(blocks)
        self.last = nn.LayerNorm(sizes.width)
        self.logits = nn.Linear(sizes.width, VOCABULARY)
        for weight in (self.token.weight, self.position.weight, self.logits.weight):
            nn.init.normal_(weight, std=0.02)  # logits start near 0: every byte equally likely

    def forward(self, batch: Batch, attend: Attend) -> torch.Tensor:
        x = self.token(batch.tokens) + self.position(batch.positions)
        for block in self.blocks:
            x = block(x, attend)
        logits: torch.Tensor = self.logits(self.last(x))
        return logits


class Shared:
    """A flashgen attention on one batch's data: planned at the first layer, for all of them."""

    def __init__(self, attention: fg.Attention, data: dict[str, torch.Tensor]) -> None:
        self.attention, self.data, self.schedule = attention, data, None

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.schedule is None:
            self.schedule = self.attention.schedule(q, k, v, **self.data)
        out: torch.Tensor = self.attention(q, k, v, schedule=self.schedule, **self.data)
        return out


def next_token_loss(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten())


@dataclass
class Run:
    """The losses of one contestant, and how many tokens a second it took."""

    losses: list[float] = field(default_factory=list)
    rate: float = 0.0


def race(
    sizes: Sizes,
    attention: fg.Attention,
    batches: Iterator[Batch],
    loss_of: Callable[[torch.Tensor, Batch], torch.Tensor] = next_token_loss,
) -> dict[str, Run]:
    """Train with both attentions and print losses and speeds. Returns a Run of each."""
    torch.manual_seed(0)
    model = Transformer(sizes).to(sizes.device)
    drawn = [next(batches).to(sizes.device) for _ in range(sizes.steps)]
    contestants: dict[str, Callable[[Batch], Attend]] = {
        "flashgen": lambda batch: Shared(attention, batch.data),
        "SDPA": lambda batch: functools.partial(
            F.scaled_dot_product_attention, attn_mask=batch.mask
        ),
    }
    runs = {
        name: _train(copy.deepcopy(model), drawn, attend_of, loss_of)
        for name, attend_of in contestants.items()
    }
    ours, theirs = runs["flashgen"], runs["SDPA"]
    print(f"{'step':>4} {'flashgen':>10} {'SDPA':>10}")
    for step, pair in enumerate(zip(ours.losses, theirs.losses, strict=True)):
        print(f"{step:4} {pair[0]:10.5f} {pair[1]:10.5f}")
    print(", ".join(f"{name} {run.rate:,.0f} tokens/s" for name, run in runs.items()))
    return runs


def _train(model: Transformer, batches: list[Batch], attend_of: Any, loss_of: Any) -> Run:
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3 * model.last.weight.numel() ** -0.5)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARM_UP, total_iters=WARM_UP - 1)
    run, device = Run(), batches[0].tokens.device
    start = 0.0
    for step, batch in enumerate(batches):
        if step == 1:  # the first step compiles
            _wait(device)
            start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of(model(batch, attend_of(batch)), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        warm_up.step()
        run.losses.append(loss.detach())
    _wait(device)
    run.losses = [loss.item() for loss in run.losses]
    tokens = sum(batch.tokens.numel() for batch in batches[1:])
    run.rate = tokens / (time.perf_counter() - start) if tokens else 0.0
    return run


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@functools.cache
def documents() -> tuple[torch.Tensor, ...]:
    """The repository's own pages and sources as bytes, in a fixed order."""
    patterns = ("*.md", "docs/*.md", "flashgen/**/*.py", "masks/*.py", "templates/*.j2")
    paths = sorted({path for pattern in patterns for path in ROOT.glob(pattern)})
    texts = [path.read_bytes() for path in paths if path.is_file()]
    return tuple(
        torch.frombuffer(bytearray(text), dtype=torch.uint8).long() for text in texts if text
    )


def snippets(length: int, seed: int) -> Iterator[torch.Tensor]:
    """Random pieces of documents, of at most `length` bytes, for ever."""
    generator = torch.Generator().manual_seed(seed)
    texts = documents()
    while True:
        text = texts[int(torch.randint(len(texts), (), generator=generator))]
        first = int(torch.randint(max(1, len(text) - 16), (), generator=generator))
        size = int(torch.randint(16, max(17, length), (), generator=generator))
        yield text[first : first + size]
