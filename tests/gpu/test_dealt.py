"""Few queries of sequences of different lengths on a GPU: tiles dealt over their ends."""

from __future__ import annotations

from typing import Any

import pytest
import stored
import torch
from graphs import captured
from stored import Sequences

import flashgen as fg
from flashgen import masks
from flashgen.decoding import choose_kernel

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nan_filled_empty")]
BF16 = torch.bfloat16
# More than are looked at at once; nothing, a key, a tile and one more, and one that is long.
LENS = [0, 1, 128, 129, 2000, 64, *((37 * b) % 301 for b in range(34))]
SEEN = {"none": stored.every, "causal": stored.causal, "sliding_window": stored.within(70)}


def attention(name: str) -> fg.Attention:
    if name == "sliding_window":
        return fg.Attention(masks.sliding_window(window=70))
    return fg.Attention(None if name == "none" else getattr(masks, name))


def close(results: Any, right: Any) -> None:
    """Outputs are averages of values of about 1: a rounding of the weights and of the result."""
    for (out, lse), (exact, exact_lse) in zip(results, right, strict=True):
        torch.testing.assert_close(out.cpu().double(), exact, rtol=0, atol=1.6e-2)
        torch.testing.assert_close(lse.cpu().double(), exact_lse, rtol=1e-5, atol=2e-5)
        assert (out.cpu()[exact_lse == -torch.inf] == 0).all()


@pytest.mark.parametrize("size", [None, 1, 16, 64, 128])
@pytest.mark.parametrize("name", SEEN)
def test_lengths_of_each_sequence(name: str, size: int | None) -> None:
    sequences = Sequences.random([1] * len(LENS), LENS, 8, 2, 128, 128, BF16, "cuda")
    keys, arguments = sequences.padded() if size is None else sequences.paged(size)
    q = torch.stack(sequences.q)
    results = attention(name)(q, *keys, **arguments, return_lse=True)
    close(stored.parted(*results, None), sequences.reference(SEEN[name]))


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("name", SEEN)
def test_packed_queries(name: str, paged: bool) -> None:
    """One, several, or none of a sequence, and rows behind the last one."""
    q_lens = [(1, 3, 0, 16, 2)[b % 5] for b in range(len(LENS))]
    sequences = Sequences.random(q_lens, LENS, 8, 2, 128, 128, BF16, "cuda")
    (q, *keys), arguments = sequences.packed()
    if paged:
        keys, places = sequences.paged(16)
        arguments = {"cu_seqlens_q": arguments["cu_seqlens_q"], **places}
    q = torch.cat([q, q.new_full((4, *q.shape[1:]), stored.NAN)])
    attend, given = attention(name), {**arguments, "max_seqlen_q": 16}
    assert choose_kernel(attend._check_look(q, *keys, dict(given)), "portable").decodes
    for _ in range(3):
        out, lse = attend(q, *keys, **given, return_lse=True)
        assert (out[-4:] == 0).all()
        assert (lse[:, -4:] == -torch.inf).all()
        close(stored.parted(out[:-4], lse[:, :-4], q_lens), sequences.reference(SEEN[name]))


@pytest.mark.parametrize("name", ["none", "causal"])
def test_lengths_beyond_the_cache_end_there(name: str) -> None:
    q, k, v = (
        torch.randn(3, n, s, 64, device="cuda", dtype=BF16) for n, s in ((4, 2), *[(2, 300)] * 2)
    )
    lens = torch.tensor([1000, -7, 2**31 - 1], dtype=torch.int32, device="cuda")
    attend = attention(name)
    for _ in range(3):
        got = attend(q, k, v, kv_lens=lens, return_lse=True)
        right = attend(q, k, v, kv_lens=lens.clamp(0, 300), return_lse=True)
        for mine, exact in zip(got, right, strict=True):
            assert torch.equal(mine, exact)


def test_a_graph_serves_other_lengths_of_packed_queries() -> None:
    """Queries and keys of each sequence are others in each replay."""
    B, T, size, total = 5, 1024, 16, 24
    pools = [torch.randn(B * T // size, size, 2, 128, device="cuda", dtype=BF16) for _ in range(2)]
    table = torch.randperm(B * T // size, device="cuda").int().reshape(B, -1)
    q = torch.randn(total, 8, 128, device="cuda", dtype=BF16)
    cu = torch.tensor([0, 1, 2, 3, 4, 5], dtype=torch.int32, device="cuda")
    lens = torch.full((B,), 700, dtype=torch.int32, device="cuda")
    attend = fg.Attention(masks.causal)

    def step() -> Any:
        given = {"cu_seqlens_q": cu, "max_seqlen_q": 16, "page_table": table, "kv_lens": lens}
        return attend(q, *pools, **given, return_lse=True)

    graph, (out, lse) = captured(step)
    k, v = (x[table.long()].flatten(1, 2).transpose(1, 2) for x in pools)
    for q_lens, now in (([16, 0, 1, 2, 3], [16, 0, T, 2, 500]), ([1] * 5, [1, 2, T, 64, 65])):
        cu.copy_(stored.starts(q_lens))
        lens.copy_(torch.tensor(now))
        graph.replay()
        torch.cuda.synchronize()
        parts = [list(torch.split(q[: sum(q_lens)].transpose(0, 1), q_lens, 1))]
        parts += [[x[b, :, :n] for b, n in enumerate(now)] for x in (k, v)]
        used = sum(q_lens)
        found = stored.parted(out[:used], lse[:, :used], q_lens)
        close(found, Sequences(*parts).reference(stored.causal))
        assert (out[used:] == 0).all()
