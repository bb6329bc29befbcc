"""Running the kernel for few queries, whose keys are split."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .. import binaries, emit, tune
from ..config import config
from ..emit import decode as emit_decode
from ..geometry import Geometry
from ..schedule import Schedule
from ..spec import Bound, Spec
from ..tiling.decode import (
    WHOLE_ROWS,
    Blocks,
    Splits,
    blocks_to_try,
    choose_blocks,
    choose_splits,
    deal,
)
from . import (
    current_target,
    key_parts,
    launch,
    merging,
    multiprocessors,
    pair_bytes,
    positive_scale,
    tuned_as,
    variant_of,
)
from .arguments import alignment, data_values, forward_scales, position_values, precision_of

# What stands for a GPU's multiprocessors where kernels are interpreted.
_INTERPRETED = 4


@functools.lru_cache(maxsize=1024)
def generate(
    spec: Spec, variant: emit.Variant, command: str = "", dealt: bool = False
) -> emit.Generated:
    """The text of the kernel; the same spec and variant give the same text."""
    return emit_decode.decode(spec, variant, command, dealt=dealt)


@functools.lru_cache(maxsize=1024)
def repairing(spec: Spec, variant: emit.Variant) -> emit.Generated:
    """The text of the kernel that repairs what Hopper's kernel for latent heads found spoilt."""
    return emit_decode.decode(spec, variant, repairs=True)


@functools.lru_cache(maxsize=1024)
def kernel_of(
    spec: Spec,
    variant: emit.Variant,
    parts: tuple[str, ...],
    repairs: bool = False,
    dealt: bool = False,
) -> tuple[Any, emit.Generated]:
    """The kernel, or the one that repairs, and its text."""
    generated = repairing(spec, variant) if repairs else generate(spec, variant, dealt=dealt)
    module = binaries.Kernels(generated.name, generated.text, parts)
    return module.repair_decoded if repairs else module.attention_decode, generated


def processors(device: torch.device) -> int:
    """Multiprocessors of a device."""
    return _INTERPRETED if device.type == "cpu" else multiprocessors(device)


def blocks_of(
    q: torch.Tensor,
    v: torch.Tensor,
    bound: Bound,
    geometry: Geometry,
    tile: tuple[int, int],
    *,
    dealt: bool = False,
) -> Blocks:
    """The blocks that a call's kernel works on, along tiles of this size; `dealt`: over the ends of
    sequences."""
    return choose_blocks(
        current_target(q.device),
        q.dtype,
        (q.shape[-1], v.shape[-1]),
        (geometry.q_len, geometry.group),
        tile,
        latent=bound.spec.heads is not None,
        page_size=geometry.pages.size if geometry.pages else None,
        plain=bound.spec.score is None and not bound.spec.softcap and not dealt,
        pair_bytes=pair_bytes(bound.spec),
    )


def splits_of(
    blocks: Blocks, geometry: Geometry, *, batch_invariant: bool, dealt: bool = False
) -> Splits:
    """Into how many splits the keys are cut, from what the host knows; `dealt`: over the ends of
    sequences."""
    if dealt:
        room = processors(geometry.device)
        lines = programs_of(blocks, geometry, dealt=True)
        return deal(blocks, lines, geometry.batch, geometry.kv_len, room)
    return choose_splits(
        blocks,
        max(1, programs_of(blocks, geometry)),
        geometry.kv_len,
        processors(geometry.device),
        invariant=batch_invariant,
        even=not geometry.has_lens,
    )


def is_dealt(bound: Bound, geometry: Geometry, *, batch_invariant: bool) -> bool:
    """Whether sequences may have different numbers of tiles, so that these are dealt."""
    if geometry.packing is not None:
        return True
    if batch_invariant or geometry.batch == 1 or bound.spec.heads is not None:
        return False
    if bound.spec.mask is None:
        return geometry.has_lens
    return geometry.varies_by_batch or bound.spec.uses("b")


