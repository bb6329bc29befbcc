"""Dropout in the interpreted kernels: the pairs that the reference drops, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen import masks
from flashgen.reference import attention_reference

pytestmark = pytest.mark.usefixtures("nan_filled_empty")

CAUSAL = fg.Attention(masks.causal)


def inputs(
    B: int = 2, H: int = 4, Hkv: int = 2, S: int = 35, T: int = 70, D: int = 16
) -> list[torch.Tensor]:
    shapes = ((B, H, S, D), (B, Hkv, T, D), (B, Hkv, T, D))
    return [torch.randn(s).requires_grad_() for s in shapes]


def check(attend: Any, leaves: list[torch.Tensor], allowed: Any, **options: Any) -> None:
    own = {n: options.pop(n) for n in ("schedule",) if n in options}
    out, lse = attend(*leaves, return_lse=True, backend="interpret", **own, **options)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    right = attention_reference(*exact, mask=allowed, **options)
    torch.testing.assert_close(lse.double(), right[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.double(), right[0], rtol=1e-5, atol=1e-5)
    grad = torch.randn_like(out)
    ours = torch.autograd.grad(out, leaves, grad)
    theirs = torch.autograd.grad(right[0], exact, grad.double())
    for name, mine, wanted in zip("qkv", ours, theirs, strict=True):
        close = {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(
            mine.double(), wanted, **close, msg=lambda m, n=name: f"d{n}: {m}"
        )


@pytest.mark.parametrize("block_size", [16, (64, 48), 128])
def test_tiles(block_size: Any) -> None:
    leaves = inputs(B=1)
    allowed = masks.causal.dense(35, 70)
    schedule = CAUSAL.schedule(*leaves, block_size=block_size)
    check(CAUSAL, leaves, allowed, schedule=schedule, dropout_p=0.3, seed=7)


def test_offsets_of_each_sequence_and_rows_without_keys() -> None:
    """Beside the cpu backend: autograd through the reference has NaN for such rows."""
    leaves = inputs()
    grad = torch.randn(2, 4, 35, 16)
    results = []
    for backend in ("interpret", "cpu"):
        out = CAUSAL(*leaves, q_offset=torch.tensor([40, -9]), dropout_p=0.3, seed=7,
                     backend=backend)  # fmt: skip
        results.append((out, *torch.autograd.grad(out, leaves, grad)))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("p", [0.0, 0.97, 1.0])
def test_probabilities(p: float) -> None:
    allowed = masks.causal.dense(35, 70)
    check(CAUSAL, inputs(B=1), allowed, dropout_p=p, seed=-5)


@pytest.mark.parametrize("dim", [8, 40])
def test_head_dimensions_without_a_mask(dim: int) -> None:
    check(fg.Attention(), inputs(B=1, D=dim), None, dropout_p=0.2, seed=2**62 + 1)


def test_only_some_gradients() -> None:
    options: dict[str, Any] = {"dropout_p": 0.4, "seed": 3, "backend": "interpret"}
    whole = inputs(B=1)
    grads = torch.autograd.grad(CAUSAL(*whole, **options).sum(), whole)
    for i in range(3):
        leaves = [x.detach().requires_grad_(n == i) for n, x in enumerate(whole)]
        (grad,) = torch.autograd.grad(CAUSAL(*leaves, **options).sum(), leaves[i])
        torch.testing.assert_close(grad, grads[i])


@pytest.mark.parametrize("garbage", [torch.inf, torch.nan])
def test_what_a_dropped_pair_holds_is_not_seen(garbage: float) -> None:
    """A value behind it, and the gradient of the output: both meet a weight of 0."""
    q, k, v = inputs(B=1, H=2, S=40, T=40)
    options: dict[str, Any] = {"dropout_p": 0.5, "seed": 4, "backend": "interpret"}
    eye = torch.eye(40).expand(1, 2, 40, 40)
    dropped = CAUSAL(q, k, eye, **options) == 0
    with torch.no_grad():
        v[:, :, 5] = garbage
    assert torch.equal(CAUSAL(q, k, v, **options).isfinite().all(-1), dropped[..., 5])
    clean = torch.randn(1, 2, 40, 16, requires_grad=True)
    out = CAUSAL(q, k, clean, **options)
    grad_out = torch.randn_like(out)
    grad_out[:, :, 20] = garbage
    (grad,) = torch.autograd.grad(out, clean, grad_out)
    assert torch.equal(grad.isfinite().all(-1), dropped[:, :, 20])
