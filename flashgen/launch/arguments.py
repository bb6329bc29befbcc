"""What kernels are given: arguments by name, and compile-time values."""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping
from typing import Any

import torch

from .. import emit
from ..dropout import Dropout
from ..geometry import MAX_POSITION, Geometry
from ..lower.widths import size_name
from ..order import tables_of
from ..schedule import Runs, Schedule
from ..spec import Bound, Spec
from ..tiling import Tiling

LOG2E = 1.4426950408889634


def data_values(bound: Bound) -> dict[str, Any]:
    """The kernel's arguments for a call's scalars and data."""
    values: dict[str, Any] = {
        name: int(value) if isinstance(value, bool) else value
        for name, value in bound.scalars.items()
    }
    for param in bound.spec.scalars:
        if param.kind == "double":
            (values[param.name],) = struct.unpack("q", struct.pack("d", values[param.name]))
    return values | tensor_values(bound.tensors)


def tensor_values(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The kernel's arguments for tensors."""
    values: dict[str, Any] = {}
    for name, tensor in tensors.items():
        values[f"{name}_ptr"] = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
        for dim in range(tensor.ndim):
            values[size_name(name, dim)] = tensor.shape[dim]
            values[f"{name}_stride_{dim}"] = tensor.stride(dim)
    return values


def position_values(geometry: Geometry, *, compares: bool = False) -> dict[str, Any]:
    """The kernel's arguments for lengths and positions; `compares`: it compares lengths with the
    cache itself."""
    values: dict[str, Any] = {"q_len": geometry.q_len, "kv_len": geometry.kv_len}
    if compares:
        values["kv_lens_ptr"] = geometry.given_lens
        values["kv_room"] = MAX_POSITION if geometry.room is None else geometry.room
    elif geometry.has_lens:
        values["kv_lens_ptr"] = geometry.kv_lens
    offset = geometry.q_offset
    if isinstance(offset, torch.Tensor):
        values |= {
            "q_offset_ptr": offset,
            "q_offset_stride": offset.stride(0) if offset.numel() > 1 else 0,
        }
    elif offset is not None:
        values["q_offset"] = offset
    else:
        values["q_offset"] = geometry.kv_len - geometry.q_len
    return values | storage_values(geometry)


def storage_values(geometry: Geometry) -> dict[str, Any]:
    """The kernel's arguments for where packed and paged tensors hold a sequence."""
    values: dict[str, Any] = {}
    if (packing := geometry.packing) is not None:
        values["cu_seqlens_q_ptr"], values["cu_seqlens_kv_ptr"] = packing.cu_q, packing.cu_kv
        values["total_q"] = packing.total_q
    if (pages := geometry.pages) is not None:
        values |= {
            "page_table_ptr": pages.table,
            "page_table_stride": pages.table.stride(0),
            "table_width": pages.table.shape[1],
            "num_pages": pages.count,
        }
    return values


def dropout_values(dropout: Dropout | None) -> dict[str, Any]:
    """The kernel's arguments for dropout."""
    if dropout is None:
        return {}
    return {
        "dropout_seed": dropout.seed,
        "dropout_threshold": dropout.threshold,
        "dropout_scale": dropout.scale,
    }


def score_values(scale: float, softcap: float | None, is_scaled: bool) -> dict[str, float]:
    """The kernel's arguments for factors of the scores: before a score function, before the cap's
    tanh, and from there to base 2. `is_scaled`: whether the score function leaves them scaled."""
    rest = 1.0 if is_scaled else scale
    if softcap is not None:
        return {"scale": scale, "to_cap": rest / softcap, "scale_log2": softcap * LOG2E}
    return {"scale": scale, "scale_log2": rest * LOG2E}


def forward_scales(spec: Spec, scale: float, softcap: float | None) -> dict[str, float]:
    """The same for forward kernels, whose score functions may be of scores that aren't scaled."""
    is_scaled = spec.score is not None and not emit.is_added(spec)
    return {**score_values(scale, softcap, is_scaled), "by_scale": 1.0 / scale}


def schedule_values(schedule: Schedule) -> dict[str, Any]:
    """The kernel's arguments for a schedule's runs; strides count rows of tiles."""
    rows = schedule.states.shape[2]
    return {
        **run_values(schedule.kv_runs), "sequences_ptr": schedule.q_sequences, "q_tiles": rows
    }  # fmt: skip


def run_values(runs: Runs) -> dict[str, Any]:
    """The same without what only packed sequences have."""
    batch, heads, rows = runs.counts.shape[:3]
    return {
        "counts": runs.counts,
        "masked_runs": runs.masked,
        "full_runs": runs.full,
        "schedule_stride_b": heads * rows if batch > 1 else 0,
        "schedule_stride_h": rows if heads > 1 else 0,
        "masked_width": runs.masked.shape[-2],
        "full_width": runs.full.shape[-2],
    }


def range_values(spec: Spec, schedule: Schedule) -> dict[str, Any]:
    """The kernel's arguments for the ranges of data in order, which the schedule holds."""
    tensors: dict[str, torch.Tensor] = {}
    for table, ranges in zip(tables_of(spec.mask), schedule.ranges, strict=True):
        tensors |= {table.range_name: ranges.range, table.order_name: ranges.order}
    return tensor_values(tensors)


def forward_values(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    bound: Bound,
    geometry: Geometry,
    schedule: Schedule,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> dict[str, Any]:
    """The arguments of a forward kernel by name."""
    values: dict[str, Any] = {
        "q_ptr": q, "k_ptr": k, "v_ptr": v, "out_ptr": out, "lse_ptr": lse, "sinks_ptr": sinks,
        "heads": geometry.heads, "group": geometry.group,
        **forward_scales(bound.spec, scale, softcap),
        **schedule_values(schedule), **position_values(geometry), **data_values(bound),
    }  # fmt: skip
    for letter, tensor in (("q", q), ("k", k), ("v", v), ("o", out)):
        values |= {f"stride_{letter}{d}": tensor.stride(i) for i, d in enumerate("bhs")}
    return values


def alignment(tensors: list[torch.Tensor]) -> int:
    """Elements in 16 bytes if every row starts on such a boundary, else 1."""
    elements = 16 // tensors[0].element_size()
    for tensor in tensors:
        if tensor.data_ptr() % 16 or not _rows_align(tensor.stride(), elements):
            return 1
    return elements


@functools.lru_cache(maxsize=1024)
def _rows_align(strides: tuple[int, ...], elements: int) -> bool:
    return not any(stride % elements for stride in strides[:-1])


def precision_of(dtype: torch.dtype) -> str:
    """fp32 is true fp32 unless PyTorch was asked for TF32."""
    if dtype != torch.float32:
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def constants_of(
    q: torch.Tensor, aligned: list[torch.Tensor], tiling: Tiling, block_size: tuple[int, int]
) -> dict[str, Any]:
    """The compile-time values of an attention kernel."""
    import triton.language as tl

    # The largest tile has 256 rows.
    narrow = all(256 * t.stride(-2) < 2**31 for t in aligned if t.ndim > 1)
    return {
        "BLOCK_M": tiling.block_m,
        "BLOCK_N": tiling.block_n,
        "TILE_M": block_size[0],
        "TILE_N": block_size[1],
        "ALIGN": alignment(aligned),
        "OFFSET": tl.int32 if narrow else tl.int64,
        "FLOAT": tl.float64 if q.dtype == torch.float64 else tl.float32,
        "PRECISION": precision_of(q.dtype),
    }
