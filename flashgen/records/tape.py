"""What a call does with its tensors, written down once, and done again without a thought.

Shapes, strides, dtypes, alignment and scalars decide which buffers a call allocates, and which
kernels it launches with which arguments. To work that out takes the host longer than a short
kernel runs. So the second call of a kind is recorded, and the ones after it play the record, with
their own tensors in the places of the recorded ones (`play.py`)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..config import config
from .direct import DirectLaunch, is_watched
from .play import Buffer, Launch, Operation, Play, Record, View, is_descriptor

# Tensors, and None in the place of some.
Tensors = Sequence[Any]

# Records kept of a kind; layouts rarely change.
_MOST = 16
_ATEN = torch.ops.aten
_EMPTY = frozenset(
    (
        _ATEN.empty.memory_format,
        _ATEN.empty_like.default,
        _ATEN.empty_strided.default,
        _ATEN.new_empty.default,
        _ATEN.new_empty_strided.default,
    )
)
_ZEROS = frozenset((_ATEN.zeros.default, _ATEN.zeros_like.default, _ATEN.new_zeros.default))
# The host reads the result, or its shape depends on what is in a tensor.
_READS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_SEEN, _NEVER = "seen once", "can't be recorded"

_local = threading.local()


class Tapes:
    """The records of one kind of call."""

    def __init__(self) -> None:
        self._plays: dict[Any, Play | str] = {}

    def run(
        self, key: Any, tensors: Tensors, work: Callable[[], Tensors], others: Tensors = ()
    ) -> Tensors:
        """What `work()` returns: tensors, and None in the place of some.

        It may read `tensors`, whose layout the key says, and `others`, whose layout is looked at;
        and must do the same if those are the same: only operations on tensors and launches of
        kernels are played. Settings that decide are part of the key."""
        if others:
            key = (key, *map(layout_of, others))
            tensors = (*tensors, *others)
        found = self._plays.get(key)
        if recorder() is not None:
            # A part of what is being recorded.
            return work()
        if isinstance(found, Play):
            return work() if is_watched() else found(tensors)
        if found == _SEEN and not config.debug and not _has_twins(tensors):
            recording = Recorder(tensors)
            with recording:
                results = work()
            self._plays[key] = recording.finish(results) or _NEVER
            return results
        if found is None:
            if len(self._plays) >= _MOST:
                self._plays.clear()
            self._plays[key] = _SEEN
        return work()


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down the operations on tensors, and the launches that `launched` is told of."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._records: list[Record] = []
        self._given = self._count = len(tensors)
        # Tensors by identity; held, so that no other takes their place in memory.
        self._held: list[torch.Tensor | None] = list(tensors)
        self._slots = {id(x): i for i, x in enumerate(tensors) if x is not None}
        self._buffers: set[int] = set()
        self._is_sound, self._is_paused = True, False

    def __enter__(self) -> Recorder:
        _local.recorder = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        _local.recorder = None
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        results = func(*args, **kwargs)
        if not self._is_paused:
            self._write_down(func, args, kwargs, results)
        return results

    def _write_down(self, func: Any, args: Any, kwargs: dict[str, Any], results: Any) -> None:
        made = results if isinstance(results, (list, tuple)) else [results]
        lists = [x for x in args if isinstance(x, (list, tuple))]
        elsewhere = [*kwargs.values(), *(x for own in lists for x in own)]
        if (
            any(tag in func.tags for tag in _READS)
            or any(isinstance(x, torch.Tensor) for x in elsewhere)
            or not all(isinstance(x, torch.Tensor) for x in made)
        ):
            self._is_sound = False
            return
        fills = self._fills(args)
        if func is _ATEN.detach.default and fills[0][1] in self._buffers:
            # How an allocation ends where a mode looks on: nobody else has the tensor.
            self._hold(results, fills[0][1])
            return
        slots = [self._slot_of(x) for x in made]
        if func in _EMPTY or func in _ZEROS:
            self._records.append(Buffer.like(slots[0], results, func in _ZEROS))
            self._buffers.add(slots[0])
            return
        operation = Operation.of(func, args, kwargs, fills, slots)
        if func.is_view and isinstance(results, torch.Tensor) and fills[0][0] == 0:
            offset = results.data_ptr() - args[0].data_ptr() if results.numel() else 0
            self._records.append(View(slots[0], fills[0][1], offset, operation))
        else:
            self._records.append(operation)

    @contextmanager
    def launching(self) -> Iterator[None]:
        """What a launch does with tensors is its own affair."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def launched(
        self,
        run: Callable[..., Any],
        arguments: Sequence[Any],
        *,
        takes_stream: bool = False,
        direct: DirectLaunch | None = None,
    ) -> None:
        """A kernel was launched, as `run(*arguments)` does again, or `direct` faster."""
        fills = self._fills([x.base if is_descriptor(x) else x for x in arguments])
        self._records.append(Launch.of(run, arguments, fills, takes_stream, direct))

    def finish(self, results: Tensors) -> Play | None:
        """The record; None if it would not do the same again."""
        if not self._is_sound or not all(x is None or id(x) in self._slots for x in results):
            return None
        slots = [None if x is None else self._slots[id(x)] for x in results]
        # A schedule of a mask without data reads no tensor, and makes some.
        device = next((x.device for x in self._held if x is not None), None)
        if device is None:
            return None
        return Play(self._records, self._given, self._count, slots, device)

    def _fills(self, leaves: Sequence[Any]) -> tuple[tuple[int, int], ...]:
        """(place, slot) of each tensor. What is in no slot came from elsewhere."""
        places = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
        self._is_sound &= all(id(leaves[i]) in self._slots for i in places)
        return tuple((i, self._slots.get(id(leaves[i]), 0)) for i in places)

    def _slot_of(self, x: torch.Tensor) -> int:
        if id(x) not in self._slots:
            self._hold(x, self._count)
            self._count += 1
        return self._slots[id(x)]

    def _hold(self, x: torch.Tensor, slot: int) -> None:
        self._slots[id(x)] = slot
        self._held.append(x)


def recorder() -> Recorder | None:
    """Who must be told of this thread's launches."""
    found: Recorder | None = getattr(_local, "recorder", None)
    return found


def layout_of(x: torch.Tensor | None) -> Any:
    """What of a tensor the host's work depends on: its place and its device are last."""
    if x is None:
        return None
    return x.shape, x.stride(), x.dtype, place_of(x), x.device


def layouts_of(*tensors: torch.Tensor | None) -> str:
    """The same of many, for tensors that are looked at once: a key whose hash is kept."""
    return repr([layout_of(x) for x in tensors])


def place_of(x: torch.Tensor) -> int | None:
    """Bytes after a boundary of 16; None of what function transforms wrap, which lies nowhere."""
    try:
        address = x.data_ptr()
    except RuntimeError:
        return None
    if not address and torch._C._functorch.is_functorch_wrapped_tensor(x):
        return None
    return address & 15


def _has_twins(tensors: Tensors) -> bool:
    """Whether a tensor is given twice, so that a record couldn't tell in which of its roles."""
    ids = [id(x) for x in tensors if x is not None]
    return len(set(ids)) < len(ids)
