"""TMA descriptors of tensors, as Hopper's kernels are given them. Importing it imports Triton."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from triton.experimental.gluon import language as gl

from ..hopper import TensorDescriptor
from ..records.tape import place_of

_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


def descriptor(tensor: torch.Tensor, tile: Sequence[int]) -> Any:
    """How TMA reads and writes tiles of a tensor: of shape `tile`, padded with 1s on the left.

    What lies outside of the tensor is read as 0 and not written, at the end of every head too if
    the tensor is [B, H, S, D]. Wants what `can_describe` asks for."""
    pattern = _pattern(tensor.shape, tensor.stride(), tuple(tile), tensor.dtype)
    made = TensorDescriptor.__new__(TensorDescriptor)
    made.__dict__.update(pattern, base=tensor)
    return made


@functools.lru_cache(maxsize=4096)
def _pattern(
    shape: tuple[int, ...], strides: tuple[int, ...], tile: tuple[int, ...], dtype: torch.dtype
) -> dict[str, Any]:
    """A descriptor but for its tensor; made and checked once, as a call makes many."""
    block = [1] * (len(shape) - len(tile)) + list(tile)
    layout = gl.NVMMASharedLayout.get_default_for(block, _TYPES[dtype])
    nowhere = torch.empty(0, dtype=dtype, device="cpu")
    known = _strides(shape, strides, dtype.itemsize)
    made: dict[str, Any] = vars(TensorDescriptor(nowhere, list(shape), [*known, 1], block, layout))
    # All of it that a kernel's code depends on, but the tensor's dtype.
    return made | {"kind": f"{block} {layout} {made['padding']}"}


def _strides(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> list[int]:
    """All but the last; that of a dimension of size 1 is never used, and may be anything."""
    aligned = 16 // itemsize
    return [
        aligned if size == 1 and (stride == 0 or stride % aligned) else stride
        for size, stride in zip(shape[:-1], strides[:-1], strict=True)
    ]


def can_describe(tensor: torch.Tensor) -> str:
    """Why TMA can't address a tensor; empty if it can. Rows must be contiguous."""
    place = place_of(tensor)
    if place is None:
        return "no address, as a function transform wraps it"
    if place:
        return "data that doesn't start at a multiple of 16 bytes"
    return _cannot_describe(tensor.shape, tensor.stride(), tensor.element_size())


@functools.lru_cache(maxsize=4096)
def _cannot_describe(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> str:
    steps = [stride * itemsize for stride in _strides(shape, strides, itemsize)]
    if any(step % 16 for step in steps):
        return "strides that aren't multiples of 16 bytes"
    if not all(0 < step < 2**40 for step in steps):
        return "strides of 0 or beyond 2^40 bytes"
    if 0 in shape:
        return "no elements"
    return ""
