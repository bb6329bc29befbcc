"""Hopper's launches without a GPU: every kernel is given just the arguments that it declares."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

import flashgen as fg
from flashgen import launch, masks, ops
from flashgen.records.play import Play
from flashgen.records.tape import Tapes
from flashgen.tiling import target_of

H200 = target_of("cuda", 90)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that would run, once their arguments were bound."""
    names: list[str] = []

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        signature = inspect.signature(self.fn)
        known = {name: x for name, x in options.items() if name in signature.parameters}
        bound = signature.bind(*arguments, **known)
        assert set(options) - set(known) <= {"num_warps", "num_stages", "maxnreg"}
        assert not any(x is None for x in bound.arguments.values())
        names.append(self.fn.__name__)

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(launch, "current_target", lambda device: H200)
    return names


def _sinks(attention: fg.Attention) -> dict[str, Any]:
    return {"sinks": torch.zeros(4)} if attention._program.sinks else {}


@pytest.mark.parametrize(
    ("attention", "data"),
    [
        (fg.Attention(), {}),
        (fg.Attention(mask=masks.causal_document, softcap=20.0), {"doc": torch.zeros(2, 200)}),
        (fg.Attention(mask=masks.sliding_window, sinks=True), {"window": 30}),
    ],
    ids=["full", "documents", "window"],
)
@pytest.mark.parametrize("kv_lens", [None, torch.tensor([100, 150])], ids=["whole", "lens"])
def test_forward(launched: list[str], attention: Any, data: Any, kv_lens: Any) -> None:
    data = {n: x.int() if isinstance(x, torch.Tensor) else x for n, x in data.items()}
    q, k = (torch.randn(2, h, 200, 64, dtype=torch.bfloat16) for h in (4, 2))
    given = {"kv_lens": kv_lens, **data}
    call = attention._check_look(q, k, k, given | _sinks(attention))
    schedule = attention.schedule(q, k, block_size=(128, 128), **given)
    out, lse = run(call, schedule)
    assert out.shape == q.shape
    assert lse.shape == q.shape[:3]
    assert launched == ["attention_forward", "repair_rows"]


def run(call: Any, schedule: Any, deterministic: bool = False) -> Any:
    arguments = ops.arguments_of(call, schedule, deterministic)
    made = ops.engine("hopper", call.bound, **arguments)
    return ops.attention(made, call.q, call.k, call.v, call.sinks, call.data)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(
    ("attention", "data"),
    [
        (fg.Attention(), {}),
        (fg.Attention(mask=masks.causal_document, softcap=20.0), {"doc": torch.zeros(2, 200)}),
    ],
    ids=["full", "documents"],
)
def test_backward(launched: list[str], attention: Any, data: Any, kv_heads: int) -> None:
    data = {n: x.int() for n, x in data.items()}
    q, k = (torch.randn(2, h, 200, 64, dtype=torch.bfloat16) for h in (4, kv_heads))
    tensors = [x.requires_grad_() for x in (q, k, k.clone())]
    call = attention._check_look(*tensors, data)
    schedule = attention.schedule(q, k, block_size=(128, 128), **data)
    out, lse = run(call, schedule)
    launched.clear()
    grads = torch.autograd.grad((out.sum(), lse.sum()), tensors)
    assert [g.shape for g in grads] == [x.shape for x in tensors]
    sums = ["finish_queries", *["finish_keys"] * (kv_heads == 2)]
    repairs = ["attention_backward_q", "attention_backward_kv"]
    assert launched == ["prepare_rows", "attention_backward", *sums, *repairs]


@pytest.mark.parametrize("backend", ["hopper", "portable"])
@pytest.mark.parametrize("name", ["causal", "causal_document"])
def test_all_that_is_read_of_a_shared_schedule_is_known(
    launched: list[str], backend: str, name: str
) -> None:
    """What kernels read of a schedule beside that, no record could tell from another call's."""
    attention, tapes = fg.Attention(mask=getattr(masks, name)), Tapes()
    data = {"doc": torch.zeros(2, 200).int()} if name == "causal_document" else {}
    tensors = [torch.randn(2, 2, 200, 64).bfloat16().requires_grad_() for _ in range(3)]
    call = attention._check_look(*tensors, data)
    schedule = attention.schedule(*tensors, block_size=(128, 128), **data)
    arguments = ops.arguments_of(call, schedule, False)
    for _ in range(3):
        made = ops.engine(backend, call.bound, tapes=tapes, **arguments)
        out, _ = ops.attention(made, *tensors, None, call.data)
        torch.autograd.grad(out.sum(), tensors)
    assert [type(x) for x in tapes._plays.values()] == [Play, Play]


def test_gradients_in_a_fixed_order(launched: list[str]) -> None:
    attention = fg.Attention(mask=masks.causal)
    tensors = [torch.randn(1, 2, 200, 64).bfloat16().requires_grad_() for _ in range(3)]
    call = attention._check_look(*tensors, {})
    schedule = attention.schedule(*tensors, block_size=(128, 128))
    out, _ = run(call, schedule, deterministic=True)
    launched.clear()
    torch.autograd.grad(out.sum(), tensors)
    assert launched[:4] == ["prepare_rows", "order_visits", "attention_backward", "finish_queries"]
    assert launched[4:] == ["attention_backward_q", "attention_backward_kv"]


def test_tall_tiles(launched: list[str]) -> None:
    """Three warpgroups; the backward takes the same tiles."""
    attention = fg.Attention(mask=masks.causal)
    tensors = [torch.randn(1, 2, 400, 64).bfloat16().requires_grad_() for _ in range(3)]
    call = attention._check_look(*tensors, {})
    schedule = attention.schedule(*tensors, block_size=(192, 128))
    out, _ = run(call, schedule)
    torch.autograd.grad(out.sum(), tensors)
    assert launched[:2] == ["attention_forward", "repair_rows"]
    assert "attention_backward" in launched


def test_row_blocks_that_are_shared(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Few row blocks of many tiles, on a GPU with many processors; such a call can be recorded."""
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    attention, tapes = fg.Attention(mask=masks.causal), Tapes()
    tensors = [torch.randn(1, 2, n, 64).bfloat16() for n in (200, 8192, 8192)]
    call = attention._check_look(*tensors, {})
    schedule = attention.schedule(*tensors, block_size=(128, 128))
    for invariant, kernels in ((False, ["merge"]), (True, [])):
        arguments = ops.arguments_of(call, schedule, False, invariant)
        for _ in range(2):
            launched.clear()
            ops.engine("hopper", call.bound, tapes=tapes, **arguments).forward(*tensors, None, [])
            assert launched == ["attention_forward", *kernels, "repair_rows"]
    assert [type(x) for x in tapes._plays.values()] == [Play, Play]
