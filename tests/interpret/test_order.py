"""Kernels on data in order, in no order, and on both in one batch: forward and backward."""

from __future__ import annotations

import pytest
import torch
from dense import attention as dense_attention

import flashgen as fg
from flashgen import masks, order, plan

LENGTH = 70


def documents(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    doc = torch.randint(0, 5, (2, LENGTH), generator=generator)
    if kind == "none in order":
        return doc
    doc = doc.sort(1).values
    if kind == "padded":
        doc[:, 55:] = -1
    elif kind == "one in order":
        doc[1] = torch.randint(0, 3, (LENGTH,), generator=generator)
    return doc


MASKS = {
    "document": masks.document,
    "causal_document": masks.causal_document,
    "window": masks.document & masks.sliding_window(window=20),
    "blockwise": masks.causal_blockwise(test_doc=3),
}


def by_formula(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor
) -> torch.Tensor:
    """One head of keys for all; every row sees itself."""
    s = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~allowed, -torch.inf)
    return torch.softmax(s, -1) @ v


@pytest.mark.parametrize("kind", ["all in order", "padded", "one in order", "none in order"])
@pytest.mark.parametrize("q_len", [LENGTH, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MASKS)
def test_results_and_gradients(name: str, q_len: int, kind: str) -> None:
    doc, mask = documents(kind), MASKS[name]
    generator = torch.Generator().manual_seed(q_len)
    shapes = [(2, 2, q_len, 16), (2, 1, LENGTH, 16), (2, 1, LENGTH, 16)]
    leaves = [
        torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes
    ]
    grad = torch.randn(shapes[0], dtype=torch.float64, generator=generator)
    attend = fg.Attention(mask)
    out = attend(*leaves, doc=doc, backend="interpret")
    dense = mask.dense(q_len, LENGTH, batch=2, doc=doc)
    expected = by_formula(*leaves, dense)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    found, right = (torch.autograd.grad(x, leaves, grad) for x in (out, expected))
    torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("shape", "dim"), [((3, 17), 1), ((1, 1100), 1), ((40,), 0), ((2, 3, 33), 2), ((33, 2), 0)]
)
@pytest.mark.parametrize("kind", ["random", "sorted", "rolled", "falling"])
def test_the_kernel_finds_the_same_ranges(shape: tuple[int, ...], dim: int, kind: str) -> None:
    x = torch.randint(0, 6, shape, generator=torch.Generator().manual_seed(len(shape)))
    if kind != "random":
        x = x.sort(dim, descending=kind == "falling").values
    if kind == "rolled":
        x = x.to(torch.int32).roll(5, dim)
    expected, found = order.find_ranges(x, dim), plan.find_ranges(x, dim)
    assert torch.equal(found.order, expected.order)
    held = expected.order.bool().unsqueeze(dim).expand(shape)
    assert torch.equal(found.range[:, held], expected.range[:, held])
    assert found.range.shape == expected.range.shape


def test_a_name_that_kernels_use() -> None:
    @fg.mask
    def named(b, q_idx, kv_idx, doc: fg.Tensor, doc_range_0: int, doc_order_0: fg.Tensor):
        return (doc[b, q_idx] == doc[b, kv_idx]) & (q_idx - kv_idx < doc_range_0 + doc_order_0[b])

    doc = documents("all in order")
    q = torch.randn(2, 1, LENGTH, 16, dtype=torch.float64)
    data = {"doc": doc, "doc_range_0": 5, "doc_order_0": torch.tensor([0, 9])}
    out = fg.Attention(named)(q, q, q, backend="interpret", **data)
    expected = dense_attention(q, q, q, named.dense(LENGTH, LENGTH, batch=2, **data))[0]
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
