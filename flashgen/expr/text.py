"""Expressions as the Python a reader would have written."""

from __future__ import annotations

from .node import Expr

# Binding strength, weakest first, as in Python.
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
    "floordiv": ("//", 7),
    "mod": ("%", 7),
}
_PREFIX = {"not": ("~", 8), "neg": ("-", 8)}
_ATOM = 9


def format_expr(expr: Expr) -> str:
    """`(kv_idx <= q_idx) & (doc[b, q_idx] == doc[b, kv_idx])`"""
    return _show(expr)[0]


def _show(expr: Expr) -> tuple[str, int]:
    if expr.op == "const":
        text = repr(expr.attr)
        return text, 8 if text.startswith("-") else _ATOM
    if expr.op in ("index", "scalar"):
        return str(expr.attr), _ATOM
    if expr.op == "size":
        name, dim = expr.attr
        return f"{name}.shape[{dim}]", _ATOM
    if expr.op == "score":
        return "score", _ATOM
    if expr.op == "load":
        inside = ", ".join(format_expr(arg) for arg in expr.args)
        return (f"{expr.attr}[{inside}]" if inside else str(expr.attr)), _ATOM
    if expr.op in _BINARY:
        sign, strength = _BINARY[expr.op]
        left, right = (_show(arg) for arg in expr.args)
        # Comparisons don't chain here, so their operands bind strictly tighter on both sides.
        left_text = _wrap(left, strength + (strength == 1))
        return f"{left_text} {sign} {_wrap(right, strength + 1)}", strength
    if expr.op in _PREFIX:
        sign, strength = _PREFIX[expr.op]
        return sign + _wrap(_show(expr.args[0]), strength), strength
    if expr.op == "tile":
        side, end = expr.attr
        return f"{end}[{side}]({format_expr(expr.args[0])})", _ATOM
    name = expr.kind if expr.op == "cast" else expr.op
    return f"{name}({', '.join(format_expr(arg) for arg in expr.args)})", _ATOM


def _wrap(shown: tuple[str, int], needed: int) -> str:
    text, strength = shown
    return text if strength >= needed else f"({text})"
