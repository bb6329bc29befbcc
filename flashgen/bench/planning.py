"""Making schedules on a GPU: time, density and memory, beside a compiled `create_block_mask`.

Workers share the masks of flashgen.masks. All compile first, at the same time; then one after the
other measures, so that nothing else runs."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import api
from ..call import CallText
from ..errors import FlashgenError
from ..schedule import Schedule
from ..spec import Mask
from .mask_functions import mask_function
from .measure import Times
from .table import Row, rows_of

LENGTHS = (8192, 32768, 131072)
TILE = (128, 128)
PEER, OURS = "create_block_mask", "flashgen"
MATRICES = ("dense_table", "tree")
# Beside create_block_mask at every length; it looks at every pair, whatever the mask.
COMPARED = ("causal", "document", "natten_2d", "shared_question", "random_eviction", "chunked")
# Seconds that all masks may take to compile, and a maker to be timed in a round.
PATIENCE, SHARE = 120.0, 0.1


@dataclass(frozen=True)
class Measured:
    """One maker on one mask and length: milliseconds, and bytes allocated at most."""

    times: Times
    peak: int

    def __str__(self) -> str:
        return f"{self.times.forward_ms:.3f} ms, {self.peak / 2**20:.2f} MiB"


def title() -> str:
    """What was measured, and on what."""
    return (
        f"schedules of {TILE[0]}x{TILE[1]} tiles, ms a call from an idle device, "
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    )


def run(rounds: int) -> list[Row]:
    """A row for each mask and length; density and memory stand in the name of the work."""
    if not torch.cuda.is_available():
        raise FlashgenError("there is no GPU", call="flashgen bench planning", write="bench cpu")
    masks = importlib.import_module("flashgen.masks")
    return measure([n for n in masks.EXAMPLES if isinstance(getattr(masks, n), Mask)], rounds)


def measure(names: Sequence[str], rounds: int, lengths: Sequence[int] = LENGTHS) -> list[Row]:
    """The rows of some masks."""
    # Workers compile beside each other, not each on all cores.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    spawn = multiprocessing.get_context("spawn")
    count = min(len(names), max(1, (os.cpu_count() or 2) - 2))
    shared = (lengths, rounds, spawn.Barrier(count), spawn.Lock(), spawn.Queue())
    workers = [spawn.Process(target=_work, args=(names[n::count], *shared)) for n in range(count)]
    for worker in workers:
        worker.start()
    rows = [row for _ in workers for row in shared[-1].get(timeout=3 * PATIENCE)]
    for worker in workers:
        worker.join()
    return sorted(rows, key=lambda row: names.index(row.work.partition(",")[0]))


def _work(
    names: Sequence[str], lengths: Sequence[int], rounds: int, gate: Any, lock: Any, results: Any
) -> None:
    """Compile everything, wait for the others, then measure alone."""
    torch._dynamo.config.recompile_limit = 256
    deadline = time.monotonic() + PATIENCE
    makers: dict[str, dict[str, Callable[[], Any]]] = {}
    for length in lengths:
        for name in names:
            # Matrices of all pairs are read, not planned without them: the shortest is enough.
            if time.monotonic() < deadline and (length == lengths[0] or name not in MATRICES):
                makers[f"{name}, S={length}"] = _makers(name, length)
    with contextlib.suppress(threading.BrokenBarrierError):
        gate.wait(max(1.0, deadline - time.monotonic()))
    rows: list[Row] = []
    for work, pair in makers.items():
        with lock:
            rows += _rows(work, pair, rounds)
    results.put(rows)


def _report(line: str) -> None:
    """Say at once what is known: the table comes at the end."""
    print(line, file=sys.stderr, flush=True)


def _makers(name: str, length: int) -> dict[str, Callable[[], Any]]:
    """What makes the schedule, after a first call; without what fails."""
    masks = importlib.import_module("flashgen.masks")
    device = torch.device("cuda", torch.cuda.current_device())
    data = masks.EXAMPLES[name](length, torch.Generator().manual_seed(0))
    attend = api.Attention(mask=getattr(masks, name)(**data).to(device))
    q = torch.empty(1, 1, length, 64, dtype=torch.bfloat16, device=device)

    def ours() -> Schedule:
        # Schedules of masks without data are kept, and would cost nothing.
        attend._kept.clear()
        return attend.schedule(q, q, q_offset=0, block_size=TILE)

    makers: dict[str, Callable[[], Any]] = {OURS: ours}
    if length == LENGTHS[0] or name in COMPARED:
        bound = attend._program.bind({}, CallText(name, {}))
        makers[PEER] = _block_mask(mask_function(bound, length, length), length, device)
    for who, make in list(makers.items()):
        start = time.perf_counter()
        try:
            make()
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            _report(f"{name}, S={length}: {who} fails: {first[:300]}")
            del makers[who]
        else:
            _report(f"{name}, S={length}: {who} ready, {time.perf_counter() - start:.1f} s")
    return makers


def _block_mask(function: Any, length: int, device: torch.device) -> Callable[[], Any]:
    from torch.nn.attention.flex_attention import create_block_mask

    compiled = torch.compile(create_block_mask, dynamic=False)
    return lambda: compiled(function, 1, 1, length, length, device=str(device), BLOCK_SIZE=TILE)


def _rows(work: str, makers: dict[str, Callable[[], Any]], rounds: int) -> list[Row]:
    """Measure the makers of one mask and length, and compare what they make."""
    if OURS not in makers:
        return []
    schedule = makers[OURS]()
    found = {who: Measured(_time(make, rounds), _peak(make)) for who, make in makers.items()}
    notes = [f"{who} {measured}" for who, measured in found.items()]
    if PEER in makers:
        notes.append(_difference(schedule, makers[PEER]()))
    work = f"{work}, density {schedule.density:.4f}"
    _report(f"{work}: {'; '.join(notes)}")
    memory = ", ".join(f"{who} {one.peak / 2**20:.2f} MiB" for who, one in found.items())
    order = [who for who in (PEER, OURS) if who in found]
    return rows_of(f"{work}; peak {memory}; {notes[-1]}", {who: found[who].times for who in order})


def _difference(schedule: Schedule, block_mask: Any) -> str:
    """Whether both found the same number of partial and of full tiles in every row."""
    pairs = [
        (schedule.kv_num_blocks, block_mask.kv_num_blocks),
        (schedule.full_kv_num_blocks, block_mask.full_kv_num_blocks),
    ]
    off = [int((mine[:, :1] - theirs).abs().sum()) for mine, theirs in pairs]
    return "the same tiles" if not any(off) else f"{off[0]} partial and {off[1]} full tiles differ"


def _time(make: Callable[[], Any], rounds: int) -> Times:
    """The median of single calls that start and end with an idle device."""
    seconds: list[float] = []
    end = time.perf_counter() + SHARE * rounds
    while len(seconds) < 3 or time.perf_counter() < end:
        torch.cuda.synchronize()
        start = time.perf_counter()
        kept = make()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        del kept
    return Times(1e3 * statistics.median(seconds))


def _peak(make: Callable[[], Any]) -> int:
    """Bytes allocated at most while a schedule is made, beyond what was there before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = make()
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before
