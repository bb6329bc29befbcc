"""FlashInfer's decoding over pages, to stand beside, where it is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

_WORKSPACE = 256 << 20


def decode(
    q: torch.Tensor,
    pools: tuple[torch.Tensor, torch.Tensor],
    table: torch.Tensor,
    lens: torch.Tensor,
) -> tuple[Callable[[], Any], Callable[[], torch.Tensor]] | None:
    """What plans a step, and what runs it: out [B, Hq, 1, D]; None where it can't be imported.

    q [B, Hq, 1, D]; `pools` [pages, page size, Hkv, D] each, of full pages; `table` [B, P]."""
    try:
        flashinfer = importlib.import_module("flashinfer")
    except ImportError:
        return None
    heads, size, kv_heads, dim = q.shape[1], *pools[0].shape[1:]
    workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=q.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
    used = (lens + size - 1) // size
    indptr = torch.nn.functional.pad(used.cumsum(0), (1, 0)).int()
    indices = torch.cat([row[:n] for row, n in zip(table, used.tolist(), strict=True)])
    last = lens - (used - 1) * size
    how = {"q_data_type": q.dtype, "kv_data_type": q.dtype}
    plan = partial(wrapper.plan, indptr, indices, last, heads, kv_heads, dim, size, **how)
    plan()
    rows = q[:, :, 0].contiguous()
    return plan, lambda: wrapper.run(rows, pools)[:, :, None]
