"""Ten masks on a GPU, beside FlexAttention and the hand-written kernels that are installed."""

from __future__ import annotations

import sys
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import api
from ..errors import FlashgenError
from . import peers
from .compare import geometric_means, matrix
from .flex import Counted, count, flex_attention
from .measure import Times
from .sides import Side, differences, times
from .table import Differs, Row, print_markdown, rows_of
from .turns import milliseconds
from .work import LENGTHS, TOKENS, Work, masks, works
from .workers import in_turns, told

OURS = "flashgen"
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


@dataclass
class Prepared:
    """What computes a piece of work, compiled; pairs that attend; who fails: peers, and flashgen,
    which may not."""

    work: Any
    sides: dict[str, Side]
    counted: Counted
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def run_once(self, tensors: Sequence[torch.Tensor]) -> None:
        """Compile, in both directions. What fails is left out."""
        taken = []
        for name, side in list(self.sides.items()):
            start = time.perf_counter()
            try:
                side.results(tensors, tensors[0])
            except Exception as error:
                told_of = self.wrong if name.startswith(OURS) else self.failed
                told_of.append(f"{name} fails: {told(error)}")
                del self.sides[name]
            taken.append(f"{name} {time.perf_counter() - start:.1f} s")
            torch.cuda.empty_cache()
        print(f"{self.work} compiled: {', '.join(taken)}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Measured:
    """Times of the sides of a piece of work, the operations of a forward, which peers failed, and
    what is wrong: results that differ, or flashgen's own failure."""

    times: Mapping[str, Times]
    flops: float
    failed: Sequence[str]
    wrong: Sequence[str]


def title() -> str:
    """What was measured, and on what."""
    return f"B={TOKENS} / S, bf16, {machine()}; schedules reused"


def machine() -> str:
    """The GPU, and the versions of what runs on it."""
    import triton

    name = torch.cuda.get_device_name()
    return f"{name}, torch {torch.__version__}, triton {triton.__version__}"


def run(rounds: int, only: Sequence[str] = (), lengths: Sequence[int] = LENGTHS) -> list[GpuRow]:
    """Forward and backward times, each row shown when it is there.

    `only`: work whose name, `D=64 S=8192 causal`, contains one of these texts.
    Raises Differs where results do, after everything was measured."""
    need_gpu("gpu")
    chosen = works(only, lengths)
    for name, reason in peers.absent().items():
        print(f"not installed: {name} ({reason})", file=sys.stderr, flush=True)
    found = in_turns(chosen, prepare, measure, rounds, alike=alike)
    return gather((str(f.work), f.value, f.problem) for f in found)


def alike(work: Work) -> Hashable:
    """Work of other lengths has the same kernels, but FlexAttention's."""
    return work.head_dim, work.mask


def need_gpu(name: str) -> None:
    """Raises FlashgenError without one."""
    if not torch.cuda.is_available():
        raise FlashgenError("there is no GPU", call=f"flashgen bench {name}", write="bench cpu")


def prepare(work: Work) -> Prepared:
    """Everything that can do this work here, compiled."""
    tensors, mask = work.tensors(), masks(work.length, work.device)[work.mask]
    counted = count(mask, 1, 1, work.length, work.device)
    missing = peers.absent()
    sides = {
        peers.TRITON: Side(flex_attention(mask, counted)),
        OURS: Side(flashgen(mask, tensors)),
    }
    for name in peers.names(work.mask):
        if name == peers.FLASH and name not in missing:
            sides[name] = Side(flex_attention(mask, counted, backend="FLASH"))
        elif name != peers.TRITON and name not in missing:
            sides[name] = peers.hand_written(name, work)
    prepared = Prepared(work, sides, counted)
    prepared.run_once(tensors)
    return prepared


def flashgen(mask: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """flashgen with its schedule made before."""
    attend = api.Attention(mask=mask)
    schedule = attend.schedule(*tensors)
    return lambda q, k, v: attend(q, k, v, schedule=schedule)


def measure(prepared: Prepared, rounds: int) -> Measured:
    """Times of what was prepared, after results were compared."""
    tensors = prepared.work.tensors()
    grad = torch.randn_like(tensors[0])
    wrong = [*prepared.wrong, *differences(prepared.sides, tensors, grad)]
    found = times(prepared.sides, tensors, grad, rounds)
    flops = prepared.work.flops(prepared.counted.pairs)
    del tensors, grad
    torch.cuda.empty_cache()
    return Measured(found, flops, prepared.failed, wrong)


def gather(found: Iterable[tuple[str, Measured | None, str]]) -> list[GpuRow]:
    """Rows of what was measured, told as they come. Raises Differs at the end."""
    rows: list[GpuRow] = []
    problems: list[str] = []
    rate = 0.0
    for work, measured, problem in found:
        # Asked when the others have compiled.
        rate = rate or matmul_rate()
        wrong = [problem] if measured is None else list(measured.wrong)
        failed = [] if measured is None else list(measured.failed)
        for line in [*failed, *wrong]:
            print(f"{work}: {line}", file=sys.stderr, flush=True)
        problems += [f"{work}: {line}" for line in wrong]
        if measured is not None and measured.times:
            own = list(rows_with_rates(rows_of(work, measured.times), measured.flops, rate))
            rows += own
            for row in own:
                backward = "" if row.backward_ms is None else f"{row.backward_ms:9.3f}"
                line = f"{row.work:36} {row.backend:20} {row.forward_ms:9.3f} {backward}"
                print(line.rstrip(), file=sys.stderr, flush=True)
    if problems:
        raise Differs(rows, problems)
    return rows


def matmul_rate() -> float:
    """FLOP/s of a square product of bf16 matrices, as cuBLAS does it here."""
    size = 8192
    x, y = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    # The library starts with the first one.
    torch.mm(x, y)
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
    """Print the rows as Markdown under the title."""
    print(f"{title()}\n")
    print_rows(rows)


def print_rows(rows: Sequence[GpuRow]) -> None:
    """Two tables of Markdown, a row for each work: everybody's milliseconds; flashgen's TFLOP/s and
    their share of a matrix product's rate; how many times as fast as FlexAttention and as the best
    of the others."""
    forward = {(row.work, row.backend): row.forward_ms for row in rows}
    backward = {(row.work, row.backend): row.backward_ms for row in rows}
    ours = {row.work: row for row in rows if row.backend == OURS}
    rates = {w: f"{row.forward_tflops:.0f} ({row.forward_share:.2f})" for w, row in ours.items()}
    print("Forward, milliseconds:\n")
    print_markdown(*matrix(forward, OURS, peers.TRITON, rates))
    rates = {
        work: f"{row.backward_tflops:.0f} ({row.backward_share:.2f})"
        for work, row in ours.items()
        if row.backward_tflops is not None
    }
    print("\nBackward, milliseconds:\n")
    print_markdown(*matrix(backward, OURS, peers.TRITON, rates))


def summary(rows: Sequence[Row]) -> str:
    """flashgen beside FlexAttention's two backends in geometric means; who isn't installed."""
    missing = [f"{name} ({reason})" for name, reason in peers.absent().items()]
    lines: list[str] = []
    for peer in (peers.TRITON, peers.FLASH):
        lines += geometric_means(rows, OURS, peer)
    return "\n".join([*lines, f"Not installed: {', '.join(missing) or 'nobody'}."])
