"""What a call does with its tensors, written down once, and done again without a thought.

Shapes, strides, dtypes, alignment and scalars decide which buffers a call allocates, and which
kernels it launches with which arguments. To work that out takes the host longer than a short
kernel runs. So the second call of a kind is recorded, and the ones after it play the record, with
their own tensors in the places of the recorded ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .config import config
from .direct import DirectLaunch, is_watched

# Tensors, and None in the place of some.
Tensors = Sequence[Any]
# Of the tensors so far, and the stream that kernels run on.
Step = Callable[[list[Any], Any], None]

# Records kept of a kind; layouts rarely change.
_MOST = 16
_EMPTY = frozenset(
    (
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
    )
)
# The host reads the result, or its shape depends on what is in a tensor.
_READS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_SEEN, _NEVER = "seen once", "can't be recorded"

_local = threading.local()


class Tapes:
    """The records of one kind of call."""

    def __init__(self) -> None:
        self._tapes: dict[Any, Tape | str] = {}

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
        tape = self._tapes.get(key)
        if isinstance(tape, Tape):
            return tape.play(tensors)
        if tape == _SEEN and not config.debug and not _has_twins(tensors):
            recorder = Recorder(tensors)
            with recorder:
                results = work()
            self._tapes[key] = recorder.finish(results) or _NEVER
            return results
        if tape is None:
            if len(self._tapes) >= _MOST:
                self._tapes.clear()
            self._tapes[key] = _SEEN
        return work()


class Tape:
    """Steps over a list of tensors: those given, then those made."""

    def __init__(self, steps: Sequence[Step], made: int, results: Sequence[int | None]) -> None:
        self._steps, self._none, self._results = tuple(steps), [None] * made, tuple(results)

    def play(self, tensors: Tensors) -> Tensors:
        """The results of the recorded work on these tensors."""
        slots: list[Any] = [*tensors, *self._none]
        device = next(x.device for x in tensors if x is not None)
        with on_device(device):
            stream = _stream_of(device)
            for step in self._steps:
                step(slots, stream)
        return [None if slot is None else slots[slot] for slot in self._results]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down the operations on tensors, and the launches that `launched` is told of."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps: list[Step] = []
        self._given = len(tensors)
        # Tensors by identity; held, so that no other takes their place in memory.
        self._held: list[torch.Tensor | None] = list(tensors)
        self._slots = {id(x): i for i, x in enumerate(tensors) if x is not None}
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
        slots = [self._slot_of(x) for x in made]
        if func in _EMPTY:
            self._steps.append(_empty(results, slots[0]))
        else:
            self._steps.append(_operation(func, args, kwargs, fills, slots))

    @contextmanager
    def launching(self) -> Iterator[None]:
        """What a launch does with tensors is its own affair."""
        self._is_paused = True
        yield
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
        fills = self._fills([x.base if _is_descriptor(x) else x for x in arguments])
        step = _launch(run, arguments, fills, takes_stream)
        self._steps.append(step if direct is None else _direct(direct, fills, step))

    def finish(self, results: Tensors) -> Tape | None:
        """The record; None if it would not do the same again."""
        if not all(x is None or id(x) in self._slots for x in results):
            return None
        slots = [None if x is None else self._slots[id(x)] for x in results]
        made = len(self._held) - self._given
        return Tape(self._steps, made, slots) if self._is_sound else None

    def _fills(self, leaves: Sequence[Any]) -> tuple[tuple[int, int], ...]:
        """(place, slot) of each tensor. What is in neither list came from elsewhere."""
        places = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
        self._is_sound &= all(id(leaves[i]) in self._slots for i in places)
        return tuple((i, self._slots.get(id(leaves[i]), 0)) for i in places)

    def _slot_of(self, x: torch.Tensor) -> int:
        if id(x) not in self._slots:
            self._slots[id(x)] = len(self._held)
            self._held.append(x)
        return self._slots[id(x)]


def recorder() -> Recorder | None:
    """Who must be told of this thread's launches."""
    found: Recorder | None = getattr(_local, "recorder", None)
    return found


def layout_of(x: torch.Tensor | None) -> Any:
    """What of a tensor the host's work depends on."""
    if x is None:
        return None
    return x.shape, x.stride(), x.dtype, place_of(x), x.device


def place_of(x: torch.Tensor) -> int | None:
    """Bytes after a boundary of 16; None of what function transforms wrap, which lies nowhere."""
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return None
    return x.data_ptr() & 15


def _has_twins(tensors: Tensors) -> bool:
    """Whether a tensor is given twice, so that a record couldn't tell in which of its roles."""
    ids = [id(x) for x in tensors if x is not None]
    return len(set(ids)) < len(ids)


def _empty(like: torch.Tensor, slot: int) -> Step:
    shape, strides, dtype, device = tuple(like.shape), like.stride(), like.dtype, like.device

    def step(slots: list[Any], _: Any) -> None:
        slots[slot] = torch.empty_strided(shape, strides, dtype=dtype, device=device)

    return step


def _operation(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    fills: Sequence[tuple[int, int]],
    results: Sequence[int],
) -> Step:
    blank = _blanked(args, fills)
    single = results[0] if len(results) == 1 else None

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


def _launch(
    run: Callable[..., Any],
    arguments: Sequence[Any],
    fills: Sequence[tuple[int, int]],
    takes_stream: bool,
) -> Step:
    blank = _blanked(arguments, fills)
    plain = [(place, slot) for place, slot in fills if not _is_descriptor(arguments[place])]
    based = [
        (place, slot, type(x), {**vars(x), "base": None})
        for place, slot in fills
        if _is_descriptor(x := arguments[place])
    ]

    def step(slots: list[Any], stream: Any) -> None:
        given = blank.copy()
        for place, slot in plain:
            given[place] = slots[slot]
        for place, slot, kind, pattern in based:
            given[place] = made = object.__new__(kind)
            made.__dict__.update(pattern, base=slots[slot])
        if takes_stream:
            run(*given, stream=stream)
        else:
            run(*given)

    return step


def _direct(direct: DirectLaunch, fills: Sequence[tuple[int, int]], watched: Step) -> Step:
    writers = direct.writers([place for place, _ in fills])
    sources = [slot for _, slot in fills]

    def step(slots: list[Any], stream: Any) -> None:
        if is_watched():
            watched(slots, stream)
        else:
            direct(writers, [slots[slot] for slot in sources], stream)

    return step


def _blanked(arguments: Sequence[Any], fills: Sequence[tuple[int, int]]) -> list[Any]:
    """Without the tensors that are filled in."""
    places = {place for place, _ in fills}
    return [None if i in places else x for i, x in enumerate(arguments)]


def _is_descriptor(x: Any) -> bool:
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
