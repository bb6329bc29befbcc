"""The first call of a mask in a process: with empty caches, and with what another process left.

Each time is a process of its own, from tensors on the device to results on it: planning, compiling
or loading, and running. Modules were imported before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from ..errors import FlashgenError
from .measure import Times
from .table import Row, rows_of

SIDES = ("FlexAttention", "flashgen")
HEADS, LENGTH, DIM, WINDOW = 16, 4096, 128, 1000
_CACHES = ("FLASHGEN_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
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
    """Rows of both sides, for empty caches and for full ones; of `rounds` the last counts."""
    if not torch.cuda.is_available():
        raise FlashgenError("there is no GPU", call="flashgen bench first", write="bench cpu")
    cold, warm = {}, {}
    for side in SIDES:
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                cold[side], warm[side] = _times(side, folder), _times(side, folder)
    return [*rows_of("empty caches", cold), *rows_of("another process's caches", warm)]


def _times(side: str, folder: str) -> Times:
    """Of one process."""
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
    return Times(*json.loads(done.stdout.splitlines()[-1]))


def _first_call(side: str) -> tuple[float, float]:
    """Milliseconds of a forward and of its backward, in this process."""
    import time

    import torch.nn.attention.flex_attention as flex

    from .. import api

    doc = torch.arange(LENGTH, device="cuda") // 700
    q, k, v = (
        torch.randn(1, HEADS, LENGTH, DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )

    def mask(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return (doc[q_idx] == doc[kv_idx]) & (q_idx >= kv_idx) & (q_idx - kv_idx < WINDOW)

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
    return 1e3 * (between - start), 1e3 * (time.perf_counter() - between)


if __name__ == "__main__":
    print(json.dumps(_first_call(sys.argv[1])))
