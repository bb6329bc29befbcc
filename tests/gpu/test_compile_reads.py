"""Compiled graphs, replayed as CUDA graphs too, see what their masks read now."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashgen as fg

pytestmark = pytest.mark.gpu
S = 512


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.documents = self.drawn()
        self.slope = torch.nn.Parameter(torch.rand(4, device="cuda"))
        self.attend = fg.Attention(self.mask, self.score)

    @staticmethod
    def drawn() -> torch.Tensor:
        return torch.randint(0, 5, (S,), device="cuda").sort().values

    def mask(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (self.documents[q_idx] == self.documents[kv_idx]) & (q_idx >= kv_idx)

    def score(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + self.slope[h] * (kv_idx - q_idx)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attend(x, x, x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_documents_and_parameters_of_each_step(mode: str) -> None:
    torch._dynamo.reset()
    layer = Layer()
    run = torch.compile(layer, fullgraph=True, mode=mode)
    for number in range(6):
        layer.documents = layer.drawn()
        if number == 4:
            layer.slope = torch.nn.Parameter(torch.rand(4, device="cuda"))
        x = torch.randn(2, 4, S, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        grad = torch.randn_like(x)
        torch.compiler.cudagraph_mark_step_begin()
        found = []
        for call in (run, layer):
            out = call(x)
            grads = torch.autograd.grad(out, (x, layer.slope), grad)
            # A replay overwrites what the one before gave.
            found.append([y.clone() for y in (out, *grads)])
        # The graph's tile is one for all lengths: outputs differ by a rounding to 16 bits, and so
        # does what gradients are made of. Documents or slopes of another step are off by half.
        for mine, right in zip(*found, strict=True):
            assert (mine - right).float().norm() < 0.02 * right.float().norm()
