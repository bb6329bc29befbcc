"""One run of a user's function on symbols."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode

from ..errors import FlashgenError, SourceLine
from ..expr import Expr, Kind, const, index, load, scalar, score
from .follow import find_reads
from .reads import Reads
from .signature import Function, Parameter
from .symbol import ScalarSymbol, Symbol, TensorSymbol, number, reject
from .watch import Watch, flat


@dataclass(frozen=True)
class TensorType:
    """What tracing must know of a tensor: the kind of its elements, its rank, and which
    dimensions hold one value for every batch element or head."""

    kind: Kind
    ndim: int
    single: frozenset[int] = frozenset()

    # Indices that take several values, so that a dimension of size 1 stands for all of them.
    spread: frozenset[str] = frozenset()

    @staticmethod
    def of(tensor: torch.Tensor, spread: frozenset[str] = frozenset()) -> TensorType:
        """Notes dimensions of size 1, which the indices in `spread` read at 0."""
        kind: Kind = "float" if tensor.dtype.is_floating_point else "int"
        kind = "bool" if tensor.dtype == torch.bool else kind
        single = frozenset(d for d, n in enumerate(tensor.shape) if n == 1)
        return (
            TensorType(kind, tensor.ndim, single, spread)
            if single and spread
            else (TensorType(kind, tensor.ndim))
        )


@dataclass(frozen=True)
class Traced:
    """The expression, and the tensors that the function captured, by the names they got; and all
    that it `read` besides its arguments."""

    expr: Expr
    captured: Mapping[str, torch.Tensor]
    read: Reads

    def agrees(self, other: Traced) -> bool:
        """Whether both mean the same, and read the same tensors."""
        mine, theirs = self.captured, other.captured
        if self.expr != other.expr or mine.keys() != theirs.keys():
            return False
        return all(tensor is theirs[name] for name, tensor in mine.items())


def is_odd(tensor: torch.Tensor) -> bool:
    """Whether expressions can't read such a tensor's elements."""
    is_dense = tensor.layout == torch.strided and not tensor.is_nested
    return tensor.is_complex() or tensor.is_quantized or not is_dense


class Recorder:
    """Lifts what a function mixes with symbols: numbers, and tensors it captured."""

    def __init__(self, function: Function) -> None:
        self._names = _names_of_tensors(function.function)
        self.captured: dict[str, torch.Tensor] = {}
        self.watch = Watch()

    def lift(self, value: Any) -> Expr:
        if isinstance(value, Symbol):
            return value.expr
        if isinstance(value, torch.Tensor):
            return self.captured_tensor(value).expr
        constant = number(value)
        if constant is None:
            raise TypeError(f"a symbol can't be combined with a {type(value).__name__}")
        return constant

    def captured_tensor(self, tensor: torch.Tensor) -> TensorSymbol:
        if is_odd(tensor):
            reject(
                f"a {tensor.layout} tensor of {tensor.dtype} is read",
                "a dense tensor of booleans, integers or floats",
            )
        name = next((n for n, t in self.captured.items() if t is tensor), None)
        if name is None:
            name = self._names.get(id(tensor), f"captured{len(self.captured)}")
            while name in self.captured:
                name += "_"
            self.captured[name] = tensor
        kind = TensorType.of(tensor)
        return TensorSymbol(name, kind.kind, kind.ndim, self)

    def argument(self, parameter: Parameter, types: Mapping[str, Any], public: str) -> Any:
        if parameter.role == "index":
            return Symbol(index(parameter.name), self)
        if parameter.role == "score":
            return Symbol(score(), self)
        if parameter.role == "const":
            return types[public]
        if parameter.role == "scalar":
            return Symbol(scalar(public, cast_kind(parameter.type)), self)
        tensor = types[public]
        if isinstance(tensor, str):
            return ScalarSymbol(scalar(public, cast_kind(tensor)), self)
        if tensor.ndim == 0:
            return ScalarSymbol(load(public, tensor.kind, ()), self)
        return TensorSymbol(public, tensor.kind, tensor.ndim, self, tensor=tensor)


def cast_kind(name: str) -> Kind:
    kinds: dict[str, Kind] = {"int": "int", "float": "float", "bool": "bool"}
    return kinds[name]


class _SeesTensors(TorchFunctionMode):
    """`tensor[symbol]` on a plain tensor reaches us only through a mode, and what is computed from
    tensors themselves."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.__getitem__ and _has_symbol(args[1]):
            return self.recorder.captured_tensor(args[0])[args[1]]
        result = func(*args, **(kwargs or {}))
        given = flat((*args, *(kwargs or {}).values()))
        if not any(isinstance(x, Symbol) for x in given):
            tensors = [x for x in given if isinstance(x, torch.Tensor)]
            self.recorder.watch.computed(func, tensors, result)
        return result


