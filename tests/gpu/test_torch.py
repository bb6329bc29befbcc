"""Attention as PyTorch operations on a GPU: CUDA graphs, torch.compile, the operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen import masks

pytestmark = pytest.mark.gpu
B, H, S, D = 2, 4, 384, 64


@fg.attention(mask=masks.causal_document)
def biased(score, h, q_idx, kv_idx, slope: fg.Tensor):
    return score + slope[h] * (kv_idx - q_idx)


def inputs() -> list[torch.Tensor]:
    shape = (B, H, S, D)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    return [x.requires_grad_() for x in (q, k, v, torch.rand(H, device="cuda"))]


def documents() -> torch.Tensor:
    return torch.randint(0, 5, (B, S), device="cuda").sort(-1).values.int()


def step(q: Any, k: Any, v: Any, slope: Any, doc: Any, grad: Any) -> tuple[torch.Tensor, ...]:
    out = biased(q, k, v, doc=doc, slope=slope)
    return (out, *torch.autograd.grad(out, (q, k, v, slope), grad))


def close(mine: Any, right: Any) -> None:
    for x, y in zip(mine, right, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-2)


def test_a_graph_replays_with_new_data() -> None:
    """Planning, forward and backward are captured: no host synchronisation is in them."""
    static, doc, grad = inputs(), documents(), torch.randn(B, H, S, D, device="cuda").bfloat16()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(*static, doc, grad)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(*static, doc, grad)
    for _ in range(3):
        fresh, fresh_doc = inputs(), documents()
        with torch.no_grad():
            for old, new in zip((*static, doc), (*fresh, fresh_doc), strict=True):
                old.copy_(new)
        graph.replay()
        close(captured, step(*fresh, fresh_doc, grad))


def test_what_a_graph_makes_is_not_kept_for_eager_calls() -> None:
    attend = fg.Attention(mask=masks.sliding_window(window=50))
    q, k, v, _ = inputs()
    attend.schedule(q[..., :128, :], k[..., :128, :])
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        # Compiled before, by another length: nothing is kept for this one.
        attend(q[..., :128, :], k[..., :128, :], v[..., :128, :])
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            captured = attend(q, k, v)
        eager = attend(q, k, v)
        graph.replay()
        torch.cuda.synchronize()
    right = fg.Attention(mask=masks.sliding_window(window=50))(q, k, v)
    torch.testing.assert_close(eager, right)
    torch.testing.assert_close(captured, right)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_graphs_of_any_length(backend: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    run = torch.compile(
        lambda q, k, v, slope, doc: biased(biased(q, k, v, doc=doc, slope=slope), k, v, doc=doc,
                                           slope=slope) + 1,
        fullgraph=True, dynamic=True, backend=backend,
    )  # fmt: skip
    for length in (40, 130, 250, 384):
        full = inputs()
        q, k, v = (x.detach()[:, :, :length].contiguous().requires_grad_() for x in full[:3])
        slope, doc = full[3], documents()[:, :length].contiguous()
        grad = torch.randn_like(q)
        once = biased(q, k, v, doc=doc, slope=slope)
        right = biased(once, k, v, doc=doc, slope=slope) + 1
        out = run(q, k, v, slope, doc)
        wanted = torch.autograd.grad(right, (q, k, v, slope), grad)
        close((out, *torch.autograd.grad(out, (q, k, v, slope), grad)), (right, *wanted))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_operators_with_a_schedule_from_outside() -> None:
    q, k, v, slope = inputs()
    doc, grad = documents(), torch.randn(B, H, S, D, device="cuda").bfloat16()
    schedule = biased.schedule(q, k, v, doc=doc)
    run = torch.compile(
        lambda q, k, v, slope, doc, s: biased(q, k, v, doc=doc, slope=slope, schedule=s),
        fullgraph=True, dynamic=True, backend="aot_eager",
    )  # fmt: skip
    out = run(q, k, v, slope, doc, schedule)
    got = (out, *torch.autograd.grad(out, (q, k, v, slope), grad))
    close(got, step(q, k, v, slope, doc, grad))


def test_autocast() -> None:
    x = torch.randn(B, H, S, D, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = fg.Attention(mask=masks.causal)(x, x, x)
    assert out.dtype == torch.bfloat16
