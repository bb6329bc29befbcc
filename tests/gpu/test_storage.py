"""Packed and paged tensors on a GPU: right in every dtype, planned without waiting for it."""

from __future__ import annotations

from typing import Any

import pytest
import stored
import torch
import torch.nn.functional as F
from cases import CASES
from gradient_checks import rounding
from stored import Sequences

import flashgen as fg
from flashgen import masks

pytestmark = pytest.mark.gpu

# A few of tests/interpret's: a mask without data, by data, by head, of its own positions.
SOME = [
    next(case for case in CASES if case.id.startswith(name))
    for name in ("prefix_lm", "causal_document", "flashmask", "natten")
]
Q_LENS, KV_LENS = [0, 1, 300, 64, 129, 7], [5, 1, 300, 200, 513, 0]
MASKS: dict[str, tuple[Any, stored.Allowed]] = {
    "causal": (masks.causal, stored.causal),
    "window": (masks.sliding_window(window=70), stored.within(70)),
    "full": (None, stored.every),
}


def sdpa(b: int, sequences: Sequences, allowed: stored.Allowed) -> torch.Tensor:
    """PyTorch's own attention of one sequence [Hq, n, D]; rows without keys are NaN."""
    q, k, v = (x[b] for x in (sequences.q, sequences.k, sequences.v))
    group = q.shape[0] // k.shape[0]
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    n, m = q.shape[1], k.shape[1]
    keep = allowed(b, torch.arange(m - n, m)[:, None], torch.arange(m)).to(q.device)
    return F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=keep[None])[0]


def as_good_as_sdpa(
    results: list[tuple[torch.Tensor, torch.Tensor]],
    sequences: Sequences,
    allowed: stored.Allowed,
) -> None:
    """At most twice the error of PyTorch's own attention, and exact for rows without keys."""
    theirs, ours = 0.0, 0.0
    for b, ((out, lse), (right, right_lse)) in enumerate(
        zip(results, sequences.reference(allowed), strict=True)
    ):
        empty = right_lse == -torch.inf
        out, lse = out.cpu().double(), lse.cpu().double()
        assert (out[empty] == 0).all()
        assert (lse[empty] == -torch.inf).all()
        torch.testing.assert_close(lse[~empty], right_lse[~empty], rtol=1e-5, atol=1e-5)
        if (~empty).any():
            own = sdpa(b, sequences, allowed).cpu().double()
            theirs = max(theirs, (own - right)[~empty].abs().max().item())
            ours = max(ours, (out - right).abs().max().item())
    # 1e-6: fp32's own rounding, where SDPA happens to be luckier.
    assert ours <= 2 * theirs + 1e-6


@pytest.mark.parametrize(
    ("name", "dims", "dtype"),
    [
        ("causal", (128, 128), torch.bfloat16),
        ("window", (64, 64), torch.float16),
        ("full", (192, 128), torch.float32),
    ],
    ids=str,
)
def test_packed(name: str, dims: tuple[int, int], dtype: torch.dtype) -> None:
    mask, allowed = MASKS[name]
    sequences = Sequences.random(Q_LENS, KV_LENS, 4, 2, *dims, dtype, "cuda")
    tensors, arguments = sequences.packed()
    for longest in ({}, {"max_seqlen_q": 300, "max_seqlen_kv": 513}):
        results = fg.Attention(mask)(*tensors, **arguments, **longest, return_lse=True)
        as_good_as_sdpa(stored.parted(*results, Q_LENS), sequences, allowed)


@pytest.mark.parametrize(
    ("name", "dtype"), [("causal", torch.bfloat16), ("window", torch.float32)], ids=str
)
def test_packed_gradients(name: str, dtype: torch.dtype) -> None:
    """Each sequence's, at most twice as wrong as PyTorch's; in a fixed order the same bits each
    time."""
    mask, allowed = MASKS[name]
    sequences = Sequences.random(Q_LENS, KV_LENS, 4, 2, 128, 128, dtype, "cuda")
    tensors, arguments = sequences.packed()
    leaves = [x.requires_grad_() for x in tensors]
    out = fg.Attention(mask)(*leaves, **arguments)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, grad)
    out = fg.Attention(mask)(*leaves, **arguments, deterministic=True)
    fixed = torch.autograd.grad(out, leaves, grad, retain_graph=True)
    for again, first in zip(torch.autograd.grad(out, leaves, grad), fixed, strict=True):
        assert torch.equal(again, first)
    grads = torch.split(grad.transpose(0, 1), Q_LENS, 1)
    parts = [torch.split(x.transpose(0, 1), n, 1) for x, n in zip(found, _lens(), strict=True)]
    errors = {"ours": [0.0] * 3, "theirs": [0.0] * 3}
    largest = [rounding(x, dtype) for x in found]
    for b, (n, m) in enumerate(zip(Q_LENS, KV_LENS, strict=True)):
        if not n or not m:
            assert all((x[b] == 0).all() for x in parts)
            continue
        exact, theirs = (dense_grads(b, sequences, allowed, grads[b], d) for d in ("double", ""))
        for i, (right, other) in enumerate(zip(exact, theirs, strict=True)):
            errors["ours"][i] = max(errors["ours"][i], _gap(parts[i][b], right))
            errors["theirs"][i] = max(errors["theirs"][i], _gap(other, right))
    for ours, bound, least in zip(errors["ours"], errors["theirs"], largest, strict=True):
        assert ours <= 2 * max(bound, least) + 2e-6


