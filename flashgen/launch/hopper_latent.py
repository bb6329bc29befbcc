"""Running Hopper's kernel for latent heads: what it can do, blocks, descriptors."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .. import binaries, emit, launch
from ..emit import hopper_latent as emit_hopper_latent
from ..geometry import Geometry
from ..schedule import Schedule
from ..spec import MLA, Bound, Spec
from ..tiling import Tiling
from ..tiling.decode import Blocks, power_of_two
from ..tiling.hopper import SHARED
from . import decode as launch_decode
from .hopper_forward import unsupported

# Rows of a program, keys of a tile; four warps are one warpgroup, and the kernel adds the others.
BLOCK_M, BLOCK_N = 64, 64
_WARPS = Tiling(BLOCK_M, BLOCK_N, 4, 1)
# Of a thread that adds values; those that are left are for one that weighs.
_REGISTERS = 216
RANKS, ROPES = (128, 256, 512), (16, 32, 64)


def obstacle(
    device: torch.device,
    dtype: torch.dtype,
    heads: MLA,
    q: torch.Tensor,
    kv: torch.Tensor,
    geometry: Geometry,
    schedule: Schedule | None = None,
) -> str:
    """Why Hopper's kernel can't run a call with latent heads; empty if it can."""
    if device.type != "cuda":
        return f"Hopper's kernels run on its GPU, and the tensors are on {device}"
    if problem := unsupported(launch.current_target(device), dtype):
        return problem
    if heads.rank not in RANKS or heads.rope not in ROPES:
        return f"Hopper's kernel for latent heads takes no {heads}"
    if geometry.packing is not None:
        return "Hopper's kernel for latent heads takes no packed queries"
    if geometry.pages is not None and geometry.pages.size % BLOCK_N:
        return f"pages of {geometry.pages.size} are no multiple of {BLOCK_N}"
    if schedule is not None and schedule.block_size[1] % BLOCK_N:
        return f"tiles of {schedule.block_size[1]} keys are no multiple of {BLOCK_N}"
    from . import tma

    for name, x in (("q", q), ("kv", kv)):
        # What isn't contiguous along a row is copied first.
        if x.stride(-1) == 1 and (problem := tma.can_describe(x)):
            return f"{name} has {problem}"
    return ""


@functools.lru_cache(maxsize=1024)
def generate(spec: Spec, variant: emit.Variant) -> emit.Generated:
    """The text of the kernel; what repairs its rows is `launch_decode.repairing`'s."""
    return emit_hopper_latent.latent(spec, variant)


@functools.lru_cache(maxsize=1024)
def kernel_of(
    spec: Spec, variant: emit.Variant, parts: tuple[str, ...]
) -> tuple[Any, emit.Generated]:
    """The kernel and its text."""
    generated = generate(spec, variant)
    module = binaries.Kernels(generated.name, generated.text, parts)
    return module.attention_latent, generated


def blocks_of(q_len: int, heads: int, tile: tuple[int, int]) -> Blocks:
    """64 packed rows: queries of one row of tiles, and as many heads of each as there is room."""
    queries = min(power_of_two(q_len), max(1, BLOCK_M // power_of_two(heads)))
    if q_len > tile[0]:
        queries = min(queries, tile[0] & -tile[0])
    return Blocks(_WARPS, BLOCK_M // queries, 1)


def stages_of(heads: MLA) -> int:
    """As many tiles as there is room for beside queries and weights; at most four."""
    row = 2 * (heads.rank + heads.rope)
    return min(4, (SHARED - BLOCK_M * (row + 2 * BLOCK_N + 4)) // (BLOCK_N * row))


def forward(
    q: torch.Tensor,
    kv: torch.Tensor,
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
    """Attend to latent rows; arguments and results are those of `launch_decode.forward`."""
    q, kv, v, scale = launch.positive_scale(q, kv, v, scale)
    tile = launch_decode.tile_of(bound, schedule)
    blocks = blocks_of(geometry.q_len, geometry.heads, tile)
    splits = launch_decode.splits_of(blocks, geometry, batch_invariant=batch_invariant)
    common: dict[str, Any] = {"bound": bound, "geometry": geometry, "schedule": schedule}
    work = launch_decode.prepare(
        q, kv, v, **common, scale=scale, softcap=softcap, sinks=sinks, splits=splits
    )
    if not work.lse.numel():
        return work.out, work.lse
    assert bound.spec.heads is not None
    work.values["spoilt_ptr"] = torch.empty(
        (*work.lses.shape, 2), dtype=torch.int8, device=q.device
    )
    work.values.update(descriptors(q, kv, bound.spec.heads, blocks))
    variant = launch.variant_of(bound, geometry, q.shape[-1], v.shape[-1], like=q)
    kernel, generated = kernel_of(bound.spec, variant, launch.key_parts())
    constants = constants_of(bound.spec.heads, blocks, partial=work.partial)
    constants |= launch_decode.storage_constants(bound, geometry, schedule)
    programs = launch_decode.programs_of(blocks, geometry) * splits.count
    launch.launch(kernel, generated.arguments, work.values, constants, _WARPS, programs)
    # Splits are shares of tiles of 64 keys there too.
    portable = launch_decode.blocks_of(q, v, bound, geometry, tile)
    launch_decode.run(work, portable, **common, repairs=True)
    return work.merged()


def constants_of(heads: MLA, blocks: Blocks, *, partial: bool) -> dict[str, Any]:
    """The compile-time values of the kernel, but for those of its storage."""
    return {
        "BLOCK_N": BLOCK_N, "STAGES": stages_of(heads), "GROUP": blocks.group,
        "QUERIES": blocks.queries, "PARTIAL": partial, "REGISTERS": _REGISTERS,
    }  # fmt: skip


def descriptors(q: torch.Tensor, kv: torch.Tensor, heads: MLA, blocks: Blocks) -> dict[str, Any]:
    """TMA descriptors of half a latent row and of its positions, as the kernel names them."""
    from . import tma

    rows = (blocks.group, blocks.queries)
    return {
        "q_half_desc": tma.descriptor(q, (*rows, heads.rank // 2)),
        "q_rope_desc": tma.descriptor(q, (*rows, heads.rope)),
        "k_half_desc": tma.descriptor(kv, (BLOCK_N, heads.rank // 2)),
        "k_rope_desc": tma.descriptor(kv, (BLOCK_N, heads.rope)),
    }
