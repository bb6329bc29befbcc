"""Launches of packed and paged calls without a GPU: each kernel is given what it takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from stored import Sequences
from test_hopper_launch import launched, run

import flashgen as fg
from flashgen import launch, masks, ops
from flashgen.call import Call
from flashgen.calls.routes import tile_of
from flashgen.launch.hopper_forward import obstacle
from flashgen.plan import compact, plan
from flashgen.plan import queue as queue_by_kernel
from flashgen.tiling import target_of

__all__ = ["launched"]

CASES = {
    "full": (fg.Attention(), {}),
    "causal": (fg.Attention(masks.causal, softcap=20.0), {}),
    "window": (fg.Attention(masks.sliding_window, sinks=True), {"window": 30}),
    "documents": (fg.Attention(masks.causal_document), {"doc": torch.zeros(3, 300).int()}),
}


def call_of(name: str, keys: str, q_offset: Any = None) -> tuple[Call, list[torch.Tensor]]:
    attend, data = CASES[name]
    sequences = Sequences.random([70, 0, 130], [300, 5, 140], 4, 2, 64, 64, torch.bfloat16)
    (q, k, v), arguments = sequences.packed()
    if keys == "paged":
        (k, v), paged = sequences.paged(16)
        arguments = {**paged, "cu_seqlens_q": arguments["cu_seqlens_q"]}
    if attend._program.sinks:
        arguments["sinks"] = torch.zeros(4)
    tensors = [x.requires_grad_(keys == "packed") for x in (q, k, v)]
    arguments |= {"q_offset": q_offset, **data}
    return attend._check_look(*tensors, arguments), tensors


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("keys", ["packed", "paged"])
@pytest.mark.parametrize(
    "q_offset", [None, 3, torch.tensor([0, 1, 2])], ids=["last", "int", "each"]
)
def test_planning_forward_and_backward(
    launched: list[str], name: str, keys: str, q_offset: Any
) -> None:
    call, tensors = call_of(name, keys, q_offset)
    plan(call.bound, call.geometry, (128, 64), "auto")
    packing = call.geometry.packing
    assert packing is not None
    expected = ["compact"] if name == "full" else ["classify"]
    if name == "documents":
        expected = ["summarize", "classify"]
    assert launched == expected
    schedule = CASES[name][0].schedule
    made = schedule(
        *tensors, block_size=(64, 64), **_arguments(call, keys), **CASES[name][1], q_offset=q_offset
    )
    launched.clear()
    engine = ops.engine("portable", call.bound, **ops.arguments_of(call, made, False))
    out, lse = ops.attention(engine, call.q, call.k, call.v, call.sinks, call.data)
    assert out.shape == call.q.shape
    assert lse.shape == call.q.shape[:3]
    assert launched == ["attention_forward"]
    if keys == "packed":
        launched.clear()
        out.sum().backward()
        assert launched == ["prepare_rows", "attention_backward_q", "attention_backward_kv"]
        launched.clear()
        lens = (call.geometry.kv_len, call.geometry.kv_lens, (64, 64))
        compact(made.states, *lens, 5, by_key=True, packing=packing)
        assert launched == ["compact"]
        launched.clear()
        tiles = made.block_size
        for by_key, runs in ((False, made.kv_runs), (True, made.q_runs)):
            queue_by_kernel(runs.counts, packing, tiles, by_key)
        assert launched == ["queue", "queue"]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("q_offset", [None, torch.tensor([0, 1, 2])], ids=["last", "each"])
def test_on_hopper(launched: list[str], name: str, q_offset: Any) -> None:
    call, tensors = call_of(name, "packed", q_offset)
    given = {**_arguments(call, "packed"), **CASES[name][1], "q_offset": q_offset}
    made = CASES[name][0].schedule(*tensors, block_size=(192, 128), **given)
    out, lse = run(call, made)
    assert out.stride()[1:] == call.q.stride()[1:]
    assert lse.shape == call.q.shape[:3]
    assert launched == ["attention_forward", "repair_rows"]
    launched.clear()
    torch.autograd.grad(out.sum(), tensors)
    kernels = ["prepare_rows", "attention_backward", "finish_queries", "finish_keys"]
    assert launched == [*kernels, "attention_backward_q", "attention_backward_kv"]


def _arguments(call: Call, keys: str) -> dict[str, Any]:
    """How the call's tensors lie, as it was given."""
    packing, pages = call.geometry.packing, call.geometry.pages
    assert packing is not None
    found: dict[str, Any] = {"cu_seqlens_q": packing.cu_q}
    if pages is None:
        return {**found, "cu_seqlens_kv": packing.cu_kv}
    return {**found, "page_table": pages.table, "kv_lens": call.geometry.kv_lens}


@pytest.mark.parametrize(
    ("keys", "number", "why"),
    [
        ("paged", 8, "take pages of 16, 32, 64 and multiples of 128"),
        ("paged", 32, ""),
        ("paged", 384, ""),
        ("packed", 16, "at most 16 queries"),
        ("packed", 17, ""),
    ],
)
def test_what_hopper_leaves_to_portable(
    monkeypatch: pytest.MonkeyPatch, keys: str, number: int, why: str
) -> None:
    """`number`: keys of a page, or the most queries."""
    monkeypatch.setattr(launch, "current_target", lambda device: target_of("cuda", 90))
    call, _ = call_of("causal", keys)
    pages = call.geometry.pages
    if pages is None:
        geometry = replace(call.geometry, q_len=number)
    else:
        geometry = replace(call.geometry, pages=replace(pages, size=number))
    found = obstacle(torch.device("cuda"), torch.bfloat16, geometry=geometry)
    assert (why in found) if why else not found


def test_tiles_of_packed_sequences(launched: list[str]) -> None:
    """Those of any length are of 128 queries: a new length must find the same binary."""
    call, _ = call_of("causal", "packed")
    assert tile_of(call, "hopper") == (128, 128)
    assert not launched


def test_gradients_of_packed_outputs_are_views() -> None:
    """A result that was indexed would have its gradient copied into zeros."""
    _, tensors = call_of("causal", "packed")
    ends = torch.tensor([0, 70, 200], dtype=torch.int32)
    sequences = [x[:200] for x in tensors]
    out = CASES["causal"][0](*sequences, cu_seqlens_q=ends, cu_seqlens_kv=ends)
    assert out.grad_fn is not None
    assert out.grad_fn.next_functions[0][0].name() == "SqueezeBackward1"