def test_packed_sinks_have_gradients() -> None:
    """One for each head, of the sequences' rows alone: also of rows without a key."""
    sequences = Sequences.random(Q_LENS, KV_LENS, 4, 2, 64, 64, torch.bfloat16, "cuda")
    tensors, arguments = sequences.packed()
    sinks = torch.randn(4, device="cuda", requires_grad=True)
    attend = fg.Attention(masks.causal, sinks=True)
    out, lse = attend(*tensors, **arguments, sinks=sinks, return_lse=True)
    grads = torch.randn_like(out), torch.randn_like(lse)
    (found,) = torch.autograd.grad((out, lse), sinks, grads)
    right = torch.zeros(4, dtype=torch.float64, device="cuda")
    exact = sinks.detach().double().requires_grad_()
    parts = torch.split(grads[0].transpose(0, 1), Q_LENS, 1), torch.split(grads[1], Q_LENS, 1)
    for b, (n, m) in enumerate(zip(Q_LENS, KV_LENS, strict=True)):
        q, k, v = (x[b].double() for x in (sequences.q, sequences.k, sequences.v))
        k, v = (x.repeat_interleave(2, 0) for x in (k, v))
        keep = stored.causal(b, torch.arange(m - n, m)[:, None], torch.arange(m)).cuda()
        scores = torch.where(keep, q @ k.mT * 64**-0.5, -torch.inf)
        whole = torch.cat([scores, exact[:, None, None].expand(4, n, 1)], -1)
        wanted = (whole.softmax(-1)[..., :m] @ v, whole.logsumexp(-1))
        given = parts[0][b].double(), parts[1][b].double()
        right += torch.autograd.grad(wanted, exact, given)[0]
    # What is added up was rounded to bf16, by 2^-9 of its own size and either way.
    assert (found.double() - right).norm() <= 2**-7 * right.norm()


def _lens() -> tuple[list[int], list[int], list[int]]:
    return Q_LENS, KV_LENS, KV_LENS


def _gap(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x.double() - y.double()).abs().max())


def dense_grads(
    b: int, sequences: Sequences, allowed: stored.Allowed, grad: torch.Tensor, kind: str
) -> tuple[torch.Tensor, ...]:
    own = [x[b] for x in (sequences.q, sequences.k, sequences.v)]
    leaves = [(x.double() if kind else x).detach().requires_grad_() for x in own]
    group, (n, m) = own[0].shape[0] // own[1].shape[0], (own[0].shape[1], own[1].shape[1])
    k, v = (x.repeat_interleave(group, 0) for x in leaves[1:])
    keep = allowed(b, torch.arange(m - n, m)[:, None], torch.arange(m)).cuda()
    if kind:
        scores = torch.where(keep, leaves[0] @ k.mT * own[0].shape[2] ** -0.5, -torch.inf)
        out = torch.softmax(scores, -1) @ v
    else:
        out = F.scaled_dot_product_attention(leaves[0][None], k[None], v[None], keep[None])[0]
    return torch.autograd.grad(out, leaves, grad.to(out.dtype))


@pytest.mark.parametrize(
    ("size", "layout", "dtype"),
    [
        (1, "NHD", torch.bfloat16),
        (5, "HND", torch.float32),
        (16, "NHD", torch.float16),
        (64, "HND", torch.bfloat16),
        (256, "NHD", torch.bfloat16),
    ],
    ids=str,
)
def test_paged(size: int, layout: str, dtype: torch.dtype) -> None:
    """Whatever isn't used is NaN, or no page: queries in a batch, and packed."""
    batch = len(KV_LENS)
    for name, q_lens in (("causal", Q_LENS), ("window", [16] * batch), ("full", [1] * batch)):
        mask, allowed = MASKS[name]
        sequences = Sequences.random(q_lens, KV_LENS, 4, 2, 128, 128, dtype, "cuda")
        keys, arguments = sequences.paged(size, layout)
        packed = q_lens is Q_LENS
        if packed:
            arguments["cu_seqlens_q"] = stored.starts(q_lens, "cuda")
        q = stored.join(sequences.q) if packed else torch.stack(sequences.q)
        results = fg.Attention(mask)(q, *keys, **arguments, return_lse=True)
        found = stored.parted(*results, q_lens if packed else None)
        as_good_as_sdpa(found, sequences, allowed)


