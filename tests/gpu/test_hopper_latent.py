"""Hopper's kernel for latent heads on a GPU, asked for by name."""

from __future__ import annotations

from typing import Any

import pytest
import sm_90
import torch
from dense_checks import oracle, sdpa_error

import flashgen as fg
from flashgen import masks
from flashgen.launch import decode as launch_decode
from flashgen.tiling.decode import Splits

pytestmark = sm_90.marks(60)
MLA, SCALE = fg.MLA(rank=512, rope=64), 192**-0.5
CAUSAL = fg.Attention(masks.causal, heads=MLA)


def inputs(B: int, H: int, S: int, T: int, heads: fg.MLA = MLA, dtype: Any = torch.bfloat16) -> Any:
    width = heads.rank + heads.rope
    return [torch.randn(B, h, s, width, device="cuda").to(dtype) for h, s in ((H, S), (1, T))]


def causal(S: int, T: int, lens: Any) -> Any:
    """The queries being the last positions of `lens` [B] keys."""
    i = torch.arange(S, device="cuda")[None, None, :, None] + (lens - S)[:, None, None, None]
    j = torch.arange(T, device="cuda")
    return (j <= i) & (j < lens[:, None, None, None])


def check(attend: Any, q: Any, kv: Any, allowed: Any, given: Any = None, **data: Any) -> None:
    """`given`: the cache as the call gets it, if it isn't `kv`."""
    cache = kv if given is None else given
    out, lse = attend(q, cache, scale=SCALE, return_lse=True, backend="hopper", **data)
    v = kv[..., : out.shape[-1]]
    exact, exact_lse = oracle(q, kv, v, allowed, SCALE)
    empty = ~allowed.expand(*q.shape[:3], kv.shape[2]).any(-1)
    assert (out[empty] == 0).all()
    assert (lse[empty] == -torch.inf).all()
    error = (out.double() - exact).abs().max().item()
    assert error <= 2 * sdpa_error(q, kv, v, allowed, exact, SCALE) + 1e-6
    torch.testing.assert_close(lse[~empty].double(), exact_lse[~empty], rtol=1e-5, atol=1e-5)


def fix_splits(monkeypatch: pytest.MonkeyPatch, count: int | None) -> None:
    if count is not None:
        monkeypatch.setattr(launch_decode, "splits_of", lambda *_, **__: Splits(count, 0))


# Few, as each compiles two kernels; the walk on a CPU has the others.
CASES = [(1, 4, 7), (16, 1, 1), (64, 3, None), (128, 2, 3)]


@pytest.mark.parametrize(("heads", "queries", "splits"), CASES, ids=str)
def test_heads_queries_and_lengths(
    monkeypatch: pytest.MonkeyPatch, nan_filled_empty: None, heads: int, queries: int, splits: Any
) -> None:
    fix_splits(monkeypatch, splits)
    T = 4096
    lens = torch.tensor([0, 1, 64, 777, 4096], dtype=torch.int32, device="cuda")
    q, kv = inputs(5, heads, queries, T)
    beyond = torch.arange(T, device="cuda") >= lens[:, None]
    given = kv.masked_fill(beyond[:, None, :, None], torch.nan)
    check(CAUSAL, q, kv, causal(queries, T, lens), given, kv_lens=lens)


def test_no_mask() -> None:
    q, kv = inputs(3, 20, 2, 1000)
    every = torch.ones(1, 1, 1, 1000, dtype=torch.bool, device="cuda")
    check(fg.Attention(heads=MLA), q, kv, every)


def test_another_rank() -> None:
    heads = fg.MLA(256, 32)
    q, kv = inputs(2, 16, 2, 900, heads, torch.float16)
    lens = torch.tensor([900, 900], device="cuda")
    check(fg.Attention(masks.causal, heads=heads), q, kv, causal(2, 900, lens))


