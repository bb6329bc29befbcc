"""Interpreted forward kernels on masks, against oracles written by hand."""

from __future__ import annotations

import math

import pytest
import torch
from cases import CASES

import flashgen as fg
from flashgen import masks

DEFAULT = CASES[::4]


def inputs(B, H, Hkv, S, T, D, Dv=None, dtype=torch.float32):
    shapes = ((B, H, S, D), (B, Hkv, T, D), (B, Hkv, T, Dv or D))
    return [torch.randn(shape).to(dtype) for shape in shapes]


def oracle(q, k, v, allowed, scale=None, softcap=None, sinks=None):
    """Dense softmax attention in float64, written out."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = q.double() @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = torch.where(allowed, scores, -torch.inf)
    if sinks is not None:
        column = sinks.double().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
    return weights[..., : k.shape[2]] @ v, lse


def agree(attend, tensors, allowed, tolerance=1e-5, **arguments):
    out, lse = attend(*tensors, return_lse=True, backend="interpret", **arguments)
    known = {n: arguments.get(n) for n in ("scale", "sinks")}
    right, right_lse = oracle(*tensors, allowed, softcap=attend._program.softcap, **known)
    torch.testing.assert_close(out.double(), right, rtol=0, atol=tolerance)
    torch.testing.assert_close(lse.double(), right_lse, rtol=1e-5, atol=1e-5)
    empty = right_lse == -torch.inf
    assert (out[empty] == 0).all()


@pytest.mark.parametrize("case", DEFAULT, ids=lambda case: case.id)
def test_masks(case, nan_filled_empty):
    S, T = (70, 131) if case.below_zero else (131, 131)
    data = case.build(2, 2, S, T, torch.Generator().manual_seed(3))
    allowed = case.expected(2, 2, S, T, data)
    agree(fg.Attention(case.bound(data)), inputs(2, 2, 2, S, T, 16), allowed)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_mask(case, nan_filled_empty):
    test_masks(case, None)


@pytest.mark.parametrize(
    ("heads", "kv_heads"),
    [
        (1, 1),
        (6, 2),
        *[pytest.param(*pair, marks=pytest.mark.slow) for pair in ((5, 1), (7, 7), (10, 2))],
    ],
)
@pytest.mark.parametrize(("dim", "v_dim"), [(1, 8), (40, 72), (96, 16), (192, 128), (80, 256)])
def test_heads_and_dims(heads, kv_heads, dim, v_dim):
    allowed = torch.ones(33, 50, dtype=torch.bool).tril(17)
    agree(fg.Attention(masks.causal), inputs(1, heads, kv_heads, 33, 50, dim, v_dim), allowed)


@pytest.mark.parametrize("block", [16, (48, 32), (64, 256), (256, 16)], ids=str)
def test_tiles_change_nothing(block):
    attend = fg.Attention(masks.sliding_window(window=37))
    tensors = inputs(1, 2, 1, 150, 150, 16)
    away = torch.arange(150)[:, None] - torch.arange(150)
    schedule = attend.schedule(*tensors, block_size=block)
    agree(attend, tensors, (away >= 0) & (away < 37), schedule=schedule)


def test_rows_without_keys_and_leading_empty_tiles():
    """More queries than keys; and keys that start in a later tile."""
    above = torch.ones(90, 40, dtype=torch.bool).tril(-50)
    agree(fg.Attention(masks.causal), inputs(1, 2, 2, 90, 40, 16), above)
    late = (torch.arange(140) >= 100).expand(8, 140)
    attend = fg.Attention(fg.mask(lambda q_idx, kv_idx: kv_idx >= 100))
    agree(attend, inputs(1, 2, 2, 8, 140, 16), late)
    sinks = torch.tensor([30.0, -30.0])
    agree(fg.Attention(masks.causal, sinks=True), inputs(1, 2, 2, 90, 40, 16), above, sinks=sinks)


def test_softcap_scales_and_signs():
    allowed = torch.ones(64, 64, dtype=torch.bool).tril()
    tensors = [20 * x if i == 0 else x for i, x in enumerate(inputs(1, 2, 1, 64, 64, 32))]
    agree(fg.Attention(masks.causal, softcap=1.0), tensors, allowed)
    for scale in (-0.3, 0.0, 2.0):
        agree(fg.Attention(masks.causal), tensors, allowed, tolerance=1e-4, scale=scale)


def test_closed_forms():
    """With q = 0 a row is the mean of its keys, and its LSE the logarithm of their number."""
    S = 128
    q, k, _ = inputs(1, 1, 1, S, S, 16)
    v = torch.arange(S, dtype=torch.float32).reshape(1, 1, S, 1).expand(1, 1, S, 16)
    rows = torch.arange(S)
    attend = fg.Attention(masks.causal)
    out, lse = attend(0 * q, k, v, return_lse=True, backend="interpret")
    torch.testing.assert_close(out[0, 0, :, 0], rows / 2)
    torch.testing.assert_close(lse[0, 0], torch.log(rows + 1.0))
    doc = torch.repeat_interleave(torch.arange(4), torch.tensor([3, 0, 5, 120]))[None]
    out = fg.Attention(masks.causal_document)(0 * q, k, v, doc=doc, backend="interpret")
    wanted = torch.tensor([0, 0.5, 1, 3, 5, 8, 67.5])
    torch.testing.assert_close(out[0, 0, [0, 1, 2, 3, 7, 8, 127], 0], wanted)
    slope = 0.25

    def alibi(score, q_idx, kv_idx):
        return score + slope * (kv_idx - q_idx)

    lse = fg.Attention(masks.causal, score=alibi)(
        0 * q, k, v, return_lse=True, backend="interpret"
    )[1]
    geometric = (1 - torch.exp(-slope * (rows + 1.0))) / (1 - math.exp(-slope))
    torch.testing.assert_close(lse[0, 0], torch.log(geometric))


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65])
def test_windows_count_themselves(window):
    """One-hot values count the keys that each query attends."""
    S = 130
    q, k, _ = inputs(1, 1, 1, S, S, 16)
    v = torch.eye(S)[None, None]
    attend = fg.Attention(masks.sliding_window)
    seen = attend(q, k, v, window=window, backend="interpret")[0, 0] > 0
    assert torch.equal(seen.sum(-1), torch.arange(1, S + 1).clamp(max=window))


def test_lengths_and_offsets_by_batch():
    lens, offset = torch.tensor([0, 7, 64, 100]), torch.tensor([-3, 5, 60, 0])
    q, k, v = inputs(4, 2, 1, 20, 100, 16)
    for b, n in enumerate(lens.tolist()):
        k[b, :, n:], v[b, :, n:] = float("nan"), float("inf")
    i, j = torch.arange(20)[:, None], torch.arange(100)
    for q_offset, first in ((None, lens - 20), (offset, offset)):
        positions = i + first.reshape(-1, 1, 1, 1)
        allowed = (j <= positions) & (j < lens.reshape(-1, 1, 1, 1))
        clean = [q, k.nan_to_num(0, 0, 0), v.nan_to_num(0, 0, 0)]
        out = fg.Attention(masks.causal)(
            q, k, v, kv_lens=lens, q_offset=q_offset, backend="interpret"
        )
        right = oracle(*clean, allowed)[0]
        torch.testing.assert_close(out.double(), right, rtol=0, atol=1e-5)


def test_hidden_numbers_that_are_not_finite():
    """Behind the mask, inside a tile that the mask cuts; visible ones still show."""
    tensors = inputs(1, 2, 2, 100, 100, 16)
    _, k, v = tensors
    attend = fg.Attention(masks.causal)
    clean = attend(*tensors, backend="interpret")
    v[:, :, 70, 3], v[:, :, 80, 5], k[:, :, 90] = float("nan"), float("inf"), float("nan")
    out = attend(*tensors, backend="interpret")
    torch.testing.assert_close(out[:, :, :70], clean[:, :, :70])
    assert out[:, :, 70:, 3].isnan().all()
    assert (out[:, :, 80:90, 5] == torch.inf).all()
    assert out[:, :, 70:80, 5].isfinite().all()


@pytest.mark.parametrize("shape", [(0, 2, 4, 4), (2, 0, 4, 4), (1, 1, 0, 4), (1, 1, 4, 0)], ids=str)
def test_sizes_of_zero(shape):
    B, H, S, T = shape
    out, lse = fg.Attention(masks.causal)(
        *inputs(B, H, H, S, T, 16), return_lse=True, backend="interpret"
    )
    assert out.shape == (B, H, S, 16)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


def test_strides():
    S = 50
    qkv = torch.randn(1, S, 3, 4, 16)
    q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))
    shared = torch.randn(1, 1, S, 16).expand(1, 4, S, 16)
    backwards = torch.randn(1, 4, 16, S).mT
    allowed = torch.ones(S, S, dtype=torch.bool).tril()
    for tensors in ((q, k, v), (q, shared, v), (backwards, k, shared)):
        agree(fg.Attention(masks.causal), list(tensors), allowed)


def test_data_called_like_a_kernels_variables():
    acc = torch.randint(0, 2, (60,))

    def odd(b, h, q, k):
        return acc[q] == acc[k]

    @fg.mask
    def awkward(q_idx, kv_idx, tile: int, out: fg.Tensor, dims_16: int, keep: int):
        return (q_idx - kv_idx < tile + dims_16) & (out[kv_idx] < keep)

    tensors = inputs(1, 1, 1, 60, 60, 16)
    data = {"tile": 5, "dims_16": 7, "out": torch.arange(60), "keep": 40}
    away = torch.arange(60)[:, None] - torch.arange(60)
    allowed = (acc[:, None] == acc) & (away < 12) & (torch.arange(60) < 40)
    agree(fg.Attention(fg.mask(odd) & awkward(**data)), tensors, allowed)
