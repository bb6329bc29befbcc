"""What a score function costs on a GPU over plain causal attention, and beside FlexAttention."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from .. import api
from . import gpu, peers
from .compare import told
from .flex import count, flex_attention
from .gpu import OURS, GpuRow
from .sides import Side
from .table import Differs, Row, print_markdown
from .work import Work, chosen
from .workers import in_turns

PLAIN, BIAS = "plain", "relative bias"
NAMES = (PLAIN, "ALiBi", "softcap", BIAS, "tanh gate")
SHAPES, LENGTHS = ((128, 16), (64, 32)), (8192,)
PORTABLE = f"{OURS}, portable"
# flashgen's own without the score function, in turns with it.
BESIDE = f"{OURS}, plain"
BACKENDS: dict[str, Any] = {OURS: "auto", PORTABLE: "portable"}
CAP, DISTANCES = 30.0, 512
# What the cheap ones may cost.
CHEAP, ALLOWED = ("ALiBi", "softcap"), 1.1
Score = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class ScoreRow(GpuRow):
    """Also the time over that of the same backend without a score function, in both directions."""

    forward_over: float | None
    backward_over: float | None


def title() -> str:
    """What was measured, and on what."""
    return f"causal, B={Work(*SHAPES[0], LENGTHS[0], PLAIN).batch}, bf16, {gpu.machine()}"


def run(
    rounds: int, only: Sequence[str] = (), lengths: Sequence[int] = LENGTHS
) -> list[GpuRow | ScoreRow]:
    """Forward and backward times, each row shown when it is there.

    `only`: work whose name, `D=64 S=8192 ALiBi`, contains one of these texts; plain attention is
    measured as well. Raises Differs where results do, after everything was measured."""
    gpu.need_gpu("scores")
    every = [Work(*shape, n, name) for shape in SHAPES for n in lengths for name in NAMES]
    asked = chosen(every, only, lengths)
    shapes = {(work.head_dim, work.length) for work in asked}
    works = [w for w in every if w in asked or w.mask == PLAIN and (w.head_dim, w.length) in shapes]
    found = in_turns(works, prepare, gpu.measure, rounds)
    try:
        rows = gpu.gather((str(f.work), f.value, f.problem) for f in found)
    except Differs as error:
        raise Differs(with_overheads(error.rows), str(error).splitlines()) from None
    return with_overheads(rows)


def prepare(work: Work) -> gpu.Prepared:
    """FlexAttention, and flashgen's two families of kernels, compiled."""
    masks: Any = importlib.import_module("flashgen.masks")
    score, captured = score_function(work.mask, work.heads, work.device)

    def causal(b, h, q, k):  # type: ignore[no-untyped-def]
        return q >= k

    counted = count(causal, 1, 1, work.length, work.device)
    softcap = CAP if work.mask == "softcap" else None
    attend = api.Attention(masks.causal, None if softcap else score, softcap=softcap)
    sides = {peers.TRITON: Side(flex_attention(causal, counted, score=score), captured=captured)}
    for name, backend in BACKENDS.items():
        sides[name] = Side(partial(attend, backend=backend), captured=captured)
    if work.mask != PLAIN:
        sides[BESIDE] = Side(api.Attention(masks.causal), compared=False)
    prepared = gpu.Prepared(work, sides, counted)
    prepared.run_once(work.tensors())
    return prepared


def score_function(
    name: str, heads: int, device: torch.device
) -> tuple[Score | None, tuple[torch.Tensor, ...]]:
    """A score_mod of FlexAttention, which flashgen takes as it is; what in it gets a gradient."""
    slope = 2.0 ** (-8.0 * (torch.arange(heads, device=device) + 1) / heads)
    generator = torch.Generator(device).manual_seed(0)
    table = torch.randn(heads, DISTANCES, generator=generator, device=device)
    gate = torch.rand(heads, generator=generator, device=device)
    if name == "ALiBi":
        return lambda score, b, h, q, k: score + slope[h] * (k - q), ()
    if name == "softcap":
        return lambda score, b, h, q, k: CAP * torch.tanh(score / CAP), ()
    if name == "tanh gate":
        return lambda score, b, h, q, k: score * torch.tanh(score * gate[h]), ()
    if name == BIAS:
        table.requires_grad_()
        last = DISTANCES - 1
        return lambda score, b, h, q, k: score + table[h, (q - k).clamp(0, last)], (table,)
    return None, ()


def with_overheads(rows: Sequence[Row]) -> list[GpuRow | ScoreRow]:
    """Rows beside the plain one of the same turns, or else of the same shape and backend."""
    plain = {
        (_shape(row), row.backend): row for row in rows if row.work.split(maxsplit=2)[2] == PLAIN
    }
    plain |= {(row.work, OURS): row for row in rows if row.backend == BESIDE}
    found: list[GpuRow | ScoreRow] = []
    for row in rows:
        base = plain.get((row.work, row.backend)) or plain.get((_shape(row), row.backend))
        forward = None if base is None else row.forward_ms / base.forward_ms
        backward = None
        if base is not None and base.backward_ms and row.backward_ms:
            backward = row.backward_ms / base.backward_ms
        found.append(ScoreRow(**asdict(row), forward_over=forward, backward_over=backward))
    return found


def _shape(row: Row) -> str:
    return " ".join(row.work.split()[:2])


def show(rows: Sequence[ScoreRow]) -> None:
    """Print the rows as Markdown."""
    print(f"{title()}\n")
    one = ("ms", "over plain", "x")
    bases = {row.work: row for row in rows if row.backend == peers.TRITON}
    lines = []
    for row in rows:
        base = bases.get(row.work)
        ms, backward_ms = (base.forward_ms, base.backward_ms) if base else (None, None)
        forward = _cells(row.forward_ms, row.forward_over, ms)
        backward = _cells(row.backward_ms, row.backward_over, backward_ms)
        lines.append((row.work, row.backend, *forward, *backward))
    print_markdown(("work", "backend", *one, *(f"backward {x}" for x in one)), lines)


def _cells(ms: float | None, over: float | None, base: float | None) -> tuple[str, str, str]:
    if ms is None:
        return "", "", ""
    shown = "" if over is None else f"{over:.3f}"
    return f"{ms:.3f}", shown, "" if base is None else f"{base / ms:.2f}"


def summary(rows: Sequence[ScoreRow]) -> str:
    """What ALiBi and softcap cost over plain attention, and all beside FlexAttention."""
    lines = []
    for row in rows:
        if row.backend == OURS and row.work.split(maxsplit=2)[2] in CHEAP:
            over = [x for x in (row.forward_over, row.backward_over) if x is not None]
            shown = ", ".join(f"{100 * (x - 1):+.1f} %" for x in over)
            within = "within" if max(over, default=0.0) <= ALLOWED else "beyond"
            lines.append(f"{row.work} over plain: {shown} ({within} {100 * (ALLOWED - 1):.0f} %)")
    theirs = {row.work: row for row in rows if row.backend == peers.TRITON}
    for backend in BACKENDS:
        ratios = [
            theirs[row.work].forward_ms / row.forward_ms
            for row in rows
            if row.backend == backend and row.work in theirs
        ]
        both = [row.ratio for row in rows if row.backend == backend and row.work in theirs]
        if ratios:
            lines.append(
                f"{backend} beside FlexAttention: forward {told(ratios)}; both {told(both)}"
            )
    return "\n".join(lines)
