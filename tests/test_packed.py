"""Packed sequences on the CPU: results, gradients, schedules, looking inside."""

from __future__ import annotations

from typing import Any

import pytest
import stored
import torch
from stored import Sequences

import flashgen as fg
from flashgen import masks

# (queries, keys) of each sequence: equal, fewer and more queries, none, longer than tiles.
LENGTHS = {
    "mixed": [(1, 1), (5, 2), (0, 7), (7, 0)],
    "training": [(130, 130), (64, 64), (1, 1), (70, 70)],
    "prefill": [(3, 200), (64, 65), (100, 129), (0, 0)],
    "none": [(0, 0), (0, 3)],
}
ONE_MORE_THAN_A_TILE = [(65, 65), (129, 129), (1, 65), (193, 1)]


def check(
    attend: Any, sequences: Sequences, allowed: stored.Allowed, backend: str = "cpu", **data: Any
) -> None:
    tensors, arguments = sequences.packed()
    results = attend(*tensors, **arguments, return_lse=True, backend=backend, **data)
    stored.same(stored.parted(*results, sequences.q_lens), sequences.reference(allowed))


def check_gradients(
    attend: Any, sequences: Sequences, dense: Any, backend: str = "cpu", **data: Any
) -> None:
    """Against autograd through each sequence alone; the loss uses the output and the LSE."""
    tensors, arguments = sequences.packed()
    leaves = [(x.double() if backend == "cpu" else x).requires_grad_() for x in tensors]
    out, lse = attend(*leaves, **arguments, return_lse=True, backend=backend, **data)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    torch.autograd.backward([out, lse], [grad_out, grad_lse])
    rows = [0, *torch.tensor(sequences.q_lens).cumsum(0).tolist()]
    columns = [0, *torch.tensor(sequences.kv_lens).cumsum(0).tolist()]
    for b in range(len(sequences.q)):
        row, column = (slice(*x[b : b + 2]) for x in (rows, columns))
        own = (sequences.q[b], sequences.k[b], sequences.v[b])
        parts = [x.double()[None].requires_grad_() for x in own]
        right = dense(b, *parts)
        if all(x.shape[2] for x in parts):
            given = (grad_out[row].transpose(0, 1)[None].double(), grad_lse[None, :, row].double())
            torch.autograd.backward(right, given)
        for leaf, part, span in zip(leaves, parts, (row, column, column), strict=True):
            wanted = torch.zeros_like(part) if part.grad is None else part.grad
            got = leaf.grad[span].transpose(0, 1)[None].double()
            torch.testing.assert_close(got, wanted, rtol=0, atol=2e-5)


def plain(allowed: stored.Allowed) -> Any:
    """Dense attention by PyTorch's operations, whose gradients are right for rows without keys."""

    def attend(b: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        n, m, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        keep = allowed(b, torch.arange(m - n, m)[:, None], torch.arange(m))
        scores = torch.where(keep, q @ k.mT * q.shape[-1] ** -0.5, -torch.inf)
        seen = keep.any(-1, keepdim=True)
        weights = torch.softmax(torch.where(seen, scores, 0.0), -1)
        lse = torch.logsumexp(torch.where(seen, scores, 0.0), -1)
        keep_lse = seen.squeeze(-1).expand_as(lse)
        return (
            torch.where(keep, weights, 0.0) @ v,
            torch.where(keep_lse, lse, torch.zeros_like(lse)),
        )

    return attend


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (5, 1)], ids=str)
def test_lengths_and_heads(name: str, heads: tuple[int, int]) -> None:
    q_lens, kv_lens = zip(*LENGTHS[name], strict=True)
    sequences = Sequences.random(q_lens, kv_lens, *heads, 16, 24)
    check(fg.Attention(masks.causal), sequences, stored.causal)
    check(fg.Attention(), sequences, stored.every)
    check(fg.Attention(masks.sliding_window(window=33)), sequences, stored.within(33))


