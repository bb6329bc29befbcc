"""All that decides what Triton makes of a kernel, beside its text and its launch."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..config import config, log
from ..records.direct import Unknown, driver_version

# Parts of Triton's package that a binary depends on; what else is there runs on the host alone.
_PARTS = ("_C", "backends", "compiler", "experimental", "language", "runtime")
# Variables that only say where files are kept.
_HARMLESS = frozenset(("TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_DUMP_DIR", "TRITON_OVERRIDE_DIR"))
_log = log("cache")


def doubt() -> str:
    """Why Triton should be asked itself: something changes, or wants to see, how it compiles. Empty
    if nothing does."""
    if config.debug or config.print_code:
        return "debugging"
    found = next((name for name in os.environ if _is_triton(name)), "")
    return found or _changed_knob() or next(iter(_variables()), "")


def _is_triton(name: str) -> bool:
    return name.startswith(("TRITON_", "MLIR_", "LLVM_")) and name not in _HARMLESS


def _changed_knob() -> str:
    """A setting of Triton's that isn't as it was made, or a hook."""
    from triton import knobs

    # Who only listens needn't hear of what isn't compiled.
    for part in ("compilation", "language", "runtime", "nvidia"):
        group = getattr(knobs, part)
        for name, value in vars(group).items():
            if name != "listener" and value != vars(type(group)).get(name):
                return f"{part}: {name}"
        for name, knob in group.knob_descriptors.items():
            if knob.key in os.environ:
                return f"{part}: {name}"
    if knobs.cache.manager_class is not None:
        return "cache: manager_class"
    hooks = ("launch_enter_hook", "kernel_load_start_hook", "kernel_load_end_hook")
    found = (name for name in hooks if getattr(getattr(knobs.runtime, name), "calls", None))
    return next(found, "")


def _variables() -> dict[str, str]:
    """Variables that are set and that Triton's compiler, in C++, looks at."""
    from triton._C.libtriton import get_cache_invalidating_env_vars

    return dict(get_cache_invalidating_env_vars())


@functools.cache
def surroundings(index: int) -> str:
    """Versions, files and the GPU, as text; empty where they aren't known."""
    try:
        import triton

        folder = Path(triton.__file__).parent
        parts = (
            f"flashgen {__version__}",
            f"triton {triton.__version__} {_digest_of(folder)}",
            f"hopper {hashlib.sha256(_hopper().read_bytes()).hexdigest()}",
            f"torch {torch.__version__}",
            f"python {sys.version}",
            f"gpu {torch.cuda.get_device_name(index)} {torch.cuda.get_device_capability(index)}",
            f"driver {driver_version()}",
        )
    except (OSError, ImportError, AttributeError, Unknown) as error:
        _log.info("binaries aren't kept: %r", error)
        return ""
    return "\n".join(parts)


def _hopper() -> Path:
    """What generated kernels import, and compile as a part of themselves."""
    return Path(__file__).parent.parent / "hopper.py"


def _digest_of(folder: Path) -> str:
    """Changes with the size or the time of any of Triton's files. Raises OSError."""
    files = sorted(found for part in _PARTS for found in _files(folder / part))
    return hashlib.sha256(repr(files).encode()).hexdigest()


def _files(folder: Path) -> Iterator[tuple[str, int, int]]:
    for entry in os.scandir(folder):
        if entry.is_dir():
            if entry.name != "__pycache__":
                yield from _files(Path(entry.path))
        else:
            status: Any = entry.stat()
            yield entry.path, status.st_size, status.st_mtime_ns
