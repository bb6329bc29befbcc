"""Generated kernels as PyTorch operations."""

from __future__ import annotations

from typing import Any

import torch

from . import launch
from .errors import FlashgenError


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The forward kernel; asking for its gradient is an error with advice."""
    tensors = [t for t in arguments["bound"].tensors.values() if t.dtype.is_floating_point]
    out, lse = _Attention.apply(  # type: ignore[no-untyped-call]
        arguments, q, k, v, arguments["sinks"], *tensors
    )
    return out, lse


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, arguments: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return launch.forward(q, k, v, **arguments)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise FlashgenError(
            "generated kernels have no gradient in this version",
            write='backend="cpu" on CPU tensors, which is differentiable',
        )
