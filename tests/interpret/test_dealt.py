"""Interpreted kernels for few queries whose tiles are dealt over the ends of sequences."""

from __future__ import annotations

import concurrent.futures
import itertools
import math
from typing import Any

import dense
import numpy as np
import pytest
import stored
import torch
from stored import Sequences

import flashgen as fg
from flashgen import masks
from flashgen.decoding import choose_kernel
from flashgen.launch import decode as launch_decode
from flashgen.tiling.decode import Splits

pytestmark = pytest.mark.usefixtures("nan_filled_empty")
# Nothing, a key, tiles that are full and one more, many; tiles have 64 keys.
LENS = [0, 1, 64, 65, 300, 0, 500, 17]
# Queries of a sequence: one, some of which are several blocks, or none.
Q_LENS = [1, 0, 6, 1, 2, 2, 5, 0]
SEEN = {"none": stored.every, "causal": stored.causal, "sliding_window": stored.within(70)}


@pytest.fixture
def programs(monkeypatch):
    """Fixes to how many programs the tiles are dealt."""

    def fix(count: int) -> None:
        dealt = Splits(count, 0, dealt=True)
        monkeypatch.setattr(launch_decode, "splits_of", lambda *_, **__: dealt)

    return fix


def quick(*names: str, of: tuple[tuple[Any, ...], ...], few: tuple[tuple[Any, ...], ...]) -> Any:
    """Parametrises by all combinations, of which a few aren't slow."""
    cases = [
        pytest.param(*case, marks=() if case in few else pytest.mark.slow)
        for case in itertools.product(*of)
    ]
    return pytest.mark.parametrize(names, cases)


def attention(name: str, **options: Any) -> fg.Attention:
    if name == "sliding_window":
        return fg.Attention(masks.sliding_window(window=70), **options)
    return fg.Attention(None if name == "none" else getattr(masks, name), **options)


def run(attend: fg.Attention, q: Any, keys: Any, **arguments: Any) -> Any:
    return attend(q, *keys, **arguments, return_lse=True, backend="interpret")


FEW = (("none", 3), ("causal", 7))


@quick("name", "count", of=((*SEEN,), (1, 3, 7, 40)), few=FEW)
def test_lengths_of_each_sequence(programs, name, count):
    """A share is a part of a sequence, or a few; some sequences lie in many shares."""
    programs(count)
    sequences = Sequences.random([1] * 8, LENS, 6, 2, 16, 24)
    keys, arguments = sequences.padded()
    results = run(attention(name), torch.stack(sequences.q), keys, **arguments)
    stored.same(stored.parted(*results, None), sequences.reference(SEEN[name]))


@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.slow), 11])
def test_more_sequences_than_are_looked_at_at_once(programs, count):
    programs(count)
    lens = [(37 * b) % 101 for b in range(36)]
    sequences = Sequences.random([1] * 36, lens, 1)
    keys, arguments = sequences.padded()
    results = run(fg.Attention(), torch.stack(sequences.q), keys, **arguments)
    stored.same(stored.parted(*results, None), sequences.reference(stored.every))


@quick("name", "size", of=((*SEEN,), (1, 16, 64)), few=(("sliding_window", 16),))
def test_pages(programs, name, size):
    programs(5)
    sequences = Sequences.random([2] * 8, LENS, 2, 1, 16, 24)
    keys, arguments = sequences.paged(size)
    results = run(attention(name), torch.stack(sequences.q), keys, **arguments)
    stored.same(stored.parted(*results, None), sequences.reference(SEEN[name]))


@quick(
    *("name", "size", "count"),
    of=((*SEEN,), (None, 16), (1, 5)),
    few=(("causal", 16, 5),),
)
def test_packed_queries(programs, name, size, count):
    """Several blocks, and sequences without queries; rows behind the last sequence."""
    programs(count)
    sequences = Sequences.random(Q_LENS, LENS, 6, 1, 16, 24)
    (q, *keys), arguments = sequences.packed()
    if size is not None:
        keys, places = sequences.paged(size)
        arguments = {"cu_seqlens_q": arguments["cu_seqlens_q"], **places}
    q = torch.cat([q, q.new_full((4, *q.shape[1:]), stored.NAN)])
    out, lse = run(attention(name), q, keys, **arguments, max_seqlen_q=6)
    assert out.shape == (sum(Q_LENS) + 4, 6, 24)
    assert (out[-4:] == 0).all()
    assert (lse[:, -4:] == -torch.inf).all()
    stored.same(stored.parted(out[:-4], lse[:, :-4], Q_LENS), sequences.reference(SEEN[name]))


