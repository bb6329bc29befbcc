"""From expressions to Triton: widths of integers, spelling, placement, names."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import Problem, bounded, problems, shapes

import flashgen as fg
from flashgen.emit.distance import is_by_distance
from flashgen.expr import Env, Expr, const, evaluate, index, load, make, scalar, substitute, walk
from flashgen.lower import Lowered, Widths, isolate, lower, with_distances
from flashgen.lower.widths import scalar_is_wide
from flashgen.spec import Program

Q, K, B = index("q_idx"), index("kv_idx"), index("b")
N, X = scalar("n", "int"), scalar("x", "float")
DTYPES = {"doc": torch.int32, "page": torch.int64, "byte": torch.uint8, "time": torch.float32}
DTYPES |= {"flag": torch.bool, "word": torch.uint32}


def doc(*places: Expr) -> Expr:
    return load("doc", "int", places)


def lowered(*exprs: Expr, taken: Any = (), wide: Any = ()) -> Lowered:
    return lower(
        list(exprs),
        stages=2,
        stage_of=lambda e: int(any(n == K for n in walk(e))),
        names={n: n for n in ("q_idx", "kv_idx", "b", "h")},
        dtypes=DTYPES,
        wide_scalars=frozenset(wide),
        taken=frozenset(taken),
    )


def text(expr: Expr, **options: Any) -> str:
    (result,) = lowered(expr, **options).results
    return result


@pytest.mark.parametrize(
    ("expr", "wide"),
    [
        (make("sub", Q, K), False),
        (make("add", Q, N), False),
        (make("mul", Q, const(2)), False),
        (make("mul", Q, const(4)), True),
        (make("mul", Q, K), True),
        (make("mul", Q, N), True),
        (make("mod", make("mul", Q, K), const(8)), True),
        (make("shl", const(1), K), True),
        (make("shr", K, const(3)), False),
        (make("add", doc(Q), Q), True),
        (make("eq", doc(Q), doc(K)), False),
        (make("lt", make("add", doc(Q), const(1)), K), True),
        (make("neg", doc(Q)), True),
        (load("page", "int", (K,)), True),
        (load("byte", "int", (K,)), False),
        (load("word", "int", (K,)), True),
        (make("lt", K, const(2**40)), True),
        (make("minimum", K, const(2**40)), True),
    ],
)
def test_what_needs_64_bits(expr: Expr, wide: bool) -> None:
    assert Widths(DTYPES, frozenset()).is_wide(expr) == wide


def test_scalars_that_need_64_bits() -> None:
    assert not scalar_is_wide(2**30 - 1)
    assert scalar_is_wide(2**30)
    assert scalar_is_wide(-(2**40))
    assert text(make("sub", Q, N)) == "q_idx - n"
    assert text(make("sub", Q, N), wide={"n"}) == "q_idx.to(tl.int64) - n"


SAMPLES = {
    "q_idx": (-(2**30) + 1, -1, 2**30 - 1),
    "kv_idx": (0, 2**30 - 1),
    "doc": (-(2**31), 0, 2**31 - 1),
    "byte": (0, 255),
    "n": (-(2**30) + 1, 3, 2**30 - 1),
}
_integers = st.deferred(
    lambda: st.one_of(
        st.sampled_from([Q, K, doc(Q), load("byte", "int", (K,)), N]),
        st.integers(-9, 9).map(const),
        st.builds(
            make,
            st.sampled_from("add sub mul minimum maximum and or xor floordiv mod".split()),
            _integers,
            st.sampled_from([Q, K, N, doc(Q), *map(const, (-7, -1, 1, 3, 8))]),
        ),
        st.builds(make, st.sampled_from(["neg", "abs", "not"]), _integers),
        st.builds(make, st.just("shr"), _integers, st.integers(0, 5).map(const)),
        st.builds(lambda a, b: make("where", make("lt", a, b), a, b), _integers, _integers),
    )
)  # fmt: skip


@bounded(300)
@given(_integers)
def test_ranges_hold_every_value(expr: Expr) -> None:
    """In Python's own integers, at the ends of what indices, scalars and data may be."""
    widths = Widths(DTYPES, frozenset())
    low, high = widths.range(expr)
    for values in itertools.product(*SAMPLES.values()):
        exact = _exactly(expr, dict(zip(SAMPLES, values, strict=True)))
        if -(2**63) <= exact < 2**63:
            assert low <= exact <= high
            assert widths.is_wide(expr) or -(2**31) <= exact < 2**31


