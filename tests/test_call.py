"""Calls at the edges of what fits: sizes of one and zero, offsets and lengths of every form."""

from __future__ import annotations

import inspect
import math
from typing import Any

import dense
import numpy as np
import pytest
import torch

import flashgen as fg
from flashgen import masks
from flashgen.geometry import MAX_POSITION
from flashgen.spec.program import CALL_ARGUMENTS


def tensors(B: int = 2, H: int = 2, S: int = 9, T: int = 9, D: int = 8, Hkv: int = 2) -> Any:
    return [torch.randn(B, h, n, D) for h, n in ((H, S), (Hkv, T), (Hkv, T))]


def refused(work: Any, *words: str) -> None:
    with pytest.raises(fg.FlashgenError) as caught:
        work()
    for word in (*words, "instead: "):
        assert word in str(caught.value)


OFFSETS = {
    "an int": (4, [4, 4]),
    "negative": (-7, [-7, -7]),
    "0-d": (torch.tensor(4), [4, 4]),
    "[1]": (torch.tensor([4]), [4, 4]),
    "[B]": (torch.tensor([-3, 8]), [-3, 8]),
    "int8": (torch.tensor([-3, 8], dtype=torch.int8), [-3, 8]),
    "a view": (torch.tensor([[-3, 0], [8, 1]])[:, 0], [-3, 8]),
    "expanded": (torch.tensor([5]).expand(2), [5, 5]),
    "default": (None, [11, 11]),
}


@pytest.mark.parametrize("name", OFFSETS)
def test_offsets(name: str) -> None:
    offset, first = OFFSETS[name]
    q, k, v = tensors(T=20)
    rows = torch.arange(9)[:, None] + torch.tensor(first).reshape(-1, 1, 1, 1)
    out, lse = fg.Attention(masks.causal)(q, k, v, q_offset=offset, return_lse=True)
    right, right_lse = dense.attention(q, k, v, torch.arange(20) <= rows)
    torch.testing.assert_close(out.double(), right, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), right_lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("offset", "problem"),
    [
        (True, "is a bool"),
        ("3", "is a str"),
        (torch.tensor([1.0, 2.0]), "has dtype torch.float32"),
        (torch.tensor([True, False]), "has dtype torch.bool"),
        (torch.tensor([[1], [2]]), "has shape [2, 1]"),
        (torch.zeros(3, dtype=torch.int32), "has shape [3]"),
        (torch.zeros(2, dtype=torch.int32, device="meta"), "is on meta"),
        (2**40, "is 1099511627776, beyond 2^30"),
    ],
)
def test_offsets_that_are_none(offset: Any, problem: str) -> None:
    refused(lambda: fg.Attention()(*tensors(), q_offset=offset), f"q_offset {problem}", "[2]")


def test_an_offset_may_be_any_integer() -> None:
    q, k, v = tensors()
    attend = fg.Attention(masks.causal)
    assert torch.equal(attend(q, k, v, q_offset=np.int64(5)), attend(q, k, v, q_offset=5))


def test_positions_end_at_2_to_the_30() -> None:
    last = MAX_POSITION - 9
    refused(lambda: fg.Attention()(*tensors(), q_offset=last + 1), "the last query is position")
    q, k, v = tensors()
    far = fg.Attention(masks.sliding_window)
    assert (far(q, k, v, q_offset=last, window=MAX_POSITION) != 0).any()
    assert (far(q, k, v, q_offset=last, window=100) == 0).all()


@pytest.mark.parametrize(
    "lens",
    [[3, 4], torch.ones(3, dtype=torch.int32), torch.ones(2), torch.tensor([-1, 3]), 4],
    ids=str,
)
def test_lengths_that_are_none(lens: Any) -> None:
    refused(lambda: fg.Attention()(*tensors(), kv_lens=lens), "kv_lens", "from 0 to 9")


