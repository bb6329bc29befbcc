"""Lengths, heads and positions of one call."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .errors import FlashgenError

# Positions and int scalars below this add and subtract in 32 bits without overflow.
MAX_POSITION = 2**30 - 1


@dataclass(frozen=True, eq=False)
class Geometry:
    """What an attention problem looks like, apart from its mask.

    `kv_len` is the capacity of keys and values; `kv_lens` [B] (int32, on the device) says how
    many of them are valid. `q_offset` is the position of the first query: an int, a tensor with 1
    or B elements, or None for `kv_len[b] - q_len`: the queries are the last positions."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    device: torch.device
    q_offset: int | torch.Tensor | None = None
    kv_lens: torch.Tensor | None = None

    @property
    def group(self) -> int:
        """Query heads that share one head of keys."""
        return self.heads // self.kv_heads if self.kv_heads else 1

    @property
    def offset(self) -> int | torch.Tensor:
        """The position of the first query; per batch [B] where it varies."""
        if self.q_offset is not None:
            return self.q_offset
        if self.kv_lens is not None:
            return self.kv_lens - self.q_len
        return self.kv_len - self.q_len

    @property
    def varies_by_batch(self) -> bool:
        offset = self.q_offset
        many = isinstance(offset, torch.Tensor) and offset.numel() > 1
        return self.kv_lens is not None or many

    @property
    def last_position(self) -> int | None:
        """The largest position of a query, plus 1; None where only the device knows."""
        if isinstance(self.q_offset, int):
            return self.q_offset + self.q_len
        return self.kv_len if self.q_offset is None else None

    @property
    def spread(self) -> frozenset[str]:
        """Which of b, h and h_kv take several values."""
        sizes = {"b": self.batch, "h": self.heads, "h_kv": self.kv_heads}
        return frozenset(name for name, size in sizes.items() if size > 1)

    @property
    def extents(self) -> dict[str, int | None]:
        """How many values each index takes."""
        return {
            "b": self.batch,
            "h": self.heads,
            "h_kv": self.kv_heads,
            "q_idx": self.last_position,
            "kv_idx": self.kv_len,
        }


def check_offset(
    offset: object, batch: int, device: torch.device, call: object
) -> int | torch.Tensor | None:
    """An int, or a 0-d, [1] or [B] integer tensor on the device. Raises FlashgenError."""
    if offset is None or (isinstance(offset, int) and not isinstance(offset, bool)):
        if offset is not None and abs(offset) > MAX_POSITION:
            raise _offset_error(f"is {offset}, beyond 2^30", batch, call)
        return offset
    if not isinstance(offset, torch.Tensor):
        raise _offset_error(f"is a {type(offset).__name__}", batch, call)
    if offset.dtype.is_floating_point or offset.dtype == torch.bool or offset.is_complex():
        raise _offset_error(f"has dtype {offset.dtype}", batch, call)
    if offset.ndim > 1 or offset.numel() not in (1, batch):
        raise _offset_error(f"has shape {list(offset.shape)}", batch, call)
    if offset.device != device and not (offset.device.type == "cpu" and offset.ndim == 0):
        raise _offset_error(f"is on {offset.device}, and the queries on {device}", batch, call)
    if offset.device != device:
        return int(offset)
    return offset.reshape(-1)


def _offset_error(problem: str, batch: int, call: object) -> FlashgenError:
    return FlashgenError(
        f"q_offset {problem}",
        call=call,
        write=f"an int, or an integer tensor of shape [], [1] or [{batch}] on the queries' device",
    )
