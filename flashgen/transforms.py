"""Inside `torch.func`'s transforms: what is no input of a derivative, without its wrappers.

A transform wraps what its function is given and whatever is computed in it. Lengths, schedules and
places are read by kernels, which need memory, and schedules outlive the transform."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch._C import _functorch

from .errors import FlashgenError
from .geometry import Geometry
from .storage import Packing


def are_active() -> bool:
    """Whether a function that `torch.func` transforms is running."""
    return bool(torch._C._are_functorch_transforms_active())


def outside() -> AbstractContextManager[Any]:
    """What is computed here gets no wrapper."""
    return torch._C._DisableFuncTorch() if are_active() else nullcontext()


def bare(x: Any) -> Any:
    """A tensor without the wrappers of transforms; anything else as it is. Raises FlashgenError
    for one that `torch.vmap` maps."""
    while isinstance(x, torch.Tensor) and _functorch.is_functorch_wrapped_tensor(x):
        refuse_mapped(x)
        x = _functorch.get_unwrapped(x)
    return x


def bare_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: bare(x) for name, x in tensors.items()}


def bare_geometry(geometry: Geometry) -> Geometry:
    packing, pages = geometry.packing, geometry.pages
    if packing is not None:
        cu_q = bare(packing.cu_q)
        cu_kv = cu_q if packing.cu_kv is packing.cu_q else bare(packing.cu_kv)
        packing = Packing(cu_q, cu_kv, packing.total_q, packing.total_kv)
    return replace(
        geometry,
        q_offset=bare(geometry.q_offset),
        given_lens=bare(geometry.given_lens),
        packing=packing,
        pages=None if pages is None else replace(pages, table=bare(pages.table)),
    )


def refuse_mapped(*tensors: Any, call: object | None = None) -> None:
    """Raises FlashgenError if one of them is mapped: by `torch.vmap`, or by autograd's
    `is_grads_batched`."""
    for x in tensors:
        if not isinstance(x, torch.Tensor):
            continue
        if _functorch.is_batchedtensor(x) or _functorch.is_legacy_batchedtensor(x):
            raise mapped(call)


def mapped(call: object | None = None) -> FlashgenError:
    """The error for a mapped attention."""
    return FlashgenError(
        "attention is mapped by torch.vmap, for which it has no rule",
        call=call,
        write="the mapped dimension as part of the batch B, or a loop over it",
    )
