"""Schedules against brute force: sound always, exact where the elements are looked at."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from cases import CASES

import flashgen as fg
from flashgen import masks


def brute_force(allowed: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Each tile's state, looked at one by one."""
    rows, columns = (-(-n // size) for n, size in zip(allowed.shape[2:], block, strict=True))
    states = torch.zeros(*allowed.shape[:2], rows, columns, dtype=torch.int8)
    for i in range(rows):
        for j in range(columns):
            tile = allowed[
                ..., i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]
            ].flatten(2)
            states[:, :, i, j] = tile.any(-1).to(torch.int8) + tile.all(-1)
    return states


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_masks_exactly(case):
    for (S, T), block in (((67, 130), (16, 48)), ((129, 129), (64, 16))):
        S = S if case.below_zero else T
        data = case.build(2, 2, S, T, torch.Generator().manual_seed(S))
        truth = brute_force(case.expected(2, 2, S, T, data), block)
        q, k = torch.empty(2, 2, S, 1), torch.empty(2, 2, T, 1)
        attend = fg.Attention(case.bound(data))
        exact = attend.schedule(q, k, block_size=block, planner="exact").to_dense()
        assert torch.equal(exact.expand_as(truth), truth)
        bounds = attend.schedule(q, k, block_size=block, planner="bounds").to_dense()
        said, is_open = bounds.expand_as(truth), (bounds == 1).expand_as(truth)
        assert torch.equal(said[~is_open], truth[~is_open])


def test_names_of_flex_attention():
    """Counts and indices, along rows and columns, are those of torch's BlockMask."""
    from torch.nn.attention.flex_attention import create_block_mask

    doc = torch.tensor([0] * 100 + [1] * 156)

    def causal_document(b, h, q, k):
        return (q >= k) & (doc[q] == doc[k])

    theirs = create_block_mask(causal_document, 1, 1, 256, 256, device="cpu", BLOCK_SIZE=32)
    q = torch.empty(1, 1, 256, 1)
    ours = fg.Attention(causal_document).schedule(q, q, block_size=32)
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name))
    for name in ("kv", "full_kv", "q", "full_q"):
        counts = getattr(ours, f"{name}_num_blocks")
        valid = torch.arange(8) < counts[..., None]
        mine, right = (getattr(x, f"{name}_indices") for x in (ours, theirs))
        assert torch.equal(mine[valid], right[valid])
    assert ours.density == pytest.approx(1 - theirs.sparsity() / 100)


def test_a_ragged_end_alone_makes_nothing_partial():
    q = torch.empty(1, 1, 100, 1)
    assert (fg.Attention().schedule(q, q, block_size=64).to_dense() == 2).all()
    lens = torch.tensor([0, 65])
    states = fg.Attention().schedule(q.expand(2, 1, 100, 1), q.expand(2, 1, 100, 1), kv_lens=lens,
                                     block_size=64).to_dense()  # fmt: skip
    assert states[:, 0, 0].tolist() == [[0, 0], [2, 2]]


def test_a_long_sequence():
    """131072 positions: n (n - 1) / 2 full and n partial tiles, and no square of anything."""
    n = 1024
    q = torch.empty(1).expand(1, 32, 128 * n, 1)
    states = fg.Attention(masks.causal).schedule(q, q, block_size=128).states
    assert states.shape == (1, 1, n, n)
    assert [(states == s).sum().item() for s in (1, 2)] == [n, n * (n - 1) // 2]


def test_made_once_and_used_by_layers_with_other_scores():
    @fg.attention(mask=masks.document)
    def cooler(score, temperature: float):
        return score * temperature

    q = torch.randn(1, 2, 90, 8)
    doc = torch.arange(90)[None] // 30
    schedule = cooler.schedule(q, q, q, doc=doc)
    plain = fg.Attention(mask=masks.document)
    assert torch.equal(plain(q, q, q, doc=doc, schedule=schedule), plain(q, q, q, doc=doc))
    assert torch.allclose(
        cooler(q, q, q, doc=doc, temperature=1.0, schedule=schedule), plain(q, q, q, doc=doc)
    )


@fg.attention(mask=masks.sliding_window(window=9) & masks.document)
def shifted(score, h, shift: fg.Tensor):
    """At the top level of a module, so that it can be found again by its name."""
    return score + shift[h]


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_attention_survives_copies(again):
    q = torch.randn(1, 2, 40, 8)
    data = {"doc": torch.arange(40)[None] // 15, "shift": torch.randn(2)}
    assert torch.equal(again(shifted)(q, q, q, **data), shifted(q, q, q, **data))
    module = torch.nn.Module()
    module.attend = again(shifted)
    assert torch.equal(module.attend(q, q, q, **data), shifted(q, q, q, **data))