def _has_symbol(position: Any) -> bool:
    positions = position if isinstance(position, tuple) else (position,)
    return any(isinstance(p, Symbol) for p in positions)


def trace(
    function: Function,
    types: Mapping[str, Any],
    *,
    wants: Literal["mask", "score"],
    names: Mapping[str, str] | None = None,
) -> Traced:
    """Run `function` on symbols.

    `types` gives, by public name, the TensorType of each tensor (for a plain number given in a
    tensor's place, its kind) and the value of each constant;
    `names` maps the function's parameters to public names where they were renamed.
    Raises FlashgenError, with the user's line, for what can't be compiled."""
    names = names or {}
    recorder = Recorder(function)
    arguments = {
        p.name: recorder.argument(p, types, names.get(p.name, p.name))
        for p in function.parameters
        if p.role != "default"
    }
    with _SeesTensors(recorder):
        result = recorder.watch.run(lambda: _run(function, arguments))
    expr = _result(function, recorder, result, wants)
    captured = recorder.captured
    return Traced(expr, captured, find_reads(function.function, recorder.watch, captured.values()))


def _run(function: Function, arguments: dict[str, Any]) -> Any:
    try:
        if function.style == "flex":
            return function.function(*arguments.values())
        return function.function(**arguments)
    except FlashgenError as error:
        error.line = error.line or SourceLine.of_caller(function.function, error) or function.line
        raise
    except Exception as error:
        raise FlashgenError(
            f"{function.name} can't be run on symbols: {type(error).__name__}: {error}",
            line=SourceLine.of_caller(function.function, error) or function.line,
            write=_instead(error),
        ) from error


def _instead(error: Exception) -> str:
    """What to write where Python itself has stopped a function."""
    if isinstance(error, NameError):
        return "a name that is defined where the function is, and when it is called"
    if isinstance(error, (ZeroDivisionError, RecursionError, ImportError, AssertionError, OSError)):
        return "a function that runs: Python stopped it, whatever the symbols are"
    return "element-wise arithmetic on the symbols: comparisons, & | ~, fg.where, ..."


def _result(function: Function, recorder: Recorder, result: Any, wants: str) -> Expr:
    try:
        expr = recorder.lift(result)
    except TypeError:
        expr = None
    if wants == "mask" and (expr is None or expr.kind != "bool"):
        got = f"{expr}, a {expr.kind}" if expr is not None else repr(result)
        raise FlashgenError(
            f"the mask {function.name} must return a boolean, and returns {got}",
            line=function.line,
            write="a comparison, e.g. `kv_idx <= q_idx` or `value != 0`",
        )
    if expr is None:
        raise FlashgenError(
            f"the score function {function.name} returns {result!r}",
            line=function.line,
            write="return score + ..., the changed score",
        )
    return expr if wants == "mask" or expr.kind == "float" else _as_float(expr)


def _as_float(expr: Expr) -> Expr:
    return const(float(expr.attr)) if expr.is_const else Expr("cast", "float", (expr,))


def _names_of_tensors(function: Callable[..., Any]) -> dict[int, str]:
    """Names under which a function, and the functions it closes over, see tensors."""
    names: dict[int, str] = {}
    pending: list[Any] = [function]
    seen: set[int] = set()
    while pending:
        inner = pending.pop()
        while isinstance(inner, functools.partial):
            pending.extend(inner.keywords.values())
            names.update(
                {id(v): k for k, v in inner.keywords.items() if isinstance(v, torch.Tensor)}
            )
            inner = inner.func
        if id(inner) in seen or not hasattr(inner, "__code__"):
            continue
        seen.add(id(inner))
        for name, value in _visible(inner):
            if isinstance(value, torch.Tensor):
                names.setdefault(id(value), name)
            elif callable(value):
                pending.append(value)
            elif isinstance(value, (list, tuple)):
                pending.extend(v for v in value if callable(v))
    return names


def _visible(function: Any) -> list[tuple[str, Any]]:
    code = function.__code__
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    found = [(name, cell.cell_contents) for name, cell in cells if _is_filled(cell)]
    found += [(n, function.__globals__[n]) for n in code.co_names if n in function.__globals__]
    return found


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
