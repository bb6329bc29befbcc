"""Running Hopper's forward kernel: what it can do, descriptors, how work is laid out."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import binaries, emit, launch
from ..emit import hopper_forward as emit_hopper
from ..geometry import Geometry
from ..schedule import Schedule
from ..schedule.make import has_long_rows
from ..spec import Bound, Spec
from ..tiling import Target, Tiling
from ..tiling.decode import MOST_QUERIES
from ..tiling.shares import Shares, Work, choose_shares
from . import decode

ROWS = (128, 192)
KEYS = (128, 64)
# Pages that are part of a tile.
PAGES = (16, 32, 64)
# Bytes for tiles: what a program may have, without barriers and what Triton needs for reductions.
SHARED = 232448 - 2048


@dataclass(frozen=True)
class Shape:
    """Warpgroups of 64 rows, keys of a tile, turns of the ring, row blocks whose queries are there,
    registers of a thread that multiplies, and of one that copies."""

    groups: int
    block_n: int
    stages: int
    buffers: int
    registers: int
    producer: int

    @property
    def block_m(self) -> int:
        return 64 * self.groups


def tile_for(head_dim: int, v_head_dim: int, long_rows: bool, q_len: int = 8192) -> tuple[int, int]:
    """Queries and keys of a tile that Hopper's forward kernel works on.

    Three warpgroups of narrow heads keep tensor cores and exponentials busy at the same time, but
    their tiles are cut more often; rows that reach back to the first key don't mind."""
    is_tall = long_rows and q_len > 256 and max(head_dim, v_head_dim) <= 64
    return ROWS[is_tall], shape_for(head_dim, v_head_dim).block_n


