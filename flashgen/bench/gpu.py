"""Beside FlexAttention (Triton) on a GPU over ten masks; on two of them beside cuDNN and FA3."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch

from .. import api
from ..errors import FlashgenError
from .measure import Times, check_equal
from .peers import Peer, dense_peers
from .table import Row, print_markdown, rows_of
from .work import LENGTHS, SHAPES, TOKENS, Work, masks, works

# Operations of a backward, in those of a forward: five products for two.
_BACKWARD = 2.5


@dataclass(frozen=True)
class GpuRow(Row):
    """Also TFLOP/s of the pairs that attend, and their share of the rate of a matrix product that
    was measured in the same run."""

    forward_tflops: float
    backward_tflops: float | None
    forward_share: float
    backward_share: float | None


def title() -> str:
    """What was measured, and on what."""
    import triton

    return (
        f"B={TOKENS} / S, bf16, {torch.cuda.get_device_name()}, torch {torch.__version__}, "
        f"triton {triton.__version__}; schedules reused"
    )


def run(rounds: int, only: str = "", lengths: Sequence[int] = LENGTHS) -> list[GpuRow]:
    """Forward and backward times, each row shown when it is there.

    `only`: the part of the work whose name, `D=64 S=8192 causal`, contains this text.
    Raises AssertionError where results differ, after the others were measured."""
    if not torch.cuda.is_available():
        raise FlashgenError("there is no GPU", call="flashgen bench gpu", write="bench cpu")
    work = works(only, lengths)
    if not work:
        raise FlashgenError(f"no work is called so: {only}", write="--only 'D=128 S=8192 causal'")
    compile_ahead(work)
    rate = matmul_rate()
    rows: list[GpuRow] = []
    failures: list[str] = []
    for one in work:
        try:
            times = _measure(one, rounds)
        except AssertionError as error:
            failures.append(f"{one}: {error}")
            print(failures[-1], file=sys.stderr, flush=True)
            continue
        for row in rows_with_rates(rows_of(str(one), times), one.flops(), rate):
            backward = "" if row.backward_ms is None else f"{row.backward_ms:8.3f}"
            line = f"{row.work:32} {row.backend:16} {row.forward_ms:8.3f} {backward}"
            print(line.rstrip(), file=sys.stderr, flush=True)
            rows.append(row)
    if failures:
        show(rows)
        raise AssertionError("\n".join(failures))
    return rows


def compile_ahead(work: Sequence[Work]) -> None:
    """Fill the caches on disk in parallel processes: compiling takes longer than measuring.

    What fails here fails again when it is measured, and is reported then."""
    count = min(12, os.cpu_count() or 1, len(work))
    with ProcessPoolExecutor(count, get_context("spawn")) as pool:
        for done in [pool.submit(_run_once, one) for one in work]:
            done.exception()


def _run_once(work: Work) -> None:
    tensors = work.tensors()
    for attend in _sides(work, tensors).values():
        attend(*tensors).sum().backward()


def _sides(work: Work, tensors: list[torch.Tensor]) -> dict[str, Callable[..., Any]]:
    """FlexAttention and flashgen, with the same mask."""
    mask = masks(work.length, tensors[0].device)[work.mask]
    return {"FlexAttention": flex_attention(mask, tensors), "flashgen": flashgen(mask, tensors)}


def matmul_rate() -> float:
    """FLOP/s of a square product of bf16 matrices, as cuBLAS does it here."""
    size = 8192
    x, y = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / (1e-3 * milliseconds(lambda: x @ y))


def rows_with_rates(rows: Iterable[Row], flops: float, rate: float) -> Iterator[GpuRow]:
    """`flops` of a forward; `rate` of a matrix product, FLOP/s."""
    for row in rows:
        forward = flops / row.forward_ms / 1e9
        backward = None if row.backward_ms is None else _BACKWARD * flops / row.backward_ms / 1e9
        share = None if backward is None else backward / (rate / 1e12)
        yield GpuRow(
            *(row.work, row.backend, row.forward_ms, row.backward_ms, row.forward_ratio, row.ratio),
            *(forward, backward, forward / (rate / 1e12), share),
        )


def show(rows: Sequence[GpuRow]) -> None:
    """Print the rows as Markdown: ms, TFLOP/s, the share of a matrix product's rate, and how many
    times as fast as the first backend, in both directions."""
    print(f"{title()}\n")
    one = ("ms", "TFLOP/s", "of matmul", "x")
    bases: dict[str, GpuRow] = {}
    lines = []
    for row in rows:
        base = bases.setdefault(row.work, row)
        forward = _cells(row.forward_ms, row.forward_tflops, row.forward_share, base.forward_ms)
        backward = _cells(
            row.backward_ms, row.backward_tflops, row.backward_share, base.backward_ms
        )
        lines.append((row.work, row.backend, *forward, *backward))
    print_markdown(("work", "backend", *one, *(f"backward {x}" for x in one)), lines)


def _cells(
    ms: float | None, tflops: float | None, share: float | None, base: float | None
) -> tuple[str, str, str, str]:
    if ms is None or tflops is None or share is None:
        return "", "", "", ""
    return f"{ms:.3f}", f"{tflops:.0f}", f"{share:.2f}", "" if base is None else f"{base / ms:.2f}"


def summary(rows: Sequence[Row]) -> str:
    """How many times faster than FlexAttention flashgen is, for each head dimension: the geometric
    mean, and the least."""
    flex = {row.work: row for row in rows if row.backend == "FlexAttention"}
    lines = []
    for head_dim, _ in SHAPES:
        pairs = [
            (row, flex[row.work])
            for row in rows
            if row.backend == "flashgen" and row.work.startswith(f"D={head_dim} ")
        ]
        if pairs:
            forward = [theirs.forward_ms / ours.forward_ms for ours, theirs in pairs]
            backward = [
                (theirs.backward_ms or 0) / (ours.backward_ms or 1) for ours, theirs in pairs
            ]
            parts = (_told("forward", forward), _told("backward", backward))
            lines.append(f"D={head_dim}, geometric means: {'; '.join(parts)}")
    return "\n".join(lines)


def _backward(row: Row) -> float:
    assert row.backward_ms is not None
    return row.backward_ms


def _told(direction: str, ratios: Sequence[float]) -> str:
    mean = statistics.geometric_mean(ratios)
    return f"{direction} {mean:.3f}, least {min(ratios):.3f}"


def _measure(work: Work, rounds: int) -> dict[str, Times]:
    """Medians of interleaved rounds, after outputs and gradients were found to agree; and what else
    computes the same."""
    tensors = work.tensors()
    sides = _sides(work, tensors)
    grad = torch.randn_like(tensors[0])
    check_equal({n: partial(f, *tensors) for n, f in sides.items()}, tensors, grad, 4e-2)
    peers: dict[str, Peer] = {}
    if work.mask in ("full", "causal"):
        peers = dense_peers(work.mask == "causal", tensors)
    forwards: dict[str, Callable[[], Any]] = {n: partial(f, *tensors) for n, f in sides.items()}
    forwards |= {name: peer.forward for name, peer in peers.items()}
    trained = sides | {n: p.with_gradients for n, p in peers.items() if p.with_gradients}
    forward: dict[str, list[float]] = {name: [] for name in forwards}
    backward: dict[str, list[float]] = {name: [] for name in trained}
    for _ in range(rounds):
        for name, run_forward in forwards.items():
            forward[name].append(milliseconds(run_forward))
            if name in trained:
                out = trained[name](*tensors)
                again = partial(torch.autograd.grad, out, tensors, grad, retain_graph=True)
                backward[name].append(milliseconds(again))
    return {
        name: Times(
            statistics.median(forward[name]),
            statistics.median(backward[name]) if name in backward else None,
        )
        for name in forwards
    }


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
