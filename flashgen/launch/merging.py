"""Running the kernels that merge what splits of the keys gave."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from .. import binaries
from ..emit import decode as emit_decode
from ..tiling import Tiling
from . import key_parts, launch

# Warps, parts that are read at once, and columns of a program. Of dealt tiles, rows have few parts.
MERGING, DEALT_MERGING = Tiling(0, 0, 4, 1), Tiling(0, 0, 1, 1)
CHUNK, DEALT_CHUNK, COLUMNS = 32, 8, 128


@functools.lru_cache(maxsize=8)
def _merging(parts: tuple[str, ...], dealt: bool = False) -> Any:
    generated = emit_decode.merging(dealt)
    return binaries.Kernels(generated.name, generated.text, parts).merge


def merge(parts: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Merge parts [B, Hq, Sq, splits, Dv], whose LSE is in base 2, into out and the natural LSE."""
    values = {
        "parts_ptr": parts, "lses_ptr": lses, "out_ptr": out, "lse_ptr": lse,
        "splits": parts.shape[-2],
    }  # fmt: skip
    constants = merging_constants(out.shape[-1], parts.dtype)
    arguments = emit_decode.merging().arguments
    programs = lse.numel() * math.ceil(out.shape[-1] / constants["BLOCK_D"])
    launch(_merging(key_parts()), arguments, values, constants, MERGING, programs)


def merge_dealt(
    parts: torch.Tensor,
    lses: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    spans: torch.Tensor,
    batch: int,
    heads: int,
    cu_seqlens_q: torch.Tensor | None = None,
) -> None:
    """Merge parts [rows, Dv] of tiles that were dealt; `spans`: the first and the last part of each
    row of the results."""
    packed = cu_seqlens_q is not None
    values = {
        "parts_ptr": parts, "lses_ptr": lses, "out_ptr": out, "lse_ptr": lse,
        "spans_ptr": spans, "batch": batch, "heads": heads, "total_q": lse.shape[2],
        "cu_seqlens_q_ptr": cu_seqlens_q if packed else spans,
    }  # fmt: skip
    constants = merging_constants(out.shape[-1], parts.dtype)
    constants |= {"CHUNK": DEALT_CHUNK, "PACKED": packed}
    arguments = emit_decode.merging(dealt=True).arguments
    programs = lse.numel() * math.ceil(out.shape[-1] / constants["BLOCK_D"])
    launch(_merging(key_parts(), dealt=True), arguments, values, constants, DEALT_MERGING, programs)


def merging_constants(v_head_dim: int, dtype: torch.dtype) -> dict[str, Any]:
    """The compile-time values of the merging of parts of this dtype."""
    import triton.language as tl

    return {
        "V_HEAD_DIM": v_head_dim,
        "BLOCK_D": min(COLUMNS, max(16, 1 << (v_head_dim - 1).bit_length())),
        "CHUNK": CHUNK,
        "FLOAT": tl.float64 if dtype == torch.float64 else tl.float32,
    }
