"""Data in order on a GPU: its ranges, and the portable kernels' two forms of one mask."""

from __future__ import annotations

import pytest
import torch
from dense_checks import check_against_sdpa, inputs

import flashgen as fg
from flashgen import masks, order, plan

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ranges(dtype: torch.dtype) -> None:
    x = torch.randint(0, 40, (4, 5000), device="cuda", dtype=dtype)
    x[:2] = x[:2].sort(-1).values
    x[1, 4000:] = -1
    expected, found = order.find_ranges(x, 1), plan.find_ranges(x, 1)
    assert found.order.tolist() == expected.order.tolist() == [1, 1, 0, 0]
    assert torch.equal(found.range[:, :2], expected.range[:, :2])


def test_documents_in_order_and_in_none() -> None:
    """The same documents under other names are in no order: the other form, the same numbers."""
    length = 1000
    attend = fg.Attention(masks.causal_document)
    tensors = [x.requires_grad_() for x in inputs(2, 4, 2, length, length, 64, 64, torch.bfloat16)]
    ids = torch.randint(0, 6, (2, length), device="cuda").sort(-1).values
    ids[:, 900:] = -1
    names = torch.tensor([3, 0, 5, 1, 4, 2, 9], device="cuda")[ids]
    allowed = masks.causal_document.dense(length, length, batch=2, doc=ids)
    grad = torch.randn_like(tensors[0])
    results = {}
    for kind, doc in (("in order", ids), ("in none", names)):
        (ranges,) = attend.schedule(*tensors, doc=doc).ranges
        assert ranges.order.tolist() == [int(kind == "in order")] * 2
        check_against_sdpa(
            attend, [x.detach() for x in tensors], allowed, doc=doc, backend="portable"
        )
        out = attend(*tensors, doc=doc, backend="portable")
        results[kind] = (out, *torch.autograd.grad(out, tensors, grad))
    for mine, other in zip(results["in order"], results["in none"], strict=True):
        torch.testing.assert_close(mine, other)
