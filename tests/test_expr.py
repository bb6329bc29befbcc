"""Expressions: kinds, folding, floors, clamped loads, text, and values in other processes."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys

import pytest
import torch

from flashgen.expr import (
    Env,
    Expr,
    cast,
    const,
    evaluate,
    format_expr,
    index,
    leaves,
    load,
    make,
    scalar,
    score,
    substitute,
    walk,
)
from flashgen.expr.build import KindError

Q, K = index("q_idx"), index("kv_idx")
FLAG, LENGTH, SLOPE = scalar("flag", "bool"), scalar("n", "int"), scalar("slope", "float")
HERE = Env({"q_idx": torch.arange(-9, 10)[:, None], "kv_idx": torch.arange(7)[None]})


def value(expr: Expr, **given: object) -> torch.Tensor:
    return evaluate(expr, Env(dict(HERE.index), **given))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("expr", "kind"),
    [
        (make("add", Q, FLAG), "int"),
        (make("add", FLAG, FLAG), "int"),
        (make("sub", Q, SLOPE), "float"),
        (make("truediv", Q, K), "float"),
        (make("floordiv", Q, SLOPE), "float"),
        (make("neg", FLAG), "int"),
        (make("abs", SLOPE), "float"),
        (make("minimum", FLAG, Q), "int"),
        (make("lt", Q, SLOPE), "bool"),
        (make("and", FLAG, FLAG), "bool"),
        (make("and", FLAG, Q), "int"),
        (make("shl", FLAG, Q), "int"),
        (make("not", Q), "int"),
        (make("exp", Q), "float"),
        (make("floor", Q), "int"),
        (make("floor", SLOPE), "float"),
        (make("isnan", Q), "bool"),
        (make("where", FLAG, Q, SLOPE), "float"),
        (make("where", Q, FLAG, FLAG), "bool"),
        (make("pow", Q, const(3)), "int"),
        (make("pow", Q, const(-1)), "float"),
        (score(), "float"),
    ],
)
def test_kinds(expr: Expr, kind: str) -> None:
    assert expr.kind == kind


@pytest.mark.parametrize(
    "build",
    [
        lambda: make("and", SLOPE, Q),
        lambda: make("xor", FLAG, SLOPE),
        lambda: make("not", SLOPE),
        lambda: make("shl", Q, SLOPE),
        lambda: load("doc", "int", (SLOPE,)),
        lambda: make("sum", Q),
    ],
)
def test_kinds_without_a_meaning(build: object) -> None:
    with pytest.raises(KindError):
        build()  # type: ignore[operator]


@pytest.mark.parametrize("op", ["floordiv", "mod"])
def test_a_divisor_of_zero(op: str) -> None:
    with pytest.raises(ZeroDivisionError):
        make(op, Q, const(0))
    varying = make(op, Q, K)
    assert (value(varying)[:, 0] == 0).all()


@pytest.mark.parametrize(
    ("expr", "folded"),
    [
        (make("add", Q, const(0)), Q),
        (make("add", const(0), Q), Q),
        (make("mul", const(1), Q), Q),
        (make("mul", Q, const(0)), const(0)),
        (make("mod", Q, const(1)), const(0)),
        (make("floordiv", Q, const(1)), Q),
        (make("shr", Q, const(0)), Q),
        (make("sub", Q, Q), const(0)),
        (make("le", Q, Q), const(True)),
        (make("ne", Q, Q), const(False)),
        (make("minimum", Q, Q), Q),
        (make("and", FLAG, const(True)), FLAG),
        (make("and", const(False), FLAG), const(False)),
        (make("or", FLAG, const(True)), const(True)),
        (make("or", FLAG, const(False)), FLAG),
        (make("not", make("not", FLAG)), FLAG),
        (make("where", const(True), Q, K), Q),
        (make("where", FLAG, K, K), K),
        (make("floordiv", const(-7), const(2)), const(-4)),
        (make("mod", const(-7), const(3)), const(2)),
        (make("mod", const(7), const(-3)), const(-2)),
        (cast(const(2), "float"), const(2.0)),
        (make("pow", Q, const(2)), make("mul", Q, Q)),
        (make("isnan", Q), const(False)),
    ],
)
def test_folding(expr: Expr, folded: Expr) -> None:
    assert expr == folded
    assert expr.kind == folded.kind


def test_what_must_not_fold() -> None:
    """A float x may be NaN or infinite, and a number's bits are no truth value."""
    assert make("eq", SLOPE, SLOPE).op == "eq"
    assert make("sub", SLOPE, SLOPE).op == "sub"
    assert make("mul", SLOPE, const(0.0)).op == "mul"
    assert make("not", make("lt", SLOPE, const(1.0))).op == "not"
    assert make("and", Q, const(1)).op == "and"
    assert const(1) != const(1.0)
    assert const(1) != const(True)


@pytest.mark.parametrize("divisor", [3, -3, 8, -8, -1])
def test_floors_are_pythons(divisor: int) -> None:
    rows = HERE.index["q_idx"].flatten().tolist()
    assert value(make("floordiv", Q, const(divisor))).flatten().tolist() == [
        i // divisor for i in rows
    ]
    assert value(make("mod", Q, const(divisor))).flatten().tolist() == [i % divisor for i in rows]
    assert value(make("shr", Q, const(2))).flatten().tolist() == [i >> 2 for i in rows]


