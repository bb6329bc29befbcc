"""Attention as PyTorch operations: for eager calls an autograd function, for everything that looks
at operators (`torch.compile`, dispatch modes, tensor subclasses) `torch.ops.flashgen.*`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

# Registers them: a policy of selective checkpointing names them before the first call.
from . import library  # noqa: F401
from .eager import again, attention
from .engine import Engine, Kernels, arguments_of, engine, no_autocast
from .planned import Planned

if TYPE_CHECKING:
    from ..spec import Program

__all__ = [
    "Engine",
    "Kernels",
    "Planned",
    "again",
    "arguments_of",
    "as_operators",
    "attention",
    "engine",
    "no_autocast",
    "shapes",
]

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def as_operators(*tensors: Any) -> bool:
    """Whether somebody looks at a call's operators: then it must consist of such.

    Otherwise the autograd function is called, which saves the dispatcher's boxing."""
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return True
    for x in tensors:
        # Nested tensors are refused, as no operator can.
        if isinstance(x, torch.Tensor) and type(x) not in _PLAIN and not x.is_nested:
            return True
    return False


def shapes(
    program: Program,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    arguments: Mapping[str, Any],
    data: Mapping[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and LSE of a checked call of meta tensors, which have shapes alone."""
    from . import graph

    return graph.shapes(program, (q, k, v), arguments, data)