@functools.cache
def shape_for(
    head_dim: int, v_head_dim: int, block_n: int | None = None, block_m: int = 128
) -> Shape:
    """The blocks of Hopper's forward kernel.

    As many stages as fit in shared memory beside the queries, at most four, and two at least.
    Keys of a tile: as asked for, or the most for which that fits."""
    if block_n is None:
        shapes = (shape_for(head_dim, v_head_dim, n, block_m) for n in KEYS)
        return next(s for s in shapes if s.stages > 1)
    q_dim, v_dim = (sum(p.size for p in emit.parts_of(d)) for d in (head_dim, v_head_dim))
    groups = block_m // 64
    # Three warpgroups have no registers to hold queries; those of the next row block come early.
    buffers, registers, producer = (2, 160, 32) if groups == 3 else (1, 232, 40)
    left, stage = SHARED - 2 * buffers * block_m * q_dim, 2 * block_n * (q_dim + v_dim)
    return Shape(groups, block_n, min(4, left // stage), buffers, registers, producer)


def obstacle(
    device: torch.device,
    dtype: torch.dtype,
    tensors: Sequence[torch.Tensor] = (),
    schedule: Schedule | None = None,
    geometry: Geometry | None = None,
) -> str:
    """Why Hopper's kernel can't run a call (q, k, v: `tensors`), or any; empty if it can."""
    if device.type != "cuda":
        return f"Hopper's kernels run on its GPU, and the tensors are on {device}"
    if problem := unsupported(launch.current_target(device), dtype):
        return problem
    if geometry is not None and geometry.pages is not None:
        if problem := _odd_pages(geometry.pages.size):
            return problem
    if geometry is not None and geometry.packing is not None:
        if not geometry.batch:
            return "there is no sequence"
        if geometry.q_len <= MOST_QUERIES:
            return f"sequences of at most {MOST_QUERIES} queries leave most of a tile empty"
    if not tensors:
        return ""
    from .. import hopper

    q, k, v = tensors
    dims = (q.shape[-1], v.shape[-1])
    if not emit_hopper.covers(*dims):
        return f"Hopper's kernels don't take head dimensions {dims[0]} and {dims[1]}"
    if schedule is not None and not _fits(schedule, *dims):
        tile = " x ".join(map(str, schedule.block_size))
        return f"Hopper's kernels don't work on tiles of {tile}"
    for name, x in (("q", q), ("k", k), ("v", v)):
        # What isn't contiguous along a row is copied first.
        if x.stride(-1) == 1 and (problem := hopper.can_describe(x)):
            return f"{name} has {problem}"
    return ""


def _odd_pages(size: int) -> str:
    """Why tiles can't be copied from pages of a size."""
    if size % max(KEYS) and size not in PAGES:
        return f"Hopper's kernels take pages of {', '.join(map(str, PAGES))} and multiples of 128"
    return ""


@functools.cache
def unsupported(target: Target, dtype: torch.dtype) -> str:
    if dtype not in (torch.bfloat16, torch.float16):
        return f"Hopper's kernels take 16-bit floats, not {str(dtype).removeprefix('torch.')}"
    if (target.backend, target.arch) != ("cuda", "90"):
        return f"Hopper's kernels are for sm_90, and this is {target.backend} {target.arch}"
    try:
        from .. import hopper as hopper
    except (ImportError, AttributeError) as error:
        return f"this Triton's Gluon isn't known to flashgen ({error})"
    return ""


def _fits(schedule: Schedule, head_dim: int, v_head_dim: int) -> bool:
    """Whether the kernel works on a schedule's tiles."""
    rows, keys = schedule.block_size
    if rows not in ROWS or keys not in KEYS or (rows > 128 and max(head_dim, v_head_dim) > 64):
        return False
    return shape_for(head_dim, v_head_dim, keys, rows).stages > 1


@functools.lru_cache(maxsize=1024)
def generate(
    spec: Spec, variant: emit.Variant, groups: int = 2
) -> tuple[emit.Generated, emit.Generated]:
    """The texts of the forward kernel, and of the one that repairs its rows."""
    forward = emit_hopper.forward(spec, variant, groups=groups)
    return forward, emit.forward(spec, variant, repairs=True)


@functools.lru_cache(maxsize=1024)
def _kernels(
    spec: Spec, variant: emit.Variant, groups: int, parts: tuple[str, ...]
) -> tuple[Any, Any]:
    made = (binaries.Kernels(g.name, g.text, parts) for g in generate(spec, variant, groups))
    forward, repair = made
    return forward.attention_forward, repair.repair_rows


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
    dropout: None = None,
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run Hopper's forward kernel; arguments and results are those of `launch.forward`.

    It has no dropout. `batch_invariant`: no row block is shared, as that depends on the batch."""
    q, k, v, scale = launch.positive_scale(q, k, v, scale)
    out, lse = _results(q, v.shape[-1], geometry)
    spoilt = torch.zeros(q.shape[:3], dtype=torch.int8, device=q.device)
    variant = launch.variant_of(bound, geometry, q.shape[-1], v.shape[-1], like=q)
    shape = shape_for(q.shape[-1], v.shape[-1], schedule.block_size[1], schedule.block_size[0])
    heads, blocks = geometry.batch * geometry.heads, math.ceil(geometry.q_len / shape.block_m)
    is_packed = geometry.packing is not None
    if is_packed:
        # At most; only the device knows how many of them hold a tile.
        heads, blocks = geometry.heads, schedule.states.shape[2]
    processors = launch.multiprocessors(q.device)
    shares = Shares(heads * blocks)
    if not is_packed and not batch_invariant:
        shares = _shares(bound, geometry, shape, (q.shape[-1], v.shape[-1]), processors)
    shared_row = shares.whole // blocks * geometry.q_len + shares.whole % blocks * shape.block_m
    parts = lses = lse
    if shares.splits > 1:
        lses = lse.new_empty((lse.numel() - shared_row, shares.splits))
        parts = lse.new_empty((*lses.shape, v.shape[-1]))
    page_size = geometry.pages.size if geometry.pages is not None else None
    values = {
        **launch.forward_values(
            q, k, v, out, lse, bound=bound, geometry=geometry, schedule=schedule, scale=scale,
            softcap=softcap, sinks=sinks,
        ),
        **descriptors(q, k, v, shape, page_size),
        **launch.range_values(bound.spec, schedule),
        "spoilt_ptr": spoilt,
        "next_item_ptr": torch.zeros(1, dtype=torch.int32, device=q.device),
        "items": heads * blocks,
        "last_heads": _last_heads(heads, geometry.group, blocks, processors),
        "whole": shares.whole,
        "splits": shares.splits,
        "shared_row": shared_row,
        "parts_ptr": parts,
        "lses_ptr": lses,
        "batch": geometry.batch,
        "queue_ptr": schedule.queue() if is_packed else None,
    }  # fmt: skip
    kernel, repair = _kernels(bound.spec, variant, shape.groups, launch.key_parts())
    texts = generate(bound.spec, variant, shape.groups)
    programs = min(shares.whole + (heads * blocks - shares.whole) * shares.splits, processors)
    paged = {} if page_size is None else {"PAGE_SIZE": page_size}
    constants = constants_of(shape) | paged
    launch.launch(kernel, texts[0].arguments, values, constants, WARPS, programs)
    if shares.splits > 1:
        decode.merge(parts, lses, out.view(-1, v.shape[-1])[shared_row:], lse.view(-1)[shared_row:])
    tiling = launch.default_tiling(q, v.shape[-1], schedule, bound.spec)
    constants = launch.constants_of(q, [q, k, v, out], tiling, schedule.block_size) | paged
    values["items"] = launch.row_blocks(geometry, schedule, tiling) * geometry.heads
    programs = math.ceil(values["items"] / _CHUNK)
    constants["CHUNK"] = _CHUNK
    launch.launch(repair, texts[1].arguments, values, constants, tiling, programs)
    return out, lse


def _results(
    q: torch.Tensor, v_head_dim: int, geometry: Geometry
) -> tuple[torch.Tensor, torch.Tensor]:
    """Buffers for the output, laid out like packed queries if these are, and the LSE."""
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    batch, heads, rows = q.shape[:3]
    if geometry.packing is None:
        return q.new_empty((batch, heads, rows, v_head_dim)), lse
    return q.new_empty((batch, rows, heads, v_head_dim)).transpose(1, 2), lse


def _shares(
    bound: Bound, geometry: Geometry, shape: Shape, dims: tuple[int, int], processors: int
) -> Shares:
    """How many programs share a row block."""
    row_blocks = geometry.batch * geometry.heads * math.ceil(geometry.q_len / shape.block_m)
    if not has_long_rows(bound, geometry):
        return Shares(row_blocks)
    tiles = math.ceil(geometry.kv_len / shape.block_n)
    is_uniform = bound.spec.mask is None and geometry.kv_lens is None
    work = Work(row_blocks, shape.block_m, tiles, shape.block_n, dims, is_uniform)
    return choose_shares(work, processors)


def _last_heads(heads: int, group: int, blocks: int, processors: int) -> int:
    """How many heads at the end work side by side; `group` of them share keys.

    Under causal masks a head's row blocks have 1 to n tiles, the longest first. If its last one is
    begun before its first one has ended, processors wait at the end. Heads side by side begin all
    their long ones before; of so many they take 2n tiles' time."""
    wanted = math.ceil(4 * processors / blocks)
    return min(heads, math.ceil(wanted / group) * group)


# Row blocks that a program looks at for rows to repair.
_CHUNK = 32
# Four warps are a consumer; the kernel adds the others itself.
WARPS = Tiling(0, 0, 4, 1)


def constants_of(shape: Shape) -> dict[str, Any]:
    """The compile-time values of the kernel."""
    return {
        "BLOCK_M": shape.block_m,
        "BLOCK_N": shape.block_n,
        "STAGES": shape.stages,
        "BUFFERS": shape.buffers,
        "REGISTERS": shape.registers,
        "PRODUCER": shape.producer,
    }


def descriptors(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: Shape, page_size: int | None = None
) -> dict[str, Any]:
    """TMA descriptors of each part of the head dimensions, as the kernel names them."""
    from .. import hopper

    keys, widest = shape.block_n, 256
    if page_size is not None and page_size < keys:
        # Rows of 128 bytes: a tile's rows in shared memory lie so, one after the other.
        keys, widest = page_size, 64
    rows = {"q": 64, "k": keys, "v": keys}
    return {
        f"{name}{part.number}_desc": hopper.descriptor(
            x, (rows[name], part.size if name == "q" else min(part.size, widest))
        )
        for name, x in (("q", q), ("k", k), ("v", v))
        for part in emit.parts_of(x.shape[-1])
    }
