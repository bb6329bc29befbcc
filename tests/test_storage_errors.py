"""Packed and paged input that doesn't fit: one clear error each, with advice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from stored import Sequences

import flashgen as fg
from flashgen import masks

ATTEND = fg.Attention(masks.causal)
SEQUENCES = Sequences.random([4, 9], [30, 9])


def packed(**changes: Any) -> Any:
    tensors, arguments = SEQUENCES.packed()
    return ATTEND(*tensors, **{**arguments, **changes})


def paged(**changes: Any) -> Any:
    keys, arguments = SEQUENCES.paged(8)
    return ATTEND(torch.randn(2, 2, 3, 16), *keys, **{**arguments, **changes})


def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def out_of_range() -> Any:
    keys, arguments = SEQUENCES.paged(8)
    arguments["page_table"][0, 3] = 99
    with fg.config.override(debug=True):
        return ATTEND(torch.randn(2, 2, 3, 16), *keys, **arguments)


def without_room() -> Any:
    keys = [torch.randn(5, 0, 1, 16) for _ in range(2)]
    table, lens = torch.zeros(1, 2, dtype=torch.int32), ints(0)
    return ATTEND(torch.randn(1, 2, 3, 16), *keys, page_table=table, kv_lens=lens)


DENSE = [torch.randn(2, 2, 9, 16) for _ in range(3)]
BAD: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "64-bit cu_seqlens": (
        lambda: packed(cu_seqlens_q=ints(0, 4, 13, dtype=torch.int64)),
        ["cu_seqlens_q has shape [3] and dtype torch.int64", "int32"],
    ),
    "float cu_seqlens": (
        lambda: packed(cu_seqlens_kv=torch.tensor([0.0, 30.0, 39.0])),
        ["cu_seqlens_kv", "dtype torch.float32"],
    ),
    "cu_seqlens of two dimensions": (
        lambda: packed(cu_seqlens_q=ints(0, 4, 13)[None]),
        ["cu_seqlens_q has shape [1, 3]", "[B + 1]"],
    ),
    "a list of cu_seqlens": (lambda: packed(cu_seqlens_q=[0, 4, 13]), ["cu_seqlens_q is a list"]),
    "no sequence's end": (
        lambda: packed(cu_seqlens_q=torch.zeros(0, dtype=torch.int32)),
        ["cu_seqlens_q has shape [0]"],
    ),
    "different numbers of sequences": (
        lambda: packed(cu_seqlens_q=ints(0, 4, 9, 13)),
        ["cu_seqlens_q has 4 elements, and cu_seqlens_kv 3"],
    ),
    "cu_seqlens that start late": (
        lambda: packed(cu_seqlens_q=ints(1, 4, 13)),
        ["cu_seqlens_q holds [1, 4, 13]", "ascending"],
    ),
    "cu_seqlens that descend": (
        lambda: packed(cu_seqlens_kv=ints(0, 30, 20)),
        ["cu_seqlens_kv holds [0, 30, 20]"],
    ),
    "cu_seqlens beyond the tensor": (
        lambda: packed(cu_seqlens_q=ints(0, 4, 14)),
        ["cu_seqlens_q holds [0, 4, 14]", "up to 13"],
    ),
    "a longest length that isn't": (
        lambda: packed(max_seqlen_q=8),
        ["max_seqlen_q is 8, and a sequence has 9"],
    ),
    "a longest length of keys that isn't": (
        lambda: packed(max_seqlen_kv=29),
        ["max_seqlen_kv is 29, and a sequence has 30"],
    ),
    "a longest length that is no number": (
        lambda: packed(max_seqlen_q=9.0),
        ["max_seqlen_q is 9.0", "a Python int"],
    ),
    "lengths of keys twice": (lambda: packed(kv_lens=ints(30, 9)), ["both say how many keys"]),
    "keys in two places": (
        lambda: paged(cu_seqlens_kv=ints(0, 3, 6)),
        ["cu_seqlens_kv and page_table both say where keys are"],
    ),
    "no lengths of keys": (lambda: packed(cu_seqlens_kv=None), ["neither cu_seqlens_kv nor"]),
    "no lengths of queries": (lambda: packed(cu_seqlens_q=None), ["cu_seqlens_q isn't"]),
    "dense tensors as packed": (
        lambda: ATTEND(*DENSE, cu_seqlens_q=ints(0, 2), cu_seqlens_kv=ints(0, 2)),
        ["q has 4 dimensions", "q [Tq, Hq, D]"],
    ),
    "packed tensors as dense": (lambda: ATTEND(*SEQUENCES.packed()[0]), ["q has 3 dimensions"]),
    "a longest length of dense tensors": (
        lambda: ATTEND(*DENSE, max_seqlen_q=9),
        ["max_seqlen_q is given"],
    ),
    "a layout without pages": (lambda: ATTEND(*DENSE, page_layout="NHD"), ["page_table isn't"]),
    "an unknown layout": (lambda: paged(page_layout="DHN"), ["no page_layout 'DHN'", "HND"]),
    "pages without lengths": (lambda: paged(kv_lens=None), ["kv_lens isn't"]),
    "lengths beyond the cache": (
        lambda: paged(kv_lens=ints(99, 9)),
        ["kv_lens holds [99, 9]", "from 0 to 48"],
    ),
    "a 64-bit table": (
        lambda: paged(page_table=torch.zeros(2, 4, dtype=torch.int64)),
        ["page_table has shape [2, 4] and dtype torch.int64", "int32"],
    ),
    "a table of one dimension": (
        lambda: paged(page_table=torch.zeros(4, dtype=torch.int32)),
        ["page_table has shape [4]"],
    ),
    "a table of another batch": (
        lambda: paged(page_table=torch.zeros(3, 4, dtype=torch.int32)),
        ["page_table has shape [3, 4]", "page_table [2, P]"],
    ),
    "a table that is a list": (lambda: paged(page_table=[[0, 1]]), ["page_table is a list"]),
    "a page that isn't": (out_of_range, ["page_table[0, 3] is 99", "has 30 keys", "pages from 0"]),
    "a page size of zero": (without_room, ["room for 0 keys", "positive integer"]),
    "the other layout": (
        lambda: ATTEND(
            torch.randn(2, 4, 3, 16),
            *(torch.randn(9, 2, 8, 16) for _ in range(2)),
            page_table=torch.zeros(2, 4, dtype=torch.int32),
            kv_lens=ints(30, 9),
        ),
        ["4 query heads can't share 8 heads of keys"],
    ),
    "a longest length of pages that isn't": (
        lambda: paged(max_seqlen_kv=29),
        ["max_seqlen_kv is 29, and a sequence has 30 keys"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_storage(name: str) -> None:
    work, words = BAD[name]
    with pytest.raises(fg.FlashgenError) as caught:
        work()
    message = str(caught.value)
    for word in (*words, "instead: ", "causal("):
        assert word in message, message


def test_a_page_size_is_no_argument() -> None:
    with pytest.raises(fg.FlashgenError, match="page_size"):
        paged(page_size=16)
