"""Searching for faster blocks: `FLASHGEN_TUNE=quick` or `full`, or `config.override(tune=...)`.

The first call of a kind runs its own kernels with other blocks, on its own tensors and schedule,
and keeps what was fastest: in this process, and in a file beside the generated kernels, which later
processes read whether they tune or not. `quick` tries warps and pipeline stages of each portable
kernel, and of Hopper's one number at a time; `full` all blocks inside the schedule's tiles, all
combinations, and other tiles where no schedule was given.

Without the setting nothing is ever measured. Winners change how sums are grouped, so results of
two machines may differ by rounding; nothing else depends on them."""

from __future__ import annotations

import functools
import itertools
import json
import statistics
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from . import __version__
from .config import config, log, warn_once
from .errors import FlashgenError
from .private import write_whole
from .records import tape
from .tiling import Tiling

# What a kernel or a schedule is made for, and the numbers that were fastest.
Numbers = tuple[int, ...]

FILE = "tuned.json"
_WARPS, _STAGES, _BLOCKS = (4, 8), (1, 2, 3, 4), (32, 64, 128)
# Milliseconds that a candidate is warmed up and measured for.
_WARM_UP, _MEASURED = 5, 30
# How often those are measured that take at most so many times as long as the fastest, and which
# part of the default's time is clearly less.
_ROUNDS, _NEAR, _CLEARLY = 3, 1.3, 0.98
_log = log("tune")
_lock = threading.RLock()
_used: dict[str, Numbers] = {}
_read: dict[Path, dict[str, Numbers]] = {}


def use(key: str, numbers: Iterable[int]) -> None:
    """Take these numbers for what `key` names, in this process, without measuring.

    Tuning prints such calls, to be pasted into a program. Raises FlashgenError where the numbers
    aren't positive integers."""
    given = tuple(numbers)
    if not given or not all(isinstance(n, int) and n > 0 for n in given):
        raise FlashgenError(
            "blocks are positive integers",
            call=f"tune.use({key!r}, {given})",
            write="the line that FLASHGEN_TUNE=quick printed",
        )
    with _lock:
        _used[key] = given


def winners() -> dict[str, Numbers]:
    """What is known to be fastest: from the file, and from `use`, which wins."""
    with _lock:
        return {**_stored(_path()), **_used}


def blocks(
    what: str,
    device: torch.device,
    default: Tiling,
    tile: tuple[int, int],
    run: Callable[[Tiling], Any] | None = None,
) -> Tiling:
    """The blocks of a portable kernel, `what`, on a schedule's tiles: the fastest known, found now
    if tuning is on, or the default. `run(tiling)` launches the kernel, as often as it is asked to;
    without it nothing is measured."""
    found = numbers(
        f"{what}, tiles of {tile[0]} x {tile[1]}",
        device,
        (astuple(candidate) for candidate in _candidates(default, tile)),
        astuple(default),
        lambda given: len(given) == 4 and not (tile[0] % given[0] or tile[1] % given[1]),
        None if run is None else lambda given: run(Tiling(*given)),
    )
    return Tiling(*found)


def numbers(
    what: str,
    device: torch.device,
    candidates: Iterable[Numbers],
    default: Numbers,
    fits: Callable[[Numbers], bool],
    run: Callable[[Numbers], Any] | None,
) -> Numbers:
    """The numbers of a kernel, `what`: the fastest known, those found now by `run(numbers)` if
    tuning is on, or the default. Raises FlashgenError where those known don't fit."""
    key = _key(what, device)
    known = winners().get(key)
    if known is not None:
        if len(known) != len(default) or not fits(known):
            raise FlashgenError(
                f"{known} are no blocks of this kernel",
                call=key,
                write=f"numbers like {default}; those of queries and keys divide the tile's",
            )
        return known
    if run is None or not _may_measure(device):
        return default
    tried = [default, *(c for c in dict.fromkeys(candidates) if c != default)]
    return _fastest(key, ((c, functools.partial(run, c)) for c in tried), len(tried))


def tiles(
    what: str,
    device: torch.device,
    default: tuple[int, int],
    others: Iterable[tuple[int, int]],
    prepare: Callable[[tuple[int, int]], Callable[[], Any]],
) -> tuple[int, int]:
    """The tile of schedules, found with `full` alone. `prepare(tile)` makes the schedule, and gives
    what runs the call with it."""
    if tile_known(what, device) is None and config.tune == "full" and _may_measure(device):
        candidates = [default, *(tile for tile in others if tile != default)]
        runs = ((tile, prepare(tile)) for tile in candidates)
        _fastest(_key(f"tiles of {what}", device), runs, len(candidates))
    return tile_known(what, device) or default


