"""Running generated kernels: their variants and devices, and the portable forward."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from .. import binaries, cache, emit, tune
from ..bounds import side
from ..dropout import Dropout
from ..expr import leaves, walk
from ..geometry import Geometry
from ..lower.widths import scalar_is_wide, size_name
from ..schedule import Schedule
from ..spec import Bound, Spec
from ..tiling import INTERPRETER, Target, Tiling, choose_for, target_of
from .arguments import constants_of as constants_of
from .arguments import data_values as data_values
from .arguments import dropout_values, forward_values, range_values
from .arguments import position_values as position_values
from .arguments import precision_of as precision_of
from .interpreted import interpreting as interpreting
from .start import launch as launch


@functools.cache
def _target_of_device(index: int) -> Target:
    if torch.version.hip is None:
        # Not from Triton, whose driver is compiled first where its cache is empty.
        major, minor = torch.cuda.get_device_capability(index)
        return target_of("cuda", 10 * major + minor)
    from triton.runtime import driver

    with torch.cuda.device(index):
        found = driver.active.get_current_target()
    return target_of(found.backend, found.arch)


def current_target(device: torch.device) -> Target:
    """What kernels for tensors on `device` are made for."""
    if device.type == "cpu":
        return INTERPRETER
    return _target_of_device(device.index if device.index is not None else 0)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many a GPU has; one where kernels are interpreted."""
    if device.type == "cpu":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def variant_of(
    bound: Bound,
    geometry: Geometry,
    head_dim: int,
    v_head_dim: int,
    dropout: bool = False,
    like: torch.Tensor | None = None,
) -> emit.Variant:
    """Which kernel a call needs; `like`: its queries, where the kernel computes scores of them."""
    wide = {s for s, value in bound.scalars.items() if _is_wide(value)}
    for name, tensor in bound.tensors.items():
        wide |= {size_name(name, d) for d, n in enumerate(tensor.shape) if n >= 2**31}
    offset = "scalar"
    if isinstance(geometry.q_offset, torch.Tensor):
        offset = "tensor"
    elif geometry.q_offset is None and geometry.has_lens:
        offset = "lens"
    keys = "paged" if geometry.pages is not None else "dense"
    if geometry.packing is not None and geometry.packing.cu_kv is not None:
        keys = "packed"
    return emit.Variant(
        head_dim,
        v_head_dim,
        offset,
        geometry.has_lens,
        frozenset(wide),
        dropout,
        geometry.packing is not None,
        keys,
        like is not None and _approximates(like.dtype, current_target(like.device)),
    )


def _approximates(dtype: torch.dtype, target: Target) -> bool:
    """Whether scores may be as inexact as 16-bit numbers are, and the target gains by it."""
    return dtype.itemsize == 2 and target.backend == "cuda" and int(target.arch) >= 75


def _is_wide(value: Any) -> bool:
    return isinstance(value, int) and scalar_is_wide(value)


@functools.lru_cache(maxsize=1024)
def generate(spec: Spec, variant: emit.Variant, command: str = "") -> emit.Generated:
    """The text of the forward kernel; the same spec and variant give the same text."""
    return emit.forward(spec, variant, command)


def key_parts() -> tuple[str, ...]:
    """What changes a generated file's meaning beside its text."""
    import triton

    return (f"triton {triton.__version__}", "interpret" if interpreting() else "compile")


