"""Interpreted kernels for few queries: splits, packed groups, latent heads, hidden values."""

from __future__ import annotations

import math
from typing import Any

import dense
import pytest
import torch

import flashgen as fg
from flashgen import masks
from flashgen.launch import decode as launch_decode
from flashgen.tiling.decode import Splits

NAN, INF = math.nan, math.inf
pytestmark = pytest.mark.usefixtures("nan_filled_empty")


@pytest.fixture
def splits(monkeypatch):
    """Fixes into how many splits the keys are cut."""

    def fix(count: int, tiles: int = 0) -> None:
        monkeypatch.setattr(launch_decode, "splits_of", lambda *_, **__: Splits(count, tiles))

    return fix


def inputs(B: int, H: int, Hkv: int, S: int, T: int, D: int, Dv: int | None = None) -> list[Any]:
    shapes = ((B, H, S, D), (B, Hkv, T, D), (B, Hkv, T, Dv or D))
    return [torch.randn(shape) for shape in shapes]


def agree(attend: fg.Attention, tensors: Any, allowed: Any, **arguments: Any) -> None:
    known = {n: arguments.pop(n) for n in ("score", "softcap") if n in arguments}
    out, lse = attend(*tensors, return_lse=True, backend="interpret", **arguments)
    known |= {n: arguments.get(n) for n in ("scale", "sinks")}
    k = tensors[1]
    v = tensors[2] if len(tensors) > 2 else k[..., : out.shape[-1]]
    right, right_lse = dense.attention(tensors[0], k, v, allowed, **known)
    torch.testing.assert_close(out.double(), right, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), right_lse, rtol=0, atol=1e-5)
    assert (out[right_lse == -INF] == 0).all()


def positions(S: int, T: int, lens: Any) -> tuple[Any, Any]:
    """i [B, 1, S, 1], the queries being the last positions, and j [1, 1, 1, T]."""
    first = torch.as_tensor(lens).reshape(-1, 1, 1, 1) - S
    return torch.arange(S)[None, None, :, None] + first, torch.arange(T)[None, None, None]


@pytest.mark.parametrize("heads", [(6, 1), (12, 3), (7, 7), (5, 1)], ids=str)
@pytest.mark.parametrize("queries", [1, 3, pytest.param(16, marks=pytest.mark.slow)])
def test_groups_that_are_no_power_of_two(splits, queries, heads):
    splits(3)
    i, j = positions(queries, 200, 200)
    agree(fg.Attention(masks.causal), inputs(2, *heads, queries, 200, 16), j <= i)


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("name", ["none", "causal", "sliding_window", "global_window"])
def test_lengths_of_each_sequence(splits, name, count):
    """A split without keys writes 0 and -inf; keys beyond a length hold NaN."""
    splits(count)
    T, lens = 300, torch.tensor([0, 1, 64, 65, 300], dtype=torch.int32)
    q, k, v = inputs(5, 4, 2, 2, T, 16, 24)
    i, j = positions(2, T, lens)
    inside = j < lens[:, None, None, None]
    data: dict[str, Any] = {"window": 70} if "window" in name else {}
    data |= {"globals": 3} if name == "global_window" else {}
    near = (j <= i) & (i - j < 70)
    wanted = {
        "none": torch.ones_like(inside),
        "causal": j <= i,
        "sliding_window": near,
        "global_window": near | ((j <= i) & (j < 3)),
    }[name]
    for x in (k, v):
        x.transpose(1, 2)[~inside[:, 0, 0]] = 0.0
    right = dense.attention(q, k, v, wanted & inside)
    for x in (k, v):
        x.transpose(1, 2)[~inside[:, 0, 0]] = NAN
    mask = None if name == "none" else getattr(masks, name)
    out, lse = fg.Attention(mask)(
        q, k, v, kv_lens=lens, return_lse=True, backend="interpret", **data
    )
    torch.testing.assert_close(out.double(), right[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), right[1], rtol=0, atol=1e-5)


@fg.attention(mask=masks.causal, softcap=2.0, sinks=True)
def slanted(score, h, q_idx, kv_idx, slope: fg.Tensor):
    return score + slope[h] * (kv_idx - q_idx)


