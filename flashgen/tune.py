"""Searching for faster blocks: `FLASHGEN_TUNE=quick` or `full`, or `config.override(tune=...)`.

The first call of a kind runs its own kernels with other blocks, on its own tensors and schedule,
and keeps what was fastest: in this process, and in a file beside the generated kernels, which later
processes read whether they tune or not. `quick` tries warps and pipeline stages of each kernel;
`full` all blocks inside the schedule's tiles, and other tiles where no schedule was given.

Without the setting nothing is ever measured. Winners change how sums are grouped, so results of
two machines may differ by rounding; nothing else depends on them."""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
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
from .records import tape
from .tiling import Tiling

# What a kernel or a schedule is made for, and the numbers that were fastest.
Numbers = tuple[int, ...]

FILE = "tuned.json"
_WARPS, _STAGES, _BLOCKS = (4, 8), (1, 2, 3, 4), (32, 64, 128)
# Milliseconds that a candidate is warmed up and measured for.
_WARM_UP, _MEASURED = 5, 30
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
    what: str, device: torch.device, default: Tiling, tile: tuple[int, int], run: Callable[..., Any]
) -> Tiling:
    """The blocks of a kernel, `what`, on a schedule's tiles: the fastest known, found now if tuning
    is on, or the default. `run(tiling)` launches the kernel, as often as it is asked to."""
    key = _key(f"{what}, tiles of {tile[0]} x {tile[1]}", device)
    known = winners().get(key)
    if known is not None:
        return _tiling(key, known, tile)
    if not _may_measure(device):
        return default
    candidates = [default, *(c for c in _candidates(default, tile) if c != default)]
    timed = ((astuple(c), lambda c=c: run(c)) for c in candidates)
    return Tiling(*_fastest(key, timed, len(candidates)))


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
    """Measure all, tell how it goes, and keep the fastest. The first is the default."""
    found: list[tuple[float, Numbers]] = []
    for number, (candidate, run) in enumerate(candidates, 1):
        try:
            ms = milliseconds(run)
        except _refusals() as error:
            _tell(f"{key}: {candidate} ({number} of {count}): {type(error).__name__}")
            continue
        _tell(f"{key}: {candidate} ({number} of {count}): {ms:.4f} ms")
        found.append((ms, candidate))
    if not found:
        raise FlashgenError(f"none of {count} candidates runs", call=key, write="FLASHGEN_TUNE=off")
    ms, best = min(found)
    _store(key, best)
    gain = found[0][0] / ms
    _tell(f"flashgen.tune.use({key!r}, {best})  # {gain:.2f} times as fast as the first")
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


def _tiling(key: str, numbers: Numbers, tile: tuple[int, int]) -> Tiling:
    if len(numbers) != 4 or tile[0] % numbers[0] or tile[1] % numbers[1]:
        raise FlashgenError(
            f"blocks of {numbers} don't divide the tile",
            call=key,
            write="(queries, keys, warps, stages), the first two divisors of the tile's",
        )
    return Tiling(*numbers)


def _key(what: str, device: torch.device) -> str:
    import triton

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{what}, {name}, triton {triton.__version__}"


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
                handle, name = tempfile.mkstemp(dir=path.parent, suffix=".json")
                with os.fdopen(handle, "w") as file:
                    json.dump(merged, file, indent=1)
                Path(name).replace(path)
            _read[path] = merged
        except OSError as error:
            warn_once(_log, f"{path} can't be written ({error}): winners are kept until the end")
