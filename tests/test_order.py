"""Data in order: its ranges, the masks that they make cheaper, and that nothing else changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import bounded

import flashgen as fg
from flashgen import masks
from flashgen.expr import Env, Expr, evaluate
from flashgen.order import find_ranges, ordered, tables_of, with_tables


def agree(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each row, whether it is said to be in order, and whether its ranges are right."""
    found, n = find_ranges(x, x.ndim - 1), x.shape[-1]
    first, past = found.range
    position = torch.arange(n)
    same = x[..., :, None] == x[..., None, :]
    inside = (first[..., :, None] <= position) & (position < past[..., :, None])
    return found.order.bool(), (same == inside).flatten(-2).all(-1)


@pytest.mark.parametrize(
    ("row", "is_in_order"),
    [
        ([4], True),
        ([0, 0, 1, 1, 7], True),
        ([7, 3, 3, -1], True),
        ([0, 0, 1, 1, -1, -1], True),
        ([1, 1, 2, 2, 0, 0], True),
        ([3, 2, 5, 4], True),
        ([0, 1, 0], False),
        ([1, 0, 1], False),
        ([2, 3, 0, 2], False),
        ([0, 1, 2, 1, 0, 2], False),
        # Equal ones lie together, and that isn't found out.
        ([5, 5, 1, 1, 9, 9, 3], False),
    ],
)
def test_what_is_in_order(row: list[int], is_in_order: bool) -> None:
    said, right = agree(torch.tensor([row]))
    assert said.item() == is_in_order
    assert right.item() or not is_in_order


@bounded(200)
@given(st.lists(st.integers(-2, 3), min_size=1, max_size=7))
def test_what_is_said_to_be_in_order_is(row: list[int]) -> None:
    said, right = agree(torch.tensor([row, sorted(row)]))
    assert said[1]
    assert right[said].all()


def test_ranges_end_beyond_every_position() -> None:
    """Positions before a tensor and behind it read its ends."""
    first, past = find_ranges(torch.tensor([[0, 0, 1], [2, 2, 2]]), 1).range
    assert first.tolist() == [[-(2**30), -(2**30), 2], [-(2**30)] * 3]
    assert past.tolist() == [[2, 2, 2**30], [2**30] * 3]


def test_along_any_dimension_and_once_for_what_is_broadcast() -> None:
    x = torch.arange(12).reshape(4, 3) // 5
    along = find_ranges(x, 0)
    assert along.range.shape == (2, 4, 3)
    assert torch.equal(along.range, find_ranges(x.T.contiguous(), 1).range.mT)
    wide = find_ranges(torch.arange(5)[None].expand(1000, -1), 1)
    assert wide.range.shape == (2, 1000, 5)
    assert wide.order.shape == (1000,)
    assert wide.nbytes == 4 * (2 * 5 + 1)


def mask_of(mask: fg.Mask, length: int = 12, **data: object) -> Expr:
    q = torch.empty(2, 2, length, 16)
    found = fg.Attention(mask)._check_look(q, q, q, dict(data)).bound.spec.mask
    assert found is not None
    return found


DOC = torch.zeros(2, 12, dtype=torch.int64)


def test_masks_that_profit() -> None:
    form = ordered(mask_of(masks.causal_document, doc=DOC))
    assert str(form) == (
        "where equal doc lie together: (kv_idx <= q_idx) & ((doc_range_0[0, b, q_idx] <= kv_idx) "
        "& (kv_idx < doc_range_0[1, b, q_idx]))"
    )
    back = ordered(mask_of(masks.document, doc=DOC), "kv_idx")
    assert back is not None
    assert str(back.mask) == (
        "(doc_range_0[0, b, kv_idx] <= q_idx) & (q_idx < doc_range_0[1, b, kv_idx])"
    )
    assert str(back.holds) == "doc_order_0[b] != 0"
    # Answers are in no order, and are alternatives to what a key decides.
    both = {"doc": DOC, "answer": DOC}
    tables = tables_of(mask_of(masks.shared_question, **both))
    assert [table.tensor for table in tables] == ["doc"]
    assert tables_of(mask_of(masks.causal_blockwise, doc=DOC, test_doc=1))
    twice = masks.document & masks.document.rename(doc="segment")
    assert len(tables_of(mask_of(twice, doc=DOC, segment=DOC))) == 2
    assert len(tables_of(mask_of(masks.document & masks.causal_document, doc=DOC))) == 1


