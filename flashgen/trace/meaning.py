"""What operations mean in torch, where that differs from the same on Python's numbers."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import FlashgenError
from ..expr import FLOATS, Expr, cast, const, make
from ..expr.build import CLAMPS

# Of two booleans torch makes a boolean.
_BOOLEANS = {"add": "or", "mul": "and", "maximum": "or", "minimum": "and"}
# Symbols' own integers are wider than these, and their floats than those.
_NARROW = (torch.int8, torch.uint8, torch.int16)
_ROUNDED = (torch.float16, torch.bfloat16)
_NONNEGATIVE = frozenset("add mul floordiv minimum maximum and or xor shr".split())


def as_torch(op: str, *args: Expr) -> Expr | None:
    """The operation as torch does it; None where that is what Python does.

    Raises FlashgenError where torch refuses, or gives integers that wrap or are rounded."""
    op = CLAMPS.get(op, op)
    if op in _BOOLEANS and all(x.kind == "bool" for x in args):
        return make(_BOOLEANS[op], *args)
    if op in ("sub", "neg") and all(x.kind == "bool" for x in args):
        raise FlashgenError(
            f"{args[0]} is a boolean, and torch has no minus for those",
            write="^ for two that differ, ~ for not, or .int() to count",
        )
    if op == "pow" and all(x.kind not in FLOATS for x in args):
        return _integer_power(*args)
    return None


def _integer_power(base: Expr, exponent: Expr) -> Expr:
    """An integer, as there: a product, or a shift, or by the exponent's bits."""
    if exponent.is_const and exponent.attr < 0:
        raise FlashgenError(
            f"an integer to the power {exponent.attr} is no integer, and torch refuses it",
            write=f"({base}) * 1.0 to that power, for a float",
        )
    if exponent.is_const:
        return _product(base, int(exponent.attr))
    if not _is_nonnegative(exponent):
        raise FlashgenError(
            f"({base}) ** ({exponent}) is an integer in torch, 0 for a negative exponent",
            write="2.0 ** ... for a float; or 2 ** fg.maximum(..., 0)",
        )
    exponent = cast(exponent, "int")
    if base.is_const and base.attr > 0 and base.attr & (base.attr - 1) == 0:
        bits = base.attr.bit_length() - 1
        return make("shl", const(1), make("mul", exponent, const(bits)))
    return _by_bits(cast(base, "int"), exponent)


def _by_bits(base: Expr, exponent: Expr) -> Expr:
    """The product of base ** 2 ** bit for each bit that is set; 64 bits hold the result."""
    power = const(1)
    for bit in range(6):
        is_set = make("ne", make("and", exponent, const(1 << bit)), const(0))
        power = make("mul", power, make("where", is_set, base, const(1)))
        base = make("mul", base, base)
        if base.is_const and abs(base.attr) >= 2**63:
            break
    return power


def _product(base: Expr, times: int) -> Expr:
    if times == 0:
        return const(1)
    half = _product(base, times // 2)
    whole = make("mul", half, half)
    return make("mul", whole, base) if times % 2 else whole


def _is_nonnegative(x: Expr) -> bool:
    if x.is_const:
        return bool(x.attr >= 0)
    if x.op in _NONNEGATIVE or x.op == "cast":
        signs = [_is_nonnegative(arg) for arg in x.args]
        return any(signs) if x.op in ("maximum", "and") else all(signs)
    if x.op == "mod":
        return _is_nonnegative(x.args[1])
    return x.kind == "bool" or x.op in ("size", "abs") or (x.op == "index" and x.attr != "q_idx")


def check_cast(value: Expr, dtype: Any) -> None:
    """Raises FlashgenError for a dtype whose numbers wrap or are rounded."""
    name = str(dtype).removeprefix("torch.")
    if dtype in _NARROW and value.kind != "bool":
        raise FlashgenError(
            f"{value} is cast to {name}, in which numbers wrap, and a symbol's don't",
            write="torch.int32; or what the wrapping is for, e.g. `x & 255` for uint8",
        )
    if dtype in _ROUNDED:
        raise FlashgenError(
            f"{value} is cast to {name}, and a symbol's numbers aren't rounded to that",
            write="torch.float32, which all floats of a kernel are",
        )