def test_loads_clamp_every_index() -> None:
    table = torch.arange(15).reshape(3, 5)
    got = value(load("t", "int", (Q, make("mul", K, const(2)))), tensors={"t": table})
    rows, columns = HERE.index["q_idx"].clamp(0, 2), (HERE.index["kv_idx"] * 2).clamp(0, 4)
    assert torch.equal(got, table[rows, columns])
    inner = load("t", "int", (const(0), load("p", "int", (K,))))
    pages = torch.tensor([4, -1, 99], dtype=torch.int8)
    got = value(inner, tensors={"t": table, "p": pages})
    assert got.flatten().tolist() == [4, 0, 4, 4, 4, 4, 4]
    assert value(load("x", "float", ()), tensors={"x": torch.tensor(2.5)}).item() == 2.5


def test_values_have_their_kinds_dtype() -> None:
    table = torch.tensor([0, 3], dtype=torch.uint8)
    given = {"tensors": {"t": table, "x": torch.ones(2, dtype=torch.float64)}}
    assert value(load("t", "int", (K,)), **given).dtype == torch.int64
    assert value(load("t", "bool", (K,)), **given).dtype == torch.bool
    assert value(load("x", "float", (K,)), **given).dtype == torch.float32
    assert value(load("x", "float", (K,)), **given, float_dtype=torch.float64).dtype == (
        torch.float64
    )
    assert value(cast(make("lt", Q, K), "int")).dtype == torch.int64


def test_a_comparison_with_nan_is_false_and_its_opposite_true() -> None:
    below = make("lt", SLOPE, cast(K, "float"))
    env = {"scalars": {"slope": math.nan}}
    assert not value(below, **env).any()
    assert value(make("not", below), **env).all()


@pytest.mark.parametrize(
    ("expr", "text"),
    [
        (make("and", make("le", K, Q), make("lt", make("sub", Q, K), LENGTH)),
         "(kv_idx <= q_idx) & (q_idx - kv_idx < n)"),
        (make("sub", Q, make("sub", K, LENGTH)), "q_idx - (kv_idx - n)"),
        (make("sub", make("sub", Q, K), LENGTH), "q_idx - kv_idx - n"),
        (make("mul", make("add", Q, K), const(2)), "(q_idx + kv_idx) * 2"),
        (make("eq", load("doc", "int", (Q, const(0))), LENGTH), "doc[q_idx, 0] == n"),
        (make("ne", FLAG, make("lt", Q, K)), "flag != (q_idx < kv_idx)"),
        (make("not", make("or", FLAG, make("lt", Q, K))), "~(flag | (q_idx < kv_idx))"),
        (make("floordiv", make("neg", Q), const(-3)), "-q_idx // -3"),
        (make("exp", cast(Q, "float")), "exp(float(q_idx))"),
        (Expr("size", "int", (), ("doc", 1)), "doc.shape[1]"),
        (load("gate", "float", ()), "gate"),
    ],
)  # fmt: skip
def test_text(expr: Expr, text: str) -> None:
    assert format_expr(expr) == str(expr) == text


def test_text_says_what_is_computed() -> None:
    """Python reads the text as the same tree: binding strengths are right."""
    parts = [Q, K, make("add", Q, K), make("sub", Q, K), make("mul", K, const(3))]
    parts += [make("lt", Q, K), make("or", make("lt", Q, K), make("le", K, Q))]
    scope = {**HERE.index, "int": lambda x: x.long()}
    for op in ("add", "sub", "mul", "and", "or", "xor", "lt", "eq"):
        for left in parts:
            for right in parts:
                for expr in (make(op, left, right), make("not", make(op, left, right))):
                    if not expr.is_const:
                        shown = eval(str(expr), {}, scope)
                        assert torch.equal(shown, value(expr).expand_as(shown)), str(expr)


def test_walking_and_replacing() -> None:
    shared = make("add", Q, K)
    expr = make("mul", shared, shared)
    assert list(walk(expr)) == [Q, K, shared, expr]
    assert list(walk(expr, known={shared})) == [expr]
    assert leaves(expr, "index") == {"q_idx", "kv_idx"}
    assert leaves(None, "index") == frozenset()
    moved = substitute(expr, lambda node: LENGTH if node == Q else None)
    assert str(moved) == "(n + kv_idx) * (n + kv_idx)"
    assert moved.args[0] is moved.args[1]


def test_a_deep_chain_needs_no_recursion() -> None:
    """Hashing, walking and evaluating unfold nothing that is shared."""
    expr = K
    for _ in range(60):
        expr = make("sub", make("mul", expr, const(3)), expr)
        expr = make("mod", expr, const(1 << 20))
    assert len(list(walk(expr))) < 250
    assert value(expr).shape == (1, 7)


@pytest.mark.parametrize("seed", ["1", "2"])
def test_hashes_do_not_travel(seed: str) -> None:
    """Hashes of strings differ between processes; equality must not."""
    expr = make("and", make("le", K, Q), make("eq", load("doc", "int", (Q,)), const(3)))
    program = (
        "import pickle, sys; from flashgen.expr import *;"
        "e = pickle.load(sys.stdin.buffer);"
        "Q, K = index('q_idx'), index('kv_idx');"
        "other = make('and', make('le', K, Q), make('eq', load('doc', 'int', (Q,)), const(3)));"
        "assert e == other and hash(e) == hash(other) and {e: 1}[other];"
        "print(e)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        input=pickle.dumps(expr),
        capture_output=True,
        env={"PYTHONHASHSEED": seed, "PATH": ""},
        check=True,
    )
    assert result.stdout.decode().strip() == str(expr)
