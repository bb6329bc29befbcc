"""`flashgen explain` and `flashgen source`: a call's stages and kernels."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from ..errors import FlashgenError
from . import target
from .shapes import heads_of

_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


def explain(given: argparse.Namespace) -> None:
    """Print every stage of the compilation."""
    attention, arguments, data = _call(given)
    print(attention.explain(*arguments, backend=given.backend, **data))


def source(given: argparse.Namespace) -> None:
    """Print the generated kernels."""
    attention, arguments, data = _call(given)
    print(attention.source(*arguments, backend=given.backend, **data))


def _check_device(device: str) -> None:
    """Raises FlashgenError where torch can't make tensors there."""
    try:
        torch.zeros((), device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        problem = f"--device {device}: {str(error).partition(chr(10))[0]}"
        raise FlashgenError(problem, write="--device cpu, which needs no GPU") from None


def _call(given: argparse.Namespace) -> tuple[Any, list[torch.Tensor], dict[str, Any]]:
    """The attention, (q, k, v), and the data by name."""
    found = target.find(given)
    _check_device(given.device)
    data = {
        name: value.to(given.device) if isinstance(value, torch.Tensor) else value
        for name, value in found.data.items()
    }
    asked = (given.batch, given.heads, given.kv_heads)
    program = found.program
    wanted = {argument.name for argument in program.params}
    read = {name: value for name, value in data.items() if name in wanted}
    target.check_complete(program.name, program.leaves, read)
    batch, heads, kv_heads = heads_of(program.bind(read, given.name), asked)
    shapes = [(batch, heads, given.n[0])] + 2 * [(batch, kv_heads, given.n[1])]
    dtype = _DTYPES[given.dtype]
    made = [torch.zeros(*s, given.head_dim, dtype=dtype, device=given.device) for s in shapes]
    return found.attention, made, data
