"""The one error class a user meets, and what helps to write a good message.

A message restates the call, says what is wrong, shows the user's line where it is known, and says
what to write instead:

    raise FlashgenError(
        "a position has no truth value while the mask is traced",
        call=format_call("attend", q=q, k=k),
        line=SourceLine.of_caller(mask_function, error),
        write="fg.where(condition, a, b), or conditions combined with & and |",
    )
"""

from __future__ import annotations

import difflib
import functools
import inspect
import linecache
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType, TracebackType
from typing import Any

_SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


@dataclass(frozen=True)
class SourceLine:
    """A line of the user's program; prints as `model.py:12: return score if ok else 0`."""

    file: str
    number: int
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.number}" + (f": {self.text}" if self.text else "")

    @classmethod
    def of_caller(
        cls, function: Callable[..., Any], error: BaseException | None = None
    ) -> SourceLine | None:
        """The line of `function` that was running when `error` was raised.

        Without `error`: the line running now. Lambdas and functions defined inside `function`
        count as its lines; the innermost wins. None where `function` isn't running at all.
        """
        if error is None:
            frames = _frames_outwards(sys._getframe(1))
        else:
            frames = reversed(list(_frames_inwards(error.__traceback__)))
        codes = _codes_of(function)
        return next((_at(frame, number) for frame, number in frames if frame.f_code in codes), None)


class FlashgenError(ValueError):
    """What a user wrote can't be done.

    Args:
        problem: what is wrong, a sentence without its full stop.
        call: the call as the user made it (see `format_call`). A stage that doesn't know the
            call leaves it out, and the public function that does sets `error.call`.
        line: the user's line, where one is to blame.
        write: what to write instead; the message shows it behind `instead:`.
    """

    def __init__(
        self,
        problem: str,
        *,
        call: object | None = None,
        line: SourceLine | None = None,
        write: str | None = None,
    ) -> None:
        super().__init__(problem)
        self.problem = problem
        self.call = None if call is None else str(call)
        self.line = line
        self.write = write

    def __str__(self) -> str:
        first = f"{self.call}: {self.problem}" if self.call else self.problem
        lines = [first, *([str(self.line)] if self.line else [])]
        return "\n  ".join([*lines, *([f"instead: {self.write}"] if self.write else [])])


def format_call(name: str, /, *args: Any, **kwargs: Any) -> str:
    """`attend(q=[2, 8, 128, 64] bf16, scale=0.125)`; arguments of no effect are left out."""
    shown = [show(value) for value in args]
    shown += [f"{key}={show(value)}" for key, value in kwargs.items() if not _is_idle(key, value)]
    return f"{name}({', '.join(shown)})"


class CallText:
    """The call as the user made it; written only when an error asks for it."""

    def __init__(self, name: str, arguments: Mapping[str, Any], given: Sequence[Any] = ()) -> None:
        self._name, self._arguments, self._given = name, arguments, given

    def __str__(self) -> str:
        return format_call(self._name, *self._given, **self._arguments)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Advice for an unknown name: the closest of `known`, else all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"Did you mean `{close[0]}`?"
    return f"There are: {', '.join(f'`{known}`' for known in names)}." if names else ""


def show(value: Any) -> str:
    """A value in a line of text: tensors, also in lists, by shape and dtype, never by elements.

    They are told apart by their attributes: torch may not be loaded."""
    if type(value) in (list, tuple):
        text = ", ".join(map(show, value[:_MOST_SHOWN]))
        text += ", ..." if len(value) > _MOST_SHOWN else ""
        text = f"[{text}]" if isinstance(value, list) else f"({text})"
        return _cut(text, _LONGEST_LIST)
    if hasattr(type(value), "shape") and hasattr(value, "dtype"):
        dtype = str(value.dtype).rpartition(".")[2]
        return f"{_shape_of(value)} {_SHORT_DTYPES.get(dtype, dtype)}"
    return _cut(" ".join(repr(value).split()), 60)


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


# Elements of a list, and its characters.
_MOST_SHOWN, _LONGEST_LIST = 8, 200


def _shape_of(value: Any) -> str:
    try:
        return str(list(value.shape))
    except RuntimeError:
        # A nested tensor has none.
        return "[nested]"


def _is_idle(name: str, value: Any) -> bool:
    if name == "batch_invariant":
        return value is False
    return value is None or (name == "dropout_p" and type(value) is float and value == 0.0)


def _at(frame: FrameType, number: int) -> SourceLine:
    file = frame.f_code.co_filename
    return SourceLine(file, number, linecache.getline(file, number, frame.f_globals).strip())


def _frames_outwards(frame: FrameType | None) -> Iterator[tuple[FrameType, int]]:
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back


def _frames_inwards(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next


def _codes_of(function: Callable[..., Any]) -> set[CodeType]:
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    if not hasattr(function, "__code__"):
        function = type(function).__call__
    return set(_nested(function.__code__)) if hasattr(function, "__code__") else set()


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
