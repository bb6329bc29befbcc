"""Building nodes: kinds are checked and promoted here, integer constants are folded."""

from __future__ import annotations

import math
from typing import Any

from .node import FLOATS, INDEX_NAMES, Expr, Kind, substitute

RANK: dict[Kind, int] = {"bool": 0, "int": 1, "float": 2, "double": 3}

ARITHMETIC = frozenset({"add", "sub", "mul", "floordiv", "mod", "minimum", "maximum", "pow"})
COMPARISONS = frozenset({"lt", "le", "eq", "ne"})
BITWISE = frozenset({"and", "or", "xor"})
SHIFTS = frozenset({"shl", "shr"})
FLOAT_FUNCTIONS = frozenset(
    {"exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "tanh", "sigmoid", "erf"}
)
# `maximum` and `minimum` of floats, whose derivative at a tie is the first operand's alone.
CLAMPS = {"clamp_min": "maximum", "clamp_max": "minimum"}
ROUNDING = frozenset({"floor", "ceil"})


class KindError(TypeError):
    """An operation got operands of a kind it has no meaning for."""


def const(value: bool | int | float) -> Expr:
    kind: Kind = "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "float"
    return Expr("const", kind, (), value)


def index(name: str) -> Expr:
    assert name in INDEX_NAMES, name
    return Expr("index", "int", (), name)


def score() -> Expr:
    return Expr("score", "float")


def scalar(name: str, kind: Kind) -> Expr:
    return Expr("scalar", kind, (), name)


def load(name: str, kind: Kind, indices: tuple[Expr, ...]) -> Expr:
    for position in indices:
        if position.kind in FLOATS:
            raise KindError(f"{name} is indexed by {position}, which is not an integer")
    return Expr("load", kind, tuple(cast(i, "int") for i in indices), name)


def cast(value: Expr, kind: Kind) -> Expr:
    if value.kind == kind:
        return value
    if value.is_const:
        convert: dict[Kind, Any] = {"bool": bool, "int": int, "float": float, "double": float}
        return Expr("const", kind, (), convert[kind](value.attr))
    return Expr("cast", kind, (value,))


def in_double(expr: Expr) -> Expr:
    """The same in floats of 64 bits."""

    def widened(node: Expr) -> Expr | None:
        is_float = node.kind == "float"
        return Expr(node.op, "double", node.args, node.attr) if is_float else None

    return substitute(expr, widened)


def common_kind(*values: Expr) -> Kind:
    return max((value.kind for value in values), key=RANK.__getitem__)


def make(op: str, *args: Expr) -> Expr:
    """The node for `op`, its operands promoted to the kind the operation works in.

    Raises KindError where the operation has no meaning (a float shifted, a float `&`)."""
    if op == "where":
        return _where(*args)
    if op in CLAMPS:
        kind = common_kind(*args)
        if kind not in FLOATS:
            return make(CLAMPS[op], *args)
        return Expr(op, kind, tuple(cast(a, kind) for a in args))
    if op in ARITHMETIC or op == "truediv":
        return _arithmetic(op, *args)
    if op in COMPARISONS:
        kind = common_kind(*args)
        return _fold(Expr(op, "bool", tuple(cast(a, kind) for a in args)))
    if op in BITWISE or op in SHIFTS or op == "not":
        return _bitwise(op, *args)
    if op in FLOAT_FUNCTIONS:
        kind = "double" if args[0].kind == "double" else "float"
        return Expr(op, kind, (cast(args[0], kind),))
    if op in ROUNDING:
        return args[0] if args[0].kind not in FLOATS else Expr(op, args[0].kind, args)
    if op == "isnan":
        return const(False) if args[0].kind not in FLOATS else Expr(op, "bool", args)
    if op in ("neg", "abs"):
        (value,) = (cast(a, "int") if a.kind == "bool" else a for a in args)
        return _fold(Expr(op, value.kind, (value,)))
    raise KindError(f"no operation named {op}")


def _where(condition: Expr, yes: Expr, no: Expr) -> Expr:
    if condition.kind != "bool":
        condition = make("ne", condition, const(0))
    kind = common_kind(yes, no)
    yes, no = cast(yes, kind), cast(no, kind)
    if condition.is_const:
        return yes if condition.attr else no
    if yes == no:
        return yes
    return Expr("where", kind, (condition, yes, no))


def _arithmetic(op: str, left: Expr, right: Expr) -> Expr:
    kind: Kind = common_kind(left, right)
    if op == "truediv" and kind not in FLOATS:
        kind = "float"
    elif kind == "bool":
        kind = "int"
    if op in ("floordiv", "mod", "truediv") and right.is_const and right.attr == 0:
        if op != "truediv":
            raise ZeroDivisionError("the divisor is zero")
    if op == "pow":
        return _power(cast(left, kind), cast(right, kind))
    return _fold(Expr(op, kind, (cast(left, kind), cast(right, kind))))


def _power(base: Expr, exponent: Expr) -> Expr:
    """Whole, small powers are products; others are exp2(y log2 x) of a float."""
    if exponent.is_const and float(exponent.attr).is_integer() and 0 <= exponent.attr <= 8:
        result = const(1) if base.kind == "int" else const(1.0)
        for turn in range(int(exponent.attr)):
            result = base if turn == 0 else make("mul", result, base)
        return result
    kind: Kind = "double" if common_kind(base, exponent) == "double" else "float"
    base, exponent = cast(base, kind), cast(exponent, kind)
    if base.is_const and base.attr > 0:
        return make("exp2", make("mul", exponent, const(math.log2(base.attr))))
    return Expr("pow", kind, (base, exponent))


def _bitwise(op: str, *args: Expr) -> Expr:
    kind = common_kind(*args)
    if kind in FLOATS:
        raise KindError(f"`{op}` works on booleans and integers, and got a float")
    if op in SHIFTS:
        kind = "int"
    return _fold(Expr(op, kind, tuple(cast(a, kind) for a in args)))


def _fold(node: Expr) -> Expr:
    """Constants of integers and booleans fold; floats are left as written."""
    if any(arg.kind in FLOATS for arg in node.args):
        return node
    if all(arg.is_const for arg in node.args):
        return const(_COMPUTE[node.op](*(arg.attr for arg in node.args), node.kind))
    if len(node.args) == 2:
        return _identity(node, *node.args)
    if node.op == "not" and node.args[0].op == "not":
        return node.args[0].args[0]
    return node


def _identity(node: Expr, left: Expr, right: Expr) -> Expr:
    if left.is_const and node.op in ("add", "mul", "and", "or", "xor", "minimum", "maximum"):
        left, right = right, left
    same = {"and": left, "or": left, "minimum": left, "maximum": left}
    if left == right:
        if node.op in same:
            return left
        if node.op in ("le", "eq"):
            return const(True)
        if node.op in ("lt", "ne"):
            return const(False)
        if node.op == "sub":
            return const(0)
    if not right.is_const:
        return node
    value = right.attr
    if node.kind == "bool" and node.op in ("and", "or"):
        return left if value == (node.op == "and") else const(value)
    neutral = {"add": 0, "sub": 0, "mul": 1, "floordiv": 1, "shl": 0, "shr": 0}
    if node.kind == "int" and neutral.get(node.op) == value:
        return left
    if node.op == "mul" and value == 0 or node.op == "mod" and value == 1:
        return const(0)
    return node


_COMPUTE: dict[str, Any] = {
    "add": lambda a, b, _: a + b,
    "sub": lambda a, b, _: a - b,
    "mul": lambda a, b, _: a * b,
    "floordiv": lambda a, b, _: a // b,
    "mod": lambda a, b, _: a % b,
    "minimum": lambda a, b, _: min(a, b),
    "maximum": lambda a, b, _: max(a, b),
    "lt": lambda a, b, _: a < b,
    "le": lambda a, b, _: a <= b,
    "eq": lambda a, b, _: a == b,
    "ne": lambda a, b, _: a != b,
    "and": lambda a, b, _: a & b,
    "or": lambda a, b, _: a | b,
    "xor": lambda a, b, _: a ^ b,
    "shl": lambda a, b, _: a << b,
    "shr": lambda a, b, _: a >> b,
    "not": lambda a, kind: (not a) if kind == "bool" else ~a,
    "neg": lambda a, _: -a,
    "abs": lambda a, _: abs(a),
    "truediv": lambda a, b, _: a / b,
}
