"""Paged caches on the CPU: every page size, both layouts; what isn't used never matters."""

from __future__ import annotations

from typing import Any

import pytest
import stored
import torch
from stored import Sequences

import flashgen as fg
from flashgen import masks

LENGTHS = [0, 1, 5, 127, 129]
SIZES = [1, 3, 16, 64, 128, 256, 512]


def check(
    attend: Any,
    sequences: Sequences,
    allowed: stored.Allowed,
    size: int,
    layout: str = "NHD",
    backend: str = "cpu",
    packed: bool = False,
    **data: Any,
) -> None:
    """Against the reference: queries as a batch, or packed."""
    keys, arguments = sequences.paged(size, layout)
    if packed:
        arguments["cu_seqlens_q"] = stored.starts(sequences.q_lens, sequences.device)
    q = stored.join(sequences.q) if packed else torch.stack(sequences.q)
    results = attend(q, *keys, **arguments, return_lse=True, backend=backend, **data)
    lens = sequences.q_lens if packed else None
    stored.same(stored.parted(*results, lens), sequences.reference(allowed))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_page_sizes_and_layouts(size: int, layout: str) -> None:
    """Unused slots and pages are NaN, unused entries of the table are no pages."""
    window = fg.Attention(masks.sliding_window(window=40))
    for queries in (1, 3, 16, 70):
        sequences = Sequences.random([queries] * len(LENGTHS), LENGTHS, 6, 2, 16, 24)
        check(fg.Attention(masks.causal), sequences, stored.causal, size, layout)
        check(fg.Attention(), sequences, stored.every, size, layout)
        check(window, sequences, stored.within(40), size, layout)


@pytest.mark.parametrize("size", SIZES)
def test_packed_queries(size: int) -> None:
    """Chunks of prefill and single tokens of decoding in one call."""
    sequences = Sequences.random([0, 1, 5, 70, 1], LENGTHS, 4, 2)
    check(fg.Attention(masks.causal), sequences, stored.causal, size, packed=True)


def test_a_window_reads_only_its_pages() -> None:
    """Pages before the window may be anybody else's by now, and hold NaN."""
    sequences = Sequences.random([1, 1], [500, 300])
    keys, arguments = sequences.paged(16)
    for b, length in enumerate((500, 300)):
        for column in range((length - 65) // 16):
            for pool in keys:
                pool[arguments["page_table"][b, column]] = stored.NAN
    attend = fg.Attention(masks.sliding_window(window=64))
    results = attend(torch.stack(sequences.q), *keys, **arguments, return_lse=True)
    stored.same(stored.parted(*results, None), sequences.reference(stored.within(64)))
    schedule = attend.schedule(torch.stack(sequences.q), *keys, **arguments, block_size=(16, 64))
    assert (schedule.to_dense() != 0).sum(-1).max() <= 2


def test_sequences_share_pages() -> None:
    """A prefix that is in the cache once, and in the tables of all."""
    sequences = Sequences.random([2], [100])
    keys, arguments = sequences.paged(16)
    q = torch.randn(3, 2, 2, 16)
    table = arguments["page_table"].expand(3, -1)
    lens = torch.tensor([64, 100, 80], dtype=torch.int32)
    out = fg.Attention(masks.causal)(q, *keys, page_table=table, kv_lens=lens)
    for b, length in enumerate(lens.tolist()):
        k, v = (x[0][None, :, :length] for x in (sequences.k, sequences.v))
        alone = fg.Attention(masks.causal)(q[b][None], k, v)
        torch.testing.assert_close(out[b], alone[0])


def test_gradients_are_refused() -> None:
    sequences = Sequences.random([2], [100])
    keys, arguments = sequences.paged(16)
    q = torch.stack(sequences.q).requires_grad_()
    out = fg.Attention(masks.causal)(q, *keys, **arguments)
    with pytest.raises(fg.FlashgenError, match="paged cache"):
        out.sum().backward()


def test_looking_inside() -> None:
    sequences = Sequences.random([70, 70], [100, 3])
    keys, arguments = sequences.paged(16)
    q = torch.stack(sequences.q)
    attend = fg.Attention(masks.causal)
    source = attend.source(q, *keys, **arguments)
    for word in ("page_table_ptr", "PAGE_SIZE", "attention_forward"):
        assert word in source
    assert "attention_backward" not in source
    assert "tiles visited" in attend.explain(q, *keys, **arguments)
    schedule = attend.schedule(q, *keys, **arguments)
    results = attend(q, *keys, **arguments, schedule=schedule, return_lse=True)
    stored.same(stored.parted(*results, None), sequences.reference(stored.causal))
