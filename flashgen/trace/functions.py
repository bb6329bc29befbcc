"""The vocabulary: what symbols answer to, by the names torch gives its functions and methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import FlashgenError
from ..expr import Expr, Kind, cast, const
from .meaning import check_cast
from .symbol import Symbol, apply, reject

if TYPE_CHECKING:
    from .run import Recorder

Implementation = Callable[..., Expr]


def call(recorder: Recorder, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply the function torch calls `name` to symbols, numbers and captured tensors."""
    if name == "__getitem__":
        tensor = args[0] if isinstance(args[0], Symbol) else recorder.captured_tensor(args[0])
        return tensor[args[1]]
    implementation = METHODS.get(name.strip("_") if name.startswith("__") else name)
    if implementation is None:
        reject(
            f"torch's `{name}` can't be compiled into a kernel",
            f"an element-wise function: {', '.join(sorted(PUBLIC))}",
        )
    kwargs = {key: value for key, value in kwargs.items() if key != "out"}
    if implementation in _RAW:
        return Symbol(implementation(recorder, *args, **kwargs), recorder)
    lifted = (recorder.lift(arg) for arg in args)
    return Symbol(implementation(*lifted, **kwargs), recorder)


def _op(op: str, arity: int) -> Implementation:
    def implementation(*args: Expr) -> Expr:
        if len(args) != arity:
            reject(f"`{op}` takes {arity} arguments, and got {len(args)}", "one number for each")
        return apply(op, *args)

    return implementation


def _swapped(op: str) -> Implementation:
    return lambda left, right: apply(op, right, left)


def _scaled(op: str) -> Implementation:
    def implementation(left: Expr, right: Expr, alpha: float = 1) -> Expr:
        return apply(op, left, right if alpha == 1 else apply("mul", right, const(alpha)))

    return implementation


def _div(left: Expr, right: Expr, rounding_mode: str | None = None) -> Expr:
    if rounding_mode is None:
        return apply("truediv", left, right)
    if rounding_mode == "floor":
        return apply("floordiv", left, right)
    quotient = apply("floordiv", apply("abs", left), apply("abs", right))
    negative = apply("ne", apply("lt", left, const(0)), apply("lt", right, const(0)))
    return apply("where", negative, apply("neg", quotient), quotient)


def _clamp(recorder: Recorder, value: Any, min: Any = None, max: Any = None) -> Expr:
    result = recorder.lift(value)
    if min is not None:
        result = apply("clamp_min", result, recorder.lift(min))
    return result if max is None else apply("clamp_max", result, recorder.lift(max))


def _truth(value: Expr) -> Expr:
    return value if value.kind == "bool" else apply("ne", value, const(0))


def _logical(op: str) -> Implementation:
    return lambda *args: apply(op, *(_truth(a) for a in args))


def _as(kind: Kind, dtype: str = "") -> Implementation:
    def implementation(value: Expr, *_: Any, **__: Any) -> Expr:
        import torch

        if dtype:
            check_cast(value, getattr(torch, dtype))
        return _truth(value) if kind == "bool" else cast(value, kind)

    return implementation


def _to(recorder: Recorder, value: Any, *args: Any, dtype: Any = None, **_: Any) -> Expr:
    import torch

    kinds: dict[Any, Kind] = {bool: "bool", int: "int", float: "float"}
    wanted = dtype
    for arg in args:
        if isinstance(arg, (Symbol, torch.Tensor)):
            wanted = arg.dtype
        elif isinstance(arg, torch.dtype) or arg in kinds:
            wanted = arg
    expr = recorder.lift(value)
    if wanted is None:
        return expr
    if wanted in kinds:
        return _as(kinds[wanted])(expr)
    if wanted == torch.bool:
        return _truth(expr)
    check_cast(expr, wanted)
    return cast(expr, "float" if wanted.is_floating_point else "int")


def _filled(fixed: Any = None) -> Implementation:
    def implementation(
        recorder: Recorder, value: Any, size: Any = (), fill: Any = fixed, *_: Any, **kwargs: Any
    ) -> Expr:
        import torch

        if fixed is not None:
            fill = fixed
        if "fill_value" in kwargs:
            fill = kwargs["fill_value"]
        dtype = kwargs.get("dtype")
        if dtype == torch.bool:
            return const(bool(fill))
        return const(float(fill) if dtype is not None and dtype.is_floating_point else fill)

    return implementation


def _like(fixed: int) -> Implementation:
    return lambda value, **_: cast(const(fixed), value.kind)


def _sign(value: Expr) -> Expr:
    zero = const(0)
    negative = apply("where", apply("lt", value, zero), const(-1), zero)
    return cast(apply("where", apply("lt", zero, value), const(1), negative), value.kind)


