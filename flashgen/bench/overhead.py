"""Host time of a small eager call on a GPU, beside FlexAttention (compiled) and SDPA.

At B=1, S=128 kernels take microseconds: calls in a row, with one synchronisation at the end, take
what the host takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import flashgen as fg
from flashgen.masks.causality import causal  # type: ignore[import-not-found]
from flashgen.masks.documents import causal_document  # type: ignore[import-not-found]

from ..errors import FlashgenError
from .flex import count, flex_attention
from .measure import Times
from .table import Row, rows_of

HEADS, LENGTH, DIM, CALLS = 8, 128, 64, 200


def title() -> str:
    """What was measured, and on what."""
    name = torch.cuda.get_device_name()
    return f"host ms of a call, B=1 H={HEADS} S={LENGTH} D={DIM} bf16, {name}"


def run(rounds: int) -> list[Row]:
    """Medians of rounds of calls in a row; the sides take turns."""
    if not torch.cuda.is_available():
        raise FlashgenError("there is no GPU", call="flashgen bench overhead", write="bench cpu")
    shape = (1, HEADS, LENGTH, DIM)
    q, k, v = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    sides = _sides([q, k, v])
    grad = torch.randn_like(q)
    forward: dict[str, list[float]] = {name: [] for name in sides}
    both: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds + 1):
        for name, attend in sides.items():
            with torch.no_grad():
                forward[name].append(_host(partial(attend, q, k, v)))
            both[name].append(_host(partial(_both, attend, [q, k, v], grad)))
    medians = {
        n: (statistics.median(forward[n][1:]), statistics.median(both[n][1:])) for n in sides
    }
    return rows_of("one call", {n: Times(f, max(b - f, 0.0)) for n, (f, b) in medians.items()})


def _both(attend: Callable[..., Any], tensors: list[torch.Tensor], grad: torch.Tensor) -> None:
    torch.autograd.grad(attend(*tensors), tensors, grad)


def _sides(tensors: list[torch.Tensor]) -> dict[str, Callable[..., Any]]:
    doc = torch.arange(LENGTH, device="cuda", dtype=torch.int32)[None] // 40
    flat = doc[0]

    def mask(b, h, q, k):  # type: ignore[no-untyped-def]
        return (q >= k) & (flat[q] == flat[k])

    plain, packed = fg.Attention(mask=causal), fg.Attention(mask=causal_document)
    reused = packed.schedule(*tensors, doc=doc)
    return {
        "FlexAttention": flex_attention(mask, count(mask, 1, HEADS, LENGTH, doc.device)),
        "SDPA, causal": partial(F.scaled_dot_product_attention, is_causal=True),
        "flashgen, schedule given": partial(packed, doc=doc, schedule=reused),
        "flashgen, schedule kept": plain,
        "flashgen, schedule made": partial(packed, doc=doc),
    }


def _host(call: Callable[[], Any]) -> float:
    """Milliseconds a call."""
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / CALLS * 1e3
