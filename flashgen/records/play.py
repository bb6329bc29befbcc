"""Records of what a call did (`tape.py`), and how they are done again.

A buffer that only kernels see needs no tensor: it is a part of one allocation, and so are those
that start as zeros, which are cleared together. Of views that only kernels see an address is all
that is needed. Kernels read addresses from one table, so a play writes each of them once."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from .direct import DirectLaunch, clear

# The places in a list of tensors that are filled, and which of the call's tensors fills each.
Fills = Sequence[tuple[int, int]]
# A step runs on all tensors, and on the stream of the kernels.
Step = Callable[[list[Any], Any], None]
# Where parts of an allocation start, as the allocator itself starts.
_ALIGNMENT = 512


@dataclass(frozen=True)
class Buffer:
    """Memory of its own."""

    slot: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    is_zero: bool

    @staticmethod
    def like(slot: int, x: torch.Tensor, is_zero: bool) -> Buffer:
        return Buffer(slot, tuple(x.shape), x.stride(), x.dtype, x.device, is_zero)

    @property
    def nbytes(self) -> int:
        """What it takes, up to where the next one may start."""
        if 0 in self.shape:
            return 0
        last = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        return math.ceil((last + 1) * self.dtype.itemsize / _ALIGNMENT) * _ALIGNMENT

    @property
    def make(self) -> Callable[[], torch.Tensor]:
        """What allocates it."""
        how: Any = {"dtype": self.dtype, "device": self.device}
        make = functools.partial(torch.empty_strided, self.shape, self.strides, **how)
        return (lambda: make().zero_()) if self.is_zero else make


@dataclass(frozen=True)
class Operation:
    """A call of an operator."""

    func: Any
    args: list[Any]
    kwargs: Mapping[str, Any]
    fills: Fills
    results: Sequence[int]

    @staticmethod
    def of(
        func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], fills: Fills, results: list[int]
    ) -> Operation:
        return Operation(func, _blanked(args, fills), kwargs, fills, results)

    def step(self, addresses: Any) -> Step:
        func, blank, kwargs, fills = self.func, self.args, self.kwargs, self.fills
        results, single = self.results, self.results[0] if len(self.results) == 1 else None

        def step(slots: list[Any], _: Any) -> None:
            given = blank.copy()
            for place, slot in fills:
                given[place] = slots[slot]
            made = func(*given, **kwargs)
            if single is not None:
                slots[single] = made
            else:
                for slot, x in zip(results, made, strict=True):
                    slots[slot] = x

        return step


@dataclass(frozen=True)
class View:
    """A view of a tensor that starts so many bytes after it."""

    slot: int
    base: int
    offset: int
    operation: Operation

    def step(self, addresses: Any) -> Step:
        return self.operation.step(addresses)


@dataclass(frozen=True)
class Launch:
    """A kernel's launch: by `run`, or by addresses alone."""

    run: Callable[..., Any]
    arguments: list[Any]
    fills: Fills
    # (place, slot, kind, contents) of descriptors.
    described: Sequence[tuple[int, int, type, Mapping[str, Any]]]
    takes_stream: bool
    direct: DirectLaunch | None

    @staticmethod
    def of(
        run: Callable[..., Any],
        arguments: Sequence[Any],
        fills: Fills,
        takes_stream: bool,
        directly: DirectLaunch | None,
    ) -> Launch:
        described = [
            (place, slot, type(x), {**vars(x), "base": None})
            for place, slot in fills
            if is_descriptor(x := arguments[place])
        ]
        return Launch(run, _blanked(arguments, fills), fills, described, takes_stream, directly)

    def step(self, addresses: Any) -> Step:
        if self.direct is not None:
            launch = self.direct.reading(addresses, self.fills)
            return lambda _, stream: launch(stream)

        run, blank, described, takes_stream = (
            *(self.run, self.arguments, self.described, self.takes_stream),
        )
        places = {place for place, *_ in described}
        plain = [fill for fill in self.fills if fill[0] not in places]

        def by_tensor(slots: list[Any], stream: Any) -> None:
            given = blank.copy()
            for place, slot in plain:
                given[place] = slots[slot]
            for place, slot, kind, contents in described:
                made: Any = object.__new__(kind)
                given[place] = made
                made.__dict__.update(contents, base=slots[slot])
            if takes_stream:
                run(*given, stream=stream)
            else:
                run(*given)

        return by_tensor


Record = Buffer | Operation | View | Launch


