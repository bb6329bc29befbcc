"""Compiling generated kernels for a named target, without a GPU."""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import cache, emit, launch
from .emit_plan import PlanModule
from .errors import FlashgenError
from .spec import Spec
from .tiling import Tiling, choose, target_of

_WARP = {"hip": 64}
TARGETS: dict[str, tuple[str, int | str]] = {
    "sm_80": ("cuda", 80),
    "sm_86": ("cuda", 86),
    "sm_90": ("cuda", 90),
    "sm_100": ("cuda", 100),
    "sm_120": ("cuda", 120),
    "gfx90a": ("hip", "gfx90a"),
    "gfx942": ("hip", "gfx942"),
    "gfx950": ("hip", "gfx950"),
}


@dataclass(frozen=True)
class Compiled:
    """What a kernel costs on a target. `spills`: bytes stored and loaded; None where unknown."""

    target: str
    registers: int | None
    spills: int | None
    shared: int
    assembly: str


class _Driver:
    """Stands in for a GPU's driver, so that Triton's own specialisation path runs."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind


@contextlib.contextmanager
def compiling_for(name: str) -> Iterator[None]:
    """Inside the block, `kernel.warmup(...)` compiles for this target."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    if launch.interpreting():
        raise FlashgenError(
            "a process that interprets Triton kernels can't compile them",
            write="the same without TRITON_INTERPRET in the environment",
        )
    backend, arch = TARGETS[name]
    before = driver._active
    driver.set_active(_Driver(GPUTarget(backend, arch, _WARP.get(backend, 32))))
    try:
        yield
    finally:
        driver._active = before


def compile_forward(
    spec: Spec,
    target: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int = 128,
    v_head_dim: int | None = None,
    variant: emit.Variant | None = None,
    tiling: Tiling | None = None,
) -> Compiled:
    """Compile a spec's forward kernel for a target of `TARGETS`."""
    v_head_dim = v_head_dim or head_dim
    variant = variant or emit.Variant(head_dim, v_head_dim)
    generated = emit.forward(spec, variant)
    module = cache.module(generated.name, generated.text, launch.key_parts())
    backend, arch = TARGETS[target]
    tiling = tiling or choose(target_of(backend, arch), dtype, head_dim, v_head_dim)
    sample = torch.empty(0, dtype=dtype)
    block = (tiling.block_m, tiling.block_n)
    constants = launch.constants_of(sample, [sample], tiling, block)
    constants["ALIGN"] = 16 // dtype.itemsize
    values = _placeholders(generated.arguments, spec, dtype)
    return _compile(module.attention_forward, target, values, constants, tiling)


def compile_plan(made: PlanModule, spec: Spec, target: str, block: tuple[int, int]) -> Compiled:
    """Compile the kernel that classifies tiles."""
    generated = made.generated
    module = cache.module(generated.name, generated.text, launch.key_parts())
    values = _placeholders(generated.arguments, spec, torch.int8)
    for summary in made.summaries:
        for end in ("min", "max"):
            name = f"{summary.name}_{end}_ptr"
            at = generated.arguments.index(name)
            values[at] = torch.empty(0, dtype=summary.dtype)
    constants = {"TILE_M": block[0], "TILE_N": block[1], "BLOCK_N": block[1], "CHUNK": 64}
    tiling = Tiling(0, 0, 4, 1)
    return _compile(module.classify, target, values, {**constants, "ELEMENTS": True}, tiling)


def _placeholders(names: tuple[str, ...], spec: Spec, dtype: torch.dtype) -> list[Any]:
    """Arguments of the right kinds: nothing runs, so values don't matter."""
    data = {f"{t.name}_ptr": t.dtype for t in spec.tensors}
    floats = {s.name for s in spec.scalars if s.kind == "float"} | {"scale", "scale_log2", "softcap"}
    values: list[Any] = []
    for name in names:
        if name in data:
            kind = torch.uint8 if data[name] == torch.bool else data[name]
        elif name in ("counts", "masked_runs", "full_runs", "kv_lens_ptr", "q_offset_ptr"):
            kind = torch.int32
        elif name in ("lse_ptr", "sinks_ptr"):
            kind = torch.float32
        elif name.endswith("_ptr"):
            kind = dtype
        else:
            values.append(1.0 if name.removesuffix("_") in floats else 3)
            continue
        values.append(torch.empty(0, dtype=kind))
    return values


def _compile(
    kernel: Any, target: str, values: list[Any], constants: dict[str, Any], tiling: Tiling
) -> Compiled:
    with compiling_for(target):
        kernel.device_caches.clear()
        options = {"num_warps": tiling.warps, "num_stages": tiling.stages}
        made = kernel.warmup(*values, grid=(1,), **constants, **options)
        kernel.device_caches.clear()
    if TARGETS[target][0] == "hip":
        return _amd(target, made)
    registers, spills = _ptxas(made.asm["ptx"], target)
    return Compiled(target, registers, spills, made.metadata.shared, made.asm["ptx"])


def _amd(target: str, made: Any) -> Compiled:
    text = made.asm["amdgcn"]
    registers = _number(r"\.vgpr_count:\s+(\d+)", text)
    spills = _number(r"\.vgpr_spill_count:\s+(\d+)", text)
    return Compiled(target, registers, spills, made.metadata.shared, text)


def _number(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    return int(found[1]) if found else None


def _ptxas(ptx: str, target: str) -> tuple[int | None, int | None]:
    """Registers and bytes spilled, by the assembler that comes with Triton."""
    import triton

    arch = {"sm_90": "sm_90a", "sm_100": "sm_100a", "sm_120": "sm_120a"}.get(target, target)
    tool = "ptxas-blackwell" if arch[3:6].rstrip("a") >= "100" and len(arch) > 6 else "ptxas"
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "kernel.ptx"
        source.write_text(ptx)
        command = [str(folder / tool), "-v", f"--gpu-name={arch}", str(source), "-o"]
        done = subprocess.run(
            [*command, str(Path(scratch) / "kernel.o")], capture_output=True, text=True, check=True
        )
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    return _number(r"Used (\d+) registers", done.stderr), (
        int(spills[1]) + int(spills[2]) if spills else None
    )
