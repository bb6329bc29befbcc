"""Gradients of interpreted kernels where others went wrong: strides, merging, lists of blocks, rows
without keys, windows at a tile's edge, biases."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen import masks
from flashgen.reference import attention_reference

pytestmark = pytest.mark.usefixtures("nan_filled_empty")


def inputs(
    B: int = 1, H: int = 2, Hkv: int = 1, S: int = 40, T: int = 40, D: int = 16
) -> list[torch.Tensor]:
    shapes = ((B, H, S, D), (B, Hkv, T, D), (B, Hkv, T, D))
    return [torch.randn(s, requires_grad=True) for s in shapes]


def check(
    attend: Any, leaves: list[torch.Tensor], allowed: Any, score: Any = None, **data: Any
) -> tuple[torch.Tensor, ...]:
    """Beside autograd through the reference; rows without a key are left out of the loss there,
    and must have gradients of 0 here. Returns our gradients."""
    out = attend(*leaves, backend="interpret", **data)
    grad = torch.randn_like(out)
    learned = [x for x in data.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    ours = torch.autograd.grad(out, [*leaves, *learned], grad)
    exact = [x.detach().double().requires_grad_() for x in (*leaves, *learned)]
    q, k, v = exact[:3]
    changed = None if score is None else (lambda s: score(s, *exact[3:]))
    seen = torch.as_tensor(allowed).expand(*q.shape[:3], k.shape[2]).any(-1, keepdim=True)
    right, _ = attention_reference(q, k, v, mask=allowed | ~seen, score=changed)
    theirs = torch.autograd.grad(torch.where(seen, right, 0.0), exact, grad.double())
    for mine, wanted in zip(ours, theirs, strict=True):
        slack = 1e-5 * max(1.0, float(wanted.abs().max()))
        torch.testing.assert_close(mine.double(), wanted, rtol=0, atol=10 * slack)
    assert (ours[0][~seen.expand_as(q)] == 0).all()
    return ours


def causal(S: int, T: int) -> torch.Tensor:
    return torch.arange(T) <= torch.arange(S)[:, None] + T - S


def test_parts_that_are_merged_have_the_gradients_of_the_whole() -> None:
    leaves = q, k, v = inputs(S=8, T=70)
    whole = fg.Attention(masks.causal)(*leaves, backend="interpret")
    grad = torch.randn_like(whole)
    parts = []
    for first, last in ((0, 33), (33, 70)):
        part = k[:, :, first:last], v[:, :, first:last]
        given = {"q_offset": 62 - first, "return_lse": True, "backend": "interpret"}
        parts.append(fg.Attention(masks.causal)(q, *part, **given))
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    merged = sum(out * torch.exp(part - lse)[..., None] for out, part in parts)
    torch.testing.assert_close(merged, whole)
    ours, theirs = (torch.autograd.grad(x, leaves, grad) for x in (merged, whole))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dim", [16, 64, 128])
def test_random_lists_of_blocks(dim: int) -> None:
    """With query blocks that have no key block, and key blocks that nobody reads."""
    table = torch.rand(2, 6, 6) < 0.4
    table[:, 1], table[:, :, 4] = False, False
    allowed = table.repeat_interleave(16, 1).repeat_interleave(16, 2)[None, :, :90, :90]
    attend = fg.Attention(masks.block_sparse(q_block=16, kv_block=16))
    grads = check(attend, inputs(Hkv=2, S=90, T=90, D=dim), allowed, blocks=table[None])
    assert (grads[1][:, :, 64:80] == 0).all()
    assert (grads[2][:, :, 64:80] == 0).all()


@pytest.mark.parametrize("empty", ["first", "middle", "last", "alternate"])
def test_rows_without_keys(empty: str) -> None:
    rows = torch.arange(70)
    has_keys = {
        "first": rows >= 20, "middle": (rows < 30) | (rows > 50), "last": rows < 47,
        "alternate": rows % 2 == 0,
    }[empty]  # fmt: skip

    @fg.mask
    def some(q_idx, kv_idx, has_keys: fg.Tensor):
        return has_keys[q_idx] & (kv_idx <= q_idx)

    allowed = has_keys[:, None] & causal(70, 70)
    check(fg.Attention(some), inputs(S=70, T=70), allowed, has_keys=has_keys)


@pytest.mark.parametrize(("S", "T"), [(33, 90), (90, 33)])
@pytest.mark.parametrize("window", [1, 64, 65])
def test_windows_at_the_edge_of_a_tile(window: int, S: int, T: int) -> None:
    away = torch.arange(S)[:, None] + T - S - torch.arange(T)
    allowed = (away >= 0) & (away < window)
    check(fg.Attention(masks.sliding_window), inputs(S=S, T=T), allowed, window=window)


def test_documents_of_each_sequence_and_a_score() -> None:
    doc = torch.stack([torch.arange(129) // 40, torch.arange(129) // 11])

    @fg.attention(mask=masks.causal_document)
    def attend(score, q_idx, kv_idx):
        return score + (q_idx - kv_idx) * 0.01

    away = torch.arange(129)[:, None] - torch.arange(129)
    allowed = (doc[:, None, :, None] == doc[:, None, None]) & (away >= 0)
    check(attend, inputs(B=2, S=129, T=129), allowed, lambda s: s + away * 0.01, doc=doc)


def test_a_bias_of_256_positions() -> None:
    @fg.attention
    def attend(score, h, q_idx, kv_idx, bias: fg.Tensor):
        return score + bias[h, q_idx, kv_idx]

    bias = torch.randn(2, 256, 256, requires_grad=True)
    check(attend, inputs(S=256, T=256), torch.tensor(True), lambda s, x: s + x, bias=bias)


def test_a_mask_that_allows_everything_is_no_mask() -> None:
    @fg.mask
    def everything(q_idx, kv_idx):
        return (kv_idx >= 0) | (q_idx > 5)

    leaves = inputs(S=1, T=70)
    out = [fg.Attention(mask)(*leaves, backend="interpret") for mask in (None, everything)]
    grads = [torch.autograd.grad(x.sum(), leaves) for x in out]
    torch.testing.assert_close((out[0], *grads[0]), (out[1], *grads[1]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("attend", [fg.Attention(), fg.Attention(masks.causal)], ids=["", "causal"])
@pytest.mark.parametrize("queries", [0, 4])
def test_packed_sequences_without_any_keys(attend: Any, queries: int) -> None:
    q = torch.randn(queries, 2, 16, requires_grad=True)
    k = torch.randn(0, 2, 16, requires_grad=True)
    ends = (torch.tensor([0, queries // 2, queries]).int(), torch.zeros(3).int())
    out = attend(q, k, k, cu_seqlens_q=ends[0], cu_seqlens_kv=ends[1], backend="interpret")
    grad_q, grad_k = torch.autograd.grad(out.sum(), (q, k))
    assert not out.any()
    assert not grad_q.any()
    assert grad_k.shape == (0, 2, 16)


@pytest.mark.parametrize("where", ["q", "grad"])
def test_slots_beyond_the_length_beside_rows_without_keys(where: str) -> None:
    """What isn't finite in rows that see no key doesn't reach gradients of slots behind them."""
    leaves = inputs(S=24, T=32)
    grad = torch.randn(1, 2, 24, 16)
    poisoned = leaves[0].detach() if where == "q" else grad
    poisoned[:, :, :4] = torch.nan if where == "q" else torch.inf
    lengths = torch.tensor([20])
    out = fg.Attention(masks.causal)(*leaves, kv_lens=lengths, backend="interpret")
    dq, dk, dv = torch.autograd.grad(out, leaves, grad)
    out = fg.Attention(masks.causal)(*leaves, kv_lens=lengths, backend="cpu")
    for mine, theirs in zip((dq, dk, dv), torch.autograd.grad(out, leaves, grad), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert (dk[:, :, 20:] == 0).all()
    assert (dv[:, :, 20:] == 0).all()


def test_sinks_of_rows_without_any_keys() -> None:
    """A sink of -inf has no part in the LSE, and no gradient."""
    q, k, v = inputs(S=3, T=0)
    sinks = torch.tensor([-torch.inf, 0.5], requires_grad=True)
    attend = fg.Attention(masks.causal, sinks=True)
    _, lse = attend(q, k, v, sinks=sinks, return_lse=True, backend="interpret")
    (grad,) = torch.autograd.grad(lse, sinks, torch.ones_like(lse))
    assert grad.tolist() == [0.0, 3.0]
