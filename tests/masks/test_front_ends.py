"""Masks from other libraries' raw forms: what they mean, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import table_oracles
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

import flashgen as fg
from flashgen import masks


def rows(mask: Any, q_len: int, kv_len: int, **shape: Any) -> list[str]:
    """The dense matrix of batch 0 and head 0 as strings of 0 and 1."""
    matrix = mask.dense(q_len, kv_len, **shape)[0, 0].int().tolist()
    return ["".join(map(str, row)) for row in matrix]


# Slices


@pytest.mark.parametrize(
    ("kind", "q_len", "kv_len", "expected"),
    [
        (0, 2, 3, ["111", "111"]),
        (1, 3, 3, ["100", "110", "111"]),
        (1, 2, 4, ["1110", "1111"]),
        (1, 4, 2, ["00", "00", "10", "11"]),
        (2, 3, 3, ["111", "011", "001"]),
        (2, 2, 4, ["1111", "0111"]),
        (2, 4, 2, ["11", "01", "00", "00"]),
        (3, 3, 3, ["100", "010", "001"]),
        (3, 2, 4, ["1110", "0111"]),
        (3, 4, 2, ["00", "00", "00", "00"]),
    ],
)
def test_slice_types(kind: int, q_len: int, kv_len: int, expected: list[str]) -> None:
    mask = masks.from_slices([[0, q_len]], [[0, kv_len]], [kind])
    assert rows(mask, q_len, kv_len) == expected


def test_slices_may_share_rows_or_keys() -> None:
    mask = masks.from_slices(
        torch.tensor([[0, 2], [0, 2], [2, 4]]), torch.tensor([[4, 6], [0, 2], [0, 6]])
    )
    assert rows(mask, 5, 6) == ["110011", "110011", "111111", "111111", "000000"]


def test_touching_slices_become_one_range() -> None:
    """A causal row as two slices needs one range a row."""
    q = [[0, 4], [4, 8], [4, 8]]
    k = [[0, 4], [0, 4], [4, 8]]
    mask = masks.from_slices(q, k, [1, 0, 1])
    assert mask.leaves[0].bound["runs"] == 1
    assert torch.equal(mask.dense(8, 8), masks.causal.dense(8, 8))


def test_sliding_window_in_slices() -> None:
    """Magi's helper cuts a window into at most three slices."""
    n, w = 12, 4
    mask = masks.from_slices(
        [[0, w], [w, n]], [[0, w], [1, n]], torch.tensor([1, 3], dtype=torch.int32)
    )
    assert torch.equal(mask.dense(n, n), masks.sliding_window(window=w).dense(n, n))


@pytest.mark.parametrize(
    ("q", "k", "kinds"),
    [
        ([[0, 4], [3, 6]], [[0, 4], [3, 6]], None),
        ([[0, 4], [0, 4]], [[0, 4], [0, 4]], [1, 2]),
        ([[0, 4], [2, 3], [0, 4]], [[5, 9], [0, 2], [0, 4]], None),
    ],
)
def test_a_cell_in_two_slices_is_refused(q: Any, k: Any, kinds: Any) -> None:
    with pytest.raises(fg.FlashgenError, match="both hold the cell of row"):
        masks.from_slices(q, k, kinds)


def test_triangles_that_only_touch_are_fine() -> None:
    mask = masks.from_slices([[0, 4], [0, 3]], [[0, 4], [1, 4]], [1, 2])
    assert mask.dense(4, 4).all()


@pytest.mark.parametrize(
    ("q", "k", "kinds", "problem"),
    [
        ([[0, 4]], [[0, 4], [4, 8]], None, "1 q_ranges, 2 k_ranges"),
        ([[0, 4]], [[0, 4]], [0, 1], "2 mask_types"),
        ([[0, 4]], [[0, 4]], [4], "mask_types holds"),
        ([[4, 0]], [[0, 4]], None, "ends before it starts"),
        ([[-1, 4]], [[0, 4]], None, "below 0"),
        ([[0, 4, 8]], [[0, 4]], None, r"integers \[n, 2\]"),
        ([[0.5, 4]], [[0, 4]], None, r"integers \[n, 2\]"),
    ],
)
def test_slices_refused(q: Any, k: Any, kinds: Any, problem: str) -> None:
    with pytest.raises(fg.FlashgenError, match=problem):
        masks.from_slices(q, k, kinds)


def test_no_slices_see_nothing() -> None:
    assert not masks.from_slices([], []).dense(3, 4).any()