@pytest.mark.parametrize("count", [1, 5])
def test_scores_caps_and_sinks_once(splits, count):
    splits(count)
    slope, sinks = torch.rand(6) * 0.1, torch.tensor([30.0, -30.0, 0.0, 1.0, 2.0, -1.0])
    i, j = positions(2, 150, 150)
    away = slope[None, :, None, None] * (j - i)
    agree(
        slanted,
        inputs(1, 6, 2, 2, 150, 16),
        j <= i,
        score=lambda s: s + away.numpy(),
        softcap=2.0,
        slope=slope,
        sinks=sinks,
    )


def test_a_sink_of_a_row_without_keys(splits):
    splits(4)
    q, k, v = inputs(2, 2, 1, 1, 100, 16)
    sinks, lens = torch.tensor([0.5, -3.0]), torch.tensor([0, 0], dtype=torch.int32)
    attend = fg.Attention(masks.causal, sinks=True)
    arguments: dict[str, Any] = {"kv_lens": lens, "sinks": sinks, "backend": "interpret"}
    out, lse = attend(q, k, v, return_lse=True, **arguments)
    assert (out == 0).all()
    torch.testing.assert_close(lse, sinks.expand(2, 2)[..., None])


def test_heads_of_a_group_with_masks_of_their_own(splits):
    @fg.mask
    def longer(h, q_idx, kv_idx):
        return (kv_idx <= q_idx) & (q_idx - kv_idx < 40 * (h + 1))

    splits(3)
    i, j = positions(4, 300, 300)
    reach = 40 * (torch.arange(6) + 1)[None, :, None, None]
    agree(fg.Attention(longer), inputs(1, 6, 2, 4, 300, 16), (j <= i) & (i - j < reach))


def test_a_tree_of_drafts(splits):
    """Speculative decoding: each draft sees the prefix and its ancestors."""
    splits(2)
    parent, T = [-1, 0, 0, 1, 1, 2, 5], 130
    tree = torch.eye(7, dtype=torch.bool)
    for node in range(1, 7):
        tree[node] |= tree[parent[node]]

    @fg.mask
    def drafts(q_idx, kv_idx, prefix: int, tree: fg.Tensor):
        return (kv_idx < prefix) | tree[q_idx - prefix, kv_idx - prefix]

    allowed = torch.cat([torch.ones(7, T - 7, dtype=torch.bool), tree], 1)
    agree(fg.Attention(drafts), inputs(2, 4, 2, 7, T, 16), allowed, prefix=T - 7, tree=tree)


@pytest.mark.parametrize("block", [(16, 16), (128, 128), (48, 96)], ids=str)
def test_schedules_of_other_tiles(splits, block):
    splits(3)
    q, k, v = inputs(1, 4, 2, 5, 333, 16)
    i, j = positions(5, 333, 333)
    attend = fg.Attention(masks.sliding_window)
    schedule = attend.schedule(q, k, v, window=200, block_size=block)
    agree(attend, [q, k, v], (j <= i) & (i - j < 200), window=200, schedule=schedule)


