"""Derivatives of score expressions against PyTorch's autograd, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flashgen as fg
from flashgen.differentiate import ONE, ZERO, differentiate
from flashgen.expr import Env, Expr, cast, const, evaluate, index, load, make, score
from flashgen.trace import TensorType, trace
from flashgen.trace.signature import Function

S = score()
H, Q, K = index("h"), index("q_idx"), index("kv_idx")
SLOPE = load("slope", "float", (H,))
BIAS = load("bias", "float", (Q, K))
TABLE = load("table", "float", (make("add", make("sub", Q, K), const(8)),))
SCALAR = load("temperature", "float", ())
DISTANCE = cast(make("sub", Q, K), "float")
ROWS, COLUMNS = 6, 7


def env(dtype: torch.dtype = torch.float64) -> Env:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    tensors = {
        "slope": random(2), "bias": random(ROWS, COLUMNS), "table": random(16),
        "temperature": random(),
    }  # fmt: skip
    places = {
        "h": torch.tensor(1),
        "q_idx": torch.arange(ROWS).reshape(-1, 1),
        "kv_idx": torch.arange(COLUMNS).reshape(1, -1),
    }
    return Env(places, tensors=tensors, score=random(ROWS, COLUMNS), float_dtype=dtype)


def by_autograd(expr: Expr, given: Env, leaves: list[Expr]) -> list[torch.Tensor]:
    """d(result)/d(leaf) element by element: each is a tensor of the result's shape."""
    values: dict[Expr, torch.Tensor] = {}
    for leaf in leaves:
        value = evaluate(leaf, given).expand(ROWS, COLUMNS)
        values[leaf] = value.detach().clone().requires_grad_()
    inner = Env(
        given.index, given.scalars, given.tensors, values.get(S, given.score), torch.float64
    )
    inner.values.update(values)
    result = evaluate(expr, inner).expand(ROWS, COLUMNS)
    if not result.requires_grad:
        return [torch.zeros(ROWS, COLUMNS, dtype=torch.float64) for _ in leaves]
    inputs = list(values.values())
    grads = torch.autograd.grad(result.sum(), inputs, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads, strict=True)]


def check(expr: Expr) -> None:
    given = env()
    leaves = [S, SLOPE, BIAS, TABLE, SCALAR]
    found = differentiate(expr)
    ours = {S: found.score, **dict(found.loads)}
    for leaf, expected in zip(leaves, by_autograd(expr, given, leaves), strict=True):
        actual = evaluate(ours.get(leaf, ZERO), given).expand(ROWS, COLUMNS)
        close = {"rtol": 1e-9, "atol": 1e-9, "equal_nan": True}
        torch.testing.assert_close(actual, expected, **close, msg=lambda m, at=leaf: f"{at}: {m}")


POSITIVE = make("add", make("abs", S), const(0.5))

ONE_OPERATION = {
    **{op: make(op, S) for op in ("neg", "abs", "exp", "exp2", "sin", "cos", "tanh", "sigmoid")},
    **{op: make(op, S) for op in ("erf", "floor", "ceil")},
    **{op: make(op, POSITIVE) for op in ("log", "log2", "sqrt", "rsqrt")},
    **{
        op: make(op, S, BIAS)
        for op in ("add", "sub", "mul", "truediv", "minimum", "maximum", "mod", "floordiv")
    },
    "power": make("pow", POSITIVE, BIAS),
    "power of a constant": make("pow", POSITIVE, const(-1.5)),
    "cube": make("pow", S, const(3)),
    "constant to a power": make("pow", const(2.0), S),
    "where": make("where", make("lt", K, Q), S, BIAS),
    "where by the score": make("where", make("lt", S, const(0.0)), make("mul", S, S), SLOPE),
    "alibi": make("add", S, make("mul", SLOPE, DISTANCE)),
    "table": make("add", S, TABLE),
    "temperature": make("mul", S, SCALAR),
    "twice": make("add", make("mul", S, BIAS), make("tanh", BIAS)),
    "gated": make("add", S, make("mul", make("sigmoid", SLOPE), BIAS)),
    "whole numbers": cast(make("sub", Q, K), "float"),
    "score rounded to an index": load("table", "float", (cast(make("floor", S), "int"),)),
}


@pytest.mark.parametrize("name", ONE_OPERATION)
def test_each_operation(name: str) -> None:
    check(ONE_OPERATION[name])


@pytest.mark.parametrize("op", ["minimum", "maximum"])
def test_ties_are_shared(op: str) -> None:
    check(make(op, BIAS, make("mul", BIAS, const(1.0))))
    check(make(op, make("floor", S), cast(make("sub", Q, K), "float")))
    tie = differentiate(make(op, S, const(1.0))).score
    at = Env({"h": torch.tensor(0)}, score=torch.tensor([1.0, 2.0, 0.0]))
    assert evaluate(tie, at).tolist() == [0.5, *([0, 1] if op == "minimum" else [1, 0])]