@functools.lru_cache(maxsize=1024)
def _kernel(spec: Spec, variant: emit.Variant, parts: tuple[str, ...]) -> tuple[Any, Any]:
    generated = generate(spec, variant)
    made = binaries.Kernels(generated.name, generated.text, parts)
    return made.attention_forward, generated


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    bound: Bound,
    geometry: Geometry,
    schedule: Schedule,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dropout: Dropout | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the portable forward kernel: out [B, Hq, Sq, Dv] and the natural-log LSE [B, Hq, Sq].

    Packed: q, out [1, H, T, D] and the LSE [1, H, T]. Paged: k, v [pages, Hkv, page size, D]."""
    q, k, v, scale = positive_scale(q, k, v, scale)
    kind = torch.float64 if q.dtype == torch.float64 else torch.float32
    out, lse = _results(q, v.shape[-1], kind, geometry)
    if not lse.numel() or not geometry.batch:
        return out, lse
    variant = variant_of(bound, geometry, q.shape[-1], v.shape[-1], dropout is not None, q)
    values = forward_values(
        q, k, v, out, lse, bound=bound, geometry=geometry, schedule=schedule, scale=scale,
        softcap=softcap, sinks=sinks,
    )  # fmt: skip
    values |= {**dropout_values(dropout), **range_values(bound.spec, schedule)}
    kernel, generated = _kernel(bound.spec, variant, key_parts())

    def run(tiling: Tiling) -> None:
        constants = constants_of(q, [q, k, v, out], tiling, schedule.block_size)
        if geometry.pages is not None:
            constants["PAGE_SIZE"] = geometry.pages.size
        programs = row_blocks(geometry, schedule, tiling) * geometry.heads
        launch(kernel, generated.arguments, values, constants, tiling, programs)

    run(tuned_tiling(generated, q, v.shape[-1], schedule, bound.spec, run))
    return out, lse


def tuned_tiling(
    generated: emit.Generated,
    q: torch.Tensor,
    v_head_dim: int,
    schedule: Schedule,
    spec: Spec,
    run: Callable[[Tiling], None] | None = None,
) -> Tiling:
    """The blocks of the forward kernel that tuning found, or finds by `run(tiling)`; else the
    default."""
    what = tuned_as(generated.name, generated.text, q.dtype)
    default = default_tiling(q, v_head_dim, schedule, spec)
    return tune.blocks(what, q.device, default, schedule.block_size, run)


def default_tiling(q: torch.Tensor, v_head_dim: int, schedule: Schedule, spec: Spec) -> Tiling:
    """The blocks of the forward kernel where tuning has found no others."""
    target, dims = current_target(q.device), (q.shape[-1], v_head_dim)
    return choose_for(target, q.dtype, *dims, schedule.block_size, pair_bytes(spec))


@functools.lru_cache(maxsize=1024)
def pair_bytes(spec: Spec) -> int:
    """Bytes of the data that mask and score read for each pair; copies ahead have 4 at least."""
    dtypes = {tensor.name: tensor.dtype for tensor in spec.tensors}
    exprs = [expr for expr in (spec.mask, spec.score) if expr is not None]
    loads = {node for expr in exprs for node in walk(expr) if node.op == "load"}
    per_pair = (n for n in loads if side(n) == "both" or leaves(n, "score"))
    return sum(max(4, dtypes[node.attr].itemsize) for node in per_pair)


@functools.lru_cache(maxsize=1024)
def tuned_as(name: str, text: str, dtype: torch.dtype) -> str:
    """What tuning calls a kernel: as its file is called, and its inputs' dtype."""
    stem = cache.file_of(name, text, key_parts()).removesuffix(".py")
    return f"{stem}, {str(dtype).removeprefix('torch.')}"


def positive_scale(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """The same product with a positive scale, and tensors with a unit last stride."""
    if scale <= 0:
        # The kernel's maximum wants a positive scale; the sign moves into the queries.
        q, scale = (-q, -scale) if scale < 0 else (torch.zeros_like(q), 1.0)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return q, k, v, scale


def _results(
    q: torch.Tensor, v_head_dim: int, kind: torch.dtype, geometry: Geometry
) -> tuple[torch.Tensor, torch.Tensor]:
    """Buffers for the output and the LSE."""
    shape = (*q.shape[:3], v_head_dim)
    if geometry.packing is None:
        return q.new_empty(shape), torch.empty(shape[:3], dtype=kind, device=q.device)
    # Laid out like packed queries. Rows behind the last sequence belong to no program.
    out = q.new_zeros((shape[0], shape[2], shape[1], v_head_dim)).transpose(1, 2)
    return out, torch.full(shape[:3], -torch.inf, dtype=kind, device=q.device)


def row_blocks(geometry: Geometry, schedule: Schedule, tiling: Tiling) -> int:
    """Blocks of queries of all sequences, for one head."""
    if geometry.packing is not None:
        return schedule.states.shape[2] * (schedule.block_size[0] // tiling.block_m)
    return math.ceil(geometry.q_len / tiling.block_m) * geometry.batch
