"""Packed sequences on Hopper's own kernels, asked for by name."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import sm_90
import stored
import torch
from gradient_checks import rounding
from stored import Sequences
from test_storage import KV_LENS, MASKS, Q_LENS, as_good_as_sdpa, dense_grads

import flashgen as fg
from flashgen import masks

pytestmark = sm_90.marks()
BF16 = torch.bfloat16


def behind(tensors: list[torch.Tensor], rows: int = 3) -> list[torch.Tensor]:
    """With rows that belong to no sequence."""
    return [torch.cat([x, torch.ones_like(x[:rows])]) for x in tensors]


@pytest.mark.parametrize("heads", [(4, 4), (8, 1)], ids=str)
@pytest.mark.parametrize(
    ("name", "dims", "dtype", "tile"),
    [
        ("causal", (128, 128), BF16, (128, 128)),
        ("causal", (64, 64), BF16, (192, 128)),
        ("window", (40, 40), torch.float16, (192, 64)),
        ("full", (192, 128), BF16, (128, 64)),
        ("full", (256, 256), torch.float16, (128, 64)),
    ],
    ids=str,
)
def test_outputs(
    name: str,
    dims: tuple[int, int],
    dtype: torch.dtype,
    tile: tuple[int, int],
    heads: tuple[int, int],
    nan_filled_empty: None,
) -> None:
    mask, allowed = MASKS[name]
    sequences = Sequences.random(Q_LENS, KV_LENS, *heads, *dims, dtype, "cuda")
    tensors, places = sequences.packed()
    tensors, attend = behind(tensors), fg.Attention(mask)
    schedule = attend.schedule(*tensors, **places, block_size=tile)
    out, lse = attend(*tensors, **places, schedule=schedule, backend="hopper", return_lse=True)
    assert (out[-3:] == 0).all()
    assert (lse[:, -3:] == -torch.inf).all()
    parts = stored.parted(out[:-3], lse[:, :-3], Q_LENS)
    as_good_as_sdpa(parts, sequences, allowed)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)], ids=str)
@pytest.mark.parametrize(
    ("name", "dims", "dtype"),
    [
        ("causal", (128, 128), BF16),
        ("causal", (64, 64), torch.float16),
        ("window", (80, 64), BF16),
        ("full", (96, 96), BF16),
        ("causal", (192, 128), BF16),
        ("window", (256, 256), torch.float16),
    ],
    ids=str,
)
def test_gradients(
    name: str,
    dims: tuple[int, int],
    dtype: torch.dtype,
    heads: tuple[int, int],
    nan_filled_empty: None,
    on_hopper: list[int],
) -> None:
    """Each sequence's, at most twice as wrong as PyTorch's; none for rows of no sequence."""
    mask, allowed = MASKS[name]
    sequences = Sequences.random(Q_LENS, KV_LENS, *heads, *dims, dtype, "cuda")
    tensors, places = sequences.packed()
    leaves = [x.requires_grad_() for x in behind(tensors)]
    out = fg.Attention(mask)(*leaves, **places, backend="hopper")
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, grad)
    assert all((x[-3:] == 0).all() for x in found)
    lens = (Q_LENS, KV_LENS, KV_LENS)
    grads = torch.split(grad[:-3].transpose(0, 1), Q_LENS, 1)
    parts = [torch.split(x[:-3].transpose(0, 1), n, 1) for x, n in zip(found, lens, strict=True)]
    for b, (n, m) in enumerate(zip(Q_LENS, KV_LENS, strict=True)):
        if not n or not m:
            assert all((x[b] == 0).all() for x in parts)
            continue
        exact, theirs = (dense_grads(b, sequences, allowed, grads[b], d) for d in ("double", ""))
        for i, (right, other) in enumerate(zip(exact, theirs, strict=True)):
            error = (parts[i][b].double() - right).abs().max().item()
            off = (other.double() - right).abs().max().item()
            assert error <= 2 * max(off, rounding(right, dtype)) + 1e-5, (b, "qkv"[i])


@fg.attention(mask=masks.causal_document, softcap=9.0, sinks=True)
def odd(
    score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, gate: fg.Tensor, bias: fg.Tensor
) -> Any:
    return score * gate[b, q_idx] + bias[b, h, kv_idx]


def test_data_and_offsets_of_each_sequence(on_hopper: list[int]) -> None:
    """As the portable kernels compute them, in a batch of lengths that differ."""
    q_lens, kv_lens = [300, 129, 1, 500], [300, 450, 77, 500]
    sequences = Sequences.random(q_lens, kv_lens, 4, 2, 64, None, BF16, "cuda")
    tensors, places = sequences.packed()
    leaves = [x.requires_grad_() for x in tensors]
    starts = torch.arange(20, 60, 10)[:, None]
    data = {
        "doc": (torch.arange(600).expand(4, -1) // starts).cuda(),
        "gate": torch.rand(4, 600).cuda(), "bias": torch.randn(4, 4, 600).cuda(),
        "sinks": torch.randn(4).cuda(), "q_offset": torch.tensor([0, 3, 50, 20]).cuda(),
    }  # fmt: skip
    out, lse = odd(*leaves, **places, **data, backend="hopper", return_lse=True)
    right, exact = odd(*leaves, **places, **data, backend="portable", return_lse=True)
    torch.testing.assert_close(out, right, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, exact, rtol=1e-4, atol=1e-4)
    grad = torch.randn_like(out)
    for mine, theirs in zip(
        torch.autograd.grad(out, leaves, grad), torch.autograd.grad(right, leaves, grad),
        strict=True,
    ):  # fmt: skip
        assert (mine.double() - theirs.double()).norm() <= 1e-2 * theirs.double().norm()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_neighbours_that_are_not_finite(head_dim: int, on_hopper: list[int]) -> None:
    """The second of three sequences is NaN throughout, and the others don't notice."""
    lens = [333, 200, 150]
    sequences = Sequences.random(lens, lens, 4, 2, head_dim, None, BF16, "cuda")
    tensors, places = sequences.packed()
    attend, others = fg.Attention(masks.causal), [*range(333), *range(533, 683)]
    leaves = [x.requires_grad_() for x in tensors]
    clean = attend(*leaves, **places, backend="hopper")
    grad = torch.randn_like(clean)
    right = torch.autograd.grad(clean, leaves, grad)
    for x in (*leaves, grad):
        x.data[333:533] = torch.nan
    out = attend(*leaves, **places, backend="hopper")
    assert torch.equal(out[others], clean[others])
    assert out[333:533].isnan().all()
    for mine, exact in zip(torch.autograd.grad(out, leaves, grad), right, strict=True):
        torch.testing.assert_close(mine[others], exact[others], rtol=3e-2, atol=3e-2)