# Packed sequences


def test_cu_seqlens_equal_a_dense_mask_of_documents(seed: int) -> None:
    """CASES: gym#187: lengths of 0 and 1 among them."""
    sizes = [5, 0, 1, 1, 20, 3]
    cu = torch.tensor([0, *sizes]).cumsum(0)
    doc = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))[None]
    n = sum(sizes)
    for causal, mask in ((False, masks.document), (True, masks.causal_document)):
        packed = masks.from_cu_seqlens(cu, causal=causal)
        assert torch.equal(packed.dense(n, n), mask.dense(n, n, doc=doc))


def test_rows_behind_the_last_sequence_see_nothing() -> None:
    mask = masks.from_cu_seqlens(torch.tensor([0, 2, 3]), causal=True, total_q=6)
    assert rows(mask, 6, 6) == ["100000", "110000", "001000"] + ["000000"] * 3
    longer = masks.from_cu_seqlens(torch.tensor([0, 2, 3]))
    assert rows(longer, 6, 6) == ["110000", "110000", "001000"] + ["000000"] * 3


@pytest.mark.parametrize(
    ("q", "kv", "expected"),
    [
        ([0, 1, 6], [0, 1, 3], ["100", "000", "000", "000", "010", "011"]),
        ([0, 0, 7], [0, 7, 7], ["0000000"] * 7),
        ([0, 2, 2], [0, 1, 8], ["00000000", "10000000"]),
    ],
)
def test_more_queries_than_keys_in_a_sequence(q: Any, kv: Any, expected: list[str]) -> None:
    """CASES: FA#443: (sq, sk) of (1, 1), (5, 2), (0, 7), (7, 0)."""
    mask = masks.from_cu_seqlens(torch.tensor(q), torch.tensor(kv), causal=True)
    assert rows(mask, q[-1], kv[-1]) == expected


def test_overlapping_key_ranges_are_block_causal() -> None:
    """xformers#1093: from_seqlens([2,2,2], [0,0,0,6], [2,4,6])."""
    mask = masks.from_seqlens([2, 2, 2], [2, 4, 6], kv_start=[0, 0, 0, 6])
    assert rows(mask, 6, 6) == ["110000"] * 2 + ["111100"] * 2 + ["111111"] * 2
    q, k, v = (torch.randn(1, 1, 6, 16, requires_grad=True) for _ in range(3))
    fg.Attention(mask=mask)(q, k, v, backend="cpu").square().sum().backward()
    allowed = torch.block_diag(*[torch.ones(2, 2)] * 3).cummax(0).values > 0
    other = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    torch.nn.functional.scaled_dot_product_attention(
        *other, attn_mask=allowed
    ).square().sum().backward()
    for mine, theirs in zip((q, k, v), other, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: masks.from_seqlens([1, 2], [3]), "2 lengths of queries, 1 of keys"),
        (lambda: masks.from_seqlens([1, -2]), "negative"),
        (lambda: masks.from_seqlens([2, 2], [3, 5], kv_start=4), "padded ones lie 4 apart"),
        (lambda: masks.from_seqlens([2], window=-1), "window must be at least 0"),
        (lambda: masks.from_seqlens([2], window=(-1, 0)), "left must be at least 0"),
        (lambda: masks.from_cu_seqlens(torch.zeros(2, 2).int()), "cu_seqlens_q must be integers"),
        (lambda: masks.from_cu_seqlens(torch.tensor([0.0, 2.0])), "cu_seqlens_q must be integers"),
        (
            lambda: masks.from_cu_seqlens(torch.tensor([0, 2]), torch.tensor([0, 2, 3])),
            "1 sequences of queries and 2",
        ),
    ],
)
def test_lengths_refused(call: Any, problem: str) -> None:
    with pytest.raises(fg.FlashgenError, match=problem):
        call()


# xFormers: stand-ins with the attributes of its classes


def info(starts: list[int], sizes: list[int] | None = None, padding: int | None = None) -> Any:
    found = SimpleNamespace(seqstart=torch.tensor(starts))
    if sizes is not None:
        found.seqlen = torch.tensor(sizes)
    if padding is not None:
        found.padding = padding
    return found


def bias(name: str, *parents: str, **attributes: Any) -> Any:
    kind: Any = object
    for parent in (*reversed(parents), name):
        kind = type(parent, () if kind is object else (kind,), {})
    made = kind()
    vars(made).update(attributes)
    return made