def test_many_runs_are_searched(splits):
    """More than 64 runs in a row: a split's first one lies in a later part of the list."""
    splits(7)
    T = 16 * 300
    chosen = (torch.arange(T) // 16) % 2 == 0

    @fg.mask
    def stripes(kv_idx, chosen: fg.Tensor):
        return chosen[kv_idx]

    q, k, v = inputs(1, 2, 1, 1, T, 16)
    attend = fg.Attention(stripes)
    schedule = attend.schedule(q, k, v, chosen=chosen, block_size=16)
    assert schedule.visits(2).runs.shape[-2] > 150
    agree(attend, [q, k, v], chosen, chosen=chosen, schedule=schedule)


def test_values_that_are_not_finite(splits):
    """Seen ones show, in the rows and columns that see them; hidden ones don't."""
    splits(3)
    q, k, v = inputs(1, 8, 2, 3, 300, 16)
    v[0, 0, 299, 3], v[0, 1, 298, 5], v[0, 0, 10, 7] = NAN, INF, -INF
    v[0, 1, 20, 9], v[0, 1, 200, 9] = INF, -INF
    i, j = positions(3, 300, 300)
    out = fg.Attention(masks.causal)(q, k, v, backend="interpret")
    right, _ = dense.attention(q, k, v, j <= i)
    torch.testing.assert_close(out.double(), right, rtol=0, atol=1e-5, equal_nan=True)
    assert out.isnan().any()
    assert out.isinf().any()


@pytest.mark.parametrize(("heads", "queries"), [(1, 1), (16, 2), (5, 4), (70, 1), (3, 20)])
def test_latent_heads(splits, heads, queries):
    splits(2)
    q = torch.randn(2, heads, queries, 48)
    kv = torch.randn(2, 1, 130, 48)
    kv[0, :, 100:] = NAN
    lens = torch.tensor([100, 130], dtype=torch.int32)
    i, j = positions(queries, 130, lens)
    allowed = (j <= i) & (j < lens[:, None, None, None])
    attend = fg.Attention(masks.causal, heads=fg.MLA(rank=32, rope=16))
    out, lse = attend(q, kv, scale=0.3, kv_lens=lens, return_lse=True, backend="interpret")
    clean = kv.nan_to_num()
    right = dense.attention(q, clean, clean[..., :32], allowed, scale=0.3)
    torch.testing.assert_close(out.double(), right[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), right[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("rank", "rope"), [(112, 8), (160, 64), (16, 1)])
def test_latent_rows_of_other_sizes(splits, rank, rope):
    splits(1)
    q, kv = torch.randn(1, 3, 2, rank + rope), torch.randn(1, 1, 90, rank + rope)
    i, j = positions(2, 90, 90)
    attend = fg.Attention(masks.causal, heads=fg.MLA(rank, rope))
    agree(attend, [q, kv], j <= i, scale=0.1)


def test_latent_scores_and_windows(splits):
    @fg.attention(mask=masks.sliding_window(window=50), heads=fg.MLA(32, 16))
    def nearer(score, q_idx, kv_idx):
        return score - 0.1 * (q_idx - kv_idx)

    splits(2)
    q, kv = torch.randn(1, 4, 3, 48), torch.randn(1, 1, 200, 48)
    i, j = positions(3, 200, 200)
    near = (j <= i) & (i - j < 50)
    away = (0.1 * (i - j)).numpy()
    agree(nearer, [q, kv], near, scale=0.2, score=lambda s: s - away)


def test_bits_do_not_depend_on_the_batch(monkeypatch):
    monkeypatch.setattr("flashgen.tiling.decode.INVARIANT_KEYS", 64)
    q, k, v = inputs(4, 4, 2, 2, 300, 16)
    lens = torch.tensor([300, 2, 129, 64], dtype=torch.int32)
    attend = fg.Attention(masks.sliding_window(window=200))
    options: dict[str, Any] = {
        "return_lse": True, "batch_invariant": True, "backend": "interpret"
    }  # fmt: skip
    out, lse = attend(q, k, v, kv_lens=lens, **options)
    for b, n in enumerate(lens.tolist()):
        alone = (q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n])
        own, own_lse = attend(*alone, **options)
        assert torch.equal(own[0], out[b])
        assert torch.equal(own_lse[0], lse[b])


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_scales_that_are_not_positive(splits, scale):
    splits(2)
    i, j = positions(2, 100, 100)
    agree(fg.Attention(masks.causal), inputs(1, 4, 2, 2, 100, 16), j <= i, scale=scale)


@pytest.mark.parametrize("offset", [torch.tensor([10, 60]), 99, -3])
def test_positions_of_a_call(splits, offset):
    splits(2)
    first = torch.as_tensor(offset).reshape(-1, 1, 1, 1)
    i, j = torch.arange(4)[None, None, :, None] + first, torch.arange(100)[None, None, None]
    arguments = {"q_offset": offset}
    agree(fg.Attention(masks.causal), inputs(2, 4, 2, 4, 100, 16), j <= i, **arguments)


@pytest.mark.parametrize("phase", ["prefill", "decode", "latent"])
def test_parts_make_the_whole(phase):
    """The LSE of every kernel is the natural one, which merging weighs by."""
    heads = fg.MLA(32, 16) if phase == "latent" else None
    q, k, v = inputs(2, 4, 1, 20 if phase == "prefill" else 2, 130, 48)
    tensors = (k,) if heads else (k, v)
    attend, options = fg.Attention(heads=heads), {"scale": 0.3, "return_lse": True}
    whole = attend(q, *tensors, **options, backend="interpret")
    parts = [
        state
        for piece in (slice(0, 0), slice(0, 33), slice(33, None))
        for state in attend(q, *(x[:, :, piece] for x in tensors), **options, backend="interpret")
    ]
    torch.testing.assert_close(fg.merge(*parts), whole, rtol=0, atol=1e-5)