def _exactly(expr: Expr, leaves: dict[str, int]) -> int:
    done: dict[Expr, Any] = {}
    for node in walk(expr):
        a, b, c = [*(done[arg] for arg in node.args), 0, 0, 0][:3]
        done[node] = {
            "const": lambda node=node: node.attr,
            "index": lambda node=node: leaves[node.attr],
            "scalar": lambda node=node: leaves[node.attr],
            "load": lambda node=node: leaves[node.attr],
            "add": lambda a=a, b=b: a + b,
            "sub": lambda a=a, b=b: a - b,
            "mul": lambda a=a, b=b: a * b,
            "minimum": lambda a=a, b=b: min(a, b),
            "maximum": lambda a=a, b=b: max(a, b),
            "and": lambda a=a, b=b: a & b,
            "or": lambda a=a, b=b: a | b,
            "xor": lambda a=a, b=b: a ^ b,
            "floordiv": lambda a=a, b=b: a // b if b else 0,
            "mod": lambda a=a, b=b: a % b if b else 0,
            "neg": lambda a=a: -a,
            "abs": lambda a=a: abs(a),
            "not": lambda a=a: ~a,
            "shr": lambda a=a, b=b: a >> b,
            "lt": lambda a=a, b=b: a < b,
            "where": lambda a=a, b=b, c=c: b if a else c,
        }[node.op]()
    return int(done[expr])


@pytest.mark.parametrize(
    ("expr", "spelled"),
    [
        (make("floordiv", K, const(7)), "kv_idx // 7"),
        (make("floordiv", Q, const(7)), "floor_div(q_idx, 7)"),
        (make("floordiv", Q, const(8)), "q_idx >> 3"),
        (make("mod", Q, const(8)), "q_idx & 7"),
        (make("mod", K, const(7)), "kv_idx % 7"),
        (make("mod", Q, const(-8)), "floor_mod(q_idx, -8)"),
        (make("floordiv", K, doc(K)), "floor_div(kv_idx, doc_kv)"),
        (make("minimum", X, X), "tl.minimum(x, x, propagate_nan=tl.PropagateNan.ALL)"),
        (make("minimum", Q, K), "tl.minimum(q_idx, kv_idx)"),
        (make("tanh", X), "tanh(x)"),
        (make("isnan", X), "x != x"),
        (make("not", make("lt", Q, K)), "~(q_idx < kv_idx)"),
        (make("eq", make("lt", Q, K), make("lt", K, N)), "(q_idx < kv_idx) == (kv_idx < n)"),
        (make("sub", X, make("sub", X, const(2.0))), "x - (x - 2.0)"),
        (scalar("on", "bool"), "on != 0"),
        (make("and", scalar("on", "bool"), make("lt", Q, K)), "(on != 0) & (q_idx < kv_idx)"),
        (make("lt", make("add", Q, const(0.5)), X), "q_idx.to(FLOAT) + 0.5 < x"),
        (make("lt", X, const(float("inf"))), 'x < float("inf")'),
    ],
)
def test_spelling(expr: Expr, spelled: str) -> None:
    assert text(expr) == spelled


Q, KV = index("q_idx"), index("kv_idx")
AWAY = make("sub", Q, KV)


@pytest.mark.parametrize(
    ("expr", "same"),
    [
        (make("mul", const(0.5), make("sub", KV, Q)), "0.5 * ahead"),
        (make("add", const(0.5), AWAY), "0.5 + -ahead"),
        (make("add", const(0.5), make("abs", AWAY)), "0.5 + abs(-ahead)"),
        (make("add", const(0.5), make("neg", make("sub", KV, Q))), "0.5 + -ahead"),
        (make("add", const(0.5), make("sub", KV, const(1))), "0.5 + float(kv_idx - 1)"),
        (make("add", AWAY, const(1)), "q_idx - kv_idx + 1"),
    ],
    ids=str,
)
def test_distances_become_floats_by_themselves(expr: Expr, same: str) -> None:
    found = with_distances(expr)
    read = substitute(found, lambda e: scalar("ahead", "float") if e.op == "ahead" else None)
    assert str(read) == same


