"""Decoding on a GPU: bytes a second beside SDPA, FlexAttention and a copy; what a step costs."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import flashgen as fg

from ..errors import FlashgenError
from . import flashinfer
from .measure import Times
from .peers import CUDNN, sdpa
from .table import Row, print_markdown, rows_of
from .turns import medians, milliseconds

DEVICE = "cuda"
HEADS, KV_HEADS, DIM = 32, 8, 128
SHAPES = ((1, 131072), (16, 8192), (64, 8192))
# FlexAttention compiles anew for each shape.
WITH_FLEX = (16, 8192)
PAGES = (1, 16, 64)
WINDOW = 4096
LATENT_BATCH, LATENT_LENGTH, LATENT_HEADS = 128, 4096, (16, 32, 64, 128)
SCALE = 192**-0.5
# Latent rows expanded for many queries: sequences, heads, positions.
PREFILL = (1, 128, 8192)
Work = Callable[[], Any]
# A folder beside the package, which a type checker doesn't find.
masks: Any = importlib.import_module("flashgen.masks")


@dataclass(frozen=True)
class ReadRow(Row):
    """A row that says how fast keys and values were read: TB/s, and beside a copy.

    `tflops`: of the products, where they may be what counts, else 0."""

    rate: float
    of_copy: float
    tflops: float

    def cells(self) -> tuple[str, ...]:
        tflops = f"{self.tflops:.0f}" if self.tflops else ""
        return (f"{self.rate:.2f}", f"{self.of_copy:.2f}", tflops)


def title() -> str:
    """What was measured, and on what."""
    import triton

    heads = f"1 query, Hq {HEADS} / Hkv {KV_HEADS}, D {DIM}; latent rows of 512 + 64"
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"{heads}; bf16, in CUDA graphs but for prefill, {machine}, triton {triton.__version__}"


def run(rounds: int) -> list[Row]:
    """Times, and how fast keys and values are read. Raises AssertionError where results differ."""
    if not torch.cuda.is_available():
        raise FlashgenError("there is no GPU", call="flashgen bench decode", write="bench cpu")
    torch.manual_seed(0)
    copy = _copy_rate(rounds)
    rows: list[Row] = [row for shape in SHAPES for row in _dense(*shape, copy, rounds)]
    rows += _window(copy, rounds)
    rows += _uneven(copy, rounds)
    rows += [row for heads in LATENT_HEADS for row in _latent(heads, copy, rounds)]
    return rows + _prefill(copy, rounds) + _host()


def show(rows: Sequence[Row]) -> None:
    """Print the rows as Markdown."""
    lines = []
    for row in rows:
        rates = row.cells() if isinstance(row, ReadRow) else ("", "", "")
        us, ratio = f"{1e3 * row.forward_ms:.1f}", f"{row.forward_ratio:.2f}"
        lines.append((row.work, row.backend, us, *rates, ratio))
    print(f"{title()}\n")
    print_markdown(("work", "", "us", "TB/s", "of a copy", "TFLOP/s", "x the first"), lines)


def _copy_rate(rounds: int) -> float:
    """Bytes that a kernel reads and writes in a millisecond; a graph's own copies are slower."""
    source, target = torch.zeros(2, 1 << 29, dtype=torch.bfloat16, device=DEVICE)
    ms = milliseconds(_captured(partial(torch.add, source, 1, out=target)), rounds)
    return float(2 * source.nbytes / ms)


def _dense(batch: int, length: int, copy: float, rounds: int) -> list[Row]:
    q, k, v = _tensors(batch, length)
    works: dict[str, Work] = {"SDPA": partial(_sdpa, q, k, v)}
    if (batch, length) == WITH_FLEX:
        works["FlexAttention"] = _flex(q, k, v)
    works["flashgen"] = partial(fg.Attention(), q, k, v)
    if (batch, length) == WITH_FLEX:
        paged = {size: _paged(q, k, v, size) for size in PAGES}
        works |= {f"flashgen, pages of {size}": work for size, work in paged.items()}
        works |= _flashinfer(paged[16], "pages of 16")[1]
    _check(works)
    return _rows(f"{batch} x {length}", works, 2 * k.nbytes, copy, rounds)


def _window(copy: float, rounds: int) -> list[Row]:
    q, k, v = _tensors(1, 131072)
    attend = fg.Attention(masks.sliding_window(window=WINDOW))
    last = [x[:, :, -WINDOW:].contiguous() for x in (k, v)]
    works: dict[str, Work] = {
        f"flashgen, {WINDOW} keys": partial(fg.Attention(), q, *last),
        "flashgen, the window": partial(attend, q, k, v, schedule=attend.schedule(q, k, v)),
    }
    _check(works)
    moved = 2 * last[0].nbytes
    return _rows(f"a window of {WINDOW} over 131072", works, moved, copy, rounds)


def _uneven(copy: float, rounds: int) -> list[Row]:
    """As many keys in sequences of equal lengths, of random ones, and with half of them in one."""
    batch, length = WITH_FLEX
    total = batch * length
    share = torch.rand(batch, generator=torch.Generator().manual_seed(1)) + 0.05
    half = torch.tensor([float(batch - 1), *[1.0] * (batch - 1)])
    lengths = {"equal": torch.ones(batch), "random": share, "one long": half}
    works: dict[str, Work] = {}
    for name, shares in lengths.items():
        ends = (total * shares.cumsum(0) / shares.sum()).round().int()
        lens = ends.diff(prepend=ends.new_zeros(1)).to(DEVICE)
        q, k, v = _tensors(batch, int(lens.max()))
        works[f"flashgen, {name} lengths"] = partial(fg.Attention(), q, k, v, kv_lens=lens)
    moved = 2 * total * KV_HEADS * DIM * k.itemsize
    return _rows(f"{batch} x {length} in all", works, moved, copy, rounds)


