"""Launches of packed and paged calls without a GPU: each kernel is given what it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stored import Sequences
from test_hopper_launch import launched

import flashgen as fg
from flashgen import masks, ops
from flashgen.call import Call
from flashgen.plan import compact, plan

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


def _arguments(call: Call, keys: str) -> dict[str, Any]:
    """How the call's tensors lie, as it was given."""
    packing, pages = call.geometry.packing, call.geometry.pages
    assert packing is not None
    found: dict[str, Any] = {"cu_seqlens_q": packing.cu_q}
    if pages is None:
        return {**found, "cu_seqlens_kv": packing.cu_kv}
    return {**found, "page_table": pages.table, "kv_lens": call.geometry.kv_lens}


def test_hopper_leaves_them_to_portable(launched: list[str]) -> None:
    from flashgen.launch.hopper_forward import obstacle

    call, _ = call_of("causal", "packed")
    problem = obstacle(torch.device("cuda"), torch.bfloat16, geometry=call.geometry)
    assert "dense tensors, not packed or paged" in problem
