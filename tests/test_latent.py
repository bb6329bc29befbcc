"""Latent heads: their scale, absorbed and expanded up-projections, gradients on the CPU."""

from __future__ import annotations

import math

import dense
import pytest
import torch

import flashgen as fg
from flashgen import latent, masks

RANK, ROPE, NOPE, VALUE, HEADS = 24, 8, 12, 10, 3


def test_the_scale_is_that_of_expanded_heads():
    """DeepSeek-V3's, from its configuration: factor 40, mscale_all_dim 1."""
    assert latent.softmax_scale(128, 64) == pytest.approx(0.0721688, abs=1e-7)
    mscale = 0.1 * math.log(40) + 1
    assert mscale == pytest.approx(1.36888, abs=1e-5)
    scale = latent.softmax_scale(128, 64, factor=40, mscale_all_dim=1.0)
    assert scale == pytest.approx(0.135234, abs=1e-6)
    assert latent.softmax_scale(128, 64, factor=0.5, mscale_all_dim=1.0) == 192**-0.5


@pytest.mark.parametrize("sizes", [(0, 64), (128, -1), (128, None), (math.nan, 64), ("a", 1)])
def test_sizes_that_make_no_scale(sizes):
    with pytest.raises(fg.FlashgenError, match="make no scale"):
        latent.softmax_scale(*sizes)


@pytest.fixture
def layer():
    """q_nope, q_rope, kv, w_key, w_value of two sequences, 4 queries and 9 keys."""
    shapes = (
        *((2, HEADS, 4, NOPE), (2, HEADS, 4, ROPE), (2, 1, 9, RANK + ROPE)),
        *((HEADS, NOPE, RANK), (HEADS, VALUE, RANK)),
    )
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def test_projections_that_don_t_fit(layer):
    q_nope, q_rope, kv, w_key, w_value = layer
    wrong = [
        (latent.absorb_queries, (q_nope, q_rope, w_key[:, 1:]), "w_key is [3, 11, 24]"),
        (latent.absorb_queries, (q_nope, q_rope, w_key[:1]), "w_key is [1, 12, 24]"),
        (latent.absorb_queries, (q_nope, None, w_key), "q_rope is a NoneType"),
        (latent.absorb_queries, (q_nope[0], q_rope, w_key), "q_nope has 3 dimensions"),
        (latent.absorb_queries, (q_nope, q_rope.half(), w_key), "q_rope torch.float16"),
        (latent.expand_output, (q_nope, w_value), "w_value is [3, 10, 24]"),
        (latent.expand_cache, (kv.expand(2, 3, 9, 32), w_key, w_value), "kv is [2, 3, 9, 32]"),
        (latent.expand_cache, (kv, w_key, w_value[1:]), "w_value is [2, 10, 24]"),
        (latent.expand_cache, (kv[..., :20], w_key, w_value), "kv has 20 columns"),
    ]
    for function, given, problem in wrong:
        with pytest.raises(fg.FlashgenError) as caught:
            function(*given)
        assert problem in str(caught.value)
        assert str(caught.value).startswith(f"latent.{function.__name__}(")


def test_absorbed_and_expanded_are_the_same(layer):
    q_nope, q_rope, kv, w_key, w_value = layer
    scale = latent.softmax_scale(NOPE, ROPE)
    attend = fg.Attention(masks.causal, heads=fg.MLA(RANK, ROPE))
    out = attend(latent.absorb_queries(q_nope, q_rope, w_key), kv, scale=scale)
    k, v = latent.expand_cache(kv, w_key, w_value)
    assert k.shape == (2, HEADS, 9, NOPE + ROPE)
    assert v.shape == (2, HEADS, 9, VALUE)
    i, j = torch.arange(4)[:, None] + 5, torch.arange(9)
    right, _ = dense.attention(torch.cat([q_nope, q_rope], -1), k, v, j <= i)
    torch.testing.assert_close(latent.expand_output(out, w_value), right)
    ordinary = fg.Attention(masks.causal)(torch.cat([q_nope, q_rope], -1), k, v)
    torch.testing.assert_close(ordinary, right)


