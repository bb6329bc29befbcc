"""Every mask, dense, against its handwritten oracle."""

from __future__ import annotations

import pytest
import torch
from cases import CASES, Case

from flashgen import masks

SHORT = (1, 7, 127, 128, 129)
each_case = pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])


def compare(case: Case, q_len: int, kv_len: int, batch: int = 2, heads: int = 2) -> None:
    generator = torch.Generator().manual_seed(q_len * 100_003 + kv_len)
    data = case.build(batch, heads, q_len, kv_len, generator)
    expected = case.expected(batch, heads, q_len, kv_len, data)
    shape = {"batch": batch, "heads": heads}
    bound = case.bound(data).dense(q_len, kv_len, **shape)
    assert torch.equal(bound.expand_as(expected), expected), (q_len, kv_len, data)
    if hasattr(case.mask, "dense"):
        given = case.mask.dense(q_len, kv_len, **shape, **data)
        assert torch.equal(given, bound)


@each_case
@pytest.mark.parametrize("n", SHORT)
def test_square(case: Case, n: int) -> None:
    compare(case, n, n)


@each_case
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 7), (1, 128), (3, 129), (64, 127), (127, 128)])
def test_fewer_queries_than_keys(case: Case, q_len: int, kv_len: int) -> None:
    compare(case, q_len, kv_len)


@each_case
@pytest.mark.parametrize(("q_len", "kv_len"), [(7, 1), (129, 127), (40, 7)])
def test_more_queries_than_keys(case: Case, q_len: int, kv_len: int) -> None:
    if not case.below_zero:
        pytest.skip("has no meaning for positions below 0")
    compare(case, q_len, kv_len)


@each_case
def test_last_rows_of_a_thousand(case: Case) -> None:
    compare(case, 29, 1000)


@pytest.mark.slow
@each_case
def test_thousand(case: Case) -> None:
    compare(case, 1000, 1000)


def test_every_mask_has_a_case() -> None:
    covered = " ".join(case.id for case in CASES)
    masks_here = [n for n in masks.__all__ if isinstance(getattr(masks, n), type(masks.causal))]
    indirect = {
        "dense_table": "from_dense",
        **{n: "from_seqlens" for n in masks_here if n.startswith("block_diagonal")},
    }
    assert [n for n in masks_here if indirect.get(n, n) not in covered] == []
