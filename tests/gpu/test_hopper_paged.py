"""Paged keys on Hopper's own forward: pages that are part of a tile, and pages of several."""

from __future__ import annotations

from typing import Any

import pytest
import sm_90
import stored
import torch
from graphs import captured
from stored import Sequences
from test_storage import KV_LENS, MASKS, Q_LENS, as_good_as_sdpa

import flashgen as fg
from flashgen import masks

pytestmark = [*sm_90.marks(), pytest.mark.usefixtures("nan_filled_empty")]
BF16 = torch.bfloat16
# Tiles and ends of tiles, a sequence without keys, and one with hardly more keys than queries.
LENS = [400, 0, 256, 129, 131, 1, 1000]


def chunk(
    lens: list[int], count: int, heads: tuple[int, int], dims: tuple[int, int], dtype: Any = BF16
) -> Sequences:
    """As many queries of each sequence."""
    return Sequences.random([count] * len(lens), lens, *heads, *dims, dtype, "cuda")


@pytest.mark.parametrize(
    ("name", "dims", "dtype", "layout", "size"),
    [
        ("causal", (128, 128), BF16, "NHD", 16),
        ("full", (64, 64), torch.float16, "HND", 32),
        ("window", (192, 128), BF16, "HND", 64),
        ("causal", (256, 256), BF16, "NHD", 64),
        ("window", (72, 72), torch.float16, "NHD", 16),
        ("causal", (128, 128), BF16, "HND", 128),
        ("full", (64, 64), torch.float16, "NHD", 384),
    ],
    ids=str,
)
def test_outputs(name: str, dims: tuple[int, int], dtype: Any, layout: str, size: int) -> None:
    """What isn't used of pages and of the table is NaN, or no page."""
    mask, allowed = MASKS[name]
    sequences = chunk(LENS, 130, (8, 2), dims, dtype)
    keys, places = sequences.paged(size, layout)
    attend, q = fg.Attention(mask), torch.stack(sequences.q)
    found = attend(q, *keys, **places, backend="hopper", return_lse=True)
    as_good_as_sdpa(stored.parted(*found, None), sequences, allowed)


@pytest.mark.parametrize(("name", "size"), [("causal", 16), ("window", 64), ("full", 128)])
def test_packed_queries(name: str, size: int) -> None:
    mask, allowed = MASKS[name]
    sequences = Sequences.random(Q_LENS, KV_LENS, 4, 2, 64, None, BF16, "cuda")
    keys, places = sequences.paged(size)
    q = torch.cat([stored.join(sequences.q), torch.ones(3, 4, 64, device="cuda", dtype=BF16)])
    places["cu_seqlens_q"] = stored.starts(Q_LENS, "cuda")
    for _ in range(3):
        out, lse = fg.Attention(mask)(q, *keys, **places, backend="hopper", return_lse=True)
        assert (out[-3:] == 0).all()
        assert (lse[:, -3:] == -torch.inf).all()
        parts = stored.parted(out[:-3], lse[:, :-3], Q_LENS)
        as_good_as_sdpa(parts, sequences, allowed)


@fg.attention(mask=masks.causal_document, softcap=9.0, sinks=True)
def odd(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, bias: fg.Tensor) -> Any:
    return score + bias[b, h, kv_idx]


def test_data_is_of_positions() -> None:
    """As the portable kernels compute it."""
    sequences = chunk([300, 450, 130], 128, (4, 2), (128, 128))
    keys, places = sequences.paged(16)
    data = {
        "doc": (torch.arange(600).expand(3, -1) // 170).int().contiguous().cuda(),
        "bias": torch.randn(3, 4, 600).cuda(), "sinks": torch.randn(4).cuda(),
    }  # fmt: skip
    q = torch.stack(sequences.q)
    out, lse = odd(q, *keys, **places, **data, backend="hopper", return_lse=True)
    right, exact = odd(q, *keys, **places, **data, backend="portable", return_lse=True)
    torch.testing.assert_close(out, right, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, exact, rtol=1e-4, atol=1e-4)


def test_values_that_are_not_finite() -> None:
    """Seen ones show in the rows that see them; hidden ones don't."""
    sequences = chunk([300, 140, 513], 128, (2, 1), (128, 128))
    seen = stored.within(70)
    for b, j, x in ((0, 299, torch.nan), (0, 10, torch.inf), (2, 450, -torch.inf)):
        sequences.v[b][0, j, 5] = x
    keys, places = sequences.paged(32)
    attend = fg.Attention(masks.sliding_window(window=70))
    out = attend(torch.stack(sequences.q), *keys, **places, backend="hopper")
    for got, (right, _) in zip(out, sequences.reference(seen), strict=True):
        torch.testing.assert_close(got.cpu().double(), right, rtol=0, atol=2e-2, equal_nan=True)


def test_a_graph_serves_other_lengths() -> None:
    """Lengths and pages are others in each replay; a program of few row blocks has a share."""
    B, T, size = 2, 2048, 128
    pools = [torch.randn(B * T // size, size, 2, 128, device="cuda", dtype=BF16) for _ in range(2)]
    table = torch.randperm(B * T // size, device="cuda").int().reshape(B, -1)
    q = torch.randn(B, 4, 100, 128, device="cuda", dtype=BF16)
    lens = torch.full((B,), T, dtype=torch.int32, device="cuda")
    attend = fg.Attention(masks.causal)

    def step() -> Any:
        return attend(q, *pools, page_table=table, kv_lens=lens, return_lse=True)

    graph, (out, lse) = captured(step)
    for now in ([T, 300], [100, 0], [1999, T]):
        lens.copy_(torch.tensor(now))
        table.copy_(torch.randperm(table.numel(), device="cuda").reshape(table.shape))
        graph.replay()
        k, v = (x[table.long()].flatten(1, 2).transpose(1, 2) for x in pools)
        parts = [list(q), *([x[b, :, :n] for b, n in enumerate(now)] for x in (k, v))]
        as_good_as_sdpa(stored.parted(out, lse, None), Sequences(*parts), stored.causal)


def test_auto_takes_it() -> None:
    sequences = chunk([300, 200], 128, (2, 1), (64, 64))
    attend, q = fg.Attention(masks.causal), torch.stack(sequences.q)
    for size, why in ((16, "hopper: generated"), (8, "take pages of 16, 32, 64 and multiples")):
        keys, places = sequences.paged(size)
        assert why in attend.explain(q, *keys, **places)
