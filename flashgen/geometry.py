"""Lengths, heads and positions of one call."""

from __future__ import annotations

import numbers
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from .errors import FlashgenError
from .storage import Packing, Pages

# Positions and int scalars below this add and subtract in 32 bits without overflow.
MAX_POSITION = 2**30 - 1


@dataclass(frozen=True, eq=False)
class Geometry:
    """What an attention problem looks like, apart from its mask.

    `kv_len` is the capacity of keys and values; `kv_lens` [B] (int32, on the device) says how
    many of them are valid: `given_lens`, or of those at most `room`, if that is a number: on a GPU
    the host can't see whether a length is beyond the cache. `q_offset` is the position of the first
    query: an int, a tensor with 1 or B elements, or None for `kv_len[b] - q_len`: the queries are
    the last positions.
    Packed: `q_len` and `kv_len` are what no sequence is longer than. Paged: `kv_len` is what a
    line of the table holds. Both have `kv_lens`, and `longest`: the most queries and keys of a
    sequence, as far as the host knows. `first` is the number of the first sequence."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    device: torch.device
    q_offset: int | torch.Tensor | None = None
    given_lens: torch.Tensor | None = None
    packing: Packing | None = None
    pages: Pages | None = None
    longest: tuple[int | None, int | None] = (None, None)
    first: int = 0
    room: int | None = None

    @property
    def has_lens(self) -> bool:
        """Whether each sequence has a length of its own."""
        return self.given_lens is not None

    @cached_property
    def kv_lens(self) -> torch.Tensor | None:
        """Lengths that lie inside the cache: an operation, if they weren't compared with it."""
        if self.given_lens is None or self.room is None:
            return self.given_lens
        return self.given_lens.clamp(0, self.room)

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """What the device knows of lengths and places."""
        lens = () if self.packing is None else (self.packing.q_lens,)
        return (self.kv_lens, *lens, *self.places)

    @property
    def places(self) -> tuple[torch.Tensor | None, ...]:
        """What the device knows beside lengths."""
        found = [self.q_offset if isinstance(self.q_offset, torch.Tensor) else None]
        if (packing := self.packing) is not None:
            found += packing.starts
        if self.pages is not None:
            found.append(self.pages.table)
        return tuple(found)

    @property
    def is_dense(self) -> bool:
        """Neither packed nor paged."""
        return self.packing is None and self.pages is None

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
            lens = self.q_len if self.packing is None else self.packing.q_lens
            return self.kv_lens - lens
        return self.kv_len - self.q_len

    def sequences(self) -> Iterator[Geometry]:
        """Each sequence as a problem of its own, in dense tensors. Waits for the device."""
        lens = None if self.kv_lens is None else self.kv_lens.tolist()
        q_lens = None if self.packing is None else self.packing.q_lens.tolist()
        offset = self.offset
        offsets = offset.tolist() if isinstance(offset, torch.Tensor) else [offset]
        for b in range(self.batch):
            yield Geometry(
                1,
                self.heads,
                self.kv_heads,
                self.q_len if q_lens is None else q_lens[b],
                self.kv_len if lens is None else min(lens[b], self.kv_len),
                self.device,
                offsets[b if len(offsets) > 1 else 0],
                first=b,
            )

    @property
    def varies_by_batch(self) -> bool:
        offset = self.q_offset
        many = isinstance(offset, torch.Tensor) and offset.numel() > 1
        return self.has_lens or many

    @property
    def last_position(self) -> int | None:
        """The largest position of a query, plus 1; None where only the device knows."""
        queries, keys = self._lengths
        if isinstance(self.q_offset, int):
            return None if queries is None else self.q_offset + queries
        return keys if self.q_offset is None else None

    @property
    def _lengths(self) -> tuple[int | None, int | None]:
        """The most queries and keys of a sequence; None where only the device knows."""
        queries = self.q_len if self.packing is None else self.longest[0]
        return queries, self.kv_len if self.is_dense else self.longest[1]

    @property
    def spread(self) -> frozenset[str]:
        """Which of b, h and h_kv take several values."""
        sizes = {"b": self.batch, "h": self.heads, "h_kv": self.kv_heads}
        return frozenset(name for name, size in sizes.items() if size > 1)

    @property
    def lengths(self) -> dict[str, int]:
        """What the host knows of lengths and of where the queries start, in dense tensors."""
        if not self.is_dense:
            return {}
        known = {"q_len": self.q_len, "kv_len": self.kv_len}
        if not self.has_lens and isinstance(self.offset, int):
            known["q_offset"] = self.offset
        return known

    @property
    def extents(self) -> dict[str, int | None]:
        """How many values each index takes."""
        return {
            "b": self.batch,
            "h": self.heads,
            "h_kv": self.kv_heads,
            "q_idx": self.last_position,
            "kv_idx": self._lengths[1],
        }


def plain(x: Any) -> Any:
    """An integer of any library as Python's; all else, and what is true or false, as it is."""
    return int(x) if not isinstance(x, bool) and isinstance(x, numbers.Integral) else x


def check_offset(
    offset: object, batch: int, device: torch.device, call: object
) -> int | torch.Tensor | None:
    """An int, or a 0-d, [1] or [B] integer tensor on the device. Raises FlashgenError."""
    if offset is None:
        return None
    offset = plain(offset)
    if type(offset) is int:
        if abs(offset) > MAX_POSITION:
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


def refuse_paged(geometry: Geometry, call: object | None = None) -> None:
    """Where gradients are asked for. Raises FlashgenError."""
    if geometry.pages is not None:
        raise FlashgenError(
            "a gradient of attention over a paged cache is asked for, and there is none",
            call=call,
            write="torch.no_grad() around the call; to train, keys and values in dense or packed "
            "tensors",
        )