@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_sinks_scores_and_caps(programs, packed):
    @fg.attention(mask=masks.causal, softcap=2.0, sinks=True)
    def slanted(score, b, h, q_idx, kv_idx, slope: fg.Tensor):
        return score + slope[b, h] * (kv_idx - q_idx)

    programs(4)
    sequences = Sequences.random([2] * 8, LENS, 4, 2)
    slope, sinks = torch.rand(8, 4) * 0.1, torch.tensor([30.0, -30.0, 0.0, 1.0])
    keys, arguments = sequences.padded()
    q = torch.stack(sequences.q)
    if packed:
        (q, *keys), arguments = sequences.packed()
    results = run(slanted, q, keys, **arguments, slope=slope, sinks=sinks)
    found = stored.parted(*results, [2] * 8 if packed else None)
    for b, n in enumerate(LENS):
        i, j = torch.arange(n - 2, n)[:, None], torch.arange(n)
        away = slope[b][None, :, None, None] * (j - i)
        parts = (x[b][None] for x in (sequences.q, sequences.k, sequences.v))
        options: dict[str, Any] = {"softcap": 2.0, "sinks": sinks}
        right = dense.attention(*parts, j <= i, score=lambda s, a=away: s + a.numpy(), **options)
        stored.same([found[b]], [tuple(x[0] for x in right)])


def test_values_that_are_not_finite(programs):
    """Seen ones show, in the rows that see them, whichever share they lie in; hidden ones don't."""
    programs(5)
    sequences = Sequences.random([2] * 3, [300, 64, 150], 4, 2)
    for b, j, x in ((0, 299, math.nan), (0, 10, -math.inf), (2, 149, math.inf), (2, 3, math.nan)):
        sequences.v[b][0, j, b + 1] = x
    keys, arguments = sequences.padded()
    results = run(attention("sliding_window"), torch.stack(sequences.q), keys, **arguments)
    for (out, _), (right, _) in zip(
        stored.parted(*results, None), sequences.reference(SEEN["sliding_window"]), strict=True
    ):
        torch.testing.assert_close(out.double(), right, rtol=0, atol=1e-5, equal_nan=True)


def test_masks_that_differ_between_sequences_are_dealt():
    """Documents of several lengths: without lengths too, sequences have more and fewer tiles."""
    doc = torch.tensor([[0] * 10 + [1] * 490, [0] * 450 + [1] * 50, [0] * 500])
    q, k, v = (torch.randn(3, n, s, 16) for n, s in ((4, 2), (2, 500), (2, 500)))
    attend = fg.Attention(masks.causal_document)
    call = attend._check_look(q, k, v, {"doc": doc})
    assert choose_kernel(call, "interpret").dealt
    assert not choose_kernel(call, "interpret", invariant=True).dealt
    i, j = torch.arange(498, 500)[:, None], torch.arange(500)
    allowed = (j <= i) & (doc[:, i] == doc[:, None, :])
    right = dense.attention(q, k, v, allowed[:, None])
    for got, wanted in zip(run(attend, q, (k, v), doc=doc), right, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=1e-5)


def by_sequence(score, b):
    """Numbers and truth of `b`, which is a loop's variable where tiles are dealt."""
    return fg.where(~(b == 1), score * (b + 2) / 3, score - fg.exp(-b))


def test_scores_by_the_number_of_a_sequence():
    doc = torch.randint(0, 3, (3, 40), dtype=torch.int32)
    q, k = torch.randn(3, 1, 2, 16), torch.randn(3, 1, 40, 16)
    attend = fg.Attention(masks.document, by_sequence)
    found = attend(q, k, k, doc=doc, backend="interpret")
    allowed = doc[:, None, 38:, None] == doc[:, None, None, :]
    b = np.arange(3.0)[:, None, None, None]
    right, _ = dense.attention(
        *(q, k, k, allowed), score=lambda s: np.where(b != 1, s * (b + 2) / 3, s - np.exp(-b))
    )
    torch.testing.assert_close(found.double(), right, rtol=0, atol=1e-5)


def test_calls_of_several_threads():
    """Triton's interpreter patches its language for all threads."""
    attend, q = fg.Attention(masks.causal), torch.randn(6, 1, 1, 24, 16)
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda x: attend(x, x, x, backend="interpret"), q))
    torch.testing.assert_close(found, [attend(x, x, x) for x in q])