def _prefill(copy: float, rounds: int) -> list[Row]:
    batch, heads, length = PREFILL
    shapes = [(batch, heads, length, dim) for dim in (192, 192, 128)]
    q, k, v = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for shape in shapes)
    attend = fg.Attention(masks.causal)
    works: dict[str, Work] = {
        CUDNN: partial(sdpa, CUDNN, True, q, k, v),
        "flashgen": partial(attend, q, k, v, schedule=attend.schedule(q, k, v)),
    }
    _check(works)
    # Half of all pairs.
    flops = batch * heads * length**2 * (192 + 128)
    moved = q.nbytes + k.nbytes + 2 * v.nbytes
    name = f"prefill, causal, {batch} x {heads} x {length}, D 192 and 128"
    return _rows(name, works, moved, copy, rounds, flops, captured=False)


def _latent(heads: int, copy: float, rounds: int) -> list[Row]:
    q = torch.randn(LATENT_BATCH, heads, 1, 576, device=DEVICE, dtype=torch.bfloat16)
    kv = torch.randn(LATENT_BATCH, 1, LATENT_LENGTH, 576, device=DEVICE, dtype=torch.bfloat16)
    attend = fg.Attention(heads=fg.MLA(rank=512, rope=64))
    works: dict[str, Work] = {
        "flashgen": partial(attend, q, kv, scale=SCALE),
        "flashgen, portable": partial(attend, q, kv, scale=SCALE, backend="portable"),
    }
    _check(works)
    name = f"latent, {heads} heads, {LATENT_BATCH} x {LATENT_LENGTH}"
    flops = 2 * q[..., 0].numel() * LATENT_LENGTH * (576 + 512)
    return _rows(name, works, kv.nbytes, copy, rounds, flops)


def _host() -> list[Row]:
    """Time until a call returns, without a graph: the GPU has less to do than the host."""
    q, k, v = _tensors(2, 512)
    lens = torch.tensor([500, 512], dtype=torch.int32, device=DEVICE)
    causal = fg.Attention(masks.causal)
    schedule = causal.schedule(q, k, v, kv_lens=lens)
    works: dict[str, Work] = {
        "SDPA": partial(_sdpa, q, k, v),
        "flashgen": partial(fg.Attention(), q, k, v),
        "flashgen, causal, kv_lens": partial(causal, q, k, v, kv_lens=lens),
        "flashgen, a schedule given": partial(causal, q, k, v, kv_lens=lens, schedule=schedule),
        "flashgen, pages of 16": _paged(q, k, v, 16),
    }
    works |= _flashinfer(works["flashgen, pages of 16"], "pages of 16")[0]
    times = {name: Times(_host_ms(work)) for name, work in works.items()}
    return rows_of("host: 2 x 512", times)


def _tensors(batch: int, length: int) -> list[torch.Tensor]:
    shapes = ((batch, HEADS, 1, DIM), *[(batch, KV_HEADS, length, DIM)] * 2)
    return [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for shape in shapes]


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def _flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Work:
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, enable_gqa=True)


def _paged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, size: int) -> Work:
    """The same keys in a pool of pages in no order."""
    batch, heads, length, dim = k.shape
    order = torch.randperm(batch * length // size, device=DEVICE)
    table = order.reshape(batch, -1).int()
    pools = []
    for x in (k, v):
        pages = x.transpose(1, 2).reshape(-1, size, heads, dim)
        pools.append(torch.empty_like(pages).index_copy_(0, order, pages))
    lens = torch.full((batch,), length, dtype=torch.int32, device=DEVICE)
    return partial(fg.Attention(), q, *pools, page_table=table, kv_lens=lens)


def _flashinfer(paged: Any, name: str) -> tuple[dict[str, Work], dict[str, Work]]:
    """FlashInfer on what a call of flashgen with pages is given: a step planned and run, and run
    alone; nothing where it isn't installed."""
    q, *pools = paged.args
    given = paged.keywords
    found = flashinfer.decode(q, (pools[0], pools[1]), given["page_table"], given["kv_lens"])
    if found is None:
        return {}, {}
    plan, run = found

    def step() -> Any:
        plan()
        return run()

    return {f"FlashInfer, {name}, planned": step}, {f"FlashInfer, {name}": run}


def _check(works: Mapping[str, Work]) -> None:
    base: torch.Tensor | None = None
    for name, work in works.items():
        out = work()
        base = out if base is None else base
        torch.testing.assert_close(out, base, rtol=2e-2, atol=4e-3, msg=f"{name} differs")


def _rows(
    work: str,
    works: Mapping[str, Work],
    moved: int,
    copy: float,
    rounds: int,
    flops: int = 0,
    *,
    captured: bool = True,
) -> list[Row]:
    """Rows that say how fast `moved` bytes are read; `copy`: a copy's bytes in a ms; `flops`: of
    the products, where they may be what counts; `captured`: in a CUDA graph."""
    called = {name: _captured(one) for name, one in works.items()} if captured else works
    rows = rows_of(work, {name: Times(ms) for name, ms in medians(called, rounds).items()})
    found: list[Row] = []
    for row in rows:
        rate, products = moved / row.forward_ms, flops / row.forward_ms
        found.append(
            ReadRow(**asdict(row), rate=rate / 1e9, of_copy=rate / copy, tflops=products / 1e9)
        )
    return found


def _captured(work: Work) -> Work:
    """Replays of a call."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def _host_ms(work: Work, calls: int = 100) -> float:
    for _ in range(10):
        work()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        work()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return 1e3 * elapsed / calls
