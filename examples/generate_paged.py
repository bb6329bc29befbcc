"""Generation from a paged cache: layers that see everything, and layers with a sliding window.

Prompts of different lengths are prefilled in chunks, packed into one call; then every sequence gets
a token a step. Keys and values lie in pages that are handed out as a sequence grows, and taken back
where no window reaches them any more. Each step is checked against the model run from scratch.

Writing to the cache and rotating positions are not flashgen's: `append` below is all it takes.

    python examples/generate_paged.py
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

import flashgen as fg
from flashgen import masks

PAGE, HEADS, KV_HEADS, DIM = 16, 4, 2, 32
WIDTH, VOCABULARY = HEADS * DIM, 256
Lens = list[int]


class Cache:
    """Pages of one layer, and the page table of its sequences.

    `window`: how far back a query sees; None for everything. Pages behind it are free again."""

    def __init__(self, batch: int, pages: int, window: int | None, device: str) -> None:
        shape = (pages, PAGE, KV_HEADS, DIM)
        # Nobody clears a page: what an unused slot holds never matters.
        self.k, self.v = (torch.full(shape, float("nan"), device=device) for _ in range(2))
        self.table = torch.zeros(batch, pages, dtype=torch.int32, device=device)
        self.window, self.free = window, list(range(pages))
        self.held: list[dict[int, int]] = [{} for _ in range(batch)]

    def grow(self, lens: Lens, added: Lens) -> None:
        """Pages for new tokens; those that no later query sees are given back."""
        for b, (old, new) in enumerate(zip(lens, added, strict=True)):
            if self.window is not None:
                for column in range(max(0, old - self.window + 1) // PAGE):
                    if column in self.held[b]:
                        self.free.append(self.held[b].pop(column))
            for column in range(-(-old // PAGE), -(-(old + new) // PAGE)):
                self.held[b][column] = self.free.pop()
                self.table[b, column] = self.held[b][column]

    def append(self, k: torch.Tensor, v: torch.Tensor, lens: Lens, added: Lens) -> None:
        """Write new keys and values, packed [T, Hkv, D], behind those that are there."""
        where = torch.tensor(
            [(b, old + i) for b, (old, new) in enumerate(zip(lens, added, strict=True))
             for i in range(new)], device=k.device,
        )  # fmt: skip
        page = self.table[where[:, 0], where[:, 1] // PAGE].long()
        self.k[page, where[:, 1] % PAGE], self.v[page, where[:, 1] % PAGE] = k, v


class Layer(nn.Module):
    """Rotary attention and a feed-forward network."""

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.window = window
        mask = masks.causal if window is None else masks.sliding_window(window=window)
        self.attend = fg.Attention(mask)
        self.project = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * DIM)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def queries_keys_values(self, x: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
        """[T, H, D] each."""
        sizes = [HEADS, KV_HEADS, KV_HEADS]
        q, k, v = self.project(x).unflatten(-1, (-1, DIM)).split(sizes, dim=1)
        return [rotate(q, positions), rotate(k, positions), v]

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        x = x + self.out(attended.flatten(1))
        return x + self.feed(x)


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of packed heads [T, H, D]."""
    speeds = 10_000 ** (-torch.arange(0, DIM, 2, device=x.device) / DIM)
    angles = positions[:, None, None] * speeds
    even, odd = x[..., ::2], x[..., 1::2]
    turned = (even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos())
    return torch.stack(turned, -1).flatten(-2)


class Model(nn.Module):
    """Every second layer has a sliding window."""

    def __init__(self, layers: int, window: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(window if i % 2 else None) for i in range(layers))

    def step(self, tokens: list[torch.Tensor], lens: Lens, caches: list[Cache]) -> torch.Tensor:
        """Append each sequence's new tokens; logits of each sequence's last one [B, V]."""
        device = self.embed.weight.device
        added = [len(t) for t in tokens]
        ends = torch.tensor([0, *added], device=device).cumsum(0, dtype=torch.int32)
        starts = torch.tensor(lens, device=device).repeat_interleave(ends.diff())
        within = torch.cat([torch.arange(n, device=device) for n in added])
        kv_lens = torch.tensor(lens, dtype=torch.int32, device=device) + ends.diff()
        x = self.embed(torch.cat(tokens))
        for layer, cache in zip(self.layers, caches, strict=True):
            q, k, v = layer.queries_keys_values(x, starts + within)
            cache.grow(lens, added)
            cache.append(k, v, lens, added)
            attended = layer.attend(
                q, cache.k, cache.v,
                page_table=cache.table, kv_lens=kv_lens, cu_seqlens_q=ends,
            )  # fmt: skip
            x = layer.finish(x, attended)
        return x[ends[1:].long() - 1] @ self.embed.weight.T

    def from_scratch(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the last token of one sequence, by dense attention over all of it."""
        positions = torch.arange(len(tokens), device=tokens.device)
        x = self.embed(tokens)
        for layer in self.layers:
            q, k, v = layer.queries_keys_values(x, positions)
            away = positions[:, None] - positions
            keep = (away >= 0) & (away < (layer.window or len(tokens)))
            attended = nn.functional.scaled_dot_product_attention(
                *(y.transpose(0, 1)[None] for y in (q, k, v)), attn_mask=keep, enable_gqa=True
            )
            x = layer.finish(x, attended[0].transpose(0, 1))
        return x[-1] @ self.embed.weight.T


@torch.no_grad()
def generate(
    model: Model, prompts: list[torch.Tensor], steps: int, chunk: int
) -> tuple[list[torch.Tensor], float, list[Cache]]:
    """Greedy continuations; the largest difference to logits from scratch; the caches."""
    most = max(len(p) for p in prompts) + steps
    pages = len(prompts) * -(-most // PAGE)
    device = prompts[0].device
    caches = [Cache(len(prompts), pages, layer.window, str(device)) for layer in model.layers]
    done, lens, waiting = [p[:0] for p in prompts], [0] * len(prompts), list(prompts)
    worst = 0.0
    while min(len(d) - len(p) for d, p in zip(done, prompts, strict=True)) < steps:
        new = [w[:chunk] for w in waiting]
        logits = model.step(new, lens, caches)
        done = [torch.cat(pair) for pair in zip(done, new, strict=True)]
        lens = [len(d) for d in done]
        waiting = [w[chunk:] for w in waiting]
        for b, row in enumerate(logits):
            worst = max(worst, (row - model.from_scratch(done[b])).abs().max().item())
            if not len(waiting[b]):
                waiting[b] = row.argmax()[None]
    return done, worst, caches


def main(arguments: list[str] | None = None) -> tuple[float, list[Cache]]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=20)
    given: Any = parser.parse_args(arguments)
    torch.manual_seed(0)
    model = Model(layers=4, window=24).to(given.device)
    prompts = [torch.randint(VOCABULARY, (n,), device=given.device) for n in (70, 5, 33)]
    done, worst, caches = generate(model, prompts, given.steps, chunk=32)
    held = [sum(map(len, cache.held)) for cache in caches]
    print(f"{[len(d) for d in done]} tokens; pages held by each layer: {held}")
    print(f"largest difference to logits from scratch: {worst:.1e}")
    return worst, caches


if __name__ == "__main__":
    main()