KINKS: dict[str, Any] = {
    "clamp": lambda x, y: torch.clamp(x, -1.0, 1.0) * y,
    "clamp by data": lambda x, y: x.clamp(min=y) + torch.clamp_max(y, 0.5),
    "clamp between data": lambda x, y: torch.clamp(x, y - 1.0, y + 0.5),
    "clamp_min": lambda x, y: torch.clamp_min(x, 0.5) * y,
    "limits the wrong way round": lambda x, y: torch.clamp(x * y, 1.0, -1.0) + x,
    "relu": lambda x, y: torch.relu(x) * y + torch.relu(x - y),
    "minimum": lambda x, y: torch.minimum(x, y) * x,
    "maximum": lambda x, y: torch.maximum(x, y) * y,
    "abs": lambda x, y: torch.abs(x - y) + torch.abs(x),
    "sign": lambda x, y: torch.sign(x) * y,
    "where": lambda x, y: torch.where(x > y, x * x, y),
    "floor": lambda x, y: torch.floor(x) * y + x,
    "ceil": lambda x, y: torch.ceil(x + y) * x,
    "remainder": lambda x, y: torch.remainder(x, torch.where(y == 0, 1.5, y)),
    "remainder of a constant": lambda x, y: x % 1.0 + y % -0.5,
    "division that floors": lambda x, y: torch.div(x, 0.5, rounding_mode="floor") * x + y,
    "division that truncates": lambda x, y: torch.div(x, 0.75, rounding_mode="trunc") * y + x,
    "square": lambda x, y: x**2 + torch.square(y),
    "power of zero": lambda x, y: torch.relu(x) ** 1.5 + y**3,
    "power": lambda x, y: (torch.abs(x) + 0.5) ** y,
    "root of zero": lambda x, y: torch.sqrt(torch.relu(x) + y * y),
    "reciprocal": lambda x, y: torch.reciprocal(x) + y,
}


@pytest.mark.parametrize("name", KINKS)
def test_where_there_is_no_derivative_it_is_torchs(name: str) -> None:
    """On a grid that has every kink, and every tie of the two."""
    function = KINKS[name]

    def traced(score, q_idx, kv_idx, x: fg.Tensor, y: fg.Tensor):
        return function(x[q_idx], y[kv_idx]) + 0.0 * score

    values = torch.tensor([-2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0], dtype=torch.float64)
    types = {n: TensorType("float", 1) for n in "xy"}
    expr = trace(Function.of(traced, "score"), types, wants="score").expr
    places = {"q_idx": torch.arange(9).reshape(-1, 1), "kv_idx": torch.arange(9)}
    here = Env(places, {}, {"x": values, "y": values}, torch.zeros(9, 9).double(), torch.float64)
    pairs = [v.expand(9, 9).clone().requires_grad_() for v in (values.reshape(-1, 1), values)]
    expected = function(*pairs)
    torch.testing.assert_close(evaluate(expr, here), expected, equal_nan=True)
    theirs = torch.autograd.grad(expected.sum(), pairs, allow_unused=True)
    found = differentiate(expr)
    for name, grad in zip("xy", theirs, strict=True):
        total = torch.zeros(9, 9, dtype=torch.float64)
        for _, by in found.of_tensor(name):
            total = total + evaluate(by, here)
        right = torch.zeros_like(total) if grad is None else grad
        torch.testing.assert_close(total, right, equal_nan=True, rtol=1e-12, atol=1e-12)


def test_absolute_value_is_flat_at_zero() -> None:
    at = Env({"h": torch.tensor(0)}, score=torch.tensor([-1.0, 0.0, 2.0]))
    assert evaluate(differentiate(make("abs", S)).score, at).tolist() == [-1, 0, 1]


def test_a_power_of_zero() -> None:
    zero = make("sub", BIAS, make("add", BIAS, ZERO))
    check(make("pow", zero, POSITIVE))
    check(make("pow", zero, const(0.5)))


@pytest.mark.parametrize(
    "expr",
    [
        BIAS,
        make("mul", S, const(0.0)),
        make("floor", S),
        make("where", make("lt", S, ZERO), BIAS, SLOPE),
        make("sub", make("add", S, BIAS), make("add", S, SLOPE)),
        cast(make("lt", S, ZERO), "float"),
    ],
    ids=str,
)
def test_an_expression_that_ignores_the_score(expr: Expr) -> None:
    assert differentiate(expr).score == ZERO


def test_a_shift_has_slope_one() -> None:
    assert differentiate(make("add", S, BIAS)).score == ONE
    assert differentiate(make("sub", S, BIAS)).of_tensor("bias") == ((BIAS, const(-1.0)),)


def test_each_place_that_reads_a_tensor_counts() -> None:
    other = load("bias", "float", (K, Q))
    found = differentiate(make("add", make("mul", S, BIAS), other))
    assert found.of_tensor("bias") == ((BIAS, S), (other, ONE))


LEAVES: Any = st.sampled_from([S, S, SLOPE, BIAS, TABLE, SCALAR, DISTANCE, const(0.75)])


def _operations(inner: Any) -> Any:
    smooth = ("neg", "abs", "sin", "cos", "tanh", "sigmoid", "erf")
    pairs = ("add", "sub", "mul", "minimum", "maximum")
    condition = st.builds(lambda a, b: make("lt", a, b), inner, inner)
    return st.one_of(
        st.builds(make, st.sampled_from(smooth), inner),
        st.builds(make, st.sampled_from(pairs), inner, inner),
        st.builds(lambda c, a, b: make("where", c, a, b), condition, inner, inner),
        inner.map(lambda x: make("sqrt", make("add", make("abs", x), const(0.25)))),
        st.builds(
            lambda a, b: make("truediv", a, make("add", const(1.0), make("mul", b, b))),
            inner,
            inner,
        ),
        inner.map(lambda x: make("exp", make("minimum", x, const(1.0)))),
    )


@settings(max_examples=150)
@given(st.recursive(LEAVES, _operations, max_leaves=12))
def test_random_expressions(expr: Expr) -> None:
    check(expr)


def test_shared_parts_stay_shared() -> None:
    """A derivative grows with the expression's nodes, not with the paths through it."""
    expr = S
    for _ in range(30):
        expr = make("mul", expr, make("sin", expr))
    nodes: set[Expr] = set()
    stack = [differentiate(expr).score]
    while stack:
        node = stack.pop()
        if node not in nodes:
            nodes.add(node)
            stack.extend(node.args)
    assert len(nodes) < 500
