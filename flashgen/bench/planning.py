"""Making schedules on a GPU: time, density and memory, beside a compiled `create_block_mask`.

Workers share the masks of flashgen.masks, at every length. All compile first, at the same time;
then one after the other measures, so that nothing else runs."""

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
from ..errors import CallText, FlashgenError
from ..schedule import Schedule
from ..spec import Mask
from .mask_functions import mask_function
from .table import Row, print_markdown

LENGTHS = (8192, 32768, 131072)
TILE = (128, 128)
PEER, OURS = "create_block_mask", "flashgen"
# Matrices of all pairs are read, not planned without them: the shortest length is enough.
MATRICES = ("dense_table", "tree")
# Seconds that compiling may take, and that a maker is timed for at least.
PATIENCE, SHARE = 150.0, 0.02
WORKERS = 32
# A mask at a length.
Work = tuple[str, int]


@dataclass(frozen=True)
class PlanRow(Row):
    """One maker on one mask and length: also the mask's density, the bytes allocated at most, and
    how its tiles compare with those of the other."""

    mask: str
    length: int
    density: float
    peak: int
    tiles: str

    def __str__(self) -> str:
        return f"{self.forward_ms:.3f}, {self.peak / 2**20:.2f}"


def title() -> str:
    """What was measured, and on what."""
    import triton

    return (
        f"schedules of {TILE[0]} x {TILE[1]} tiles, ms a call from an idle device, host time "
        f"included, {torch.cuda.get_device_name()}, torch {torch.__version__}, "
        f"triton {triton.__version__}"
    )


def run(rounds: int) -> list[Row]:
    """Two rows for each mask and length: create_block_mask, and flashgen."""
    if not torch.cuda.is_available():
        raise FlashgenError("there is no GPU", call="flashgen bench planning", write="bench cpu")
    masks = importlib.import_module("flashgen.masks")
    return measure([n for n in masks.EXAMPLES if isinstance(getattr(masks, n), Mask)], rounds)


def measure(names: Sequence[str], rounds: int, lengths: Sequence[int] = LENGTHS) -> list[Row]:
    """The rows of some masks."""
    # Workers compile beside each other, not each on all cores, and nothing for the CPU.
    os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "0"
    works = [(n, s) for s in lengths for n in names if s == lengths[0] or n not in MATRICES]
    spawn = multiprocessing.get_context("spawn")
    count = min(len(works), WORKERS, max(1, (os.cpu_count() or 2) - 2))
    shared = (rounds, spawn.Barrier(count), spawn.Lock(), spawn.Queue())
    workers = [spawn.Process(target=_work, args=(works[n::count], *shared)) for n in range(count)]
    for worker in workers:
        worker.start()
    rows = [row for _ in workers for row in shared[-1].get(timeout=3 * PATIENCE)]
    for worker in workers:
        worker.join()
    return sorted(rows, key=lambda row: (names.index(row.mask), row.length))


def show(rows: Sequence[PlanRow]) -> None:
    """Print the rows as Markdown: a line for each mask and length."""
    peers = {row.work: row for row in rows if row.backend == PEER}
    lines = []
    for ours in rows:
        if ours.backend == OURS:
            found = (f"`{ours.mask}`", ours.length, f"{ours.density:.4f}", ours)
            peer = peers.get(ours.work)
            ratio = f"{ours.forward_ratio:.2f}" if peer else ""
            lines.append((*found, peer or "fails", ratio, ours.tiles))
    print(f"{title()}\n")
    header = ("mask", "S", "density", f"{OURS}: ms, MiB", f"{PEER}: ms, MiB", "x", "tiles")
    print_markdown(header, lines)


def summary(rows: Sequence[PlanRow]) -> str:
    """How many times faster flashgen is at each length: the geometric mean, and the least."""
    lines = []
    for length in sorted({row.length for row in rows}):
        peers = {r.work for r in rows if r.backend == PEER and r.length == length}
        ratios = [r.forward_ratio for r in rows if r.work in peers and r.backend == OURS]
        if ratios:
            mean = statistics.geometric_mean(ratios)
            lines.append(
                f"S = {length}: {mean:.2f} times as fast (geometric mean of {len(ratios)} masks), "
                f"{min(ratios):.2f} at least"
            )
    return "\n".join(lines)


def _work(works: Sequence[Work], rounds: int, gate: Any, lock: Any, results: Any) -> None:
    """Compile everything, wait for the others, then measure alone."""
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 256
    deadline = time.monotonic() + PATIENCE
    makers = {work: _makers(*work) for work in works if time.monotonic() < deadline}
    for name, length in works[len(makers) :]:
        _report(f"{name}, S={length}: left out, as compiling took {PATIENCE:.0f} s")
    with contextlib.suppress(threading.BrokenBarrierError):
        gate.wait(max(1.0, deadline - time.monotonic()))
    rows: list[PlanRow] = []
    try:
        with lock:
            for work, pair in makers.items():
                rows += _rows(*work, pair, rounds)
    finally:
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

    bound = attend._program.bind({}, CallText(name, {}))
    peer = _block_mask(mask_function(bound, length, length), length, device)
    makers: dict[str, Callable[[], Any]] = {OURS: ours, PEER: peer}
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


def _rows(
    name: str, length: int, makers: dict[str, Callable[[], Any]], rounds: int
) -> list[PlanRow]:
    """Measure the makers of one mask and length, and compare what they make."""
    if OURS not in makers:
        return []
    schedule = makers[OURS]()
    tiles = _difference(schedule, makers[PEER]()) if PEER in makers else "not compared"
    order = [who for who in (PEER, OURS) if who in makers]
    ms = {who: _time(makers[who], rounds) for who in order}
    work = f"{name}, S={length}"
    rows = []
    for who in order:
        ratio = ms[order[0]] / ms[who]
        found = (name, length, schedule.density, _peak(makers[who]), tiles)
        rows.append(PlanRow(work, who, ms[who], None, ratio, ratio, *found))
    _report(f"{work}: {'; '.join(f'{row.backend} {row}' for row in rows)}; {tiles}")
    return rows


def _difference(schedule: Schedule, block_mask: Any) -> str:
    """Whether both found the same number of partial and of full tiles in every row."""
    pairs = [
        (schedule.kv_num_blocks, block_mask.kv_num_blocks),
        (schedule.full_kv_num_blocks, block_mask.full_kv_num_blocks),
    ]
    off = [int((mine[:, :1] - theirs).abs().sum()) for mine, theirs in pairs]
    return "the same" if not any(off) else f"{off[0]} partial, {off[1]} full differ"


def _time(make: Callable[[], Any], rounds: int) -> float:
    """The median in ms of single calls that start and end with an idle device."""
    seconds: list[float] = []
    end = time.perf_counter() + SHARE
    while len(seconds) < rounds or time.perf_counter() < end:
        torch.cuda.synchronize()
        start = time.perf_counter()
        kept = make()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        del kept
    return 1e3 * statistics.median(seconds)


def _peak(make: Callable[[], Any]) -> int:
    """Bytes allocated at most while a schedule is made, beyond what was there before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = make()
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before
