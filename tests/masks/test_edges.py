"""Rows without keys, padding, trees, orders of tokens: where masks go wrong."""

from __future__ import annotations

import itertools

import pytest
import torch
from mask_data import ancestors, depth_first, subtree_ends

import flashgen as fg
from flashgen import masks


def attend(mask, n: int, **data):
    """out, lse of random inputs through the cpu backend, and the inputs."""
    q, k, v = (torch.randn(1, 1, n, 16, requires_grad=True) for _ in range(3))
    out, lse = fg.Attention(mask=mask)(q, k, v, return_lse=True, backend="cpu", **data)
    return out, lse, (q, k, v)


def test_dropped_segment_at_the_start_leaves_rows_without_keys() -> None:
    segment = torch.tensor([[0, 0, 0, -1, -1, 1, 1, -1]])
    mask = masks.qk_sparse(segment=segment)
    assert mask.dense(8, 8)[0, 0].sum(1).tolist() == [0, 0, 0, 4, 5, 5, 5, 8]
    out, lse, inputs = attend(mask, 8)
    assert (out[0, 0, :3] == 0).all()
    assert (lse[0, 0, :3] == -torch.inf).all()
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in inputs)
    assert (inputs[0].grad[0, 0, :3] == 0).all()


@pytest.mark.parametrize("n", [5, 130])
def test_padding_sees_nothing_and_is_not_seen(n: int) -> None:
    """The official document generator lets the last document see the padding behind it."""
    real = n - 2
    doc = torch.zeros(1, n, dtype=torch.int32)
    mask = masks.document(doc=doc) & masks.padding(kv_valid=real, q_valid=real)
    dense = mask.dense(n, n)[0, 0]
    assert dense[:real, :real].all()
    assert not dense[real:].any()
    assert not dense[:, real:].any()
    q, k, v = (torch.randn(1, 1, n, 16) for _ in range(3))
    k[:, :, real:], v[:, :, real:] = torch.nan, torch.inf
    out = fg.Attention(mask=mask)(q, k, v, backend="cpu")
    assert out.isfinite().all()
    assert (out[:, :, real:] == 0).all()


def test_padding_as_a_document_attends_to_itself() -> None:
    doc = torch.tensor([[0, 0, 1, 1, -1, -1]])
    dense = masks.document(doc=doc).dense(6, 6)[0, 0]
    assert not dense[:4, 4:].any()
    assert dense[4:, 4:].all()


def test_left_padding_hides_the_first_tile() -> None:
    """CASES: A3: the first blocks of a row are masked altogether."""
    n, start = 300, 200
    mask = masks.causal & masks.left_padding(kv_start=start)
    out, lse, _ = attend(mask, n)
    assert (lse[0, 0, :start] == -torch.inf).all()
    assert (out[0, 0, :start] == 0).all()
    assert lse[0, 0, start:].isfinite().all()


def test_all_true_is_no_mask() -> None:
    """CASES: transformers#35032."""
    ones = torch.ones(1, 9, dtype=torch.bool)
    q, k = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 9, 16)
    given = fg.Attention(mask=masks.from_dense(ones))(q, k, k, backend="cpu")
    torch.testing.assert_close(given, fg.Attention()(q, k, k, backend="cpu"))


@pytest.mark.parametrize("count", range(20))
def test_depth_first_trees_are_ancestor_trees(count: int, seed: int) -> None:
    """A node sees its ancestors; in depth-first order each node is seen by its subtree."""
    generator = torch.Generator().manual_seed(seed)
    n, prefix = 12 + count, count % 5
    up = depth_first(n - prefix, generator)
    table = torch.eye(n - prefix, dtype=torch.bool)
    for node, parent in enumerate(up):
        if parent >= 0:
            table[node] |= table[parent]
    ends = [n] * prefix + [prefix + end for end in subtree_ends(up)]
    by_table = masks.tree(prefix=prefix, ancestors=table[None]).dense(n, n)
    by_range = masks.tree_dfs(subtree_end=torch.tensor([ends])).dense(n, n)
    assert torch.equal(by_table, by_range)
    columns = torch.tensor(ends, dtype=torch.int32)[None, None, :, None]
    assert torch.equal(masks.from_flashmask(columns, causal=True).dense(n, n), by_table)


def test_tree_queries_alone(seed: int) -> None:
    """Verification: only the nodes are queries, the context lies in the cache."""
    generator = torch.Generator().manual_seed(seed)
    table = ancestors(6, generator)
    dense = masks.tree(prefix=50, ancestors=table[None]).dense(6, 56)[0, 0]
    assert dense[:, :50].all()
    assert torch.equal(dense[:, 50:], table)


def test_tree_in_any_order() -> None:
    """A child may stand before its parent: only the table counts."""
    table = torch.tensor([[[1, 1], [0, 1]]])
    dense = masks.tree(prefix=1, ancestors=table).dense(3, 3)[0, 0].int().tolist()
    assert dense == [[1, 0, 0], [1, 1, 1], [1, 0, 1]]


def test_shared_prefix_of_the_research_note() -> None:
    mask = masks.shared_prefix(
        doc=torch.tensor([[0, 0, 0, 1, 1, 2, 2]]),
        offsets=torch.tensor([[0, 3, 5, 7]]),
        prefix_doc=torch.tensor([[0, 0, 0]]),
    )
    rows = ["".join(map(str, row)) for row in mask.dense(7, 7)[0, 0].int().tolist()]
    assert rows == ["1000000", "1100000", "1110000", "1111000", "1111100", "1110010", "1110011"]


