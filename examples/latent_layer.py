"""A layer of multi-head latent attention with DeepSeek-V3's dimensions, prefilled and decoded.

    python examples/latent_layer.py

Weights are random, and there are 4 heads instead of 128 so that a CPU is quick. The prompt is
attended to with expanded keys (192) and values (128); then tokens are decoded from the latent
cache, 576 numbers a token, with the up-projections absorbed. Every step is compared with expanding
everything. Rotary embedding and appending to a cache are the model's own.
"""

from __future__ import annotations

import torch

import flashgen as fg
from flashgen import latent, masks

HIDDEN, HEADS, Q_RANK, RANK, NOPE, ROPE, VALUE = 7168, 4, 1536, 512, 128, 64, 128
PROMPT, STEPS = 48, 3
SCALE = latent.softmax_scale(NOPE, ROPE, factor=40, mscale_all_dim=1.0)


def weight(*shape: int) -> torch.Tensor:
    return torch.randn(shape) * shape[-1] ** -0.5


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of pairs of neighbours."""
    angles = positions[:, None] * 10000.0 ** (-torch.arange(0, ROPE, 2) / ROPE)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


class Layer:
    """The projections around the attention; h is [B, S, hidden]."""

    def __init__(self) -> None:
        self.down_q, self.up_q = weight(Q_RANK, HIDDEN), weight(HEADS * (NOPE + ROPE), Q_RANK)
        self.down_kv = weight(RANK + ROPE, HIDDEN)
        self.w_key, self.w_value = weight(HEADS, NOPE, RANK), weight(HEADS, VALUE, RANK)
        self.prefill = fg.Attention(mask=masks.causal)
        self.decode = fg.Attention(mask=masks.causal, heads=fg.MLA(rank=RANK, rope=ROPE))

    def queries(self, h: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, H, S, nope] and, rotated, [B, H, S, rope]."""
        q = (h @ self.down_q.T @ self.up_q.T).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        positions = first + torch.arange(h.shape[1])
        return q[..., :NOPE], rotate(q[..., NOPE:].contiguous(), positions)

    def rows(self, h: torch.Tensor, first: int) -> torch.Tensor:
        """What the cache holds of a token: [B, 1, S, rank + rope]."""
        kv = (h @ self.down_kv.T)[:, None]
        positions = first + torch.arange(h.shape[1])
        return torch.cat([kv[..., :RANK], rotate(kv[..., RANK:].contiguous(), positions)], dim=-1)

    def expanded(self, h: torch.Tensor, kv: torch.Tensor, first: int) -> torch.Tensor:
        """Attention with keys and values of every head: for many queries, and for training."""
        k, v = latent.expand_cache(kv, self.w_key, self.w_value)
        return self.prefill(torch.cat(self.queries(h, first), dim=-1), k, v, scale=SCALE)

    def absorbed(self, h: torch.Tensor, kv: torch.Tensor, first: int) -> torch.Tensor:
        """Attention on the cache as it is: for few queries."""
        q = latent.absorb_queries(*self.queries(h, first), self.w_key)
        return latent.expand_output(self.decode(q, kv, scale=SCALE), self.w_value)


def main() -> None:
    torch.manual_seed(0)
    layer, tokens = Layer(), torch.randn(1, PROMPT + STEPS, HIDDEN)
    cache = layer.rows(tokens[:, :PROMPT], 0)
    layer.expanded(tokens[:, :PROMPT], cache, 0)
    print(f"{PROMPT} tokens prefilled; the cache has {cache.shape[-1]} numbers a token")
    for position in range(PROMPT, PROMPT + STEPS):
        token = tokens[:, position : position + 1]
        cache = torch.cat([cache, layer.rows(token, position)], dim=2)
        out = layer.absorbed(token, cache, position)
        right = layer.expanded(token, cache, position)
        torch.testing.assert_close(out, right, rtol=1e-3, atol=1e-4)
    print(f"{STEPS} tokens decoded; each equals attention on expanded keys and values")


if __name__ == "__main__":
    main()