PACKED = {"q_seqinfo": info([0, 3, 4, 9]), "k_seqinfo": info([0, 5, 6, 12])}
PADDED = {"q_seqinfo": info([0, 3, 4, 9]), "k_seqinfo": info([0, 7, 14, 21], [5, 1, 6], 7)}
GAPPY = {"q_seqinfo": info([0, 3, 4, 9]), "k_seqinfo": info([2, 0, 4, 20], [5, 1, 9])}
SIZES = {"packed": (PACKED, 12), "padded": (PADDED, 21), "gappy": (GAPPY, 20)}
RAW = {
    "packed": {"kv_seqlen": [5, 1, 6]},
    "padded": {"kv_seqlen": [5, 1, 6], "kv_start": [0, 7, 14]},
    "gappy": {"kv_seqlen": [5, 1, 9], "kv_start": [2, 0, 4]},
}
ASYMMETRIC = {"window_left": 2, "window_right": 1}
FAMILY: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("BlockDiagonalMask", "packed", {}, {}),
    ("BlockDiagonalCausalMask", "packed", {}, {"causal": True, "top_left": True}),
    ("BlockDiagonalCausalFromBottomRightMask", "packed", {}, {"causal": True}),
    (
        "BlockDiagonalCausalLocalAttentionMask",
        "packed",
        {"_window_size": 2},
        {"window": 2, "top_left": True},
    ),
    (
        "BlockDiagonalCausalLocalAttentionFromBottomRightMask",
        "packed",
        {"_window_size": 2},
        {"window": 2},
    ),
    ("BlockDiagonalPaddedKeysMask", "padded", {}, {}),
    ("BlockDiagonalCausalWithOffsetPaddedKeysMask", "padded", {}, {"causal": True}),
    ("BlockDiagonalLocalAttentionPaddedKeysMask", "padded", ASYMMETRIC, {"window": (2, 1)}),
    (
        "BlockDiagonalCausalLocalAttentionPaddedKeysMask",
        "padded",
        {"_window_size": 3},
        {"window": 3},
    ),
    ("BlockDiagonalGappyKeysMask", "gappy", {}, {}),
    (
        "BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask",
        "gappy",
        ASYMMETRIC,
        {"window": (2, 1)},
    ),
    ("BlockDiagonalCausalWithOffsetGappyKeysMask", "gappy", {}, {"causal": True}),
]


@pytest.mark.parametrize(("name", "layout", "own", "means"), FAMILY, ids=[f[0] for f in FAMILY])
def test_block_diagonal_biases(name: str, layout: str, own: Any, means: Any) -> None:
    attributes, kv_len = SIZES[layout]
    mask = masks.from_xformers(bias(name, "AttentionBias", **attributes, **own))
    i, j = torch.arange(9), torch.arange(kv_len)
    data = {"q_seqlen": [3, 1, 5], **RAW[layout], **means}
    expected = table_oracles.packed(None, None, i, j, data)
    assert torch.equal(mask.dense(9, kv_len), expected)


@pytest.mark.parametrize(("q_len", "kv_len"), [(5, 8), (8, 5), (6, 6)])
def test_plain_biases(q_len: int, kv_len: int) -> None:
    ones = torch.ones(q_len, kv_len, dtype=torch.bool)
    d = kv_len - q_len
    lower = bias("LowerTriangularMask")
    assert torch.equal(masks.from_xformers(lower).dense(q_len, kv_len)[0, 0], ones.tril())
    right = bias("LowerTriangularFromBottomRightMask", "LowerTriangularMask")
    assert torch.equal(masks.from_xformers(right).dense(q_len, kv_len)[0, 0], ones.tril(d))
    window = bias(
        "LowerTriangularFromBottomRightLocalAttentionMask",
        "LowerTriangularFromBottomRightMask",
        "LowerTriangularMask",
        _window_size=3,
    )
    expected = ones.tril(d) & ones.triu(d - 2)
    assert torch.equal(masks.from_xformers(window).dense(q_len, kv_len)[0, 0], expected)
    both = bias("LocalAttentionFromBottomRightMask", window_left=2, window_right=1)
    expected = ones.tril(d + 1) & ones.triu(d - 2)
    assert torch.equal(masks.from_xformers(both).dense(q_len, kv_len)[0, 0], expected)


