"""`torch.func`: gradients of everything a call may have, and what there is no rule for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import flashgen as fg
from flashgen import FlashgenError, masks, transforms

B, H, S, D = 2, 2, 12, 8
LENS = torch.tensor([12, 5])
DOC = torch.tensor([0] * 7 + [1] * 5).repeat(B, 1)
STARTS = torch.tensor([0, 5, 12], dtype=torch.int32)
CAUSAL, DOCUMENTS = fg.Attention(masks.causal), fg.Attention(masks.causal_document)


def packed(x: torch.Tensor) -> torch.Tensor:
    return CAUSAL(*(x[0].transpose(0, 1),) * 3, cu_seqlens_q=STARTS, cu_seqlens_kv=STARTS)


def planned(x: torch.Tensor) -> torch.Tensor:
    schedule = DOCUMENTS.schedule(x, x, x, doc=DOC)
    return DOCUMENTS(x, x, x, doc=DOC, schedule=schedule)


CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "no data": lambda x: CAUSAL(x, x, x),
    "lengths": lambda x: CAUSAL(x, x, x, kv_lens=LENS + 0),
    "places": lambda x: CAUSAL(x, x, x, q_offset=LENS - 4),
    "packed": packed,
    "data": lambda x: DOCUMENTS(x, x, x, doc=DOC + 1),
    "a schedule made inside": planned,
}


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_those_of_autograd(name: str) -> None:
    run, x = CALLS[name], torch.randn(B, H, S, D)
    got = torch.func.grad(lambda x: run(x).square().sum())(x)
    leaf = x.clone().requires_grad_()
    torch.testing.assert_close(got, torch.autograd.grad(run(leaf).square().sum(), leaf)[0])


def test_nothing_outlives_a_transform_in_its_wrapper() -> None:
    attend, x = fg.Attention(masks.causal), torch.randn(B, H, S, D)
    torch.func.grad(lambda x: attend(x, x, x).sum())(x)
    (kept,) = attend._kept
    assert not torch._C._functorch.is_functorch_wrapped_tensor(kept.states)
    assert transforms.bare(kept.states) is kept.states


MAPPED = {
    "data": lambda: torch.vmap(lambda d: DOCUMENTS(*_ones(), doc=d))(DOC[None]),
    "lengths": lambda: torch.vmap(lambda n: CAUSAL(*_ones(), kv_lens=n))(LENS[None]),
    "places": lambda: torch.vmap(lambda n: CAUSAL(*_ones(), q_offset=n))(LENS[None]),
    "gradients": lambda: _batched_gradients(),
}


def _ones() -> list[torch.Tensor]:
    return [torch.ones(B, H, S, D)] * 3


def _batched_gradients() -> Any:
    x = torch.randn(B, H, S, D, requires_grad=True)
    grads = torch.randn(3, B, H, S, D)
    return torch.autograd.grad(CAUSAL(x, x, x), x, grads, is_grads_batched=True)


@pytest.mark.parametrize("name", MAPPED)
def test_what_is_mapped_says_so(name: str) -> None:
    with pytest.raises(FlashgenError, match=r"torch\.vmap"):
        MAPPED[name]()


class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_operators_have_no_rule_for_transforms() -> None:
    gradient = torch.func.grad(lambda x: CAUSAL(x, x, x).sum())
    with Watch(), pytest.raises(FlashgenError, match="where it is an operator"):
        gradient(torch.randn(B, H, S, D))
    with pytest.raises(Exception, match="in a graph attention is an operator"):
        torch.compile(gradient, backend="eager", fullgraph=True)(torch.randn(B, H, S, D))


def _paged() -> Any:
    q, pages = torch.ones(B, H, S, D, requires_grad=True), torch.ones(2, S, H, D)
    table, lens = torch.tensor([[0], [1]], dtype=torch.int32), LENS.int()
    return CAUSAL(q, pages, pages, page_table=table, kv_lens=lens).sum().backward()


def _twice() -> Any:
    x = torch.ones(B, H, S, D, requires_grad=True)
    (first,) = torch.autograd.grad(CAUSAL(x, x, x).sum(), x, create_graph=True)
    return torch.autograd.grad(first.sum(), x)


@pytest.mark.parametrize("work", [_paged, _twice, _batched_gradients, MAPPED["lengths"]])
def test_what_is_refused_late_restates_the_call(work: Callable[[], Any]) -> None:
    with pytest.raises(FlashgenError, match=r"^causal\(q=\[2, 2, 12, 8\] fp32, k=\[2, 2, 12, 8\]"):
        work()


def test_forward_derivatives_are_refused() -> None:
    x = torch.randn(B, H, S, D)
    with pytest.raises(FlashgenError, match=r"^causal\(q, k, v, ...\): a forward-mode derivative"):
        torch.func.jvp(lambda x: CAUSAL(x, x, x), (x,), (x,))


def _dual(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.randn(B, H, S, D)
    with forward_ad.dual_level():
        call(forward_ad.make_dual(x, x))


def _call(x: torch.Tensor) -> torch.Tensor:
    return CAUSAL(x, x, x)


class _Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _watched() -> None:
    with _Watching():
        _dual(_call)


@pytest.mark.parametrize(
    "work",
    [
        _watched,
        lambda: _dual(torch.compile(_call, backend="eager", fullgraph=True)),
        lambda: _dual(torch.compile(_call, backend="aot_eager", fullgraph=True)),
        lambda: torch.func.linearize(_call, torch.randn(B, H, S, D)),
    ],
    ids=("dispatch mode", "eager", "aot_eager", "linearize"),
)
def test_operators_refuse_forward_derivatives(work: Callable[[], Any]) -> None:
    """They would lose a tangent without a word."""
    with pytest.raises(FlashgenError, match=r"^causal\(q, k, v, ...\): a forward-mode derivative"):
        work()
