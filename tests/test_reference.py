"""The dense reference against torch's SDPA in float64, and against closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from flashgen.reference import attention_reference
from flashgen.spec import mask
from flashgen.trace import Tensor

INF = math.inf


@mask
def causal(q_idx, kv_idx):
    return kv_idx <= q_idx


@mask
def document(b, q_idx, kv_idx, doc: Tensor):
    return doc[b, q_idx] == doc[b, kv_idx]


@mask
def head_window(h, q_idx, kv_idx, width: int):
    return (kv_idx <= q_idx) & (q_idx - kv_idx < width + h)


def tensors(batch: int = 2, heads: int = 4, kv_heads: int = 2, q_len: int = 9, kv_len: int = 13):
    shapes = (heads, q_len, 6), (kv_heads, kv_len, 6), (kv_heads, kv_len, 5)
    return [torch.randn(batch, *s, dtype=torch.float64, requires_grad=True) for s in shapes]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_equals_sdpa(kv_heads: int, scale: float | None) -> None:
    q, k, v = tensors(kv_heads=kv_heads)
    allowed = torch.rand(2, 1, 9, 13) < 0.5
    allowed[..., 0] = True
    out, _ = attention_reference(q, k, v, mask=allowed, scale=scale)
    right = F.scaled_dot_product_attention(q, k, v, allowed, scale=scale, enable_gqa=True)
    torch.testing.assert_close(out, right)
    seed = torch.randn_like(out)
    grads = [torch.autograd.grad(x, (q, k, v), seed) for x in (out, right)]
    torch.testing.assert_close(*grads)


def test_without_a_mask_every_key_is_seen() -> None:
    q, k, v = tensors()
    out, _ = attention_reference(q, k, v)
    right = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(out, right)


def test_lower_precision_is_computed_in_float64() -> None:
    q, k, v = (x.detach().bfloat16() for x in tensors())
    out, lse = attention_reference(q, k, v)
    assert out.dtype == lse.dtype == torch.float64
    right, _ = attention_reference(q.double(), k.double(), v.double())
    assert torch.equal(out, right)


def mean_test(length: int, allowed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Query 0 and value j at key j: a row is the mean of the keys it sees."""
    q = torch.zeros(1, 1, length, 4)
    k = torch.randn(1, 1, length, 4)
    v = torch.arange(length, dtype=torch.float64)[:, None].expand(1, 1, length, 3)
    out, lse = attention_reference(q, k, v, mask=allowed)
    return out[0, 0, :, 0], lse[0, 0]


def test_mean_of_causal_keys() -> None:
    i = torch.arange(50, dtype=torch.float64)
    out, lse = mean_test(50, causal.dense(50, 50))
    torch.testing.assert_close(out, i / 2)
    torch.testing.assert_close(lse, torch.log(i + 1))


def test_mean_of_a_window() -> None:
    i = torch.arange(50, dtype=torch.float64)
    allowed = (i <= i[:, None]) & (i[:, None] - i <= 7)
    out, lse = mean_test(50, allowed)
    torch.testing.assert_close(out, ((i - 7).clamp(0) + i) / 2)
    torch.testing.assert_close(lse, torch.log((i + 1).clamp(max=8)))


def test_mean_of_causal_documents() -> None:
    doc = torch.repeat_interleave(torch.arange(4), torch.tensor([3, 0, 5, 120]))[None]
    out, lse = mean_test(128, (causal & document).dense(128, 128, doc=doc))
    rows = torch.tensor([0, 1, 2, 3, 7, 8, 127])
    means = torch.tensor([0, 0.5, 1, 3, 5, 8, 67.5], dtype=torch.float64)
    counts = torch.tensor([1, 2, 3, 1, 5, 1, 120], dtype=torch.float64)
    torch.testing.assert_close(out[rows], means)
    torch.testing.assert_close(lse[rows], torch.log(counts))


@pytest.mark.parametrize("slope", [0.5, 2.0**-8])
def test_lse_of_alibi(slope: float) -> None:
    i = torch.arange(64, dtype=torch.float64)
    q, k, v = torch.zeros(1, 1, 64, 4), torch.randn(1, 1, 64, 4), torch.randn(1, 1, 64, 4)
    _, lse = attention_reference(
        q, k, v, mask=causal.dense(64, 64), score=lambda s: s + slope * (i - i[:, None])
    )
    right = torch.log((1 - torch.exp(-slope * (i + 1))) / (1 - math.exp(-slope)))
    torch.testing.assert_close(lse[0, 0], right)


def test_softcap_comes_after_the_score_function_and_before_the_mask() -> None:
    q, k, v = tensors()
    raw = torch.einsum("bhid,bhjd->bhij", q, k.repeat_interleave(2, 1)) * 6**-0.5
    weights = torch.softmax(3 * torch.tanh((raw + 1) / 3), dim=-1)
    out, _ = attention_reference(q, k, v, score=lambda s: s + 1, softcap=3.0)
    torch.testing.assert_close(out, weights @ v.repeat_interleave(2, 1))

    hidden = torch.arange(13) % 2 == 0
    out, lse = attention_reference(
        q, k, v, score=lambda s: s.masked_fill(hidden, -INF), softcap=3.0
    )
    right, right_lse = attention_reference(q, k, v, mask=~hidden, softcap=3.0)
    torch.testing.assert_close(out, right)
    torch.testing.assert_close(lse, right_lse)


