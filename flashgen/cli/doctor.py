"""`flashgen doctor`: what is installed, which backends run, and whether one gives the truth."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import flashgen as fg

from .. import assembler, backends, cache
from ..config import config
from ..errors import FlashgenError
from ..private import check_private
from ..reference import attention_reference

_PACKAGES = ("torch", "triton", "jinja2", "numpy")
_TOLERANCE = 1e-5
Row = tuple[str, str]


def doctor(given: argparse.Namespace) -> int:
    """Print the report; 1 where the self-test fails."""
    for title, rows in (
        ("versions", _versions()),
        ("devices", _devices()),
        ("settings", _settings()),
        ("backends", _backends()),
    ):
        print(title)
        for name, text in rows:
            print(f"  {name:<20} {text}")
    passed, text = _self_test()
    print(f"self-test\n  {'ok' if passed else 'FAILED':<20} {text}")
    return 0 if passed else 1


def _versions() -> Iterator[Row]:
    yield "flashgen", f"{fg.__version__}, {Path(fg.__file__).parent}"
    yield "python", platform.python_version()
    for name in _PACKAGES:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, "not installed"


def _devices() -> Iterator[Row]:
    yield "cpu", f"{os.cpu_count()} cores, {platform.machine()}"
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        gigabytes = found.total_memory / 2**30
        yield f"cuda:{index}", f"{found.name}, {_architecture(index)}, {gigabytes:.0f} GiB"


def _architecture(index: int) -> str:
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(index).gcnArchName)
    return "sm_{}{}".format(*torch.cuda.get_device_capability(index))


def _settings() -> Iterator[Row]:
    for setting in config.settings():
        yield setting.variable, _value(setting.name, setting.source)
    for variable in ("TRITON_INTERPRET", "TRITON_CACHE_DIR", "CUDA_VISIBLE_DEVICES"):
        if variable in os.environ:
            yield variable, os.environ[variable]
    if path := _better_assembler():
        yield assembler.VARIABLE, f"set it to {path} on sm_90: Hopper's kernels spill less"
    count = len(cache.entries())
    state = _state_of(config.cache_dir)
    yield "the cache folder", f"{state}, {count} generated files"


def _better_assembler() -> str | None:
    try:
        return assembler.better_for_hopper()
    except (ImportError, RuntimeError):  # No Triton, or one without assemblers.
        return None


def _value(name: str, source: Callable[[], str]) -> str:
    try:
        value = getattr(config, name)
    except FlashgenError as error:
        return f"invalid: {error.problem}"
    shown = "" if value == "" else f"{value} "
    return f"{shown}({source()})"


def _state_of(folder: Path) -> str:
    """Whether the folder can be written, or made; nothing is made to find out."""
    try:
        if folder.exists():
            check_private(folder)
    except PermissionError as error:
        return f"can NOT be used ({error})"
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    is_writable = folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
    return "can be written" if is_writable else "can NOT be written"


def _backends() -> Iterator[Row]:
    gpu = torch.device("cuda") if torch.cuda.is_available() else None
    for name in backends.NAMES[1:]:
        yield name, _usable(name, gpu if name in ("portable", "hopper") else torch.device("cpu"))


def _usable(name: str, device: torch.device | None) -> str:
    if device is None:
        return "not usable: no GPU"
    try:
        dtype = torch.bfloat16 if name == "hopper" else torch.float32
        backends.choose(name, device, dtype, "doctor")
    except FlashgenError as error:
        problem = error.problem.removeprefix(f"backend {name}: ")
        return f"not usable: {problem}; needed: {error.write}"
    return "usable"


def _self_test() -> tuple[bool, str]:
    """Causal attention over 64 positions on the cpu backend, against the float64 reference."""
    what = "causal, 64 positions, backend cpu"

    @fg.mask
    def causal(q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return kv_idx <= q_idx

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 64, 32, generator=generator) for _ in range(3))
    try:
        out = fg.Attention(mask=causal)(q, k, v, backend="cpu")
    except Exception as error:
        return False, f"{what}: {type(error).__name__}: {error}"
    expected, _ = attention_reference(q, k, v, mask=torch.ones(64, 64, dtype=torch.bool).tril())
    largest = float((out.double() - expected).abs().max())
    return largest <= _TOLERANCE, f"{what}: largest error {largest:.1e}, allowed {_TOLERANCE:.0e}"
