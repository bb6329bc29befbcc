"""Gradients of data and dropout on a GPU: right, the same bits each time, and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashgen as fg
from flashgen import masks
from flashgen.reference import attention_reference

pytestmark = pytest.mark.gpu

B, H, HKV, S, D = 2, 4, 2, 333, 64
CAUSAL = fg.Attention(masks.causal)


@fg.attention(mask=masks.causal)
def learned(
    score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any,
    slope: fg.Tensor, gate: fg.Tensor, column: fg.Tensor, table: fg.Tensor, bias: fg.Tensor,
) -> Any:  # fmt: skip
    """An index along each axis, along both, and one that no two pairs share."""
    near = table[(q_idx - kv_idx) // 3]
    return score + slope[h] * gate[q_idx] + column[kv_idx] + near + bias[b, h, q_idx, kv_idx]


def leaves(dtype: torch.dtype) -> list[torch.Tensor]:
    shapes = ((B, H, S, D), (B, HKV, S, D), (B, HKV, S, D))
    return [torch.randn(s, device="cuda").to(dtype).requires_grad_() for s in shapes]


def data() -> dict[str, torch.Tensor]:
    shapes = {"slope": (H,), "gate": (S,), "column": (S,), "table": (40,), "bias": (B, H, S, S)}
    return {n: torch.randn(s, device="cuda").requires_grad_() for n, s in shapes.items()}


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_data(deterministic: bool) -> None:
    inputs, given = leaves(torch.float32), data()
    every = [*inputs, *given.values()]
    out = learned(*inputs, **given, deterministic=deterministic)
    grad = torch.randn_like(out)
    got = torch.autograd.grad(out, every, grad)
    exact = [x.detach().double().requires_grad_() for x in every]
    slope, gate, column, table, bias = exact[3:]
    i = torch.arange(S, device="cuda")
    away = i[:, None] - i
    near = table[(away // 3).clamp(0, 39)]
    added = slope[:, None, None] * gate[:, None] + column + near + bias
    right, lse = attention_reference(*exact[:3], mask=away >= 0, score=lambda s: s + added)
    wanted = torch.autograd.grad(right, exact, grad.double(), retain_graph=True)
    # Each pair adds weight * (dp - delta) times what its datum is multiplied by. The terms may
    # cancel, and their rounding errors, of random signs, don't.
    with torch.no_grad():
        q, k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in exact[:3])
        scores, lse = q @ k.mT * D**-0.5 + added, lse[..., None]
        weight = torch.exp(scores - lse) * (away >= 0)
        size = (grad.double() @ v.mT).abs() + (right * grad).sum(-1, keepdim=True).abs()
        # A score is rounded at its own size, which is an error of its weight.
        squares = (weight * size * (8 + scores.abs() + lse.abs())) ** 2
        spread = {
            "slope": (squares * (gate**2)[:, None]).sum((0, 2, 3)),
            "gate": (squares * (slope**2)[:, None, None]).sum((0, 1, 3)),
            "column": squares.sum((0, 1, 2)),
            "table": torch.zeros(40, device="cuda", dtype=torch.float64).index_add_(
                0, (away // 3).clamp(0, 39).flatten(), squares.sum((0, 1)).flatten()
            ),
            "bias": squares,
        }
    rounding = 2.0**-24
    for name, mine, theirs in zip(("q", "k", "v", *given), got, wanted, strict=True):
        slack = torch.tensor(1e-5 * max(1.0, theirs.abs().max().item()), device="cuda")
        if name in spread:
            # A score goes through a handful of operations.
            slack = 16 * rounding * spread[name].sqrt() + 1e-7
        assert ((mine.double() - theirs).abs() <= slack).all(), name


def test_deterministic_gradients_of_data_are_the_same_bits_under_load() -> None:
    inputs, given = leaves(torch.bfloat16), data()
    every = [*inputs, *given.values()]
    grad = torch.randn(B, H, S, D, device="cuda", dtype=torch.bfloat16)
    load, stream = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    first = None
    for turn in range(20):
        with torch.cuda.stream(stream):
            for _ in range(turn % 5):
                load @ load
        out = learned(*inputs, **given, deterministic=True)
        grads = torch.autograd.grad(out, every, grad)
        first = first or grads
        assert all(torch.equal(x, y) for x, y in zip(first, grads, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropout_drops_what_the_reference_drops(dtype: torch.dtype) -> None:
    inputs = leaves(dtype)
    options: dict[str, Any] = {"dropout_p": 0.3, "seed": 2**40 + 5}
    out, lse = CAUSAL(*inputs, return_lse=True, **options)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    allowed = torch.ones(S, S, dtype=torch.bool, device="cuda").tril()
    right, right_lse = attention_reference(*exact, mask=allowed, **options)
    grad = torch.randn_like(out)
    got = (out, *torch.autograd.grad(out, inputs, grad))
    wanted = (right, *torch.autograd.grad(right, exact, grad.double()))
    close = 2e-2 if dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(lse.double(), right_lse, rtol=0, atol=1e-4)
    for name, mine, theirs in zip(("out", "q", "k", "v"), got, wanted, strict=True):
        slack = close * max(1.0, theirs.abs().max().item())
        assert (mine.double() - theirs).abs().max() <= slack, name


def peak(run: Any, inputs: list[torch.Tensor]) -> int:
    """Bytes at most allocated, the inputs included, by forward and backward."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    out = run(*inputs)
    torch.autograd.grad(out, inputs, torch.ones_like(out))
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def test_memory_of_long_documents_is_that_of_sdpa() -> None:
    length, heads = 1 << 17, 2
    shape = (1, heads, length, 128)
    inputs = [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    doc = (torch.arange(length, device="cuda") // 5000)[None].int()
    attend = fg.Attention(masks.causal_document)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        theirs = peak(lambda *x: F.scaled_dot_product_attention(*x, is_causal=True), inputs)
    mine = peak(lambda *x: attend(*x, doc=doc), inputs)
    print(f"peak at {length}: flashgen {mine / 2**20:.0f} MiB, SDPA {theirs / 2**20:.0f} MiB")
    assert mine <= 1.1 * theirs
