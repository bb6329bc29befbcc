"""Running Hopper's forward kernel: what it can do, descriptors, how work is laid out."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import binaries, emit, launch, tune
from ..config import config
from ..emit import hopper_forward as emit_hopper
from ..geometry import Geometry
from ..schedule import Schedule
from ..schedule.documents import Apart, apart_of
from ..schedule.make import has_long_rows
from ..spec import Bound, Spec
from ..tiling import Target, Tiling
from ..tiling.decode import MOST_QUERIES
from ..tiling.hopper import KEYS, Shape, shape_for, shapes_to_try, works_on
from ..tiling.hopper import tile_for as tile_for
from ..tiling.shares import Shares, Work, choose_shares
from . import arguments, merging

# Pages that are part of a tile.
PAGES = (16, 32, 64)


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
    from . import tma

    q, k, v = tensors
    dims = (q.shape[-1], v.shape[-1])
    if not emit_hopper.covers(*dims):
        return f"Hopper's kernels don't take head dimensions {dims[0]} and {dims[1]}"
    if schedule is not None and not works_on(schedule.block_size, *dims):
        tile = " x ".join(map(str, schedule.block_size))
        return f"Hopper's kernels don't work on tiles of {tile}"
    for name, x in (("q", q), ("k", k), ("v", v)):
        # What isn't contiguous along a row is copied first.
        if x.stride(-1) == 1 and (problem := tma.can_describe(x)):
            return f"{name} has {problem}"
    return ""


def _odd_pages(size: int) -> str:
    """Why tiles can't be copied from pages of a size."""
    if size % max(KEYS) and size not in PAGES:
        return f"Hopper's kernels take pages of {', '.join(map(str, PAGES))} and multiples of 128"
    return ""


def takes_tall_tiles(bound: Bound, geometry: Geometry, dims: tuple[int, int]) -> bool:
    """Whether tiles of three warpgroups serve calls of long rows.

    Packed sequences are shorter than they seem, and tall tiles of theirs are cut more often; where
    whole tiles read one number of data, that wants registers that three don't have."""
    if geometry.packing is not None:
        return False
    return not emit_hopper.has_level_tiles(bound.spec, launch.variant_of(bound, geometry, *dims))


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


@functools.lru_cache(maxsize=1024)
def generate(
    spec: Spec, variant: emit.Variant, groups: int = 2, skips: bool = False
) -> tuple[emit.Generated, emit.Generated]:
    """The texts of the forward kernel, and of the one that repairs its rows; `skips`: it leaves
    documents that lie together to another one."""
    forward = emit_hopper.forward(spec, variant, groups=groups, skips=skips)
    return forward, emit.forward(spec, variant, repairs=True)


@functools.lru_cache(maxsize=1024)
def _kernels(
    spec: Spec, variant: emit.Variant, groups: int, skips: bool, parts: tuple[str, ...]
) -> tuple[Any, Any]:
    forward, repair = (
        binaries.Kernels(g.name, g.text, parts) for g in generate(spec, variant, groups, skips)
    )
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
    spoilt, counters = _zeros(q)
    variant = launch.variant_of(bound, geometry, q.shape[-1], v.shape[-1], like=q)
    dims = (q.shape[-1], v.shape[-1])
    default = shape_for(*dims, schedule.block_size[1], schedule.block_size[0])
    apart = apart_in(schedule, bound, geometry, dims)
    how = bound.spec, variant, default.groups, apart is not None
    (kernel, repair), texts = _kernels(*how, launch.key_parts()), generate(*how)
    page_size = geometry.pages.size if geometry.pages is not None else None
    paged = {} if page_size is None else {"PAGE_SIZE": page_size}
    values = {
        **arguments.forward_values(
            q, k, v, out, lse, bound=bound, geometry=geometry, schedule=schedule, scale=scale,
            softcap=softcap, sinks=sinks,
        ),
        **descriptors(q, k, v, default, page_size),
        **arguments.range_values(bound.spec, schedule),
        "spoilt_ptr": spoilt,
        "batch": geometry.batch,
        "queue_ptr": None if geometry.packing is None else schedule.queue(),
    }  # fmt: skip

    def attend(shape: Shape) -> None:
        layout = _lay_out(bound, geometry, schedule, shape, dims, batch_invariant)
        given = {**values, **_buffers(layout, out, lse, counters[:1])}
        constants = constants_of(shape) | paged
        launch.launch(kernel, texts[0].arguments, given, constants, WARPS, layout.programs)
        if layout.shares.splits > 1:
            results = out.view(-1, dims[1])[layout.row :], lse.view(-1)[layout.row :]
            merging.merge(given["parts_ptr"], given["lses_ptr"], *results)

    what = launch.tuned_as(texts[0].name, texts[0].text, q.dtype)
    if apart is not None:
        values["parted_ptr"] = schedule.documents(apart).holds
        _attend_apart(apart, values, variant, geometry, schedule, dims, counters[1:2])
        attend(default)
    else:
        attend(tuned(what, q.device, default, dims, attend))
    tiling = launch.default_tiling(q, v.shape[-1], schedule, bound.spec)
    constants = arguments.constants_of(q, [q, k, v, out], tiling, schedule.block_size) | paged
    values["items"] = launch.row_blocks(geometry, schedule, tiling) * geometry.heads
    programs = math.ceil(values["items"] / _CHUNK)
    constants["CHUNK"] = _CHUNK
    launch.launch(repair, texts[1].arguments, values, constants, tiling, programs)
    return out, lse


