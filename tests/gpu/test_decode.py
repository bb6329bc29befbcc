"""The kernels for few queries on a GPU: right in every dtype, split or not, captured in a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import captured

import flashgen as fg
from flashgen import masks
from flashgen.launch import decode as launch_decode
from flashgen.tiling.decode import Splits

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 2e-5}


def inputs(B: int, H: int, Hkv: int, S: int, T: int, D: int, Dv: int, dtype: Any) -> list[Any]:
    shapes = ((B, H, S, D), (B, Hkv, T, D), (B, Hkv, T, Dv))
    return [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]


def oracle(q: Any, k: Any, v: Any, allowed: Any, scale: float) -> tuple[Any, Any]:
    """Dense softmax attention in float64, written out."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.where(allowed, q.double() @ k.mT * scale, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
    return weights @ v, lse


def agree(attend: Any, tensors: list[Any], allowed: Any, scale: float | None = None, **data: Any):
    out, lse = attend(*tensors, scale=scale, return_lse=True, **data)
    q, k = tensors[:2]
    v = tensors[2] if len(tensors) > 2 else k[..., : out.shape[-1]]
    right, right_lse = oracle(q, k, v, allowed, scale or q.shape[-1] ** -0.5)
    # Outputs are averages of values of about 1: a rounding of the weights and one of the result.
    torch.testing.assert_close(out.double(), right, rtol=0, atol=TOLERANCE[q.dtype])
    torch.testing.assert_close(lse.double(), right_lse, rtol=1e-5, atol=2e-5)
    assert (out[right_lse == -torch.inf] == 0).all()


def positions(S: int, T: int, lens: Any) -> tuple[Any, Any]:
    """i [B, 1, S, 1] and j [1, 1, 1, T], the queries being the last positions."""
    i = torch.arange(S, device="cuda")[None, None, :, None] + (lens - S)[:, None, None, None]
    return i, torch.arange(T, device="cuda")[None, None, None]


# Each is a kernel to compile; interpreted tests have the others.
CASES = [
    ((128, 128), (32, 8), torch.bfloat16, 1),
    ((128, 128), (32, 8), torch.bfloat16, 3),
    ((40, 24), (4, 4), torch.float32, 16),
]


