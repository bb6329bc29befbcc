"""Making schedules on a GPU: time, density and memory, beside a compiled `create_block_mask`."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from .. import api
from ..errors import FlashgenError
from .gpu import masks, milliseconds
from .measure import Times
from .table import Row, rows_of

LENGTHS = (8192, 32768, 131072)
# Beside create_block_mask, whose compilation takes seconds for each mask and length.
COMPARED = ("causal", "causal document", "shared question", "random eviction")
TILE = (128, 128)


def title() -> str:
    """What was measured, and on what."""
    return f"schedules of {TILE[0]}x{TILE[1]} tiles, ms on {torch.cuda.get_device_name()}"


def run(rounds: int) -> list[Row]:
    """A row for each mask and length; density and memory stand in the name of the work."""
    if not torch.cuda.is_available():
        raise FlashgenError("there is no GPU", call="flashgen bench planning", write="bench cpu")
    device = torch.device("cuda", torch.cuda.current_device())
    rows: list[Row] = []
    for length in LENGTHS:
        for name, mask in masks(length, device).items():
            if mask is not None:
                rows += _measure(name, mask, length, device, min(rounds, 3))
    return rows


def _measure(name: str, mask: Any, length: int, device: torch.device, rounds: int) -> list[Row]:
    q = torch.empty(1, 1, length, 64, dtype=torch.bfloat16, device=device)

    def ours() -> Any:
        # A new object each time: schedules of masks without data are kept, and would cost nothing.
        return api.Attention(mask=mask).schedule(q, q, q, block_size=TILE)

    makers: dict[str, Callable[[], Any]] = {"flashgen": ours}
    if name in COMPARED and length <= LENGTHS[-1]:
        makers = {"create_block_mask": _block_mask(mask, length, device), **makers}
    density = ours().density
    times, peaks = {}, {}
    for who, make in makers.items():
        make()
        times[who] = Times(statistics.median(milliseconds(make) for _ in range(rounds)))
        peaks[who] = _peak(make)
    memory = ", ".join(f"{who} {peak / 2**20:.1f} MiB" for who, peak in peaks.items())
    return rows_of(f"{name}, S={length}, density {density:.4f}; peak {memory}", times)


def _block_mask(mask: Any, length: int, device: torch.device) -> Callable[[], Any]:
    from torch.nn.attention.flex_attention import create_block_mask

    torch._dynamo.reset()
    compiled = torch.compile(create_block_mask)
    return lambda: compiled(mask, 1, 1, length, length, device=str(device), BLOCK_SIZE=TILE)


def _peak(make: Callable[[], Any]) -> int:
    """Bytes allocated at most while a schedule is made, beyond what was there before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = make()
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before
