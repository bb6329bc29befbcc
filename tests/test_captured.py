"""What functions captured may be replaced: the next call sees what is there then."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen import masks

B, H, S, D = 2, 2, 9, 4
CAUSAL = torch.ones(S, S, dtype=torch.bool).tril()
DOC = torch.tensor([0] * 4 + [1] * 5)


class Warm(torch.nn.Module):
    """A method as the score function."""

    def __init__(self) -> None:
        super().__init__()
        self.warmth, self.shift = torch.nn.Parameter(torch.rand(H)), 1.0
        self.attend = fg.Attention(masks.causal, score=self.change)

    def change(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * self.warmth[h] + self.shift * kv_idx

    def forward(self, x: torch.Tensor) -> Any:
        return self.attend(x, x, x)


def attention(x: torch.Tensor, allowed: torch.Tensor, warmth: Any = 1.0, shift: float = 0) -> Any:
    scores = (x @ x.mT) * D**-0.5 * warmth + shift * torch.arange(S)
    return torch.where(allowed, scores, -torch.inf).softmax(-1) @ x


def check(module: Warm, warmth: torch.Tensor) -> None:
    """Output and the parameter's gradient, twice: the second call is known."""
    x = torch.randn(B, H, S, D)
    right = attention(x, CAUSAL, warmth[:, None, None], module.shift)
    (wanted,) = torch.autograd.grad(right.sum(), warmth)
    for _ in range(2):
        out = module(x)
        torch.testing.assert_close(out, right)
        (grad,) = torch.autograd.grad(out.sum(), warmth)
        torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-5)


def test_parameters_of_a_module() -> None:
    module = Warm()
    check(module, module.warmth)
    module.warmth = torch.nn.Parameter(torch.rand(H))
    check(module, module.warmth)
    module.load_state_dict({"warmth": torch.rand(H)}, assign=True)
    check(module, module.warmth)
    module.shift = -2.0
    check(module, module.warmth)


def test_a_copied_module_reads_its_own() -> None:
    module = Warm()
    check(module, module.warmth)
    copied = copy.deepcopy(module)
    with torch.no_grad():
        copied.warmth.add_(1)
    check(copied, copied.warmth)
    check(module, module.warmth)


def test_an_attention_copied_alone_has_its_own_module() -> None:
    module, x = Warm(), torch.randn(B, H, S, D)
    attend = copy.deepcopy(module.attend)
    right = module(x)
    with torch.no_grad():
        module.warmth.add_(1)
    torch.testing.assert_close(attend(x, x, x), right)


def test_parameters_swapped_for_a_call() -> None:
    module, x, warmth = Warm(), torch.randn(B, H, S, D), torch.rand(H, requires_grad=True)
    module(x)
    out = torch.func.functional_call(module, {"warmth": warmth}, (x,))
    torch.testing.assert_close(out, attention(x, CAUSAL, warmth[:, None, None], 1.0))
    check(module, module.warmth)


@pytest.mark.parametrize("planned", [False, True])
def test_variables_of_a_closure(planned: bool) -> None:
    """A mask in FlexAttention's form, whose documents are others at each step."""
    doc = DOC

    def same(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx <= q_idx) & (doc[q_idx] == doc[kv_idx])

    attend = fg.Attention(same)
    for turn in range(4):
        doc = DOC.roll(turn // 2)
        x = torch.randn(B, H, S, D)
        schedule = attend.schedule(x, x, x) if planned else None
        right = attention(x, CAUSAL & (doc[:, None] == doc))
        torch.testing.assert_close(attend(x, x, x, schedule=schedule), right)
        assert torch.equal(attend.mask.dense(S, S)[0, 0], CAUSAL & (doc[:, None] == doc))


def test_numbers_of_a_closure() -> None:
    window = 3

    def near(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx <= q_idx) & (q_idx - kv_idx < window)

    attend, x = fg.Attention(near), torch.randn(B, H, S, D)
    for window in (3, 3, 5):
        right = attention(x, CAUSAL & (torch.arange(S)[:, None] - torch.arange(S) < window))
        torch.testing.assert_close(attend(x, x, x), right)


def test_calls_alike_are_known_while_nothing_is_replaced() -> None:
    module, x = Warm(), torch.randn(B, H, S, D)
    module(x)
    known = module.attend._calls
    module(x)
    assert module.attend._calls is known
