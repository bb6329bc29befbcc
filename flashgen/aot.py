"""Compiling generated kernels for a named target, without a GPU."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from . import binaries, cache, emit, launch, plan
from .emit import hopper_forward as emit_hopper
from .emit.plan import PlanModule
from .errors import FlashgenError
from .launch import hopper_forward as launch_hopper
from .order import with_tables
from .spec import Spec
from .tiling import Tiling, choose, target_of
from .tiling.hopper import Shape, shape_for

_WARP = {"cuda": 32, "hip": 64}
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
    """What a kernel costs on a target.

    `registers` of a thread; `spills`: bytes stored and loaded (AMD: registers spilled);
    `called_spills`: the same in functions that are called, which run rarely; `shared`: bytes of
    shared memory; `warnings`: what the assembler says of performance; `assembly`: PTX or AMD's;
    `binary`: NVIDIA's."""

    target: str
    registers: int
    spills: int
    called_spills: int
    shared: int
    warnings: tuple[str, ...]
    assembly: str
    binary: bytes = field(default=b"", repr=False)

    def instructions(self) -> Counter[str]:
        """How often each instruction stands in NVIDIA's machine code: HGMMA, UTMALDG."""
        return Counter(name.partition(" ")[0] for name, _ in self._machine_code())

    def spills_in_loops(self) -> int:
        """Instructions that spill or fill a register in innermost loops of NVIDIA's code."""
        code = self._machine_code()
        starts = {place: i for i, (_, place) in enumerate(code)}
        branches = [(starts.get(name[4:]), i) for i, (name, _) in enumerate(code) if "BRA " in name]
        loops = {(start, end) for start, end in branches if start is not None and start < end}
        inner = [
            x for x in loops if not any(x != y and x[0] <= y[0] and y[1] <= x[1] for y in loops)
        ]
        return sum(code[i][0] in ("LDL", "STL") for start, end in inner for i in range(start, end))

    def _machine_code(self) -> list[tuple[str, str]]:
        """(instruction, address); a branch with the address that it goes to."""
        from triton import knobs

        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.binary)
            file.flush()
            command = [knobs.nvidia.cuobjdump.path, "-sass", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        line = r"^\s+/\*(\w{4,})\*/\s+(?:@!?U?P\w+ )?([A-Z]\w*)([^;\n]*)"
        return [
            (f"BRA {goal[1]}" if name == "BRA" and (goal := re.search(r"0x(\w+)", rest)) else name,
             place.lstrip("0") or "0")
            for place, name, rest in re.findall(line, text, re.MULTILINE)
        ]  # fmt: skip

    def __str__(self) -> str:
        cost = f"{self.registers} registers, {self.spills} spilled, {self.shared} bytes shared"
        return "\n".join([f"{self.target}: {cost}", *self.warnings])


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
    """Inside the block, `kernel.warmup(...)` compiles for this target of `TARGETS`.

    Raises FlashgenError where Triton kernels are interpreted."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    if launch.interpreting():
        raise FlashgenError(
            "a process that interprets Triton kernels can't compile them",
            write="the same without TRITON_INTERPRET in the environment",
        )
    backend, arch = TARGETS[name]
    before = driver._active
    driver.set_active(_Driver(GPUTarget(backend, arch, _WARP[backend])))
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
    page_size: int = 16,
) -> Compiled:
    """Compile a spec's forward kernel for a target of `TARGETS`.

    `variant` says what is not the default of a call with these head dimensions; it has its own,
    which count then. `tiling`: by default what a call on this target takes. `page_size`: of a
    variant of paged keys."""
    variant = variant or emit.Variant(head_dim, v_head_dim or head_dim)
    if tiling is None:
        dims = (variant.head_dim, variant.v_head_dim)
        tiling = choose(target_of(*TARGETS[target]), dtype, *dims)
    return compile_kernel(target, *forward_launch(spec, variant, dtype, tiling, page_size))


Launch = tuple[Any, list[Any], Mapping[str, Any], Tiling]


def forward_launch(
    spec: Spec, variant: emit.Variant, dtype: torch.dtype, tiling: Tiling, page_size: int = 16
) -> Launch:
    """The kernel, and arguments and compile-time values that stand for a call's."""
    generated = launch.generate(spec, variant)
    module = cache.module(generated.name, generated.text, launch.key_parts())
    sample = torch.empty(1, 16, 16, 16, dtype=dtype)
    block = (tiling.block_m, tiling.block_n)
    constants = launch.constants_of(sample, [sample], tiling, block)
    if variant.keys == "paged":
        constants["PAGE_SIZE"] = page_size
    values = _placeholders(generated.arguments, spec, dtype)
    return module.attention_forward, values, constants, tiling


def compile_hopper_forward(
    spec: Spec,
    *,
    dtype: torch.dtype = torch.bfloat16,
    variant: emit.Variant,
    shape: Shape | None = None,
    page_size: int = 16,
) -> Compiled:
    """Compile a spec's forward kernel of the Hopper family for sm_90.

    `page_size`: if keys are in pages."""
    shape = shape or shape_for(variant.head_dim, variant.v_head_dim)
    generated = emit_hopper.forward(spec, variant, groups=shape.groups)
    module = cache.module(generated.name, generated.text, launch.key_parts())
    q, v = (torch.empty(1, 1, 16, d, dtype=dtype) for d in (variant.head_dim, variant.v_head_dim))
    pages = {"PAGE_SIZE": page_size} if variant.keys == "paged" else {}
    known = launch_hopper.descriptors(q, q, v, shape, pages.get("PAGE_SIZE"))
    values = [
        known.get(name, value)
        for name, value in zip(
            generated.arguments, _placeholders(generated.arguments, spec, dtype), strict=True
        )
    ]
    constants = launch_hopper.constants_of(shape) | pages
    return compile_kernel("sm_90", module.attention_forward, values, constants, launch_hopper.WARPS)


def compile_plan(made: PlanModule, spec: Spec, target: str) -> dict[str, Compiled]:
    """Compile a mask's planning kernels for tiles of 128 queries and 64 keys, by their names."""
    generated = made.generated
    module = cache.module(generated.name, generated.text, launch.key_parts())
    dtypes = dict.fromkeys(("counts_ptr", "masked_ptr", "full_ptr"), torch.int32)
    dtypes |= {name: dtype for name, dtype, _ in made.buffers}
    tiles = {"TILE_M": 128, "TILE_N": 64, "BLOCK_N": 64}
    wanted: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {}
    if made.summarize:
        wanted["summarize"] = (made.summarize, {**tiles, "BLOCK_M": 128})
    wanted["classify"] = (generated.arguments, {**tiles, "CHUNK": plan.CHUNK, "ELEMENTS": True})
    compiled = {}
    for name, (arguments, constants) in wanted.items():
        values = _placeholders(arguments, spec, torch.int8, dtypes)
        kernel = getattr(module, name)
        compiled[name] = compile_kernel(target, kernel, values, constants, _PLANNING)
    return compiled


def compile_compaction(target: str, *, by_key: bool = False, packed: bool = False) -> Compiled:
    """Compile the kernel that turns states into runs, of any mask."""
    generated = plan.compaction(packed)
    module = cache.module(generated.name, generated.text, launch.key_parts())
    pointers = {"states_ptr": torch.int8}
    values = [
        torch.empty(0, dtype=pointers.get(name, torch.int32)) if name.endswith("_ptr") else 3
        for name in generated.arguments
    ]
    constants = {"TILE_N": 64, "BY_KEY": by_key, "CHUNK": plan.CHUNK}
    constants |= {"TILE_M": 64} if packed else {"HAS_LENS": True}
    return compile_kernel(target, module.compact, values, constants, _PLANNING)


_PLANNING = Tiling(0, 0, 4, 1)


def _placeholders(
    names: tuple[str, ...],
    spec: Spec,
    dtype: torch.dtype,
    others: Mapping[str, torch.dtype] | None = None,
) -> list[Any]:
    """Arguments of the right kinds: nothing runs, so values don't matter.

    Pointers are of `dtype`, but for the data's, the schedule's and `others`."""
    lists = ("counts", "masked_runs", "full_runs", "runs", "kv_lens_ptr")
    dtypes = dict.fromkeys(lists, torch.int32)
    dtypes |= {
        "q_offset_ptr": torch.int32,
        "lse_ptr": torch.float32,
        "spoilt_ptr": torch.int8,
        "next_item_ptr": torch.int32,
        "parts_ptr": torch.float32,
        "lses_ptr": torch.float32,
        "sinks_ptr": torch.float32,
    }
    places = (
        "sequences_ptr",
        "cu_seqlens_q_ptr",
        "cu_seqlens_kv_ptr",
        "page_table_ptr",
        "queue_ptr",
    )
    dtypes |= dict.fromkeys(places, torch.int32)
    for tensor in with_tables(spec).tensors:
        kind = torch.uint8 if tensor.dtype == torch.bool else tensor.dtype
        dtypes[f"{tensor.name}_ptr"] = kind
    dtypes |= others or {}
    floats = {s.name for s in spec.scalars if s.kind == "float"}
    floats |= {"scale", "scale_log2", "to_cap", "by_scale"}
    values: list[Any] = []
    for name in names:
        if name in dtypes or name.endswith("_ptr"):
            values.append(torch.empty(0, dtype=dtypes.get(name, dtype)))
        else:
            values.append(1.0 if name.removesuffix("_") in floats else 3)
    return values


def compile_kernel(
    target: str,
    kernel: Any,
    values: list[Any],
    constants: Mapping[str, Any],
    tiling: Tiling,
) -> Compiled:
    """Compile one kernel with the arguments of a launch. Always compiles: no cache is asked."""
    from triton import knobs

    options = {"num_warps": tiling.warps, "num_stages": tiling.stages}
    kernel = kernel.jit if isinstance(kernel, binaries.Kernel) else kernel
    # The binaries here are of no use to a GPU of this process.
    known, kernel.device_caches = kernel.device_caches, defaultdict(kernel.create_binder)
    log = io.StringIO()
    try:
        with compiling_for(target), knobs.compilation.scope(), knobs.nvidia.scope():
            knobs.compilation.always_compile = True
            knobs.nvidia.dump_ptxas_log = True
            with contextlib.redirect_stdout(log):
                made = kernel.warmup(*values, grid=(1,), **constants, **options)
    finally:
        kernel.device_caches = known
    read = _read_amd if TARGETS[target][0] == "hip" else _read_nvidia
    return read(target, made, log.getvalue())


def _read_nvidia(target: str, made: Any, log: str) -> Compiled:
    """From what Triton's own run of ptxas printed."""
    found = re.findall(
        r"Function properties for (\S+)\s+\d+ bytes stack frame, "
        r"(\d+) bytes spill stores, (\d+) bytes spill loads",
        log,
    )
    spills = {name: int(stores) + int(loads) for name, stores, loads in found}
    own = spills.pop(made.metadata.name)
    return Compiled(
        target,
        max(int(n) for n in re.findall(r"Used (\d+) registers", log)),
        own,
        sum(spills.values()),
        made.metadata.shared,
        tuple(dict.fromkeys(re.findall(r"\(C7\d+\)[^\n]*", log))),
        made.asm["ptx"],
        made.asm["cubin"],
    )


def _read_amd(target: str, made: Any, log: str) -> Compiled:
    text = made.asm["amdgcn"]
    registers, spills = (
        max(int(n) for n in re.findall(rf"\.{what}:\s+(\d+)", text))
        for what in ("vgpr_count", "vgpr_spill_count")
    )
    return Compiled(target, registers, spills, 0, made.metadata.shared, (), text)