def test_masks_that_dont() -> None:
    def shifted(b, q_idx, kv_idx, doc: fg.Tensor):  # type: ignore[no-untyped-def]
        return doc[b, q_idx] == doc[b, kv_idx + 1]

    def differs(b, q_idx, kv_idx, doc: fg.Tensor):  # type: ignore[no-untyped-def]
        return doc[b, q_idx] != doc[b, kv_idx]

    def apart(q_idx, kv_idx, doc: fg.Tensor):  # type: ignore[no-untyped-def]
        return doc[0, q_idx] == doc[1, kv_idx]

    def floats(b, q_idx, kv_idx, doc: fg.Tensor):  # type: ignore[no-untyped-def]
        return doc[b, q_idx] * 1.0 == doc[b, kv_idx] * 1.0

    for function in (shifted, differs, apart, floats):
        assert tables_of(mask_of(fg.mask(function), doc=DOC)) == ()
        assert ordered(mask_of(fg.mask(function), doc=DOC)) is None
    assert tables_of(mask_of(~masks.document, doc=DOC)) == ()
    assert tables_of(mask_of(masks.document | masks.causal, doc=DOC)) == ()
    assert tables_of(None) == ()


@pytest.mark.parametrize("fixed", ["q_idx", "kv_idx"])
@pytest.mark.parametrize("offset", [-3, 0, 4])
@pytest.mark.parametrize("mask", [masks.document, masks.causal_document, masks.causal_blockwise])
def test_the_same_where_it_holds(mask: fg.Mask, offset: int, fixed: str) -> None:
    doc = torch.tensor(
        [[0, 0, 0, 2, 2, 3, 3, 3], [1, 1, 2, 2, 0, 0, 0, 0], [0, 1, 0, 1, 2, 2, 2, 2]]
    )
    q, k = torch.empty(3, 1, 8, 16), torch.empty(3, 1, 6, 16)
    data = {"doc": doc} | ({"test_doc": 2} if mask is masks.causal_blockwise else {})
    if offset > 0:
        data["doc"] = torch.nn.functional.pad(doc, (0, 4), value=5)
    bound = fg.Attention(mask)._check_look(q, k, k, {"q_offset": offset, **data}).bound
    form = ordered(bound.spec.mask, fixed)
    assert form is not None
    (table,) = form.tables
    ranges = find_ranges(bound.tensors[table.tensor], table.dim)
    tables = {table.range_name: ranges.range, table.order_name: ranges.order}
    index = {
        "b": torch.arange(3).reshape(-1, 1, 1, 1),
        "h": torch.zeros(1, dtype=torch.int64),
        "h_kv": torch.zeros(1, dtype=torch.int64),
        "q_idx": torch.arange(8)[:, None] + offset,
        "kv_idx": torch.arange(6),
        "q_len": torch.tensor(8),
        "kv_len": torch.tensor(6),
    }
    tensors = {**bound.tensors, **tables}
    general, cheaper, holds = (
        evaluate(expr, Env(index, dict(bound.scalars), tensors))
        for expr in (bound.spec.mask, form.mask, form.holds)
    )
    assert holds.flatten().tolist() == ([True, offset <= 0, False])
    assert torch.equal(general[holds.flatten()], cheaper[holds.flatten()])


def test_a_kernel_reads_the_tables_and_the_spec_stays() -> None:
    q = torch.empty(1, 1, 12, 16)
    spec = fg.Attention(masks.document)._check_look(q, q, q, {"doc": DOC[:1]}).bound.spec
    more = with_tables(spec)
    assert [str(t) for t in more.tensors[len(spec.tensors) :]] == [
        "doc_range_0: int32[3-d]",
        "doc_order_0: int32[1-d]",
    ]
    assert with_tables(more) == more
    assert more.mask_digest == spec.mask_digest


def test_the_schedule_finds_ranges_when_asked() -> None:
    q = torch.empty(2, 1, 12, 16)
    doc = torch.arange(12)[None] // 5
    schedule = fg.Attention(masks.document).schedule(q, q, doc=doc)
    before = schedule.nbytes
    (ranges,) = schedule.ranges
    assert ranges.order.tolist() == [1]
    assert schedule.nbytes == before + 4 * (2 * 12 + 1)
    assert fg.Attention(masks.causal).schedule(q, q).ranges == ()


def test_explain_says_so() -> None:
    q = torch.empty(2, 1, 12, 16)
    doc = torch.tensor([[0] * 6 + [1] * 6, [0, 1] * 6])
    text = fg.Attention(masks.causal_document).explain(q, q, q, doc=doc)
    assert "── data in order ──" in text
    assert "where equal doc lie together: (kv_idx <= q_idx) &" in text
    assert "doc: 1 of 2 in order" in text
    assert "data in order" not in fg.Attention(masks.causal).explain(q, q, q)