def test_gradients_on_the_cpu(layer):
    """A latent row's gradient is that of a key and of a value."""
    q = torch.randn(1, 2, 3, RANK + ROPE, dtype=torch.float64, requires_grad=True)
    kv = torch.randn(1, 1, 5, RANK + ROPE, dtype=torch.float64, requires_grad=True)
    attend = fg.Attention(masks.causal, heads=fg.MLA(RANK, ROPE))
    grad = torch.randn(1, 2, 3, RANK, dtype=torch.float64)
    got = torch.autograd.grad(attend(q, kv, scale=0.3), (q, kv), grad)
    allowed = torch.arange(5) <= torch.arange(3)[:, None] + 2
    scores = torch.where(allowed, q @ kv.mT * 0.3, -torch.inf)
    right = torch.autograd.grad(scores.softmax(-1) @ kv[..., :RANK], (q, kv), grad)
    torch.testing.assert_close(got, right)


def test_gradients_of_the_form_that_trains():
    """Keys of 192 and values of 128, one head each."""
    q, k = (torch.randn(1, 2, 20, 192, dtype=torch.float64, requires_grad=True) for _ in "qk")
    v = torch.randn(1, 2, 20, 128, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(1, 2, 20, 128, dtype=torch.float64)
    scale = latent.softmax_scale(128, 64, factor=40, mscale_all_dim=1.0)
    got = torch.autograd.grad(fg.Attention(masks.causal)(q, k, v, scale=scale), (q, k, v), grad)
    scores = (q @ k.mT * scale).masked_fill(~torch.ones(20, 20).tril().bool(), -torch.inf)
    right = torch.autograd.grad(scores.softmax(-1) @ v, (q, k, v), grad)
    torch.testing.assert_close(got, right)


def test_a_schedule_of_latent_rows(layer):
    q, kv = torch.randn(1, 2, 3, RANK + ROPE), torch.randn(1, 1, 70, RANK + ROPE)
    attend = fg.Attention(masks.sliding_window(window=20), heads=fg.MLA(RANK, ROPE))
    schedule = attend.schedule(q, kv)
    out = attend(q, kv, scale=0.2, schedule=schedule)
    assert torch.equal(out, attend(q, kv, scale=0.2))
    assert out.shape == (1, 2, 3, RANK)


def test_what_latent_calls_look_like():
    attend = fg.Attention(masks.causal, heads=fg.MLA(16, 8))
    table, lens = torch.zeros(2, 2, dtype=torch.int32), torch.tensor([5, 6])
    paged = {"page_table": table, "kv_lens": lens}
    q, kv, pages = torch.randn(2, 4, 1, 24), torch.randn(2, 1, 9, 24), torch.randn(5, 1, 4, 24)
    wrong = [
        (q, pages, paged, 'kv [pages, page size, 1, 24] with page_layout="NHD"'),
        (q[..., :16], kv, {}, "q [B, Hq, Sq, 24], kv [B, 1, Skv, 24]"),
        (q, kv[:1], {}, "the shapes [2, 4, 1, 24], [1, 1, 9, 24] don't fit together"),
        (q.half(), kv, {}, "kv [B, 1, Skv, 24], of one dtype"),
    ]
    for q, kv, given, text in wrong:
        with pytest.raises(fg.FlashgenError) as caught:
            attend(q, kv, scale=0.1, **given)
        assert text in str(caught.value)


def test_autocast_as_in_calls(layer):
    """Outputs of linear layers are bfloat16 there, parameters float32."""
    q_nope, q_rope, kv, w_key, w_value = (x.float() for x in layer)
    with torch.autocast("cpu"):
        q = latent.absorb_queries(q_nope.bfloat16(), q_rope, w_key)
        k, v = latent.expand_cache(kv, w_key, w_value)
        out = latent.expand_output(torch.randn(*q.shape[:3], w_value.shape[-1]), w_value)
    assert {x.dtype for x in (q, k, v, out)} == {torch.bfloat16}
    right = latent.absorb_queries(q_nope, q_rope, w_key)
    # Three roundings to 8 bits, of two factors and of their sum.
    most = float(right.abs().max())
    torch.testing.assert_close(q.float(), right, rtol=0, atol=3 * 2**-8 * most)