def test_lengths_change_where_queries_are() -> None:
    q, k, v = tensors(S=3, T=20)
    lens = torch.tensor([20, 5], dtype=torch.int64)
    rows = torch.arange(3)[:, None] + (lens - 3).reshape(-1, 1, 1, 1)
    allowed = (torch.arange(20) <= rows) & (torch.arange(20) < lens.reshape(-1, 1, 1, 1))
    out = fg.Attention(masks.causal)(q, k, v, kv_lens=lens)
    right = dense.attention(q, k, v, allowed)[0]
    torch.testing.assert_close(out.double(), right, rtol=0, atol=1e-5)


@pytest.mark.parametrize("scale", ["0.5", None, True, math.inf, -math.inf, torch.ones(1), [1.0]])
def test_scales(scale: Any) -> None:
    if scale is None:
        q, k, v = tensors()
        same = fg.Attention()(q, k, v), fg.Attention()(q, k, v, scale=8**-0.5)
        assert torch.equal(*same)
        return
    refused(lambda: fg.Attention()(*tensors(), scale=scale), "scale is")


@pytest.mark.parametrize(
    "sinks", [[1.0, 2.0], 1.0, torch.ones(2, dtype=torch.int32), torch.ones(3)]
)
def test_sinks_that_are_none(sinks: Any) -> None:
    refused(lambda: fg.Attention(sinks=True)(*tensors(), sinks=sinks), "a float tensor [2]")


@pytest.mark.parametrize("block", [1.5, "16", (16,), (16, 24), (0, 16), 512, [16, 16, 16], None])
def test_block_sizes(block: Any) -> None:
    q, k, v = tensors()
    if block is None:
        assert fg.Attention().schedule(q, k, v, block_size=[16, 32]).block_size == (16, 32)
        return
    refused(lambda: fg.Attention().schedule(q, k, v, block_size=block), "block_size is")


def test_data_of_size_one_stands_for_all() -> None:
    q, k, v = tensors(B=2, H=4, Hkv=2, S=20, T=20)

    @fg.mask
    def head_window(b, h, h_kv, q_idx, kv_idx, x: fg.Tensor, y: fg.Tensor, z: fg.Tensor):
        return q_idx - kv_idx < x[b] + y[h] + z[h_kv]

    one = torch.tensor([3])
    attend = fg.Attention(head_window)
    out = attend(q, k, v, x=one, y=one, z=one)
    full = attend(q, k, v, x=one.repeat(2), y=one.repeat(4), z=one.repeat(2))
    torch.testing.assert_close(out, full)
    single = attend.schedule(q, k, v, x=one, y=one, z=one)
    assert single.states.shape[:2] == (1, 1)
    refused(lambda: attend(q, k, v, x=one, y=one.repeat(3), z=one), "y has shape [3]", "4 or 1")


def test_data_with_nothing_in_them() -> None:
    @fg.mask
    def far(q_idx, kv_idx, table: fg.Tensor):
        return table[q_idx - kv_idx] > 0

    nothing = torch.zeros(0)
    refused(lambda: fg.Attention(far)(*tensors(), table=nothing), "table has shape [0]")
    out = fg.Attention(far)(*tensors(T=0), table=nothing)
    assert (out == 0).all()


def test_data_that_must_reach_the_last_position() -> None:
    q, k, v = tensors(S=4, T=9)
    attend = fg.Attention(masks.document)
    ids = torch.zeros(1, 30, dtype=torch.int32)
    attend(q, k, v, doc=ids[:, :9])
    attend(q, k, v, doc=ids[:, :24], q_offset=20)
    refused(lambda: attend(q, k, v, doc=ids[:, :23], q_offset=20), "at least 24", "absolute")
    # Only the device knows how far these reach: indices are clamped.
    attend(q, k, v, doc=ids[:, :9], q_offset=torch.tensor(20))


