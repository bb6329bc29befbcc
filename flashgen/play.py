"""Records of what a call did (`tape.py`), and how they are done again.

A buffer that only kernels see needs no tensor: it is a part of one allocation, and so are those
that start as zeros, which are cleared together. Of views that only kernels see an address is all
that is needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from .direct import DirectLaunch, clear

# Of a list of tensors the places that are filled, and with which of all tensors of the call.
Fills = Sequence[tuple[int, int]]
# Over tensors, their addresses, and the stream that kernels run on.
Step = Callable[[list[Any], list[int], Any], None]
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

    def step(self) -> Step:
        slot, shape, strides = self.slot, self.shape, self.strides
        dtype, device, is_zero = self.dtype, self.device, self.is_zero

        def step(slots: list[Any], _: list[int], __: Any) -> None:
            made = torch.empty_strided(shape, strides, dtype=dtype, device=device)
            slots[slot] = made.zero_() if is_zero else made

        return step


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

    def step(self) -> Step:
        func, blank, kwargs, fills = self.func, self.args, self.kwargs, self.fills
        results, single = self.results, self.results[0] if len(self.results) == 1 else None

        def step(slots: list[Any], _: list[int], __: Any) -> None:
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

    def step(self) -> Step:
        return self.operation.step()


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

    def step(self) -> Step:
        if self.direct is not None:
            launch = self.direct.filled(self.fills)

            def by_address(_: list[Any], addresses: list[int], stream: Any) -> None:
                launch(addresses, stream)

            return by_address

        run, blank, described, takes_stream = (
            *(self.run, self.arguments, self.described, self.takes_stream),
        )
        places = {place for place, *_ in described}
        plain = [fill for fill in self.fills if fill[0] not in places]

        def by_tensor(slots: list[Any], _: list[int], stream: Any) -> None:
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

    `results`: which of them are returned."""

    def __init__(
        self,
        records: Sequence[Record],
        given: int,
        count: int,
        results: Sequence[int | None],
        device: torch.device,
    ) -> None:
        self._device = device
        self._blank, self._addresses = [None] * (count - given), [0] * count
        self._results = tuple(results)
        real = _real(records, results)
        addressed = _addressed(records)
        hidden = [r for r in records if isinstance(r, Buffer) and r.slot not in real]
        self._parts, self._cleared, self._size = _packed(hidden)
        self._given = tuple(slot for slot in sorted(addressed) if slot < given)
        self.steps: list[Step] = []
        for record in records:
            if isinstance(record, View) and record.slot not in real:
                if record.slot in addressed:
                    self.steps.append(_move(record))
            elif not isinstance(record, Buffer) or record.slot in real:
                self.steps.append(record.step())
                self.steps += [_locate(slot) for slot in _results_of(record) if slot in addressed]

    def __call__(self, tensors: Sequence[Any]) -> Sequence[Any]:
        slots, addresses = [*tensors, *self._blank], self._addresses.copy()
        device = self._device
        for slot in self._given:
            addresses[slot] = slots[slot].data_ptr()
        with on_device(device):
            stream = _stream_of(device)
            if self._size:
                buffer = torch.empty(self._size, dtype=torch.uint8, device=device)
                start = buffer.data_ptr()
                for slot, offset in self._parts:
                    addresses[slot] = start + offset
                if self._cleared:
                    clear(start, self._cleared, stream)
            for step in self.steps:
                step(slots, addresses, stream)
        return [None if slot is None else slots[slot] for slot in self._results]


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


def _results_of(record: Record) -> Sequence[int]:
    if isinstance(record, Launch):
        return ()
    return record.results if isinstance(record, Operation) else (record.slot,)


def _locate(slot: int) -> Step:
    def step(slots: list[Any], addresses: list[int], _: Any) -> None:
        addresses[slot] = slots[slot].data_ptr()

    return step


def _move(view: View) -> Step:
    slot, base, offset = view.slot, view.base, view.offset

    def step(_: list[Any], addresses: list[int], __: Any) -> None:
        addresses[slot] = addresses[base] + offset

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


def _stream_of(device: torch.device) -> Any:
    """The handle of a GPU's current stream."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else None
