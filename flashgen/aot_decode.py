"""Compiling the kernels for few queries for a named target, without a GPU."""

from __future__ import annotations

import torch

from . import cache, emit
from .aot import TARGETS, Compiled, _placeholders, compile_kernel
from .emit import decode as emit_decode
from .launch import decode as launch_decode
from .launch import hopper_latent as launch_hopper_latent
from .launch import key_parts, merging, pair_bytes
from .spec import Spec
from .tiling import target_of
from .tiling.decode import LATENT_TILE, WHOLE_ROWS, Blocks, choose_blocks

_TILE, _PAGE_SIZE = (64, 64), 16
_OUTPUTS = {
    "out_ptr": torch.float32,
    "whole_lse_ptr": torch.float32,
    "spans_ptr": torch.int64,
}


def blocks_for(
    spec: Spec,
    variant: emit.Variant,
    target: str,
    dtype: torch.dtype,
    rows: tuple[int, int],
    *,
    dealt: bool = False,
) -> Blocks:
    """The blocks that a call on a target takes; `rows`: queries, and heads that share keys."""
    latent = spec.heads is not None
    dims, tile = (variant.head_dim, variant.v_head_dim), LATENT_TILE if latent else _TILE
    return choose_blocks(
        target_of(*TARGETS[target]),
        dtype,
        dims,
        rows,
        WHOLE_ROWS if spec.mask is None and not latent else tile,
        latent=latent,
        page_size=_PAGE_SIZE if variant.keys == "paged" else None,
        plain=spec.score is None and not spec.softcap and not dealt,
        pair_bytes=pair_bytes(spec),
    )


def compile_decode(
    spec: Spec,
    variant: emit.Variant,
    target: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    rows: tuple[int, int] = (1, 4),
    repairs: bool = False,
    dealt: bool = False,
) -> Compiled:
    """Compile a spec's kernel for few queries, of several splits, for a target of `TARGETS`.

    `repairs`: the one that repairs what Hopper's kernel for latent heads found spoilt; `dealt`: the
    one whose tiles are dealt over the ends of sequences."""
    import triton.language as tl

    kernel, generated = launch_decode.kernel_of(spec, variant, key_parts(), repairs, dealt)
    blocks = blocks_for(spec, variant, target, dtype, rows, dealt=dealt)
    sample = torch.empty(1, 16, 16, 16, dtype=dtype)
    constants = launch_decode.constants_of(sample, [sample], blocks, partial=True)
    if dealt:
        constants["COUNT"] = tl.int32
    if spec.mask is not None:
        constants |= dict(zip(("TILE_M", "TILE_N"), _TILE, strict=True))
    if variant.keys == "paged":
        constants["PAGE_SIZE"] = _PAGE_SIZE
    values = _placeholders(generated.arguments, spec, dtype, _OUTPUTS)
    return compile_kernel(target, kernel, values, constants, blocks.tiling)


def compile_hopper_latent(
    spec: Spec,
    variant: emit.Variant,
    *,
    dtype: torch.dtype = torch.bfloat16,
    rows: tuple[int, int] = (1, 64),
    partial: bool = False,
) -> Compiled:
    """Compile a spec's kernel for latent heads of the Hopper family for sm_90.

    `rows`: queries, and heads; `partial`: of several splits."""
    heads, (queries, group) = spec.heads, rows
    assert heads is not None
    kernel, generated = launch_hopper_latent.kernel_of(spec, variant, key_parts())
    blocks = launch_hopper_latent.blocks_of(queries, group, LATENT_TILE)
    q, kv = (torch.empty(1, n, 64, heads.rank + heads.rope, dtype=dtype) for n in (group, 1))
    known = launch_hopper_latent.descriptors(q, kv, heads, blocks)
    others = {"out_ptr": torch.float32 if partial else dtype}
    placeholders = _placeholders(generated.arguments, spec, dtype, others)
    values = [
        known.get(name, value)
        for name, value in zip(generated.arguments, placeholders, strict=True)
    ]
    constants = launch_hopper_latent.constants_of(heads, blocks, partial=partial)
    if spec.mask is not None:
        constants |= dict(zip(("TILE_M", "TILE_N"), LATENT_TILE, strict=True))
    if variant.keys == "paged":
        constants["PAGE_SIZE"] = 64
    return compile_kernel("sm_90", kernel, values, constants, blocks.tiling)


def compile_merge(target: str, v_head_dim: int = 128, *, dealt: bool = False) -> Compiled:
    """Compile the kernel that merges the splits of bf16 results, or the parts of `dealt` tiles."""
    generated = emit_decode.merging(dealt)
    module = cache.module(generated.name, generated.text, key_parts())
    dtypes = {"out_ptr": torch.bfloat16, "spans_ptr": torch.int64, "cu_seqlens_q_ptr": torch.int32}
    values = [
        torch.empty(0, dtype=dtypes.get(name, torch.float32)) if name.endswith("_ptr") else 3
        for name in generated.arguments
    ]
    constants = merging.merging_constants(v_head_dim, torch.float32)
    tiling = merging.MERGING
    if dealt:
        constants |= {"CHUNK": merging.DEALT_CHUNK, "PACKED": True}
        tiling = merging.DEALT_MERGING
    return compile_kernel(target, module.merge, values, constants, tiling)