@pytest.mark.parametrize("name", LENGTHS)
def test_gradients(name: str) -> None:
    sequences = Sequences.random(*zip(*LENGTHS[name], strict=True), 4, 2)
    check_gradients(fg.Attention(masks.causal), sequences, plain(stored.causal))
    check_gradients(
        fg.Attention(masks.sliding_window(window=20)), sequences, plain(stored.within(20))
    )


def test_rows_behind_the_last_sequence() -> None:
    """Tensors may be longer than what they hold: nothing there is read, and results are empty."""
    sequences = Sequences.random([40, 3], [50, 3])
    tensors, arguments = sequences.packed()
    longer = [torch.cat([x, stored.NAN * x[:1].expand(70, -1, -1)]) for x in tensors]
    out, lse = fg.Attention(masks.causal)(*longer, **arguments, return_lse=True)
    assert (out[43:] == 0).all()
    assert (lse[:, 43:] == -torch.inf).all()
    short = fg.Attention(masks.causal)(*tensors, **arguments)
    torch.testing.assert_close(out[:43], short, rtol=0, atol=0)


def test_offsets_and_longest_lengths() -> None:
    sequences = Sequences.random([4, 9, 2], [30, 9, 64])
    tensors, arguments = sequences.packed()
    first = torch.tensor([0, -2, 60])
    for q_offset in (first, first.int(), 0):
        offsets = first if isinstance(q_offset, torch.Tensor) else torch.zeros(3, dtype=torch.int64)
        wanted = [
            fg.Attention(masks.causal)(
                *(x[b][None] for x in (sequences.q, sequences.k, sequences.v)),
                q_offset=int(offsets[b]),
                return_lse=True,
            )
            for b in range(3)
        ]
        for longest in ({}, {"max_seqlen_q": 9, "max_seqlen_kv": torch.tensor(64)}):
            results = fg.Attention(masks.causal)(
                *tensors, **arguments, **longest, q_offset=q_offset, return_lse=True
            )
            for (out, lse), (right, right_lse) in zip(
                stored.parted(*results, sequences.q_lens), wanted, strict=True
            ):
                torch.testing.assert_close(out, right[0])
                torch.testing.assert_close(lse, right_lse[0])


def test_flex_functions_know_their_positions() -> None:
    """Queries and keys of the same lengths: position 0 is the first query's, as there."""
    sequences = Sequences.random([40, 3], [40, 3])
    tensors, arguments = sequences.packed()
    lengths = arguments["cu_seqlens_q"]
    attend = fg.Attention(lambda b, h, q, k: q >= k)
    results = attend(*tensors, cu_seqlens_q=lengths, cu_seqlens_kv=lengths, return_lse=True)
    stored.same(stored.parted(*results, [40, 3]), sequences.reference(stored.causal))


def test_a_schedule_is_of_each_sequence() -> None:
    """Tiles never hold two sequences; each one's part is what it has alone."""
    q_lens, kv_lens = [100, 0, 33, 64], [100, 7, 90, 64]
    sequences = Sequences.random(q_lens, kv_lens)
    tensors, arguments = sequences.packed()
    attend = fg.Attention(masks.sliding_window(window=20))
    schedule = attend.schedule(*tensors, **arguments, block_size=(32, 16))
    grid = schedule.to_dense()
    assert grid.shape == (4, 1, 4, 7)
    for b, (n, m) in enumerate(zip(q_lens, kv_lens, strict=True)):
        q, k = sequences.q[b][None], sequences.k[b][None]
        own = attend.schedule(q, k, block_size=(32, 16))
        alone = own.to_dense()[0, 0]
        assert torch.equal(grid[b, 0, : alone.shape[0], : alone.shape[1]], alone)
        assert not grid[b, 0, alone.shape[0] :].any()
        assert not grid[b, 0, :, alone.shape[1] :].any()
        assert (n, m) == (own.q_len, own.kv_len)
    assert torch.equal(schedule.kv_num_blocks, (grid == 1).sum(-1))
    assert schedule.shape == (4, 1, 100, 100)
    assert schedule.density == (grid != 0).float().mean().item()
    results = attend(*tensors, **arguments, schedule=schedule, return_lse=True)
    stored.same(stored.parted(*results, q_lens), sequences.reference(stored.within(20)))