def apart_in(
    schedule: Schedule, bound: Bound, geometry: Geometry, dims: tuple[int, int]
) -> Apart | None:
    """How a call's documents are sequences: on a schedule that is used again, as finding them costs
    as much as it brings to one call. Narrow heads have tall tiles where a row's tiles are all full
    but one."""
    if not schedule.is_shared or (apart := apart_of(bound, geometry, schedule.block_size)) is None:
        return None
    is_tall = max(dims) <= 64 and apart.bound.spec.mask is None
    return replace(apart, block=(192, apart.block[1])) if is_tall else apart


def _attend_apart(
    apart: Apart,
    values: dict[str, Any],
    variant: emit.Variant,
    geometry: Geometry,
    schedule: Schedule,
    dims: tuple[int, int],
    counter: torch.Tensor,
) -> None:
    """Documents that lie together, as sequences; `values`: of the kernel that takes others."""
    documents, default = schedule.documents(apart), shape_for(*dims, *apart.block[::-1])
    generated, kernel = _apart_kernel(apart.bound.spec, variant, default.groups, launch.key_parts())
    out, processors = values["out_ptr"], launch.multiprocessors(geometry.device)
    own = {
        **values, **arguments.run_values(documents.runs), "total_q": apart.length, "q_offset": 0,
        "queue_ptr": documents.queue,
    }  # fmt: skip
    items = geometry.heads * documents.runs.counts.shape[2]

    def attend(shape: Shape) -> None:
        # At most; only the device knows how many rows of tiles there are.
        blocks = max(1, apart.batch * apart.length // shape.block_m)
        side = _last_heads(geometry.heads, geometry.group, blocks, shape.side * processors)
        layout = Layout(items, Shares(items), 0, min(items, processors), side)
        given = own | _buffers(layout, out, values["lse_ptr"], counter)
        constants = constants_of(shape)
        launch.launch(kernel, generated.arguments, given, constants, WARPS, layout.programs)

    what = launch.tuned_as(generated.name, generated.text, out.dtype)
    attend(tuned(what, out.device, default, dims, attend))


@functools.lru_cache(maxsize=1024)
def apart_text(spec: Spec, variant: emit.Variant, groups: int = 2) -> emit.Generated:
    """The text of the kernel for documents as sequences, of the mask without their ids; `variant`:
    of the whole call."""
    own = replace(variant, kv_lens=True, offset="scalar", packed=True, keys="parted")
    return emit_hopper.forward(spec, own, groups=groups)


@functools.lru_cache(maxsize=1024)
def _apart_kernel(
    spec: Spec, variant: emit.Variant, groups: int, parts: tuple[str, ...]
) -> tuple[emit.Generated, Any]:
    made = apart_text(spec, variant, groups)
    return made, binaries.Kernels(made.name, made.text, parts).attention_forward


def _results(
    q: torch.Tensor, v_head_dim: int, geometry: Geometry
) -> tuple[torch.Tensor, torch.Tensor]:
    """Buffers for the output, laid out like packed queries if these are, and the LSE."""
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    batch, heads, rows = q.shape[:3]
    if geometry.packing is None:
        return q.new_empty((batch, heads, rows, v_head_dim)), lse
    return q.new_empty((batch, rows, heads, v_head_dim)).transpose(1, 2), lse


@dataclass(frozen=True)
class Layout:
    """Row blocks of a call, how programs share them, and the first row [B * Hq * Sq] of those that
    several share; programs; heads that work side by side at the end."""

    items: int
    shares: Shares
    row: int
    programs: int
    last_heads: int


def _lay_out(
    bound: Bound,
    geometry: Geometry,
    schedule: Schedule,
    shape: Shape,
    dims: tuple[int, int],
    batch_invariant: bool,
) -> Layout:
    """How work is laid out; with `batch_invariant` no row block is shared."""
    heads, blocks = geometry.batch * geometry.heads, math.ceil(geometry.q_len / shape.block_m)
    is_packed = geometry.packing is not None
    if is_packed:
        # At most; only the device knows how many of them hold a tile.
        heads, blocks = geometry.heads, schedule.states.shape[2]
    processors = launch.multiprocessors(geometry.device)
    shares = Shares(heads * blocks)
    if not is_packed and not batch_invariant:
        shares = _shares(bound, geometry, shape, dims, processors)
    row = shares.whole // blocks * geometry.q_len + shares.whole % blocks * shape.block_m
    programs = min(shares.whole + (heads * blocks - shares.whole) * shares.splits, processors)
    last_heads = _last_heads(heads, geometry.group, blocks, shape.side * processors)
    return Layout(heads * blocks, shares, row, programs, last_heads)


def _zeros(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Flags of rows [B, Hq, Sq], int8, and counters of work, int32, all 0 by one operation."""
    counters = 16
    whole = torch.zeros(counters + q.shape[:3].numel(), dtype=torch.int8, device=q.device)
    return whole[counters:].view(q.shape[:3]), whole[:counters].view(torch.int32)


def _buffers(
    layout: Layout, out: torch.Tensor, lse: torch.Tensor, counter: torch.Tensor
) -> dict[str, Any]:
    """The kernel's arguments that say how work is laid out, and what shares are written to.

    `counter`: of the pieces of work that were taken."""
    if config.tune != "off":
        # Another run has counted.
        counter.zero_()
    parts = lses = lse
    if layout.shares.splits > 1:
        lses = lse.new_empty((lse.numel() - layout.row, layout.shares.splits))
        parts = lse.new_empty((*lses.shape, out.shape[-1]))
    return {
        "next_item_ptr": counter,
        "items": layout.items, "last_heads": layout.last_heads,
        "whole": layout.shares.whole, "splits": layout.shares.splits, "shared_row": layout.row,
        "parts_ptr": parts, "lses_ptr": lses,
    }  # fmt: skip


def tuned(
    what: str,
    device: torch.device,
    default: Shape,
    dims: tuple[int, int],
    attend: Callable[[Shape], None] | None = None,
) -> Shape:
    """The shape that tuning found, or finds by `attend(shape)`; else the default."""
    tile = f"{what}, tiles of {default.block_m} x {default.block_n}"
    found = tune.numbers(
        tile,
        device,
        (shape.numbers for shape in shapes_to_try(default, dims, config.tune)),
        default.numbers,
        lambda numbers: default.tuned(numbers).fits(*dims),
        None if attend is None else lambda numbers: attend(default.tuned(numbers)),
    )
    return default.tuned(found)


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
    return choose_shares(work, processors, shape.saving)


def _last_heads(heads: int, group: int, blocks: int, programs: int) -> int:
    """How many heads at the end work side by side, for so many programs; `group` of them share
    keys.

    Under causal masks a head's row blocks have 1 to n tiles, the longest first. If its last one is
    begun before its first one has ended, processors wait at the end. Heads side by side begin all
    their long ones before; of so many they take 2n tiles' time."""
    wanted = math.ceil(programs / blocks)
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
    from . import tma

    keys, widest = shape.block_n, 256
    if page_size is not None and page_size < keys:
        # Rows of 128 bytes: a tile's rows in shared memory lie so, one after the other.
        keys, widest = page_size, 64
    rows = {"q": 64, "k": keys, "v": keys}
    return {
        f"{name}{part.number}_desc": tma.descriptor(
            x, (rows[name], part.size if name == "q" else min(part.size, widest))
        )
        for name, x in (("q", q), ("k", k), ("v", v))
        for part in emit.parts_of(x.shape[-1])
    }