def tile_known(what: str, device: torch.device) -> tuple[int, int] | None:
    """The tile that `tiles` has found, or was told of."""
    known = winners().get(_key(f"tiles of {what}", device))
    return None if known is None else (known[0], known[1])


def milliseconds(run: Callable[[], Any]) -> float:
    """The median time on the device, by events, the cache flushed before each run."""
    from triton.testing import do_bench

    return float(do_bench(run, warmup=_WARM_UP, rep=_MEASURED, return_mode="median"))


def _may_measure(device: torch.device) -> bool:
    """Whether tuning is on and kernels may run more than once here."""
    if config.tune == "off" or device.type != "cuda" or tape.recorder() is not None:
        return False
    return not torch.cuda.is_current_stream_capturing()


def _fastest(
    key: str, candidates: Iterable[tuple[Numbers, Callable[[], Any]]], count: int
) -> Numbers:
    """Measure all, tell how it goes, and keep the fastest. The first is the default.

    A GPU's clock falls while it works, so that what is measured first seems faster: those that come
    near are measured again in turns, and what isn't clearly faster than the default isn't taken."""
    runs: dict[Numbers, Callable[[], Any]] = {}
    found: dict[Numbers, list[float]] = {}
    for number, (candidate, run) in enumerate(candidates, 1):
        try:
            ms = milliseconds(run)
        except _refusals() as error:
            _tell(f"{key}: {candidate} ({number} of {count}): {type(error).__name__}")
            continue
        _tell(f"{key}: {candidate} ({number} of {count}): {ms:.4f} ms")
        runs[candidate], found[candidate] = run, [ms]
    if not found:
        raise FlashgenError(f"none of {count} candidates runs", call=key, write="FLASHGEN_TUNE=off")
    first, limit = next(iter(found)), _NEAR * min(found.values())[0]
    near = [candidate for candidate, (ms,) in found.items() if candidate == first or ms <= limit]
    for candidate in near * (_ROUNDS - 1):
        found[candidate].append(milliseconds(runs[candidate]))
    times = {candidate: statistics.median(found[candidate]) for candidate in near}
    best = min(near, key=times.__getitem__)
    if times[best] > _CLEARLY * times[first]:
        best = first
    _store(key, best)
    gain = times[first] / times[best]
    _tell(f"flashgen.tune.use({key!r}, {best})  # {gain:.2f} times as fast as the default")
    return best


def _refusals() -> tuple[type[Exception], ...]:
    """What a kernel that is too large, or that Triton can't compile, raises."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    return OutOfResources, CompilationError, PTXASError


def _candidates(default: Tiling, tile: tuple[int, int]) -> Iterator[Tiling]:
    """`quick`: the default's blocks; `full`: all that divide a tile."""
    rows: Numbers = (default.block_m,)
    columns: Numbers = (default.block_n,)
    if config.tune == "full":
        rows, columns = (tuple(n for n in _BLOCKS if size % n == 0) for size in tile)
    for m, n, warps, stages in itertools.product(rows, columns, _WARPS, _STAGES):
        yield Tiling(m, n, warps, stages)


def _key(what: str, device: torch.device) -> str:
    return f"{what}, {_where(device)}"


@functools.cache
def _where(device: torch.device) -> str:
    import triton

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{name}, triton {triton.__version__}"


def _tell(line: str) -> None:
    """Progress of what a user asked for, and waits for."""
    print(line, file=sys.stderr, flush=True)


def _path() -> Path:
    return config.cache_dir / __version__ / FILE


def _stored(path: Path) -> dict[str, Numbers]:
    """The file's contents, read once; what isn't such a file counts as none, and is told of."""
    if path not in _read:
        _read[path] = _load(path)
    return _read[path]


def _load(path: Path) -> dict[str, Numbers]:
    try:
        text = path.read_text()
    except OSError:
        return {}
    try:
        return {str(key): tuple(map(int, numbers)) for key, numbers in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError):
        warn_once(_log, f"{path} isn't what tuning writes, and is not read")
        return {}


def _store(key: str, numbers: Numbers) -> None:
    """Add to the file what others may have added to; without a folder, to this process alone."""
    path = _path()
    with _lock:
        _used[key] = numbers
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(path.with_suffix(".lock")):
                merged = {**_load(path), key: numbers}
                write_whole(path, json.dumps(merged, indent=1).encode())
            _read[path] = merged
        except OSError as error:
            warn_once(_log, f"{path} can't be written ({error}): winners are kept until the end")