class Play:
    """Does what was recorded on other tensors of a device: `given` of them, then those made,
    `count` in all.

    `results`: which of them are returned; `device`: where they are."""

    def __init__(
        self,
        records: Sequence[Record],
        given: int,
        count: int,
        results: Sequence[int | None],
        device: torch.device,
    ) -> None:
        self._blank, self._count = [None] * (count - given), count
        self._results, self._device = tuple(results), device
        # None on a CPU, whatever the annotation of `torch.device.index` says.
        self._index: int | None = device.index
        real = _real(records, results)
        self._addressed = _addressed(records)
        buffers = [r for r in records if isinstance(r, Buffer)]
        self._buffers = [(b.slot, b.make) for b in buffers if b.slot in real]
        self._parts, self._cleared, self._size = _packed([b for b in buffers if b.slot not in real])
        known = {*range(given), *(b.slot for b in buffers)}
        self._given = tuple(slot for slot in self._addressed if slot < given)
        self._moves, self.records = _sorted(records, real, self._addressed, known)
        # Tables of addresses, and steps that read them, for each thread that plays at a time.
        self._ready: list[tuple[Any, list[Step]]] = []

    def __call__(self, tensors: Sequence[Any]) -> Sequence[Any]:
        index = self._index
        if index is None:
            return self._play(tensors, None)
        if torch._C._cuda_getDevice() == index:
            return self._play(tensors, torch._C._cuda_getCurrentRawStream(index))
        with torch.cuda.device(index):
            return self._play(tensors, torch._C._cuda_getCurrentRawStream(index))

    def _play(self, tensors: Sequence[Any], stream: Any) -> Sequence[Any]:
        try:
            ready = self._ready.pop()
        except IndexError:
            ready = self._prepare()
        addresses, steps = ready
        slots = [*tensors, *self._blank]
        for slot in self._given:
            addresses[slot] = slots[slot].data_ptr()
        for slot, make in self._buffers:
            slots[slot] = made = make()
            addresses[slot] = made.data_ptr()
        if self._size:
            hidden = torch.empty(self._size, dtype=torch.uint8, device=self._device)
            start = hidden.data_ptr()
            for slot, offset in self._parts:
                addresses[slot] = start + offset
            if self._cleared:
                clear(start, self._cleared, stream)
        for slot, base, offset in self._moves:
            addresses[slot] = addresses[base] + offset
        for step in steps:
            step(slots, stream)
        self._ready.append(ready)
        return [None if slot is None else slots[slot] for slot in self._results]

    def _prepare(self) -> tuple[Any, list[Step]]:
        """A table of addresses, and the steps that read it."""
        addresses, steps = (ctypes.c_uint64 * self._count)(), []
        for record in self.records:
            steps.append(record.step(addresses))
            found = (slot for slot in _results_of(record) if slot in self._addressed)
            steps += [_locate(slot, addresses) for slot in found]
        return addresses, steps


@dataclass(frozen=True)
class Move:
    """A view of which an address is all that is needed."""

    slot: int
    base: int
    offset: int

    def step(self, addresses: Any) -> Step:
        slot, base, offset = self.slot, self.base, self.offset

        def step(_: list[Any], __: Any) -> None:
            addresses[slot] = addresses[base] + offset

        return step


def _sorted(
    records: Sequence[Record], real: set[int], addressed: set[int], known: set[int]
) -> tuple[list[tuple[int, int, int]], list[Operation | View | Launch | Move]]:
    """Views whose addresses follow from what is there before anything is done, `known`; and what is
    done, in order."""
    moves: list[tuple[int, int, int]] = []
    rest: list[Operation | View | Launch | Move] = []
    for record in records:
        if isinstance(record, Buffer):
            continue
        if not isinstance(record, View) or record.slot in real:
            rest.append(record)
        elif record.slot in addressed and record.base in known:
            moves.append((record.slot, record.base, record.offset))
            known.add(record.slot)
        elif record.slot in addressed:
            rest.append(Move(record.slot, record.base, record.offset))
    return moves, rest


def _real(records: Sequence[Record], results: Sequence[int | None]) -> set[int]:
    """Slots that must hold tensors: somebody beside kernels sees them."""
    real = {slot for slot in results if slot is not None}
    for record in records:
        if isinstance(record, Operation) or (isinstance(record, Launch) and record.direct is None):
            real |= {slot for _, slot in record.fills}
    for record in reversed(records):
        if isinstance(record, View) and record.slot in real:
            real |= {slot for _, slot in record.operation.fills}
    return real


def _addressed(records: Sequence[Record]) -> set[int]:
    """Slots whose address kernels get."""
    found: set[int] = set()
    for record in reversed(records):
        if isinstance(record, Launch) and record.direct is not None:
            found |= {slot for _, slot in record.fills}
        if isinstance(record, View) and record.slot in found:
            found.add(record.base)
    return found


def _packed(buffers: Sequence[Buffer]) -> tuple[tuple[tuple[int, int], ...], int, int]:
    """(slot, offset) of each in one allocation; how many bytes of it are zeros, which come first;
    and its size."""
    parts, size, cleared = [], 0, 0
    for buffer in sorted(buffers, key=lambda one: not one.is_zero):
        parts.append((buffer.slot, size))
        size += buffer.nbytes
        cleared = size if buffer.is_zero else cleared
    return tuple(parts), cleared, size


def _results_of(record: Operation | View | Launch | Move) -> Sequence[int]:
    """Slots of the tensors that it makes."""
    if isinstance(record, Operation):
        return record.results
    return (record.slot,) if isinstance(record, View) else ()


def _locate(slot: int, addresses: Any) -> Step:
    def step(slots: list[Any], _: Any) -> None:
        addresses[slot] = slots[slot].data_ptr()

    return step


def _blanked(arguments: Sequence[Any], fills: Fills) -> list[Any]:
    """Without the tensors that are filled in."""
    places = {place for place, _ in fills}
    return [None if i in places else x for i, x in enumerate(arguments)]


def is_descriptor(x: Any) -> bool:
    """Whether it says how TMA sees a tensor, its `base`."""
    return hasattr(x, "block_shape") and isinstance(getattr(x, "base", None), torch.Tensor)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """The device made the current one, if it isn't: switching costs more than asking."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return nullcontext()
    return torch.cuda.device(device)
