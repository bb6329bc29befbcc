"""Tensors of a kind that attention doesn't take, each with what to give instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .errors import FlashgenError

_PACKED = (
    "x.values() of a jagged x [B, *, H, D], with cu_seqlens_q and cu_seqlens_kv=x.offsets().int()"
)


def check_kinds(text: object, tensors: Mapping[str, Any]) -> None:
    """Refuse queries, keys and values that aren't tensors of numbers in rows. v may be None.

    Raises FlashgenError, under torch.jit.trace too."""
    if torch._C._get_tracing_state() is not None:
        raise FlashgenError(
            "torch.jit.trace keeps the schedule of the call that it sees, whatever follows",
            call=text,
            write="torch.compile(model), or torch.export.export(model, (q, k, v))",
        )
    for name, x in tensors.items():
        found = None if x is None and name == "v" else _wrong(name, x)
        if found is not None:
            raise FlashgenError(found[0], call=text, write=found[1])


def _wrong(name: str, x: Any) -> tuple[str, str] | None:
    """What is wrong with a tensor, and what to write."""
    kind = type(x)
    if kind.__module__.startswith("torch.fx."):
        return (
            f"{name} is a Proxy of torch.fx.symbolic_trace, and a call is checked by its shapes",
            "torch.export.export(model, (q, k, v)), or torch.fx.wrap of a function that calls it",
        )
    if not isinstance(x, torch.Tensor):
        if kind.__module__ == "numpy":
            return f"{name} is a NumPy array", f"torch.from_numpy({name})"
        return f"{name} is {'None' if x is None else f'a {kind.__name__}'}", f"a tensor as {name}"
    if x.is_nested:
        return f"{name} is a nested tensor", f"packed {name}={_PACKED}"
    if x.layout != torch.strided:
        return f"{name} is sparse, of layout {x.layout}", f"{name}.to_dense()"
    if kind.__name__ == "DTensor":
        return f"{name} is a DTensor, and no operator here is sharded", f"{name}.to_local()"
    if kind.__name__ == "MaskedTensor":
        return f"{name} is a MaskedTensor", f"{name}.get_data(), and a mask in fg.Attention(mask)"
    if kind.__name__ == "FakeTensor":
        return (
            f"{name} is a fake tensor; no schedule is an operator, nor attention of latent heads",
            "tensors of the device that it runs on",
        )
    return None


def refuse_meta(x: torch.Tensor, text: object) -> None:
    """Where tensors are read, not only their shapes. Raises FlashgenError."""
    if x.device.type == "meta":
        raise FlashgenError(
            "meta tensors have no elements to plan for, and no kernels",
            call=text,
            write="tensors on the device that it runs on; the call itself takes meta tensors, and "
            "gives the shapes of its results",
        )