@pytest.mark.parametrize(
    ("name", "parents", "advice"),
    [
        ("LowerTriangularMaskWithTensorBias", ("LowerTriangularMask",), "score function"),
        ("PagedBlockDiagonalPaddedKeysMask", ("AttentionBias",), "page_table"),
        (
            "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask",
            ("PagedBlockDiagonalPaddedKeysMask",),
            "page_table",
        ),
        ("PagedBlockDiagonalGappyKeysMask", ("AttentionBias",), "page_table"),
        ("SomethingElse", (), "from_dense"),
    ],
)
def test_biases_that_are_more_than_a_mask(name: str, parents: Any, advice: str) -> None:
    with pytest.raises(fg.FlashgenError) as error:
        masks.from_xformers(bias(name, *parents))
    assert advice in str(error.value)


# Dense matrices


@pytest.mark.parametrize(
    ("matrix", "problem"),
    [
        (torch.zeros(3, 3), "must be boolean"),
        (torch.zeros(3, 3, dtype=torch.int32), "must be boolean"),
        (torch.zeros(2, 3, 3, dtype=torch.bool), "3 dimensions"),
        (torch.zeros(3, dtype=torch.bool), "1 dimensions"),
    ],
)
def test_matrices_refused(matrix: torch.Tensor, problem: str) -> None:
    with pytest.raises(fg.FlashgenError, match=problem):
        masks.from_dense(matrix)


def test_matrix_of_the_wrong_length_is_refused_at_the_call() -> None:
    with pytest.raises(fg.FlashgenError):
        masks.from_dense(torch.ones(4, 4, dtype=torch.bool)).dense(4, 5)


def test_matrix_per_batch_and_head() -> None:
    matrix = torch.rand(2, 3, 5, 7) < 0.5
    dense = masks.from_dense(matrix).dense(5, 7, batch=2, heads=3)
    assert torch.equal(dense, matrix)


# FlexAttention's BlockMask


def test_block_mask_of_a_function(seed: int) -> None:
    n = 300
    doc = torch.randint(0, 4, (2, n)).sort().values

    def flex(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (doc[b, q_idx] == doc[b, kv_idx])

    block_mask = create_block_mask(flex, 2, None, n, n, device="cpu")
    mask = masks.from_block_mask(block_mask)
    expected = create_mask(flex, 2, 1, n, n, device="cpu")
    assert torch.equal(mask.dense(n, n, batch=2), expected)
    assert torch.equal(
        masks.from_block_mask(block_mask, blocks=True).dense(n, n, batch=2), expected
    )
    shorter = mask.dense(130, 130, batch=2)
    assert torch.equal(shorter, expected[..., :130, :130])


def test_block_mask_with_fewer_queries_than_keys() -> None:
    """FlexAttention counts rows from the first query: the call must say so."""

    def flex(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    mask = masks.from_block_mask(create_block_mask(flex, None, None, 3, 8, device="cpu"))
    q, k = torch.randn(1, 1, 3, 16), torch.randn(1, 1, 8, 16)
    with pytest.raises(fg.FlashgenError, match="q_offset"):
        fg.Attention(mask=mask)(q, k, k, backend="cpu")
    assert rows(mask, 3, 8, q_offset=0) == ["10000000", "11000000", "11100000"]


@pytest.mark.parametrize("with_function", [False, True])
def test_block_mask_of_lists(with_function: bool) -> None:
    """Blocks that the lists leave out are hidden; full blocks are seen whole."""

    def flex(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    block_mask = BlockMask.from_kv_blocks(
        torch.tensor([[[1, 1]]], dtype=torch.int32),
        torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32),
        torch.tensor([[[1, 0]]], dtype=torch.int32),
        torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32),
        BLOCK_SIZE=4,
        mask_mod=flex if with_function else None,
        seq_lengths=(8, 8),
    )
    blocks = True if with_function else None
    found = rows(masks.from_block_mask(block_mask, blocks=blocks), 8, 8)
    if with_function:
        assert found[:4] == ["10001111", "11001111", "11101111", "11111111"]
        assert found[4:] == ["00001000", "00001100", "00001110", "00001111"]
    else:
        assert found == ["11111111"] * 4 + ["00001111"] * 4


def test_slices_of_block_masks_and_other_things_are_refused() -> None:
    def flex(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    block_mask = create_block_mask(flex, None, None, 256, 256, device="cpu")
    with pytest.raises(fg.FlashgenError, match="slice of a BlockMask"):
        masks.from_block_mask(block_mask[:, :, :1])
    for other in (flex, None, torch.ones(2, 2)):
        with pytest.raises(fg.FlashgenError, match="not a BlockMask"):
            masks.from_block_mask(other)
