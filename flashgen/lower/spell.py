"""How each operation is written in Triton."""

from __future__ import annotations

import math
import struct

from ..expr import FLOATS, Expr
from ..expr.build import CLAMPS

# Text with its binding strength, as in Python; names and calls are atoms.
ATOM = 9
Text = tuple[str, int]

_BINARY = {
    "lt": ("<", 1),
    "le": ("<=", 1),
    "eq": ("==", 1),
    "ne": ("!=", 1),
    "or": ("|", 2),
    "xor": ("^", 3),
    "and": ("&", 4),
    "shl": ("<<", 5),
    "shr": (">>", 5),
    "add": ("+", 6),
    "sub": ("-", 6),
    "mul": ("*", 7),
    "truediv": ("/", 7),
}
_TRITON = frozenset(
    {"exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "erf", "floor", "ceil", "sigmoid"}
)
# Written by flashgen beside the kernel that uses them (templates/functions.j2).
HELPERS = frozenset({"floor_div", "floor_mod", "tanh", "power", "ahead"})
_NAN = "propagate_nan=tl.PropagateNan.ALL"


def wrap(text: Text, needed: int) -> str:
    return text[0] if text[1] >= needed else f"({text[0]})"


def constant(value: bool | int | float) -> Text:
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")', ATOM
    return repr(value), ATOM if value >= 0 else 8


def double(value: float) -> Text:
    """A constant of 64 bits; most are the same in 32."""
    if not math.isfinite(value) or struct.unpack("f", struct.pack("f", value))[0] == value:
        return constant(value)
    return f"tl.full([], {value!r}, tl.float64)", ATOM


def cast(value: Text, target: str) -> Text:
    return f"{wrap(value, ATOM)}.to({target})", ATOM


def operation(node: Expr, args: list[Text], nonnegative: bool, safe_divisor: bool) -> Text:
    """One node. `nonnegative`: both operands of a division are; `safe_divisor`: never zero."""
    if node.op in ("floordiv", "mod"):
        return _division(node, args, nonnegative, safe_divisor)
    if node.op in _BINARY:
        sign, strength = _BINARY[node.op]
        # Triton refuses chained comparisons, and Python would chain equal strengths.
        left = wrap(args[0], strength + (strength == 1))
        return f"{left} {sign} {wrap(args[1], strength + 1)}", strength
    if node.op == "not":
        return f"~{wrap(args[0], 8)}", 8
    if node.op == "neg":
        return f"-{wrap(args[0], 8)}", 8
    plain = ", ".join(text for text, _ in args)
    extreme = CLAMPS.get(node.op, node.op)
    if extreme in ("minimum", "maximum"):
        return f"tl.{extreme}({plain}{f', {_NAN}' if node.kind in FLOATS else ''})", ATOM
    if node.op in _TRITON:
        return f"tl.{node.op}({plain})", ATOM
    if node.op == "isnan":
        value = wrap(args[0], 2)
        return f"{value} != {value}", 1
    name = {"abs": "tl.abs", "where": "tl.where", "tanh": "tanh", "pow": "power"}[node.op]
    return f"{name}({plain})", ATOM


def _division(node: Expr, args: list[Text], nonnegative: bool, safe_divisor: bool) -> Text:
    if node.kind in FLOATS:
        quotient = f"tl.floor({wrap(args[0], 7)} / {wrap(args[1], 8)})"
        if node.op == "floordiv":
            return quotient, ATOM
        return f"{wrap(args[0], 6)} - {quotient} * {wrap(args[1], 8)}", 6
    divisor = node.args[1]
    if divisor.is_const and divisor.attr > 0 and divisor.attr & (divisor.attr - 1) == 0:
        # Shifts and masks floor for negative numbers too.
        if node.op == "floordiv":
            return f"{wrap(args[0], 5)} >> {divisor.attr.bit_length() - 1}", 5
        return f"{wrap(args[0], 4)} & {divisor.attr - 1}", 4
    if nonnegative and safe_divisor:
        return f"{wrap(args[0], 7)} {'//' if node.op == 'floordiv' else '%'} {wrap(args[1], 8)}", 7
    return f"{'floor_div' if node.op == 'floordiv' else 'floor_mod'}({args[0][0]}, {args[1][0]})", 9
