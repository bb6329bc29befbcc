"""Every front end refuses forms that don't fit, with one clear error, when it can be known."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen import masks

LENGTHS = torch.tensor([0, 3, 8], dtype=torch.int32)


def integers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


BROKEN = {
    "from_dense of a list": (lambda: masks.from_dense([[True]]), "is a list"),
    "from_dense of floats": (lambda: masks.from_dense(torch.zeros(2, 2)), "must be boolean"),
    "from_dense of rank 3": (
        lambda: masks.from_dense(torch.ones(2, 2, 2, dtype=torch.bool)),
        "3 dimensions",
    ),
    "from_flashmask of rank 3": (
        lambda: masks.from_flashmask(integers(1, 8, 1), True),
        r"\[B, Hm, Skv, C\]",
    ),
    "from_flashmask of int64": (
        lambda: masks.from_flashmask(integers(1, 1, 8, 1, dtype=torch.int64), True),
        "must be int32",
    ),
    "from_flashmask, causal with 4": (
        lambda: masks.from_flashmask(integers(1, 1, 8, 4), True),
        "1 or 2 vectors, not 4",
    ),
    "from_flashmask, both ways with 1": (
        lambda: masks.from_flashmask(integers(1, 1, 8, 1), False),
        "2 or 4 vectors, not 1",
    ),
    "from_cu_seqlens of a list": (lambda: masks.from_cu_seqlens([0, 3]), "is a list"),
    "from_cu_seqlens of floats": (lambda: masks.from_cu_seqlens(LENGTHS.float()), "float32"),
    "from_cu_seqlens of booleans": (lambda: masks.from_cu_seqlens(LENGTHS.bool()), "bool"),
    "from_cu_seqlens of rank 2": (lambda: masks.from_cu_seqlens(LENGTHS[None]), r"\[1, 3\]"),
    "from_cu_seqlens of nothing": (lambda: masks.from_cu_seqlens(LENGTHS[:0]), r"\[0\]"),
    "from_cu_seqlens from 1 on": (lambda: masks.from_cu_seqlens(LENGTHS + 1), "doesn't start at 0"),
    "from_cu_seqlens that falls": (
        lambda: masks.from_cu_seqlens(torch.tensor([0, 5, 3])),
        "or falls",
    ),
    "from_cu_seqlens of other counts": (
        lambda: masks.from_cu_seqlens(LENGTHS, LENGTHS[:2]),
        "2 sequences of queries and 1 of keys",
    ),
    "from_cu_seqlens elsewhere": (
        lambda: masks.from_cu_seqlens(LENGTHS, LENGTHS.to("meta")),
        "is on meta",
    ),
    "from_cu_seqlens with total_q": (
        lambda: masks.from_cu_seqlens(LENGTHS, total_q=8.0),  # type: ignore[arg-type]
        "total_q is 8.0",
    ),
    "from_cu_seqlens with a window of three": (
        lambda: masks.from_cu_seqlens(LENGTHS, window=(1, 2, 3)),  # type: ignore[arg-type]
        r"window is \(1, 2, 3\)",
    ),
    "from_seqlens of floats": (
        lambda: masks.from_seqlens([3.5]),  # type: ignore[list-item]
        "no integer: 3.5",
    ),
    "from_seqlens below 0": (lambda: masks.from_seqlens([3, -1]), "negative: -1"),
    "from_slices of floats": (lambda: masks.from_slices([[0.0, 2]], [[0, 2]]), "float32"),  # type: ignore[list-item]
    "from_slices of triples": (lambda: masks.from_slices([[0, 2, 3]], [[0, 2]]), r"\[1, 3\]"),
    "from_slices with float types": (
        lambda: masks.from_slices([[0, 2]], [[0, 2]], torch.tensor([0.5])),
        "mask_types must be integers",
    ),
    "from_slices with an unknown type": (
        lambda: masks.from_slices([[0, 2]], [[0, 2]], [7]),
        r"mask_types holds \[7\]",
    ),
    "from_block_mask of a tensor": (
        lambda: masks.from_block_mask(torch.ones(2, 2)),
        "not a BlockMask",
    ),
    "from_xformers of a namesake": (
        lambda: masks.from_xformers(type("BlockDiagonalMask", (SimpleNamespace,), {})()),
        "isn't like xFormers'",
    ),
    "from_xformers of a local namesake": (
        lambda: masks.from_xformers(type("LocalAttentionFromBottomRightMask", (), {})()),
        "no attribute 'window_left'",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_forms_that_mean_nothing(name: str) -> None:
    make, problem = BROKEN[name]
    with pytest.raises(fg.FlashgenError, match=problem) as error:
        make()
    assert "instead: " in str(error.value), "it says what to write"


def attend(mask: Any, q_len: int, kv_len: int, **arguments: Any) -> torch.Tensor:
    q, k = torch.zeros(2, 2, q_len, 16), torch.zeros(2, 2, kv_len, 16)
    return fg.Attention(mask)(q, k, k, **arguments)


def dense(rows: int, columns: int) -> Any:
    return masks.from_dense(torch.ones(rows, columns, dtype=torch.bool))


MISFITS = {
    "a matrix of fewer rows": (dense(7, 8), "Sq = 7 and Skv = 8"),
    "a matrix of more rows": (dense(9, 8), "Sq = 9 and Skv = 8"),
    "a matrix of fewer columns": (dense(8, 7), "Sq = 8 and Skv = 7"),
    "a matrix of more columns": (dense(8, 9), "Sq = 8 and Skv = 9"),
    "vectors of more keys": (masks.from_flashmask(integers(1, 1, 9, 1), True), "9 keys"),
    "vectors of fewer keys": (masks.from_flashmask(integers(1, 1, 7, 1), True), "7 keys"),
    "vectors of another batch": (masks.from_flashmask(integers(3, 1, 8, 1), True), "2 or 1"),
    "vectors of other heads": (masks.from_flashmask(integers(1, 3, 8, 1), True), "2 or 1"),
    "slices of more rows": (masks.from_slices([[0, 9]], [[0, 8]]), "data for 9 queries"),
    "sequences of more rows": (masks.from_cu_seqlens(LENGTHS + LENGTHS), "data for 16 queries"),
    "lengths of more rows": (masks.from_seqlens([9], causal=True), "data for 9 queries"),
    "windows of more rows": (masks.from_seqlens([9], window=3), "data for 9 queries"),
    "sides of more rows": (masks.from_seqlens([9], window=(1, 1)), "data for 9 queries"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_forms_for_other_lengths(name: str) -> None:
    mask, problem = MISFITS[name]
    with pytest.raises(fg.FlashgenError, match=problem):
        attend(mask, 8, 8)
    with pytest.raises(fg.FlashgenError, match=problem):
        mask.dense(8, 8, batch=2, heads=2)
    with pytest.raises(fg.FlashgenError, match=problem):
        attend(pickle.loads(pickle.dumps(mask)) & masks.causal, 8, 8)


@pytest.mark.parametrize(
    "mask",
    [
        masks.top_left,
        masks.bottom_right,
        dense(4, 8),
        masks.from_flashmask(integers(1, 1, 8, 1), True),
        masks.from_slices([[0, 4]], [[0, 8]]),
        masks.from_seqlens([4], [8]),
        masks.from_seqlens([4], [8], window=2),
    ],
    ids=str,
)
def test_rows_that_arent_the_last(mask: Any) -> None:
    """Their rows count from the first query given, which the default offset alone tells."""
    assert attend(mask, 4, 8).shape == (2, 2, 4, 16)
    assert attend(mask, 4, 8, q_offset=4).shape == (2, 2, 4, 16)
    with pytest.raises(fg.FlashgenError, match="rows count from the first query given"):
        attend(mask, 4, 8, q_offset=0)


def test_fewer_rows_than_queries_see_nothing() -> None:
    """Rows behind the last slice and sequence have no key: that is how they are padded."""
    assert not masks.from_slices([[0, 4]], [[0, 8]]).dense(6, 8)[0, 0, 4:].any()
    assert not masks.from_seqlens([4]).dense(6, 6)[0, 0, 4:].any()
