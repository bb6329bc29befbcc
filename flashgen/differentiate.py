"""Derivatives of a score expression, as expressions: the chain rule, from the result to the leaves.

Where a function has no derivative the result is PyTorch's: `minimum` and `maximum` share a tie in
halves, `clamp` gives it to the value, `relu` and `abs` have 0 at 0, `where` follows the branch,
rounding and comparisons have none."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from .expr import Expr, const, make, walk

ZERO, ONE = const(0.0), const(1.0)

_LN2 = math.log(2)
_TWO_BY_ROOT_PI = 2 / math.sqrt(math.pi)


@dataclass(frozen=True)
class Derivatives:
    """What a score expression's result changes by: with the score, and with each float it loads.

    `score` is `ZERO` where the expression ignores the score; loads that can't matter are left
    out."""

    score: Expr
    loads: tuple[tuple[Expr, Expr], ...]

    def of_tensor(self, name: str) -> tuple[tuple[Expr, Expr], ...]:
        """(load, derivative) for each place where one tensor is read."""
        return tuple((load, by) for load, by in self.loads if load.attr == name)

    def __str__(self) -> str:
        lines = [f"d/d score = {self.score}"]
        return "\n".join([*lines, *(f"d/d {load} = {by}" for load, by in self.loads)])


def differentiate(expr: Expr) -> Derivatives:
    """The derivatives of a float expression with respect to the score and every float load."""
    order = list(walk(expr))
    adjoints: dict[Expr, Expr] = {expr: ONE}
    for node in reversed(order):
        adjoint = adjoints.get(node)
        if adjoint is None or node.op not in _RULES:
            continue
        for arg, share in zip(node.args, _RULES[node.op](node, adjoint), strict=True):
            if arg.kind == "float" and share != ZERO:
                adjoints[arg] = plus(adjoints[arg], share) if arg in adjoints else share
    score = next((adjoints[n] for n in order if n.op == "score" and n in adjoints), ZERO)
    loads = ((n, adjoints[n]) for n in order if n.op == "load" and n in adjoints)
    return Derivatives(score, tuple((n, by) for n, by in loads if n.kind == "float" and by != ZERO))


def plus(a: Expr, b: Expr) -> Expr:
    if a == ZERO or b == ZERO:
        return b if a == ZERO else a
    if a.is_const and b.is_const:
        return const(float(a.attr + b.attr))
    return make("sub", a, b.args[0]) if b.op == "neg" else make("add", a, b)


def times(a: Expr, b: Expr) -> Expr:
    """a * b. A factor that is the constant 0 makes it 0: nothing depends on the other one."""
    if a == ZERO or b == ZERO:
        return ZERO
    if a.is_const and b.is_const:
        return const(float(a.attr * b.attr))
    if a == ONE or b == ONE:
        return b if a == ONE else a
    if a == const(-1.0):
        return negated(b)
    return make("mul", a, b)


def over(a: Expr, b: Expr) -> Expr:
    return a if a == ZERO or b == ONE else make("truediv", a, b)


def negated(a: Expr) -> Expr:
    if a.is_const:
        return const(-a.attr) if a.attr else ZERO
    return a.args[0] if a.op == "neg" else make("neg", a)


def choose(condition: Expr, yes: Expr, no: Expr) -> Expr:
    return make("where", condition, yes, no)


Shares = tuple[Expr, ...]
Rule = Callable[[Expr, Expr], Shares]


def _product(node: Expr, g: Expr) -> Shares:
    a, b = node.args
    return times(g, b), times(g, a)


def _quotient(node: Expr, g: Expr) -> Shares:
    b = node.args[1]
    return over(g, b), negated(times(g, over(node, b)))


def _remainder(node: Expr, g: Expr) -> Shares:
    return g, negated(times(g, make("floordiv", *node.args)))


def _extreme(node: Expr, g: Expr) -> Shares:
    """The rule of `minimum` and `maximum`: all to the chosen side, halves of a tie."""
    a, b = node.args
    half = choose(make("eq", a, b), times(g, const(0.5)), g)
    a_loses, b_loses = make("lt", b, a), make("lt", a, b)
    if node.op == "maximum":
        a_loses, b_loses = b_loses, a_loses
    return choose(a_loses, ZERO, half), choose(b_loses, ZERO, half)


def _clamp(node: Expr, g: Expr) -> Shares:
    """A limit gets something only where it cuts."""
    value, limit = node.args
    pair = (value, limit) if node.op == "clamp_min" else (limit, value)
    cuts = make("lt", *pair)
    return choose(cuts, ZERO, g), choose(cuts, g, ZERO)


def _absolute(node: Expr, g: Expr) -> Shares:
    (x,) = node.args
    falls = choose(make("lt", x, ZERO), negated(g), ZERO)
    return (choose(make("lt", ZERO, x), g, falls),)


def _power(node: Expr, g: Expr) -> Shares:
    base, exponent = node.args
    lower = make("pow", base, plus(exponent, const(-1.0)))
    by_base = times(g, times(exponent, lower))
    if not exponent.is_const:
        by_base = choose(make("eq", exponent, ZERO), ZERO, by_base)
    by_exponent = times(g, times(node, make("log", base)))
    # 0 ** y is 0 for all y > 0, whatever the logarithm says.
    is_flat = make("and", make("eq", base, ZERO), make("le", ZERO, exponent))
    return by_base, choose(is_flat, ZERO, by_exponent)


def _selection(node: Expr, g: Expr) -> Shares:
    condition = node.args[0]
    return ZERO, choose(condition, g, ZERO), choose(condition, ZERO, g)


def _function(factor: Callable[[Expr, Expr], Expr]) -> Rule:
    """A function of one value, whose derivative is `factor(value, result)`."""
    return lambda node, g: (times(g, factor(node.args[0], node)),)


def _square(x: Expr) -> Expr:
    return times(x, x)


# What each argument gets of a node's adjoint. Operations that aren't here have no derivative.
_RULES: dict[str, Rule] = {
    "add": lambda node, g: (g, g),
    "sub": lambda node, g: (g, negated(g)),
    "neg": lambda node, g: (negated(g),),
    "mul": _product,
    "truediv": _quotient,
    "mod": _remainder,
    "clamp_min": _clamp,
    "clamp_max": _clamp,
    "abs": _absolute,
    "minimum": _extreme,
    "maximum": _extreme,
    "where": _selection,
    "pow": _power,
    "exp": _function(lambda x, y: y),
    "exp2": _function(lambda x, y: times(const(_LN2), y)),
    "log": _function(lambda x, y: over(ONE, x)),
    "log2": _function(lambda x, y: over(const(1 / _LN2), x)),
    "sqrt": _function(lambda x, y: over(const(0.5), y)),
    "rsqrt": _function(lambda x, y: times(const(-0.5), times(y, _square(y)))),
    "sin": _function(lambda x, y: make("cos", x)),
    "cos": _function(lambda x, y: negated(make("sin", x))),
    "tanh": _function(lambda x, y: make("sub", ONE, _square(y))),
    "sigmoid": _function(lambda x, y: times(y, make("sub", ONE, y))),
    "erf": _function(lambda x, y: times(const(_TWO_BY_ROOT_PI), make("exp", negated(_square(x))))),
}