def test_data_that_nobody_has_to_give() -> None:
    """The schedule of a call needs no data of its score function."""

    @fg.attention(mask=masks.document, softcap=3.0, sinks=True)
    def warm(score, h, slope: fg.Tensor, heat: float):
        return score * heat + slope[h]

    q, k, v = tensors()
    doc = torch.zeros(1, 9, dtype=torch.int32)
    made = warm.schedule(q, k, v, doc=doc)
    data = {"doc": doc, "slope": torch.ones(2), "heat": 0.5, "sinks": torch.zeros(2)}
    assert torch.equal(warm(q, k, v, schedule=made, **data), warm(q, k, v, **data))
    refused(lambda: warm(q, k, v, **{**data, "heat": None}), "heat must be a Python float")


def test_flex_positions() -> None:
    """With an offset of 0 a FlexAttention function means what it means there."""
    q, k, v = tensors(S=4, T=9)
    attend = fg.Attention(lambda b, h, i, j: j <= i)
    refused(lambda: attend(q, k, v), "FlexAttention function", "Sq=4 and Skv=9", "q_offset=0")
    refused(lambda: attend(k, k, v, kv_lens=torch.tensor([9, 3])), "FlexAttention function")
    right = dense.attention(q, k, v, torch.arange(9) <= torch.arange(4)[:, None])[0]
    torch.testing.assert_close(attend(q, k, v, q_offset=0).double(), right, rtol=0, atol=1e-5)


def test_a_symbol_in_the_place_of_another_is_no_flex_function() -> None:
    """An annotation forgotten must not bind q_idx to the batch."""
    swapped = lambda q_idx, kv_idx, doc, b: doc[b, q_idx] == doc[b, kv_idx]  # noqa: E731
    refused(lambda: fg.mask(swapped), "what the parameter doc of this mask is", "doc: fg.Tensor")
    named = fg.mask(lambda b, h, q_idx, k_idx: k_idx <= q_idx)
    assert torch.equal(named.dense(5, 5)[0, 0], torch.ones(5, 5, dtype=torch.bool).tril())


