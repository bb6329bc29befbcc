"""The lengths that `Mask.dense` is asked for."""

from __future__ import annotations

from typing import Any

import torch

from .errors import FlashgenError, show
from .geometry import plain


def checked_lengths(
    name: str, q_len: Any, kv_len: Any, batch: Any, heads: Any, q_offset: Any
) -> tuple[Any, Any, Any, Any, Any]:
    """They, integers of other libraries as Python's. Raises FlashgenError for what is no length,
    count or position."""
    q_len, kv_len, batch, heads, q_offset = map(plain, (q_len, kv_len, batch, heads, q_offset))
    call = f"{name}.dense({show(q_len)}, {show(kv_len)}, ...)"
    for what, x in (("q_len", q_len), ("kv_len", kv_len)):
        if not (_is_count(x) or _are_integers(x, 1)):
            write = "an integer from 0, or an integer tensor [B] of the lengths of sequences"
            raise FlashgenError(f"{what} is {show(x)}", call=call, write=write)
    lens = [x for x in (q_len, kv_len) if isinstance(x, torch.Tensor)]
    if len({x.numel() for x in lens}) > 1:
        problem = f"q_len has {q_len.numel()} lengths, and kv_len {kv_len.numel()}"
        raise FlashgenError(problem, call=call, write="both [B]")
    for what, x in (("batch", batch), ("heads", heads)):
        if not _is_count(x):
            raise FlashgenError(f"{what} is {show(x)}", call=call, write=f"{what}=2, an integer")
    is_place = q_offset is None or type(q_offset) is int
    if not (is_place or _are_integers(q_offset, 0) or _are_integers(q_offset, 1)):
        write = "an int, or an integer tensor of shape [], [1] or [B]"
        raise FlashgenError(f"q_offset is {show(q_offset)}", call=call, write=write)
    return q_len, kv_len, batch, heads, q_offset


def _is_count(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= 0


def _are_integers(x: Any, ndim: int) -> bool:
    if not isinstance(x, torch.Tensor) or x.ndim != ndim:
        return False
    return not (x.dtype.is_floating_point or x.is_complex() or x.dtype == torch.bool)