@pytest.mark.parametrize("splits", [None, 16])
@pytest.mark.parametrize(("dims", "heads", "dtype", "S"), CASES, ids=str)
def test_lengths_heads_and_dims(
    monkeypatch, nan_filled_empty, dims, heads, dtype, S, splits
) -> None:
    if splits is not None:
        monkeypatch.setattr(launch_decode, "splits_of", lambda *_, **__: Splits(splits, 0))
    T = 3000
    lens = torch.tensor([0, 1, 65, 3000], device="cuda", dtype=torch.int32)
    i, j = positions(S, T, lens)
    allowed = (j <= i) & (i - j < 700) & (j < lens[:, None, None, None])
    tensors = inputs(4, *heads, S, T, *dims, dtype)
    tensors[1][0], tensors[2][0] = torch.nan, torch.nan
    tensors[2][2, :, 65:] = torch.nan
    clean = [tensors[0], *(x.nan_to_num() for x in tensors[1:])]
    out, lse = oracle(*clean, allowed, dims[0] ** -0.5)
    attend = fg.Attention(masks.sliding_window)
    got, got_lse = attend(*tensors, window=700, kv_lens=lens, return_lse=True)
    torch.testing.assert_close(got.double(), out, rtol=0, atol=TOLERANCE[dtype])
    torch.testing.assert_close(got_lse.double(), lse, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("splits", [None, 5])
@pytest.mark.parametrize("with_lens", [False, True])
def test_without_a_mask(monkeypatch, nan_filled_empty, with_lens, splits) -> None:
    """Blocks of 128 keys; NaN beyond the lengths."""
    if splits is not None:
        monkeypatch.setattr(launch_decode, "splits_of", lambda *_, **__: Splits(splits, 0))
    T = 3000
    lens = torch.tensor([0, 1, 130, 3000] if with_lens else [T] * 4, device="cuda")
    keep = torch.arange(T, device="cuda") < lens[:, None]
    q, k, v = inputs(4, 32, 8, 1, T, 128, 128, torch.bfloat16)
    right, right_lse = oracle(q, k, v, keep[:, None, None], 128**-0.5)
    k, v = (x.masked_fill(~keep[:, None, :, None], torch.nan) for x in (k, v))
    given = {"kv_lens": lens.int()} if with_lens else {}
    out, lse = fg.Attention()(q, k, v, **given, return_lse=True)
    torch.testing.assert_close(out.double(), right, rtol=0, atol=TOLERANCE[torch.bfloat16])
    torch.testing.assert_close(lse.double(), right_lse, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(("heads", "queries"), [(16, 1), (128, 2)])
def test_latent_heads(nan_filled_empty, heads, queries) -> None:
    lens = torch.tensor([0, 5, 700, 1000], device="cuda", dtype=torch.int32)
    q = torch.randn(4, heads, queries, 576, device="cuda", dtype=torch.bfloat16)
    kv = torch.randn(4, 1, 1000, 576, device="cuda", dtype=torch.bfloat16)
    i, j = positions(queries, 1000, lens)
    allowed = (j <= i) & (j < lens[:, None, None, None])
    attend = fg.Attention(masks.causal, heads=fg.MLA(rank=512, rope=64))
    agree(attend, [q, kv], allowed, scale=192**-0.5, kv_lens=lens)


def test_a_tree_of_drafts() -> None:
    T, S = 500, 7
    parent = torch.tensor([-1, 0, 0, 1, 1, 2, 5])
    seen = torch.eye(S, dtype=torch.bool)
    for node in range(1, S):
        seen[node] |= seen[parent[node]]

    @fg.mask
    def drafts(q_idx, kv_idx, prefix: int, tree: fg.Tensor):
        return (kv_idx < prefix) | tree[q_idx - prefix, kv_idx - prefix]

    tree = seen.cuda()
    allowed = torch.cat([torch.ones(S, T - S, dtype=torch.bool), seen], 1).cuda()
    tensors = inputs(2, 8, 2, S, T, 64, 64, torch.bfloat16)
    agree(fg.Attention(drafts), tensors, allowed, prefix=T - S, tree=tree)


def test_values_that_are_not_finite_and_not_seen() -> None:
    q, k, v = inputs(1, 8, 2, 3, 400, 64, 64, torch.bfloat16)
    attend = fg.Attention(masks.causal)
    v[0, 0, 399, 3], v[0, 1, 398, 5] = torch.nan, torch.inf
    out = attend(q, k, v)
    expected = torch.zeros_like(out, dtype=torch.bool)
    expected[0, :4, 2, 3] = True
    assert torch.equal(out.isnan(), expected)
    expected = torch.zeros_like(expected)
    expected[0, 4:, 1:, 5] = True
    assert torch.equal(out.isinf(), expected)
    clean = attend(q, k, v.nan_to_num(posinf=0.0))
    finite = out.isfinite()
    torch.testing.assert_close(out[finite], clean[finite], rtol=0, atol=2e-2)


def test_a_graph_serves_other_lengths() -> None:
    T = 6000
    q, k, v = inputs(3, 8, 2, 1, T, 128, 128, torch.bfloat16)
    lens = torch.tensor([100, 3000, 6000], device="cuda", dtype=torch.int32)
    attend = fg.Attention(masks.sliding_window)

    def step() -> Any:
        return attend(q, k, v, window=1500, kv_lens=lens, return_lse=True)

    graph, (out, lse) = captured(step)
    for now in ([6000, 0, 1], [5, 6000, 4097], [0, 0, 0], [100, 3000, 6000]):
        lens.copy_(torch.tensor(now, dtype=torch.int32))
        graph.replay()
        right, right_lse = step()
        torch.cuda.synchronize()
        assert torch.equal(out, right)
        assert torch.equal(lse, right_lse)
        i, j = positions(1, T, lens)
        allowed = (j <= i) & (i - j < 1500) & (j < lens[:, None, None, None])
        exact, _ = oracle(q, k, v, allowed, 128**-0.5)
        torch.testing.assert_close(out.double(), exact, rtol=0, atol=1.6e-2)


def test_nothing_waits_for_the_device() -> None:
    q, k, v = inputs(2, 8, 2, 1, 500, 128, 128, torch.bfloat16)
    lens = torch.tensor([100, 500], device="cuda", dtype=torch.int32)
    attend = fg.Attention(masks.sliding_window(window=300))
    attend(q, k, v, kv_lens=lens)
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend(q, k, v, kv_lens=lens)
        attend(q, k, v, kv_lens=lens, schedule=attend.schedule(q, k, v, kv_lens=lens))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_bits_do_not_depend_on_the_batch() -> None:
    T, queries = 5000, 3
    attend = fg.Attention(masks.sliding_window)
    q, k, v = inputs(6, 8, 2, queries, T, 128, 128, torch.bfloat16)
    lens = torch.tensor([4999, 17, 2500, 0, 4096, 5000], device="cuda", dtype=torch.int32)
    options: dict[str, Any] = {"window": 3000, "return_lse": True, "batch_invariant": True}
    out, lse = attend(q, k, v, kv_lens=lens, **options)
    for b in range(6):
        n = max(int(lens[b]), queries)
        alone = (q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n])
        own = attend(*alone, kv_lens=lens[b : b + 1], **options)
        assert torch.equal(own[0][0], out[b])
        assert torch.equal(own[1][0], lse[b])


def test_offsets_of_a_cache_beyond_32_bits() -> None:
    """Rows 2^20 elements apart, and more than 2^31 elements in all."""
    T, D = 2100, 64
    buffers = [torch.empty(T, 1 << 20, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    k, v = (x[:, -D:].normal_()[None, None] for x in buffers)
    q = torch.randn(1, 4, 1, D, device="cuda", dtype=torch.bfloat16)
    allowed = torch.ones(1, T, dtype=torch.bool, device="cuda")
    agree(fg.Attention(masks.causal), [q, k, v], allowed)
