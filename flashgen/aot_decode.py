"""Compiling the kernels for few queries for a named target, without a GPU."""

from __future__ import annotations

import torch

from . import cache, emit, emit_decode, launch_decode
from .aot import TARGETS, Compiled, _placeholders, compile_kernel
from .launch import key_parts
from .spec import Spec
from .tiling import target_of
from .tiling_decode import LATENT_TILE, Blocks, choose_blocks

_TILE = (64, 64)


def blocks_for(
    spec: Spec, variant: emit.Variant, target: str, dtype: torch.dtype, rows: tuple[int, int]
) -> Blocks:
    """The blocks that a call on a target takes; `rows`: queries, and heads that share keys."""
    latent = spec.heads is not None
    dims, tile = (variant.head_dim, variant.v_head_dim), LATENT_TILE if latent else _TILE
    return choose_blocks(target_of(*TARGETS[target]), dtype, dims, rows, tile, latent=latent)


def compile_decode(
    spec: Spec,
    variant: emit.Variant,
    target: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    rows: tuple[int, int] = (1, 4),
) -> Compiled:
    """Compile a spec's kernel for few queries, of several splits, for a target of `TARGETS`."""
    generated = launch_decode.generate(spec, variant)
    module = cache.module(generated.name, generated.text, key_parts())
    blocks = blocks_for(spec, variant, target, dtype, rows)
    sample = torch.empty(1, 16, 16, 16, dtype=dtype)
    constants = launch_decode.constants_of(sample, [sample], blocks, partial=True)
    if spec.mask is not None:
        constants |= dict(zip(("TILE_M", "TILE_N"), _TILE, strict=True))
    if variant.keys == "paged":
        constants["PAGE_SIZE"] = 16
    others = {"out_ptr": torch.float32}
    values = _placeholders(generated.arguments, spec, dtype, others)
    return compile_kernel(target, module.attention_decode, values, constants, blocks.tiling)


def compile_merge(target: str, v_head_dim: int = 128) -> Compiled:
    """Compile the kernel that merges the splits of bf16 results."""
    import triton.language as tl

    generated = emit_decode.merging()
    module = cache.module(generated.name, generated.text, key_parts())
    dtypes = {"out_ptr": torch.bfloat16, "lse_ptr": torch.float32}
    values = [
        torch.empty(0, dtype=dtypes.get(name, torch.float32)) if name.endswith("_ptr") else 3
        for name in generated.arguments
    ]
    width = 1 << (v_head_dim - 1).bit_length()
    constants = {"BLOCK_D": width, "CHUNK": launch_decode.CHUNK, "FLOAT": tl.float32}
    return compile_kernel(target, module.merge, values, constants, launch_decode.MERGING)