def test_a_schedule_of_other_sequences_is_refused() -> None:
    first, second = Sequences.random([9, 4], [9, 4]), Sequences.random([8, 5], [8, 5])
    attend = fg.Attention(masks.causal)
    tensors, arguments = first.packed()
    schedule = attend.schedule(*tensors, **arguments)
    others, theirs = second.packed()
    with pytest.raises(fg.FlashgenError, match="made for"):
        attend(*others, **theirs, schedule=schedule)
    dense = [x[None].transpose(1, 2) for x in tensors]
    with pytest.raises(fg.FlashgenError, match="made for"):
        attend(*dense, schedule=schedule)


def test_a_schedule_knows_where_sequences_were() -> None:
    """Edited in place, the same tensor says where others are."""
    attend, x = fg.Attention(masks.causal), torch.randn(30, 2, 8)
    starts = torch.tensor([0, 10, 30], dtype=torch.int32)
    where = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts.clone()}
    schedule = attend.schedule(x, x, x, **where)
    attend(x, x, x, **where, schedule=schedule)
    starts[1] = 20
    with pytest.raises(fg.FlashgenError, match=r"made for cu_seqlens_q \[0, 10, 30\]"):
        attend(x, x, x, **where, schedule=schedule)


def test_looking_inside() -> None:
    tensors, arguments = Sequences.random([40, 3], [50, 3]).packed()
    attend = fg.Attention(masks.causal)
    source = attend.source(*tensors, **arguments)
    for word in ("cu_seqlens_q_ptr", "attention_forward", "attention_backward_kv", "sequences_ptr"):
        assert word in source
    page = attend.explain(*tensors, **arguments)
    assert "shape=(2, 1, 40, 50)" in page
    svg = attend.schedule(*tensors, **arguments)._repr_svg_()
    assert svg.startswith("<svg")


def test_sinks_score_and_data_by_sequence() -> None:
    """Gradients of data are sums over all sequences; b picks each one's row."""
    sequences = Sequences.random([40, 3, 0], [50, 3, 2], 2, 2)
    tensors, arguments = sequences.packed()
    slope = torch.rand(3, 2, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def tilt(score, b, h, q_idx, kv_idx, slope: fg.Tensor):
        return score + slope[b, h] * (kv_idx - q_idx)

    attend = fg.Attention(masks.causal, score=tilt, sinks=True, softcap=3.0)
    packed = [x.double() for x in tensors]
    out = attend(*packed, **arguments, slope=slope, sinks=sinks)
    grad = torch.randn_like(out)
    out.backward(grad)
    found, slope.grad = (slope.grad.clone(), sinks.grad.clone()), None
    sinks.grad = None
    for b, part in enumerate(torch.split(grad.transpose(0, 1), [40, 3, 0], 1)):
        own = [x[b].double()[None] for x in (sequences.q, sequences.k, sequences.v)]
        alone = attend(*own, slope=slope[b : b + 1], sinks=sinks)
        torch.testing.assert_close(alone[0], torch.split(out.transpose(0, 1), [40, 3, 0], 1)[b])
        alone.backward(part[None])
    torch.testing.assert_close(found[0], slope.grad)
    torch.testing.assert_close(found[1], sinks.grad)


def test_dense_masks_of_sequences() -> None:
    """The matrix of each sequence, in the corner of the longest one's."""
    q_lens, kv_lens = torch.tensor([5, 0, 9]), torch.tensor([7, 3, 9])
    doc = torch.randint(0, 3, (3, 9)).sort(-1).values
    dense = masks.causal_document.dense(q_lens, kv_lens, doc=doc)
    assert dense.shape == (3, 1, 9, 9)
    for b, (n, m) in enumerate(zip(q_lens.tolist(), kv_lens.tolist(), strict=True)):
        i, j = torch.arange(m - n, m)[:, None], torch.arange(m)
        assert torch.equal(dense[b, 0, :n, :m], (j <= i) & (doc[b][i] == doc[b][j]))
        assert not dense[b, 0, n:].any()
        assert not dense[b, 0, :, m:].any()
