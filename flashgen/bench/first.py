"""The first call of a mask in a process: with empty caches, and with what another process left.

Each time is of a process of its own, from tensors on the device to results on it: planning,
compiling or loading, and running. What either side imports was imported before."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import FlashgenError
from .measure import Times
from .table import Row, rows_of

SIDES = ("FlexAttention", "flashgen")
EMPTY, FULL = "empty caches", "another process's caches"
HEADS, LENGTH, DIM, WINDOW = 16, 4096, 128, 1000
_CACHES = ("FLASHGEN_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
# What calls import when they first need it.
_MODULES = ("triton.language", "torch._dynamo", "torch._inductor.compile_fx", "flashgen.hopper")
# No further round is begun that would not have ended in so many seconds.
_PATIENT = 150.0
# A process must not wait for ever where something hangs.
_PATIENCE = 120.0


def title() -> str:
    """What was measured, and on what."""
    import triton

    return (
        f"first call in a process, B=1 H={HEADS} S={LENGTH} D={DIM} bf16, documents and a window, "
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"
    )


def run(rounds: int) -> list[Row]:
    """Rows of both sides, for empty caches and for full ones: medians of `rounds`, or of fewer
    where those would take minutes: each starts four processes."""
    if not torch.cuda.is_available():
        raise FlashgenError("there is no GPU", call="flashgen bench first", write="bench cpu")
    found: dict[str, dict[str, list[Times]]] = {name: {} for name in (EMPTY, FULL)}
    start = time.monotonic()
    for number in range(rounds):
        if number and (time.monotonic() - start) * (number + 1) / number > _PATIENT:
            break
        for side in SIDES:
            with tempfile.TemporaryDirectory() as folder:
                for name in found:
                    forward, backward, kernels = _times(side, folder)
                    line = f"{name}, {side}: {forward:.0f} and {backward:.0f} ms; {kernels}"
                    print(line, file=sys.stderr, flush=True)
                    found[name].setdefault(side, []).append(Times(forward, backward))
    return [row for name, sides in found.items() for row in rows_of(name, _medians(sides))]


def _medians(sides: Mapping[str, Sequence[Times]]) -> dict[str, Times]:
    return {
        side: Times(
            statistics.median(t.forward_ms for t in taken),
            statistics.median(t.total_ms - t.forward_ms for t in taken),
        )
        for side, taken in sides.items()
    }


def summary(rows: Sequence[Row]) -> str:
    """What flashgen's first call takes, and how many times as fast it is."""
    return "\n".join(
        f"{row.work}: {row.forward_ms / 1e3:.2f} s and {(row.backward_ms or 0) / 1e3:.2f} s, "
        f"{row.forward_ratio:.1f} and {row.ratio:.1f} (both) times as fast as {SIDES[0]}"
        for row in rows
        if row.backend == SIDES[1]
    )


def _times(side: str, folder: str) -> tuple[float, float, str]:
    """Times of one process: forward and backward in milliseconds, and what it compiled itself."""
    caches = {name: str(Path(folder) / name.lower()) for name in _CACHES}
    done = subprocess.run(
        [sys.executable, "-m", __name__, side],
        env=os.environ | caches,
        capture_output=True,
        text=True,
        timeout=_PATIENCE,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{side}: {done.stderr[-2000:]}")
    forward, backward, kernels = json.loads(done.stdout.splitlines()[-1])
    return forward, backward, kernels


def _first_call(side: str) -> tuple[float, float, str]:
    """Milliseconds of a forward and of its backward in this process, and kernels compiled in it."""
    import torch.nn.attention.flex_attention as flex

    from .. import api

    for name in _MODULES:
        # Some Tritons have no Gluon.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    doc = torch.arange(LENGTH, device="cuda") // 700
    q, k, v = (
        torch.randn(1, HEADS, LENGTH, DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )

    def mask(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return (doc[q_idx] == doc[kv_idx]) & (q_idx >= kv_idx) & (q_idx - kv_idx < WINDOW)

    kernels = _compiled()
    torch.cuda.synchronize()
    start = time.perf_counter()
    if side == "flashgen":
        out = api.Attention(mask=mask)(q, k, v)
    else:
        blocks = flex.create_block_mask(mask, None, None, LENGTH, LENGTH, device="cuda")
        out = torch.compile(flex.flex_attention)(q, k, v, block_mask=blocks)
    torch.cuda.synchronize()
    between = time.perf_counter()
    out.backward(torch.ones_like(out))
    torch.cuda.synchronize()
    backward = time.perf_counter() - between
    return 1e3 * (between - start), 1e3 * backward, ", ".join(kernels)


def _compiled() -> list[str]:
    """Fills with Triton's kernels when they are compiled here: names, and seconds."""
    from triton import knobs

    found: list[str] = []

    def listener(*, metadata: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            found.append(f"{metadata['name']} {times.total / 1e6:.2f} s")

    knobs.compilation.listener = listener
    return found


if __name__ == "__main__":
    print(json.dumps(_first_call(sys.argv[1])))