def test_block_diffusion_of_the_research_note() -> None:
    rows = masks.block_diffusion(length=4, block=2).dense(8, 8)[0, 0].int().tolist()
    text = ["".join(map(str, row)) for row in rows]
    assert text == [r for r in ("11000000", "00111100", "00001100", "00001111") for _ in "12"]


def test_documents_with_gaps_and_empty_ones() -> None:
    """CASES: documents of lengths 3, 0, 5, 120: the rows' mean keys."""
    mask = masks.from_seqlens([3, 0, 5, 120], causal=True)
    dense = mask.dense(128, 128)[0, 0].double()
    mean = (dense @ torch.arange(128.0).double()) / dense.sum(1)
    expected = {0: 0, 1: 0.5, 2: 1, 3: 3, 7: 5, 8: 8, 127: 67.5}
    assert {row: mean[row].item() for row in expected} == expected


@pytest.mark.parametrize("extent", [(6, 10), (8, 8), (3, 5)])
def test_orders_are_permutations_of_the_raster_mask(extent: tuple[int, int]) -> None:
    """attention-gym's tiled and Morton neighborhoods: the same mask, tokens re-ordered."""
    raster = masks.natten(extent, 3)
    n = extent[0] * extent[1]
    for order in (masks.tile_order(extent, (2, 4)), masks.morton_order(extent)):
        assert sorted(order.tolist()) == list(range(n))
        dense = masks.natten(extent, 3, order=order).dense(n, n)[0, 0]
        places = order.long()
        assert torch.equal(dense, raster.dense(n, n)[0, 0][places][:, places])


def test_tile_order_is_tile_by_tile() -> None:
    order = masks.tile_order((4, 6), (2, 3)).tolist()
    assert order[:6] == [0, 1, 2, 6, 7, 8]
    assert order[6:12] == [3, 4, 5, 9, 10, 11]
    assert masks.morton_order((4, 4)).tolist()[:8] == [0, 1, 4, 5, 2, 3, 6, 7]


def test_neighborhood_of_attention_gym() -> None:
    """Per axis, the window of an odd kernel is centred at the clamped coordinate."""
    height, width, kernel = 5, 7, 3
    dense = masks.natten((height, width), kernel).dense(35, 35)[0, 0]
    half = kernel // 2
    for q, k in itertools.product(range(35), repeat=2):
        near = True
        for a, b, size in ((q // width, k // width, height), (q % width, k % width, width)):
            near &= abs(min(max(a, half), size - 1 - half) - b) <= half
        assert dense[q, k] == near


def test_sliding_tiles_see_equally_many() -> None:
    mask = masks.sliding_tile((6, 8, 4), (2, 4, 4), (2, 2, 2), text=5)
    n = 6 * 8 * 4 + 5
    counts = mask.dense(n, n)[0, 0].sum(1)
    assert (counts[:-5] == 2 * 4 * 4 + 5).all()
    assert (counts[-5:] == n).all()


def test_video_sparse_attention() -> None:
    """Top-k tiles with cut tiles: block_sparse from indices, and what is real of each."""
    indices = torch.tensor([[[[0, 2], [1, -1], [2, 0]]]])
    blocks = masks.blocks_from_indices(indices, 3)
    assert blocks.int().tolist() == [[[[1, 0, 1], [0, 1, 0], [1, 0, 1]]]]
    mask = masks.block_sparse(blocks=blocks, q_block=4, kv_block=4) & masks.block_padding(
        block_valid=torch.tensor([4, 3, 1]), kv_block=4
    )
    assert mask.dense(12, 12)[0, 0].sum(1).tolist() == [5] * 4 + [3] * 4 + [5] * 4


def test_cross_attention_to_images() -> None:
    """Text of 5 tokens, 2 images of 3: each text token sees the last image before it."""
    mask = masks.flamingo(intervals=torch.tensor([[[0, 2], [2, 5]]]), image_tokens=3)
    dense = mask.dense(5, 6, q_offset=0)[0, 0].int().tolist()
    assert dense == [[1, 1, 1, 0, 0, 0]] * 2 + [[0, 0, 0, 1, 1, 1]] * 3


def test_draft_training_of_jetspec() -> None:
    """Its queries are the blocks alone: row r is position prefix + r."""
    prefix, block, count = 5, 4, 3
    dense = masks.draft_block(prefix=prefix, block=block).dense(block * count, 17)[0, 0]
    for q, k in itertools.product(range(block * count), range(17)):
        own = k >= prefix and q // block == (k - prefix) // block
        assert dense[q, k] == (k < prefix or (own and (k - prefix) % block <= q % block))


def test_masks_compose_by_name() -> None:
    two = masks.document & masks.document.rename(doc="speaker")
    assert [p.name for p in two.params] == ["doc", "speaker"]
    doc, speaker = torch.tensor([[0, 0, 1, 1]]), torch.tensor([[0, 1, 1, 1]])
    dense = two.dense(4, 4, doc=doc, speaker=speaker)[0, 0].int().tolist()
    assert dense == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]