@pytest.mark.parametrize(("size", "layout"), [(64, "NHD"), (256, "HND")], ids=str)
def test_pages(size: int, layout: str) -> None:
    B, T, queries = 4, 2048, 2
    lens = torch.tensor([0, 5, 1001, 2048], dtype=torch.int32, device="cuda")
    q, kv = inputs(B, 128, queries, T)
    order = torch.randperm(B * T // size, device="cuda")
    pool = torch.empty(B * T // size, size, 1, 576, device="cuda", dtype=kv.dtype)
    pool[order] = kv.transpose(1, 2).reshape(-1, size, 1, 576)
    table = order.reshape(B, -1).int()
    for b, n in enumerate(lens.tolist()):
        # What a length doesn't reach is no page at all.
        table[b, -(-n // size) :] = 1 << 30
    given = pool if layout == "NHD" else pool.transpose(1, 2).contiguous()
    data = {"page_table": table, "kv_lens": lens, "page_layout": layout}
    check(CAUSAL, q, kv, causal(queries, T, lens), given, **data)


@fg.attention(mask=masks.sliding_window, heads=MLA)
def biased(score, h, q_idx, kv_idx, slope: fg.Tensor, bias: fg.Tensor):
    return score + slope[h] * (kv_idx - q_idx) + bias[kv_idx]


def test_a_score_function_and_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    fix_splits(monkeypatch, 3)
    q, kv = inputs(2, 32, 2, 1500)
    slope, bias = torch.rand(32, device="cuda"), torch.randn(1500, device="cuda")
    i = torch.arange(2, device="cuda")[:, None] + 1498
    j = torch.arange(1500, device="cuda")
    allowed = (j <= i) & (i - j < 700)
    data = {"slope": slope, "bias": bias, "window": 700, "scale": SCALE}
    out, lse = biased(q, kv, return_lse=True, backend="hopper", **data)
    scores = q.double() @ kv.double().mT * SCALE
    scores = scores + slope.double()[:, None, None] * (j - i) + bias.double()
    scores = scores.masked_fill(~allowed, -torch.inf)
    right = scores.softmax(-1) @ kv[..., :512].double()
    # Outputs are averages of values of about 1: a rounding of the weights and one of the result.
    torch.testing.assert_close(out.double(), right, rtol=0, atol=1.6e-2)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)


def test_values_that_are_not_finite_and_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    fix_splits(monkeypatch, 2)
    q, kv = inputs(1, 16, 2, 300)
    clean = CAUSAL(q, kv, scale=SCALE, backend="hopper")
    kv[0, 0, 299, 7] = torch.nan
    out = CAUSAL(q, kv, scale=SCALE, backend="hopper")
    assert out[0, :, 0].isfinite().all()
    torch.testing.assert_close(out[0, :, 0], clean[0, :, 0], rtol=0, atol=1.6e-2)
    assert out[0, :, 1].isnan().all()


@pytest.mark.parametrize("splits", [1, 3])
def test_scores_that_outgrow_the_first_maximum(
    monkeypatch: pytest.MonkeyPatch, nan_filled_empty: None, splits: int
) -> None:
    """Of some heads they rise along the keys, of others they fall; each has bits of its own."""
    fix_splits(monkeypatch, splits)
    T = 2000
    q, kv = inputs(2, 6, 1, T)
    kv[..., 512:] = torch.arange(T, device="cuda")[:, None] / 300
    q[..., 512:] = torch.tensor([1.5, 0, -1.5, 1, 0.3, -1], device="cuda")[:, None, None]
    every = torch.ones(1, 1, 1, T, dtype=torch.bool, device="cuda")
    attend = fg.Attention(heads=MLA)
    check(attend, q, kv, every)
    out = attend(q, kv, scale=SCALE, backend="hopper")
    for h in range(6):
        assert torch.equal(attend(q[:, [h]], kv, scale=SCALE, backend="hopper"), out[:, [h]])


def test_bits_do_not_depend_on_the_batch() -> None:
    q, kv = inputs(3, 16, 1, 5000)
    lens = torch.tensor([5000, 17, 2500], dtype=torch.int32, device="cuda")
    options: dict[str, Any] = {"scale": SCALE, "batch_invariant": True, "backend": "hopper"}
    out = CAUSAL(q, kv, kv_lens=lens, **options)
    for b, n in enumerate(lens.tolist()):
        own = CAUSAL(q[b : b + 1], kv[b : b + 1, :, :n], kv_lens=lens[b : b + 1], **options)
        assert torch.equal(own[0], out[b])


def test_auto_takes_it() -> None:
    q, kv = inputs(2, 16, 1, 300)
    text = CAUSAL.explain(q, kv, scale=SCALE)
    assert "hopper: generated Gluon kernels for sm_90" in text
    assert "def attention_latent(" in CAUSAL.source(q, kv, scale=SCALE)
    pool, table = kv.reshape(-1, 20, 1, 576), torch.arange(30, device="cuda").reshape(2, 15).int()
    lens = torch.tensor([300, 300], device="cuda")
    text = CAUSAL.explain(q, pool, scale=SCALE, page_table=table, kv_lens=lens)
    assert "pages of 20 are no multiple of 64" in text
