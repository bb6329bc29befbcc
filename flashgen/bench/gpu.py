"""Beside FlexAttention (Triton) on a GPU over ten masks; on two of them beside cuDNN and FA3."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch

from .. import api
from ..errors import FlashgenError
from .measure import Times, check_equal
from .peers import dense_peers
from .table import Row, print_table, rows_of

LENGTH, BATCH = 8192, 4
SHAPES = ((128, 16), (64, 32))
WINDOW, GLOBALS = 1024, 256
# Head dimension, query heads, and the name of a mask.
Work = tuple[int, int, str]


def title() -> str:
    """What was measured, and on what."""
    import triton

    return (
        f"B={BATCH}, S={LENGTH}, bf16, {torch.cuda.get_device_name()}, torch {torch.__version__}, "
        f"triton {triton.__version__}; schedules reused"
    )


def masks(length: int, device: torch.device) -> dict[str, Any]:
    """Ten masks as FlexAttention functions; both sides get the very same ones."""
    generator = torch.Generator().manual_seed(0)
    documents = max(4, length // 1024)
    cuts = torch.randperm(length - 1, generator=generator)[: documents - 1].sort().values + 1
    edges = torch.cat([torch.zeros(1, dtype=torch.long), cuts, torch.tensor([length])])
    positions = torch.arange(length)
    ids = torch.bucketize(positions, edges[1:], right=True)
    start, end = edges[ids].int().to(device), edges[ids + 1].int().to(device)
    doc, here = ids.int().to(device), positions.int().to(device)
    prefix = start + (end - start) // 3
    answer = ((here - prefix).clamp(min=0) * 3 // (end - prefix).clamp(min=1)).int()
    question = here < prefix
    uniform = torch.rand(length, generator=generator).to(device)
    evicted = (here + 1 + (uniform * (length - here)).int()).int()
    third = length // 3
    return {
        "full": None,
        "causal": lambda b, h, q, k: q >= k,
        "sliding window": lambda b, h, q, k: (q >= k) & (q - k < WINDOW),
        "document": lambda b, h, q, k: doc[q] == doc[k],
        "causal document": lambda b, h, q, k: (doc[q] == doc[k]) & (q >= k),
        "prefix LM": lambda b, h, q, k: (k < third) | (q >= k),
        "prefix document": lambda b, h, q, k: (doc[q] == doc[k]) & ((k < prefix[k]) | (q >= k)),
        "global + window": lambda b, h, q, k: (q >= k) & ((q - k < WINDOW) | (k < GLOBALS)),
        "shared question": lambda b, h, q, k: (
            (doc[q] == doc[k]) & (q >= k) & (question[k] | (answer[q] == answer[k]))
        ),
        "random eviction": lambda b, h, q, k: (q >= k) & (q < evicted[k]),
    }


def run(rounds: int) -> list[Row]:
    """Forward and backward times, each row shown when it is there.

    Raises AssertionError where results differ, after the others were measured."""
    if not torch.cuda.is_available():
        raise FlashgenError("there is no GPU", call="flashgen bench gpu", write="bench cpu")
    names = masks(16, torch.device("cpu"))
    work = [(head_dim, heads, name) for head_dim, heads in SHAPES for name in names]
    compile_ahead(work)
    rows: list[Row] = []
    failures: list[str] = []
    for head_dim, heads, name in work:
        try:
            times = _measure(head_dim, heads, name, rounds)
        except AssertionError as error:
            failures.append(f"D={head_dim} {name}: {error}")
            print(failures[-1], file=sys.stderr, flush=True)
            continue
        for row in rows_of(f"D={head_dim} {name}", times):
            backward = "" if row.backward_ms is None else f"{row.backward_ms:8.3f}"
            line = f"{row.work:24} {row.backend:16} {row.forward_ms:8.3f} {backward}"
            print(line.rstrip(), file=sys.stderr, flush=True)
            rows.append(row)
    if failures:
        print_table(rows, title())
        raise AssertionError("\n".join(failures))
    return rows


def compile_ahead(work: list[Work]) -> None:
    """Fill the caches on disk in parallel processes: compiling takes longer than measuring.

    What fails here fails again when it is measured, and is reported then."""
    count = min(12, os.cpu_count() or 1, len(work))
    with ProcessPoolExecutor(count, get_context("spawn")) as pool:
        for done in [pool.submit(_run_once, *item) for item in work]:
            done.exception()


def _run_once(head_dim: int, heads: int, name: str) -> None:
    tensors = _tensors(head_dim, heads)
    for attend in _sides(name, tensors).values():
        attend(*tensors).sum().backward()


def _tensors(head_dim: int, heads: int) -> list[torch.Tensor]:
    shape = (BATCH, heads, LENGTH, head_dim)
    return [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]


def _sides(name: str, tensors: list[torch.Tensor]) -> dict[str, Callable[..., Any]]:
    """FlexAttention and flashgen, with the same mask."""
    mask = masks(LENGTH, tensors[0].device)[name]
    return {"FlexAttention": flex_attention(mask, tensors), "flashgen": flashgen(mask, tensors)}


def summary(rows: list[Row]) -> str:
    """How many times faster than FlexAttention flashgen is, for each head dimension: the geometric
    mean, and the least."""
    flex = {row.work: row for row in rows if row.backend == "FlexAttention"}
    lines = []
    for head_dim, _ in SHAPES:
        ours = [r for r in rows if r.backend == "flashgen" and r.work.startswith(f"D={head_dim} ")]
        forward = [flex[row.work].forward_ms / row.forward_ms for row in ours]
        backward = [_backward(flex[row.work]) / _backward(row) for row in ours]
        parts = [
            f"{name} {statistics.geometric_mean(ratios):.3f}, least {min(ratios):.3f}"
            for name, ratios in (("forward", forward), ("backward", backward))
            if ratios
        ]
        lines.append(f"D={head_dim}, geometric means: {'; '.join(parts)}")
    return "\n".join(lines)


def _backward(row: Row) -> float:
    assert row.backward_ms is not None
    return row.backward_ms


def _measure(head_dim: int, heads: int, name: str, rounds: int) -> dict[str, Times]:
    """Medians of interleaved rounds, after outputs and gradients were found to agree; and the
    forward of what else computes it."""
    tensors = _tensors(head_dim, heads)
    sides = _sides(name, tensors)
    grad = torch.randn_like(tensors[0])
    check_equal({n: partial(f, *tensors) for n, f in sides.items()}, tensors, grad, 4e-2)
    forward: dict[str, list[float]] = {name: [] for name in sides}
    backward: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for side, attend in sides.items():
            forward[side].append(milliseconds(partial(attend, *tensors)))
            again = partial(torch.autograd.grad, attend(*tensors), tensors, grad, retain_graph=True)
            backward[side].append(milliseconds(again))
    times = {
        side: Times(statistics.median(forward[side]), statistics.median(backward[side]))
        for side in sides
    }
    if name in ("full", "causal"):
        peers = dense_peers(name == "causal", tensors)
        times |= {peer: Times(milliseconds(attend)) for peer, attend in peers.items()}
    return times


def flex_attention(mask: Any, tensors: list[torch.Tensor]) -> Callable[..., Any]:
    """FlexAttention compiled for static shapes, with its block mask made before."""
    from torch.nn.attention.flex_attention import create_block_mask
    from torch.nn.attention.flex_attention import flex_attention as attend

    length, device = tensors[0].shape[2], tensors[0].device
    block_mask = None
    if mask is not None:
        block_mask = create_block_mask(mask, 1, 1, length, length, device=str(device))
    torch._dynamo.reset()
    # Timing the backward alone runs it several times over one forward.
    torch._functorch.config.donated_buffer = False
    compiled = torch.compile(attend, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=block_mask)


def flashgen(mask: Any, tensors: list[torch.Tensor]) -> Callable[..., Any]:
    """flashgen with its schedule made before."""
    attend = api.Attention(mask=mask)
    schedule = attend.schedule(*tensors)
    return lambda q, k, v: attend(q, k, v, schedule=schedule)


def milliseconds(work: Callable[[], Any]) -> float:
    """The median of many runs, timed by events, the cache flushed between them."""
    from triton.testing import do_bench

    return float(do_bench(work, warmup=10, rep=40, return_mode="median"))