def random_pack(count: int, total: int) -> list[int]:
    cuts = torch.randperm(total - 1)[: count - 1].sort().values + 1
    edges = [0, *cuts.tolist(), total]
    return [b - a for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("head_dim", [64, 128])
def test_many_packs(head_dim: int, on_hopper: list[int]) -> None:
    """Runs one after the other give the same bits, dK and dV too where heads have their own keys;
    and what the portable kernels give."""
    attend = fg.Attention(masks.causal)
    for count in (1, 13, 40):
        lens = random_pack(count, 6000)
        sequences = Sequences.random(lens, lens, 4, 4, head_dim, None, BF16, "cuda")
        tensors, places = sequences.packed()
        leaves = [x.requires_grad_() for x in tensors]
        right = attend(*leaves, **places, backend="portable")
        grad = torch.randn_like(right)
        exact = torch.autograd.grad(right, leaves, grad)
        first: Any = None
        for _ in range(70):
            out = attend(*leaves, **places, backend="hopper")
            found = torch.autograd.grad(out, leaves, grad)
            first = first or (out, *found)
            assert torch.equal(out, first[0])
            assert torch.equal(found[1], first[2])
            assert torch.equal(found[2], first[3])
            assert (found[0] - first[1]).abs().max() < 3e-2
        torch.testing.assert_close(first[0], right, rtol=2e-2, atol=2e-2)
        for mine, theirs in zip(first[1:], exact, strict=True):
            assert (mine.double() - theirs.double()).norm() <= 1e-2 * theirs.double().norm()


def test_rows_in_order_as_on_the_cpu() -> None:
    lens = random_pack(50, 9000)
    sequences = Sequences.random(lens, lens[::-1], 1, 1, 16, None, BF16, "cuda")
    tensors, places = sequences.packed()
    attend = fg.Attention(masks.sliding_window(window=300))
    ours = attend.schedule(*tensors, **places, block_size=(128, 128))
    theirs = attend.schedule(
        *(x.cpu() for x in tensors), **{n: x.cpu() for n, x in places.items()},
        block_size=(128, 128),
    )  # fmt: skip
    for by_key in (False, True):
        wanted = theirs.queue(by_key)
        rows = int(wanted[0, 0])
        assert torch.equal(ours.queue(by_key)[: rows + 1, :1].cpu(), wanted[: rows + 1, :1])
        assert torch.equal(ours.queue(by_key)[1 : rows + 1].cpu(), wanted[1 : rows + 1])


def test_what_explain_says() -> None:
    sequences = Sequences.random([200, 300], [200, 300], 2, 2, 64, None, BF16, "cuda")
    tensors, places = sequences.packed()
    told = fg.Attention(masks.causal).explain(*tensors, **places)
    assert "hopper: generated Gluon kernels" in told
    assert "backward: hopper" in told


@pytest.mark.parametrize(("heads", "head_dim"), [((4, 4), 64), ((4, 2), 128), ((4, 2), 192)])
def test_sums_in_order(heads: tuple[int, int], head_dim: int, on_hopper: list[int]) -> None:
    """The same bits in each run; and what the portable kernels give."""
    attend = fg.Attention(masks.causal)
    for count in (1, 13, 40):
        lens = random_pack(count, 6000)
        sequences = Sequences.random(lens, lens, *heads, head_dim, None, BF16, "cuda")
        tensors, places = sequences.packed()
        leaves = [x.requires_grad_() for x in tensors]
        right = attend(*leaves, **places, backend="portable")
        grad = torch.randn_like(right)
        exact = torch.autograd.grad(right, leaves, grad)
        first: Any = None
        for _ in range(20):
            out = attend(*leaves, **places, backend="hopper", deterministic=True)
            found = torch.autograd.grad(out, leaves, grad)
            first = first or found
            assert all(map(torch.equal, found, first))
        for mine, theirs in zip(first, exact, strict=True):
            assert (mine.double() - theirs.double()).norm() <= 1e-2 * theirs.double().norm()