@pytest.mark.parametrize(
    ("place", "alone"),
    [
        (AWAY, True),
        (
            make("minimum", make("abs", make("add", make("sub", KV, const(3)), make("neg", Q))), Q),
            False,
        ),
        (make("abs", make("sub", make("add", KV, const(3)), Q)), True),
        (load("bucket", "int", (make("floordiv", AWAY, const(2)),)), True),
        (make("where", make("le", KV, Q), AWAY, const(0)), True),
        (make("add", Q, KV), False),
        (make("sub", make("mul", Q, const(2)), KV), False),
        (make("add", AWAY, load("doc", "int", (Q,))), False),
        (Q, False),
    ],
    ids=str,
)
def test_what_is_read_by_distance_alone(place: Expr, alone: bool) -> None:
    assert is_by_distance(place) == alone


def test_helpers_are_named() -> None:
    assert lowered(make("floordiv", Q, const(7))).helpers == {"floor_div"}
    assert lowered(make("pow", make("tanh", X), X)).helpers == {"tanh", "power"}
    assert lowered(make("floordiv", K, const(7))).helpers == frozenset()


def test_loads_clamp_what_the_host_did_not_check() -> None:
    found = lowered(load("doc", "int", (B, make("sub", Q, K))))
    (at, value) = found.statements[1]
    assert at.endswith("tl.minimum(tl.maximum(q_idx - kv_idx, 0), doc_size_1 - 1)")
    assert found.statements[0] == ("doc_row = doc_ptr + b * doc_stride_0",)
    assert value.partition(" = ")[2].startswith("tl.load(doc_row + ")
    # Positions can't be negative where keys are, and the last one is still held.
    (at, _) = lowered(doc(K)).statements[1]
    assert at.endswith("= tl.minimum(kv_idx, doc_size_0 - 1)")


def test_values_are_computed_where_they_change() -> None:
    """What is fixed for a row block is computed above the loop, once."""
    rows = make("mul", doc(Q), const(2))
    found = lowered(make("lt", make("sub", K, rows), rows))
    assert [line.partition(" = ")[0] for line in found.statements[0]] == [
        "doc_q_at", "doc_q", "q_mul",
    ]  # fmt: skip
    assert found.statements[1] == ()
    assert found.results[0].count("q_mul") == 2


def test_names_are_not_given_twice() -> None:
    twice = make("eq", make("mod", doc(Q), const(3)), make("mod", doc(make("neg", Q)), const(3)))
    taken = {"doc_q", "doc_q_2"}
    lines = [line for part in lowered(twice, taken=taken).statements for line in part]
    assigned = [line.partition(" = ")[0] for line in lines]
    assert len(set(assigned)) == len(assigned)
    assert not taken & set(assigned)


@pytest.mark.parametrize(
    ("mask", "isolated"),
    [
        (make("le", K, Q), "kv_idx <= q_idx"),
        (make("lt", make("sub", Q, K), N), "q_idx - n < kv_idx"),
        (make("le", N, make("sub", K, Q)), "n + q_idx <= kv_idx"),
        (make("lt", make("sub", make("neg", K), Q), N), "0 - q_idx - n < kv_idx"),
        (make("and", make("le", K, Q), make("lt", make("sub", Q, K), N)),
         "(kv_idx <= q_idx) & (q_idx - n < kv_idx)"),
        (make("and", make("lt", N, K), make("lt", make("sub", Q, K), N)),
         "maximum(n + 1, q_idx - n + 1) <= kv_idx"),
        (make("lt", make("mul", K, const(2)), Q), "kv_idx * 2 < q_idx"),
        (make("lt", make("add", K, K), Q), "kv_idx + kv_idx < q_idx"),
    ],
)  # fmt: skip
def test_keys_stand_alone(mask: Expr, isolated: str) -> None:
    found = str(isolate(mask))
    rows, keys = torch.arange(-9, 9)[:, None], torch.arange(9)[None]
    for n in (-2, 0, 3):
        env = {"index": {"q_idx": rows, "kv_idx": keys}, "scalars": {"n": n}}
        assert torch.equal(evaluate(isolate(mask), Env(**env)), evaluate(mask, Env(**env)))
    assert found == isolated


@bounded(200)
@given(problems(shapes(most=30, batch=2)))
def test_isolating_changes_no_mask(problem: Problem) -> None:
    bound = Program(mask=fg.mask(problem.function)).bind(problem.data, "test")
    mask = bound.spec.mask
    if mask is None:
        return
    index = {n: torch.as_tensor(x) for n, x in problem.shape.env.items()}
    env = (index, dict(bound.scalars), dict(bound.tensors))
    same = evaluate(isolate(mask), Env(*env)), evaluate(mask, Env(*env))
    assert torch.equal(*torch.broadcast_tensors(*same))
    assert substitute(mask, lambda _: None) == mask