@pytest.mark.parametrize("case", SOME, ids=lambda case: case.id)
def test_masks(case: Any) -> None:
    q_lens, kv_lens = [200, 333, 1], [333, 333, 150]
    data = case.build(3, 2, 333, 333, torch.Generator().manual_seed(0))
    on_gpu = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in data.items()}
    attend = fg.Attention(case.bound(on_gpu).to("cuda"))
    allowed = stored.of_case(case, data, 3, 2)
    sequences = Sequences.random(q_lens, kv_lens, 2, 2, 64, 64, torch.bfloat16, "cuda")
    tensors, arguments = sequences.packed()
    results = attend(*tensors, **arguments, return_lse=True)
    as_good_as_sdpa(stored.parted(*results, q_lens), sequences, allowed)
    keys, paged = sequences.paged(16)
    paged["cu_seqlens_q"] = arguments["cu_seqlens_q"]
    results = attend(tensors[0], *keys, **paged, return_lse=True)
    as_good_as_sdpa(stored.parted(*results, q_lens), sequences, allowed)


@pytest.mark.parametrize("name", MASKS)
def test_planned_as_on_the_cpu(name: str) -> None:
    mask, _ = MASKS[name]
    sequences = Sequences.random(Q_LENS, KV_LENS, 2, 2, 16, 16, torch.float16)
    tensors, arguments = sequences.packed()
    on_gpu = {n: x.cuda() for n, x in arguments.items()}
    for block in ((128, 64), (48, 96)):
        ours = fg.Attention(mask).schedule(*tensors, **arguments, block_size=block)
        theirs = fg.Attention(mask).schedule(
            *(x.cuda() for x in tensors), **on_gpu, block_size=block
        )
        grid = theirs.to_dense()
        right = ours.to_dense()
        assert torch.equal(grid[..., : right.shape[3]].cpu(), right)
        assert not grid[..., right.shape[3] :].any()
        for got, wanted in ((theirs.kv_runs, ours.kv_runs), (theirs.q_runs, ours.q_runs)):
            assert torch.equal(got.counts.cpu(), wanted.counts)


def test_nothing_waits_for_the_device() -> None:
    sequences = Sequences.random(Q_LENS, KV_LENS, 2, 2, 64, 64, torch.bfloat16, "cuda")
    tensors, arguments = sequences.packed()
    leaves = [x.requires_grad_() for x in tensors]
    keys, paged = sequences.paged(16)
    attend = fg.Attention(masks.causal)

    def work() -> None:
        attend(*leaves, **arguments).sum().backward()
        attend(*leaves, **arguments, schedule=attend.schedule(*leaves, **arguments))
        queries = {"cu_seqlens_q": arguments["cu_seqlens_q"]}
        attend(tensors[0].detach(), *keys, **paged, **queries)

    work()
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_new_lengths_compile_nothing() -> None:
    """Twenty random packs, and caches of other sizes, run the same binaries."""
    from triton import knobs

    compiled: list[Any] = []
    attend = fg.Attention(masks.causal)

    def work(q_lens: list[int], kv_lens: list[int]) -> None:
        sequences = Sequences.random(q_lens, kv_lens, 2, 2, 64, 64, torch.bfloat16, "cuda")
        tensors, arguments = sequences.packed()
        attend(*(x.requires_grad_() for x in tensors), **arguments).sum().backward()
        keys, paged = sequences.paged(16)
        queries = {"cu_seqlens_q": arguments["cu_seqlens_q"]}
        attend(tensors[0].detach(), *keys, **paged, **queries)

    work(Q_LENS, KV_LENS)
    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = lambda **info: compiled.append(info)
    try:
        for count in range(1, 21):
            lens = torch.randint(1, 400, (2, count)).tolist()
            work(*lens)
    finally:
        knobs.runtime.jit_post_compile_hook = before
    assert not compiled


def test_pools_beyond_2_to_the_31() -> None:
    """A sequence in the last pages, beside NaN everywhere else: with q = 0, the mean of v."""
    size, dim, length = 16, 128, 100
    count = 2**31 // (size * dim) + 20
    k, v = (
        torch.full((count, size, 1, dim), stored.NAN, dtype=torch.bfloat16, device="cuda")
        for _ in range(2)
    )
    used = -(-length // size)
    table = torch.arange(count - used, count, dtype=torch.int32, device="cuda")[None]
    k[-used:] = 0
    v[-used:] = torch.arange(used * size, device="cuda").reshape(used, size, 1, 1).bfloat16()
    q = torch.zeros(1, 1, 1, dim, dtype=torch.bfloat16, device="cuda")
    lens = torch.tensor([length], dtype=torch.int32, device="cuda")
    out = fg.Attention()(q, k, v, page_table=table, kv_lens=lens)
    torch.testing.assert_close(out.float(), torch.full_like(out, (length - 1) / 2).float())


def test_debugging_reads_the_table() -> None:
    sequences = Sequences.random([1], [30], 2, 2, 64, 64, torch.bfloat16, "cuda")
    keys, arguments = sequences.paged(8)
    arguments["page_table"][0, 3] = 99
    with (
        fg.config.override(debug=True),
        pytest.raises(fg.FlashgenError, match=r"page_table\[0, 3\] is 99"),
    ):
        fg.Attention()(torch.stack(sequences.q), *keys, **arguments)