@dataclass(frozen=True)
class Work:
    """A call on its way to a kernel for few queries: its arguments by name, its splits, results.

    `parts` and `lses` are the splits' results, and those of the call if there is one split;
    `spans`: which parts are a row's, of tiles that are dealt."""

    values: dict[str, Any]
    splits: Splits
    parts: torch.Tensor
    lses: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    spans: torch.Tensor | None = None

    @property
    def partial(self) -> bool:
        """Whether results have to be merged."""
        return self.splits.count > 1 or self.splits.dealt

    def merged(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The results of a call whose kernel has been launched."""
        results = self.parts, self.lses, self.out, self.lse
        if self.spans is not None:
            merging.merge_dealt(
                *results, spans=self.spans, batch=self.values["batch"], heads=self.values["heads"],
                cu_seqlens_q=self.values.get("cu_seqlens_q_ptr"),
            )  # fmt: skip
        elif self.partial:
            merging.merge(*results)
        return self.out, self.lse


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    bound: Bound,
    geometry: Geometry,
    schedule: Schedule | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    splits: Splits,
) -> Work:
    """The arguments of `forward`, whose scale is positive, as a kernel takes them."""
    out, lse = _results(q, v.shape[-1], geometry)
    parts, lses, spans = out, lse, None
    if splits.dealt:
        rows = geometry.heads * geometry.q_len * (splits.count + geometry.batch)
        parts, lses = q.new_empty((rows, v.shape[-1]), dtype=lse.dtype), lse.new_empty(rows)
        spans = torch.empty((lse.numel(), 2), dtype=torch.int64, device=q.device)
    elif splits.count > 1:
        shape = (*q.shape[:3], splits.count)
        parts, lses = q.new_empty((*shape, v.shape[-1]), dtype=lse.dtype), lse.new_empty(shape)
    values: dict[str, Any] = {
        "q_ptr": q, "k_ptr": k, "v_ptr": v, "out_ptr": parts, "lse_ptr": lses, "sinks_ptr": sinks,
        "heads": geometry.heads, "group": geometry.group,
        "spans_ptr": spans, "whole_ptr": out, "whole_lse_ptr": lse,
        "splits": splits.count, "split_tiles": splits.tiles,
        "batch": geometry.batch, "q_room": geometry.q_len,
        **forward_scales(bound.spec, scale, softcap),
        **position_values(geometry, compares=True), **data_values(bound),
    }  # fmt: skip
    for letter, tensor in (("q", q), ("k", k), ("v", v)):
        values |= {f"stride_{letter}{d}": tensor.stride(i) for i, d in enumerate("bhs")}
    if bound.spec.mask is not None:
        assert schedule is not None
        values |= _schedule_values(schedule, geometry)
    return Work(values, splits, parts, lses, out, lse, spans)


def _results(
    q: torch.Tensor, v_head_dim: int, geometry: Geometry
) -> tuple[torch.Tensor, torch.Tensor]:
    """Buffers for the output, laid out like packed queries where they are packed, and the LSE."""
    kind = torch.float64 if q.dtype == torch.float64 else torch.float32
    batch, heads, rows = q.shape[:3]
    lse = q.new_empty(q.shape[:3], dtype=kind)
    if geometry.packing is None:
        return q.new_empty((*q.shape[:3], v_head_dim)), lse
    return q.new_empty((batch, rows, heads, v_head_dim)).transpose(1, 2), lse


def storage_constants(
    bound: Bound, geometry: Geometry, schedule: Schedule | None
) -> dict[str, Any]:
    """The compile-time values that say how a schedule and pages are laid out."""
    constants = {}
    if bound.spec.mask is not None:
        constants = dict(zip(("TILE_M", "TILE_N"), tile_of(bound, schedule), strict=True))
    if geometry.pages is not None:
        constants["PAGE_SIZE"] = geometry.pages.size
    return constants


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    bound: Bound,
    geometry: Geometry,
    schedule: Schedule | None,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with few queries: out [B, Hq, Sq, Dv] and the natural-log LSE [B, Hq, Sq].

    `schedule` may be None where there is no mask. Values of latent heads are the first columns of
    `k`, whatever `v` is. Nothing waits for the device; the grid depends on shapes alone, so that
    a captured graph serves other lengths up to that of `k`."""
    q, k, v, scale = positive_scale(q, k, v, scale)
    dealt = is_dealt(bound, geometry, batch_invariant=batch_invariant)

    def attend(blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
        splits = splits_of(blocks, geometry, batch_invariant=batch_invariant, dealt=dealt)
        work = prepare(
            q, k, v, bound=bound, geometry=geometry, schedule=schedule, scale=scale,
            softcap=softcap, sinks=sinks, splits=splits,
        )  # fmt: skip
        if not work.lse.numel():
            return work.out, work.lse
        run(work, blocks, bound=bound, geometry=geometry, schedule=schedule)
        return work.merged()

    tile = tile_of(bound, schedule)
    if batch_invariant or not q.numel():
        return attend(blocks_of(q, v, bound, geometry, tile, dealt=dealt))
    return attend(tuned_blocks(q, v, bound, geometry, tile, dealt=dealt, attend=attend))


def tuned_blocks(
    q: torch.Tensor,
    v: torch.Tensor,
    bound: Bound,
    geometry: Geometry,
    tile: tuple[int, int],
    *,
    dealt: bool = False,
    attend: Callable[[Blocks], Any] | None = None,
) -> Blocks:
    """The blocks that tuning found for such calls, or finds by `attend(blocks)`; else those of
    `blocks_of`."""
    default = blocks_of(q, v, bound, geometry, tile, dealt=dealt)
    dims, latent = (q.shape[-1], v.shape[-1]), bound.spec.heads is not None
    generated = generate(bound.spec, variant_of(bound, geometry, *dims, like=q), dealt=dealt)
    tried = blocks_to_try(
        default, current_target(q.device), q.dtype, dims, tile, config.tune,
        latent=latent, pair_bytes=pair_bytes(bound.spec),
    )  # fmt: skip
    found = tune.numbers(
        f"{tuned_as(generated.name, generated.text, q.dtype)}, {default.tiling.block_m} rows",
        q.device,
        (blocks.numbers for blocks in tried),
        default.numbers,
        lambda numbers: tile[1] % numbers[0] == 0,
        None if attend is None else lambda numbers: attend(default.tuned(numbers)),
    )
    return default.tuned(found)


def run(
    work: Work,
    blocks: Blocks,
    *,
    bound: Bound,
    geometry: Geometry,
    schedule: Schedule | None,
    repairs: bool = False,
) -> None:
    """Launch the kernel; `repairs`: the one that looks at `spoilt_ptr` and repairs what is."""
    q, k, v = (work.values[f"{x}_ptr"] for x in "qkv")
    constants = constants_of(q, [q, k, v], blocks, partial=work.partial)
    constants |= storage_constants(bound, geometry, schedule)
    variant = variant_of(bound, geometry, q.shape[-1], v.shape[-1], like=q)
    dealt = work.splits.dealt
    if dealt:
        constants["COUNT"] = _count_type(work.splits, geometry, blocks.tiling.block_n)
    kernel, generated = kernel_of(bound.spec, variant, key_parts(), repairs, dealt)
    if programs := programs_of(blocks, geometry, dealt=dealt) * work.splits.count:
        launch(kernel, generated.arguments, work.values, constants, blocks.tiling, programs)


def _count_type(splits: Splits, geometry: Geometry, block_n: int) -> Any:
    """What counts the tiles of all sequences, times programs."""
    import triton.language as tl

    tiles = geometry.batch * (geometry.kv_len // block_n + 1)
    return tl.int32 if splits.count * tiles < 2**31 else tl.int64


def programs_of(blocks: Blocks, geometry: Geometry, *, dealt: bool = False) -> int:
    """Programs of one split; of dealt tiles they belong to no sequence."""
    lines = blocks.count(geometry.q_len, geometry.group) * geometry.kv_heads
    return lines if dealt else lines * geometry.batch


def constants_of(
    q: torch.Tensor, aligned: list[torch.Tensor], blocks: Blocks, *, partial: bool
) -> dict[str, Any]:
    import triton.language as tl

    narrow = all(256 * t.stride(-2) < 2**31 for t in aligned)
    return {
        "BLOCK_M": blocks.tiling.block_m,
        "BLOCK_N": blocks.tiling.block_n,
        "GROUP": blocks.group,
        "PARTIAL": partial,
        "ALIGN": alignment(aligned),
        "OFFSET": tl.int32 if narrow else tl.int64,
        "FLOAT": tl.float64 if q.dtype == torch.float64 else tl.float32,
        "PRECISION": precision_of(q.dtype),
    }


def tile_of(bound: Bound, schedule: Schedule | None) -> tuple[int, int]:
    """Queries and keys of the schedule's tile; without a mask there is none."""
    if bound.spec.mask is None:
        return WHOLE_ROWS
    assert schedule is not None, "a mask needs its schedule"
    return schedule.block_size


def _schedule_values(schedule: Schedule, geometry: Geometry) -> dict[str, Any]:
    """The kernel's arguments for the visited tiles; strides count rows of tiles."""
    visits = schedule.visits(geometry.group)
    batch, heads, rows = visits.counts.shape
    return {
        "counts": visits.counts,
        "runs": visits.runs,
        "schedule_stride_b": heads * rows if batch > 1 else 0,
        "schedule_stride_h": rows if heads > 1 else 0,
        "runs_width": visits.runs.shape[-2],
    }
