"""What servers rely on, interpreted: steps that equal rows of the whole, bits, empty splits."""

from __future__ import annotations

from typing import Any

import dense
import pytest
import stored
import torch
from stored import Sequences

import flashgen as fg
from flashgen import masks
from flashgen.launch import decode as launch_decode
from flashgen.tiling.decode import Splits

pytestmark = pytest.mark.usefixtures("nan_filled_empty")

INTERPRET: dict[str, Any] = {"backend": "interpret", "return_lse": True}


def randn(heads: int, kv_heads: int, queries: int, keys: int, batch: int = 1) -> list[Any]:
    return [torch.randn(batch, h, n, 16) for h, n in ((heads, queries), *[(kv_heads, keys)] * 2)]


@pytest.mark.parametrize("queries", [1, 3])
def test_a_mask_of_ones_is_none(queries: int) -> None:
    @fg.mask
    def given(q_idx, kv_idx, seen: fg.Tensor):
        return seen[q_idx, kv_idx]

    q, k, v = randn(4, 2, queries, 150)
    seen = torch.ones(150, 150, dtype=torch.bool)
    masked = fg.Attention(given)(q, k, v, seen=seen, **INTERPRET)
    torch.testing.assert_close(masked, fg.Attention()(q, k, v, **INTERPRET), rtol=0, atol=1e-5)


def test_a_step_is_a_row_of_the_whole() -> None:
    """Position t, as a step over a cache with room for more, is row t of prefill."""
    q, k, v = randn(4, 2, 100, 100)
    attend = fg.Attention(masks.sliding_window(window=30))
    out, lse = attend(q, k, v, **INTERPRET)
    for t in (0, 29, 30, 99):
        lens = torch.tensor([t + 1], dtype=torch.int32)
        step = attend(q[:, :, t : t + 1], k, v, kv_lens=lens, **INTERPRET)
        row = (out[:, :, t : t + 1], lse[:, :, t : t + 1])
        torch.testing.assert_close(step, row, rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [1, 16])
def test_bits_depend_neither_on_the_batch_nor_on_pages(monkeypatch: Any, size: int) -> None:
    monkeypatch.setattr("flashgen.tiling.decode.INVARIANT_KEYS", 64)
    sequences = Sequences.random([2] * 3, [200, 2, 129], 4, 2)
    attend, options = fg.Attention(masks.causal), {**INTERPRET, "batch_invariant": True}
    keys, arguments = sequences.paged(size)
    out, lse = attend(torch.stack(sequences.q), *keys, **arguments, **options)
    for b in range(3):
        alone = Sequences(*([x[b]] for x in (sequences.q, sequences.k, sequences.v)))
        keys, arguments = alone.paged(size)
        own = attend(sequences.q[b][None], *keys, **arguments, **options)
        assert torch.equal(own[0][0], out[b])
        assert torch.equal(own[1][0], lse[b])


def test_keys_that_repeat_in_memory() -> None:
    """One sequence's keys for a batch, one head's for all: strides of 0."""
    q, k, v = randn(4, 1, 2, 100, batch=3)
    k, v = (x[:1].expand(3, 4, 100, 16) for x in (k, v))
    got = fg.Attention(masks.causal)(q, k, v, **INTERPRET)
    right = dense.attention(q, k, v, torch.arange(100) <= torch.arange(98, 100)[:, None])
    for x, y in zip(got, right, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=0, atol=1e-5)


@pytest.mark.parametrize("latent", [False, True])
def test_splits_without_keys(monkeypatch: Any, latent: bool) -> None:
    """Sixteen splits of no key, one, a page, and many: most find nothing to do, and say so."""
    monkeypatch.setattr(launch_decode, "splits_of", lambda *_, **__: Splits(16, 0))
    lens, heads = [0, 1, 16, 300], fg.MLA(32, 16) if latent else None
    sequences = Sequences.random([2] * 4, lens, 4, 1, 48, 32)
    if latent:
        sequences.v = [x[..., :32] for x in sequences.k]
    keys, arguments = sequences.paged(16)
    tensors = (torch.stack(sequences.q), *keys[: 1 if latent else 2])
    attend = fg.Attention(masks.causal, heads=heads)
    results = attend(*tensors, **arguments, scale=48**-0.5, **INTERPRET)
    stored.same(stored.parted(*results, None), sequences.reference(stored.causal))