SCHEDULES = {
    "mask": ({"mask": masks.top_left}, {}, "made for the mask causal"),
    "queries": ({}, {"S": 8}, "Sq = 9, and this call has 8"),
    "keys": ({}, {"T": 8}, "Skv = 9"),
    "batch": ({"mask": masks.document}, {"B": 3}, "batch size 2"),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_that_do_not_fit(name: str) -> None:
    declared, sizes, problem = SCHEDULES[name]
    mask = masks.document if name == "batch" else masks.causal
    doc = {"doc": torch.zeros(2, 9)} if name == "batch" else {}
    made = fg.Attention(mask).schedule(*tensors(), **doc)
    attend = fg.Attention(**{"mask": mask, **declared})
    doc = {"doc": torch.zeros(3, 9)} if name == "batch" else {}
    refused(lambda: attend(*tensors(**sizes), schedule=made, **doc), problem, "attend.schedule(")


def test_schedules_of_other_heads_lengths_and_offsets() -> None:
    @fg.mask
    def by_head(h, h_kv, q_idx, kv_idx):
        return q_idx - kv_idx < 3 * h + h_kv

    attend = fg.Attention(by_head)
    made = attend.schedule(*tensors(H=4, Hkv=2))
    attend(*tensors(H=4, Hkv=2), schedule=made)
    refused(lambda: attend(*tensors(H=4, Hkv=4), schedule=made), "groups of 2", "has 1")
    refused(lambda: attend(*tensors(H=2, Hkv=1), schedule=made), "heads 4")
    causal, lens = fg.Attention(masks.causal), torch.tensor([9, 4])
    made = causal.schedule(*tensors(), kv_lens=lens)
    refused(lambda: causal(*tensors(), schedule=made), "kv_lens [9, 4]", "has None")
    other = {"kv_lens": torch.tensor([9, 5])}
    refused(lambda: causal(*tensors(), schedule=made, **other), "kv_lens [9, 4]", "[9, 5]")
    made = causal.schedule(*tensors(), q_offset=torch.tensor([1, 2]))
    refused(lambda: causal(*tensors(), schedule=made, q_offset=torch.tensor([1, 3])), "[1, 3]")
    refused(lambda: causal(*tensors(), schedule=made.to_dense()), "schedule is a Tensor")
    places = torch.tensor([1, 2])
    made = causal.schedule(*tensors(), q_offset=places)
    places[0] = 7
    refused(lambda: causal(*tensors(), schedule=made, q_offset=places), "[1, 2]", "[7, 2]")


DOC = (torch.arange(40) // 7)[None].int()
ENDS = torch.tensor([0, 10, 40], dtype=torch.int32)
LENS = torch.tensor([30])
DEVICE_CALLS: dict[str, Any] = {
    "causal": lambda q: fg.Attention(masks.causal)(q, q, q),
    "offset": lambda q: fg.Attention(masks.causal)(q, q, q, q_offset=3),
    "document": lambda q: fg.Attention(masks.document)(q, q, q, doc=DOC),
    "lengths": lambda q: fg.Attention(masks.causal)(q, q, q, kv_lens=LENS),
    "dropout": lambda q: fg.Attention()(q, q, q, dropout_p=0.5, seed=1),
    "packed": lambda q: fg.Attention(masks.causal)(
        *[q[0].transpose(0, 1)] * 3, cu_seqlens_q=ENDS, cu_seqlens_kv=ENDS
    ),
}


@pytest.mark.parametrize("name", DEVICE_CALLS)
def test_where_new_tensors_lie_by_default_is_no_matter(name: str) -> None:
    q = torch.randn(1, 2, 40, 16)
    right = DEVICE_CALLS[name](q)
    with torch.device("meta"):
        found = DEVICE_CALLS[name](q.clone().requires_grad_())
        found.sum().backward()
    assert torch.equal(found, right)


def test_views_of_negated_numbers_are_what_they_stand_for() -> None:
    def seen(b: Any, kv_idx: Any, x: fg.Tensor) -> Any:
        return x[b, kv_idx] > 0

    q, grad, x = (
        torch.randn(shape, dtype=torch.cfloat).conj().imag
        for shape in ((1, 2, 20, 16), (1, 2, 20, 16), (1, 20))
    )
    sinks = torch.randn(2, dtype=torch.cfloat).conj().imag
    assert all(y.is_neg() for y in (q, grad, x, sinks))
    attend = fg.Attention(fg.mask(seen), sinks=True)

    def run(*given: torch.Tensor) -> list[torch.Tensor]:
        q, grad, x, sinks = given
        leaf = q.requires_grad_()
        out = attend(leaf, leaf, leaf, x=x, sinks=sinks)
        return [out, *torch.autograd.grad(out, leaf, grad)]

    for found, right in zip(
        run(q, grad, x, sinks), run(*(y.resolve_neg() for y in (q, grad, x, sinks))), strict=True
    ):
        torch.testing.assert_close(found, right)


def test_what_no_call_takes() -> None:
    q, *_ = tensors()
    refused(lambda: fg.Attention()(q, q, q, scale=10**400), "scale is inf")
    refused(lambda: fg.Attention(sinks=torch.zeros(2)), "sinks is [2] fp32", "sinks=True")
    refused(lambda: fg.Attention()(q, q, q, kv_lens=[3, 4]), "kv_lens is a list", "int32 or int64")
    wrong = torch.tensor([3, 4], dtype=torch.int16)
    refused(lambda: fg.Attention()(q, q, q, kv_lens=wrong), "kv_lens has dtype torch.int16")


def test_a_misspelt_argument_is_known() -> None:
    q, *_ = tensors()
    table = torch.zeros(2, 1, dtype=torch.int32)
    refused(lambda: fg.Attention()(q, q, q, page_tabel=table), "Did you mean `page_table`?")
    refused(lambda: fg.Attention(masks.document)(q, q, q, docs=table), "Did you mean `doc`?")
    refused(lambda: fg.Attention()(q, q, q, colour=3), "nothing is left to give")
    taken = inspect.signature(fg.Attention.__call__).parameters.values()
    assert set(CALL_ARGUMENTS) == {p.name for p in taken if p.kind is p.KEYWORD_ONLY}