def test_sinks_are_a_key_without_a_value() -> None:
    q, k, v = tensors(kv_heads=4)
    sinks = torch.randn(4, dtype=torch.float64)
    raw = torch.cat([q @ k.mT * 6**-0.5, sinks.reshape(1, 4, 1, 1).expand(2, 4, 9, 1)], dim=-1)
    out, lse = attention_reference(q, k, v, sinks=sinks)
    torch.testing.assert_close(out, torch.softmax(raw, -1)[..., :-1] @ v)
    torch.testing.assert_close(lse, torch.logsumexp(raw, -1))


def test_rows_without_keys() -> None:
    leaves = tensors()
    allowed = torch.ones(9, 13, dtype=torch.bool)
    allowed[3] = False
    out, lse = attention_reference(*leaves, mask=allowed)
    assert (out[:, :, 3] == 0).all()
    assert (lse[:, :, 3] == -INF).all()
    sinks = torch.randn(4)
    out, lse = attention_reference(*leaves, mask=allowed, sinks=sinks)
    assert (out[:, :, 3] == 0).all()
    assert (lse[:, :, 3] == sinks.double()[:, None].T).all()


def test_gradients_of_rows_without_keys_are_zero() -> None:
    leaves = tensors()
    allowed = torch.ones(9, 13, dtype=torch.bool)
    allowed[3] = False
    out, lse = attention_reference(*leaves, mask=allowed)
    kept = torch.arange(9) != 3
    grads = torch.autograd.grad(out.sum() + lse[:, :, kept].sum(), leaves)
    for grad in grads:
        assert grad.isfinite().all()
    assert (grads[0][:, :, 3] == 0).all()


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 4), (4, 0), (0, 0)])
def test_lengths_of_zero(q_len: int, kv_len: int) -> None:
    out, lse = attention_reference(*tensors(q_len=q_len, kv_len=kv_len))
    assert torch.equal(out, torch.zeros(2, 4, q_len, 5, dtype=torch.float64))
    assert torch.equal(lse, torch.full((2, 4, q_len), -INF, dtype=torch.float64))


@pytest.mark.parametrize("garbage", [math.nan, INF, -INF])
@pytest.mark.parametrize("where", ["key", "value", "both"])
def test_garbage_behind_the_mask(garbage: float, where: str) -> None:
    """Rows that don't see it are as they were; rows that do must show it."""
    q, k, v = (x.detach() for x in tensors(kv_heads=4))
    allowed = torch.ones(9, 13, dtype=torch.bool).tril()
    right = attention_reference(q, k, v, mask=allowed)
    for name, x in (("key", k), ("value", v)):
        if where in (name, "both"):
            x[:, :, 6] = garbage
    ours = attention_reference(q, k, v, mask=allowed)
    for mine, other in zip(ours, right, strict=True):
        torch.testing.assert_close(mine[:, :, :6], other[:, :, :6])
    if math.isnan(garbage) or where == "value":
        assert not ours[0][:, :, 6:].isfinite().any()


def test_dense_masks_have_only_the_dimensions_they_need() -> None:
    doc = torch.tensor([[0, 0, 1], [0, 1, 1]])
    assert causal.dense(2, 5, batch=3, heads=4).shape == (1, 1, 2, 5)
    sizes = np.array([2, 5, 3, 4])
    made = causal.dense(sizes[0], sizes[1], batch=sizes[2], heads=sizes[3], q_offset=sizes[2])
    assert torch.equal(made, causal.dense(2, 5, q_offset=3))
    assert document.dense(3, 3, batch=2, heads=4, doc=doc).shape == (2, 1, 3, 3)
    assert head_window.dense(3, 3, batch=2, heads=4, width=1).shape == (1, 4, 3, 3)
    offsets = torch.tensor([0, 1])
    assert causal.dense(3, 3, batch=2, heads=4, q_offset=offsets).shape == (2, 1, 3, 3)


def test_dense_masks_against_their_formulas() -> None:
    i, j = torch.arange(4)[:, None], torch.arange(6)
    assert torch.equal(causal.dense(4, 6)[0, 0], j <= i + 2)
    assert torch.equal(causal.dense(4, 6, q_offset=-1)[0, 0], j <= i - 1)
    widths = torch.arange(3)[:, None, None] + 2
    right = (j <= i + 2) & (i + 2 - j < widths)
    assert torch.equal(head_window.dense(4, 6, heads=3, width=2)[0], right)
    assert torch.equal((~causal).dense(4, 6)[0, 0], j > i + 2)
    doc = torch.tensor([[0, 0, 1, 1, 2, 2], [3, 3, 3, 3, 3, 0]])
    right = doc[:, 2:, None] == doc[:, None]
    assert torch.equal(document.dense(4, 6, batch=2, doc=doc)[:, 0], right)
