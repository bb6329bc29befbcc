"""Attention as PyTorch operations: for eager calls an autograd function, for everything that looks
at operators (`torch.compile`, dispatch modes, tensor subclasses) `torch.ops.flashgen.*`."""

from __future__ import annotations

from .eager import attention

__all__ = ["attention"]