_NUMBERS: dict[str, Implementation] = {
    "add": _scaled("add"),
    "sub": _scaled("sub"),
    "rsub": lambda left, right: apply("sub", right, left),
    "mul": _op("mul", 2),
    "div": _div,
    "floor_divide": _op("floordiv", 2),
    "remainder": _op("mod", 2),
    "pow": _op("pow", 2),
    "square": lambda value: apply("mul", value, value),
    "reciprocal": lambda value: apply("truediv", const(1.0), value),
    "neg": _op("neg", 1),
    "abs": _op("abs", 1),
    "sign": _sign,
    "minimum": _op("minimum", 2),
    "maximum": _op("maximum", 2),
    "where": _op("where", 3),
    "lt": _op("lt", 2),
    "le": _op("le", 2),
    "gt": _swapped("lt"),
    "ge": _swapped("le"),
    "eq": _op("eq", 2),
    "ne": _op("ne", 2),
    "logical_and": _logical("and"),
    "logical_or": _logical("or"),
    "logical_xor": _logical("xor"),
    "logical_not": _logical("not"),
    "bitwise_and": _op("and", 2),
    "bitwise_or": _op("or", 2),
    "bitwise_xor": _op("xor", 2),
    "bitwise_not": _op("not", 1),
    "bitwise_left_shift": _op("shl", 2),
    "bitwise_right_shift": _op("shr", 2),
    # In this order the limit gets a tie: PyTorch's relu is flat at 0.
    "relu": lambda value: apply("clamp_min", const(0), value),
    "isnan": _op("isnan", 1),
    "zeros_like": _like(0),
    "ones_like": _like(1),
    "bool": _as("bool"),
    **{name: _as("int") for name in ("int", "long")},
    "short": _as("int", "int16"),
    **{name: _as("float") for name in ("float", "double")},
    "half": _as("float", "float16"),
    "bfloat16": _as("float", "bfloat16"),
    **{
        name: _op(name, 1)
        for name in ("exp exp2 log log2 sqrt rsqrt sin cos tanh sigmoid erf floor ceil".split())
    },
}
_ALIASES = {
    "subtract": "sub",
    "multiply": "mul",
    "divide": "div",
    "true_divide": "div",
    "truediv": "div",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "negative": "neg",
    "absolute": "abs",
    "less": "lt",
    "less_equal": "le",
    "greater": "gt",
    "greater_equal": "ge",
    "not_equal": "ne",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "invert": "bitwise_not",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
    "min": "minimum",
    "max": "maximum",
    "radd": "add",
    "rmul": "mul",
    "rand": "bitwise_and",
    "ror": "bitwise_or",
    "rxor": "bitwise_xor",
}
_REVERSED = {"rdiv": "div", "rtruediv": "div", "rfloordiv": "floor_divide", "rmod": "remainder"}
_RECORDED: dict[str, Implementation] = {
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": lambda recorder, value, min: _clamp(recorder, value, min),
    "clamp_max": lambda recorder, value, max: _clamp(recorder, value, None, max),
    "to": _to,
    "type": _to,
    "new_zeros": _filled(0),
    "new_ones": _filled(1),
    "new_full": _filled(),
    "new_tensor": lambda recorder, value, data, **_: recorder.lift(data),
}
_RAW = frozenset(_RECORDED.values())

METHODS: dict[str, Implementation] = {
    **_NUMBERS,
    **{alias: _NUMBERS[name] for alias, name in _ALIASES.items()},
    **{
        name: (lambda left, right, _f=_NUMBERS[target]: _f(right, left))
        for name, target in _REVERSED.items()
    },
    **_RECORDED,
}


def _public(name: str) -> Callable[..., Any]:
    def function(*args: Any) -> Any:
        symbol = next((a for a in args if isinstance(a, Symbol)), None)
        if symbol is not None:
            return call(symbol.recorder, name, args, {})
        import torch

        # On plain tensors and numbers the function is torch's, so a mask can be tried eagerly.
        tensors = [torch.as_tensor(arg) for arg in args]
        result: Any = getattr(torch, name)(*tensors)
        if any(isinstance(arg, torch.Tensor) for arg in args):
            return result
        return result.item()

    function.__name__ = name
    function.__doc__ = f"`torch.{name}` for symbols; for tensors and numbers, torch's own."
    return function


PUBLIC: dict[str, Callable[..., Any]] = {
    name: _public(name)
    for name in (
        "where minimum maximum abs exp exp2 log log2 sqrt rsqrt sin cos tanh sigmoid "
        "floor ceil erf isnan"
    ).split()
}

__all__ = ["METHODS", "PUBLIC", "FlashgenError", "call"]
