"""Calls of one kind after another: from the third on they are played from a record."""

from __future__ import annotations

from typing import Any

import dense
import pytest
import torch

import flashgen as fg
from flashgen import masks
from flashgen.records.play import Play

PLAYS: list[int] = []


@pytest.fixture(autouse=True)
def plays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many launches and operations each record had that was played."""
    PLAYS.clear()
    play = Play.__call__

    def counted(self: Play, tensors: Any) -> Any:
        PLAYS.append(len(self.records))
        return play(self, tensors)

    monkeypatch.setattr(Play, "__call__", counted)
    return PLAYS


def tensors() -> list[torch.Tensor]:
    shapes = ((1, 2, 33, 16), (1, 1, 33, 16), (1, 1, 33, 16))
    return [torch.randn(s, requires_grad=True) for s in shapes]


@fg.attention(mask=masks.causal_document, sinks=True)
def learned(score: Any, h: Any, q_idx: Any, kv_idx: Any, slope: fg.Tensor) -> Any:
    return score + slope[h] * (kv_idx - q_idx)


def test_training(plays: list[int]) -> None:
    """Forward and backward of a score function with gradients of data and sinks."""
    attend = learned
    for turn in range(6):
        inputs = tensors()
        slope, sinks = (torch.rand(2).requires_grad_() for _ in range(2))
        doc = torch.randint(0, 4, (1, 33)).sort(-1).values.int()
        # The gradient of another layout is another record.
        grad = (
            torch.randn(1, 2, 33, 16)
            if turn != 3
            else torch.randn(16, 33, 2, 1).permute(3, 2, 1, 0)
        )
        every = (*inputs, slope, sinks)
        given = {"doc": doc, "slope": slope, "sinks": sinks}
        out = attend(*inputs, **given, backend="interpret")
        right = attend(*inputs, **given, backend="cpu")
        torch.testing.assert_close(out, right, rtol=0, atol=2e-5)
        got = torch.autograd.grad(out, every, grad)
        wanted = torch.autograd.grad(right, every, grad)
        for mine, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=2e-4)
    # Planning reads on the host here: what is recorded is the parts around it, forward in turns 3,
    # 4, 5 and backward in 4 and 5.
    assert len(plays) == 5
    assert max(plays) > 2


def test_what_needs_no_gradient_costs_none(plays: list[int]) -> None:
    attend = fg.Attention(masks.causal)
    for _ in range(4):
        q, k, v = (x.detach() for x in tensors())
        q.requires_grad_()
        out = attend(q, k, v, backend="interpret")
        (grad,) = torch.autograd.grad(out.sum(), (q,))
        (right,) = torch.autograd.grad(attend(q, k, v, backend="cpu").sum(), (q,))
        torch.testing.assert_close(grad, right, rtol=0, atol=1e-4)
    assert len(plays) == 4


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_decoding_with_and_without_a_schedule(plays: list[int], kv_heads: int) -> None:
    attend = fg.Attention(masks.sliding_window(window=30))
    for turn in range(4):
        q = torch.randn(2, 4, 1, 16)
        k, v = (torch.randn(2, kv_heads, 70, 16) for _ in range(2))
        schedule = attend.schedule(q, k, v) if turn % 2 else None
        with torch.no_grad():
            out = attend(q, k, v, schedule=schedule, backend="interpret")
        seen = torch.arange(70) > 69 - 30
        right, _ = dense.attention(q, k, v, seen[None])
        torch.testing.assert_close(out.double(), right, rtol=0, atol=1e-5)
    assert plays


def test_layouts_that_change_from_call_to_call() -> None:
    """Strides and alignment decide what a kernel is told: each has its own record."""
    attend = fg.Attention(masks.causal)
    for turn in range(9):
        q, k, v = (x.detach() for x in tensors())
        if turn % 3 == 1:
            q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        if turn % 3 == 2:
            q = torch.cat([torch.zeros(1), q.flatten()])[1:].view(q.shape)
        out = attend(q, k, v, backend="interpret")
        torch.testing.assert_close(out, attend(q, k, v, backend="cpu"), rtol=0, atol=2e-5)


def test_one_tensor_in_several_roles() -> None:
    """A record of self-attention over one tensor must not serve three, nor the other way round."""
    attend = fg.Attention(masks.causal)
    for turn in range(8):
        shape = (1, 2, 20, 16)
        given = [torch.randn(shape) for _ in range(3)]
        if turn % 3 == 0:
            given = [given[0]] * 3
        if turn % 3 == 1:
            given[2] = given[1]
        out = attend(*given, backend="interpret")
        torch.testing.assert_close(out, attend(*given, backend="cpu"), rtol=0, atol=2e-5)


def test_a_record_after_a_change_of_settings() -> None:
    attend, q = fg.Attention(masks.causal), torch.randn(1, 1, 20, 16)
    k, v = torch.randn_like(q), torch.randn_like(q)
    for turn in range(6):
        leaf = q.clone().requires_grad_()
        torch.use_deterministic_algorithms(turn % 2 == 1)
        try:
            (grad,) = torch.autograd.grad(attend(leaf, k, v, backend="interpret").sum(), (leaf,))
        finally:
            torch.use_deterministic_algorithms(False)
        (right,) = torch.autograd.grad(attend(leaf, k, v, backend="cpu").sum(), (leaf,))
        torch.testing.assert_close(grad, right, rtol=0, atol=1e-4)


def test_a_call_without_gradients_is_one_record(plays: list[int]) -> None:
    attend = fg.Attention(masks.causal)
    for turn in range(6):
        q, k, v = (x.detach() for x in tensors())
        plays.clear()
        out, lse = attend(q, k, v, backend="interpret", return_lse=True)
        assert turn < 3 or plays == [1]
        right = attend(q, k, v, backend="cpu", return_lse=True)
        torch.testing.assert_close((out, lse), right, rtol=0, atol=2e-5)
        torch.testing.assert_close(attend(q, k, v, backend="interpret"), out, rtol=0, atol=0)


@pytest.mark.parametrize("needs", [False, True], ids=["alone", "with gradients"])
def test_schedules_like_the_one_before(plays: list[int], needs: bool) -> None:
    """Each is read by its own call; one that differs is refused as ever."""
    attend = fg.Attention(masks.causal_document)
    for turn in range(6):
        q, k, v = (x.detach().requires_grad_(needs) for x in tensors())
        doc = torch.randint(0, 4, (1, 33)).sort(-1).values.int()
        schedule = attend.schedule(q, k, doc=doc)
        plays.clear()
        out = attend(q, k, v, doc=doc, schedule=schedule, backend="interpret")
        assert turn < 3 or len(plays) == 1
        right = attend(q, k, v, doc=doc, backend="cpu")
        torch.testing.assert_close(out, right, rtol=0, atol=2e-5)
    other = fg.Attention(masks.document).schedule(q, k, doc=doc)
    with pytest.raises(fg.FlashgenError, match="another one, causal_document"):
        attend(q, k, v, doc=doc, schedule=other, backend="interpret")


def test_gradients_switched_on_and_off() -> None:
    attend = fg.Attention(masks.causal)
    for turn in range(9):
        q, k, v = tensors()
        with torch.set_grad_enabled(turn % 3 != 0):
            out = attend(q, k, v, backend="interpret")
            right = attend(q, k, v, backend="cpu")
        assert out.requires_grad == (turn % 3 != 0)
        torch.testing.assert_close(out, right, rtol=0, atol=2e-5)
        if turn % 3:
            (mine,) = torch.autograd.grad(out.sum(), k)
            torch.testing.assert_close(mine, torch.autograd.grad(right.sum(), k)[0])


def test_a_number_that_is_replaced_between_calls(plays: list[int]) -> None:
    """A record is of what a function captured when it was made."""
    most = 5

    def near(q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx <= q_idx) & (q_idx - kv_idx < most)

    attend = fg.Attention(fg.mask(near))
    for turn in range(12):
        most = 5 if turn < 5 else 9
        q, k, v = (x.detach() for x in tensors())
        out = attend(q, k, v, backend="interpret")
        gap = torch.arange(33)[:, None] - torch.arange(33)
        right, _ = dense.attention(q, k, v, (gap >= 0) & (gap < most))
        torch.testing.assert_close(out.double(), right, rtol=0, atol=1e-5)
    assert len(plays) >= 5
