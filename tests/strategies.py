"""Random masks and score functions, each with an interpreter of its own.

A `Tree` prints as the Python a user would write (`source`) and is evaluated by NumPy (`value`):
what the compiler makes of the source is compared with what NumPy says, so that the two share
neither the tracer nor the evaluator. Trees hold values that computers agree on to the last bit;
functions that are only approximately equal (exp, tanh) are tested where they are defined.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import numpy as np
import torch
from hypothesis import strategies as st
from trees import CALLS, Tree

import flashgen as fg

INDICES = ("b", "h", "h_kv", "q_idx", "kv_idx", "q_len", "kv_len")


def bounded(examples: int, shrink: bool = True) -> Callable[[Any], Any]:
    """So many examples, the same ones for the same seed (which pytest's header prints)."""
    phases = [p for p in hypothesis.Phase if shrink or p.name not in ("shrink", "explain")]
    seed = hypothesis.seed(int(os.environ["FLASHGEN_TEST_SEED"]))
    settings = hypothesis.settings(
        max_examples=examples,
        phases=phases,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        print_blob=True,
        report_multiple_bugs=False,
    )
    return lambda test: seed(settings(test))


CALLS |= {name: getattr(fg, name) for name in ("isnan", "floor", "ceil", "sqrt")}


@dataclass(frozen=True)
class Data:
    """A tensor that a tree may read. `dims`: which index may stand bare in each dimension."""

    name: str
    dtype: torch.dtype
    dims: tuple[str, ...]

    @property
    def kind(self) -> str:
        if self.dtype == torch.bool:
            return "bool"
        return "float" if self.dtype.is_floating_point else "int"


POOL = (
    Data("flags", torch.bool, ("position",)),
    Data("table", torch.bool, ("free", "free")),
    Data("ids", torch.int32, ("b", "position")),
    Data("small", torch.int8, ("free",)),
    Data("large", torch.int64, ("h", "free")),
    Data("times", torch.float32, ("b", "position")),
    Data("levels", torch.float32, ("h_kv", "free")),
    Data("single", torch.int32, ("one", "position")),
)
FINITE = tuple(d for d in POOL if d.kind != "float")


@dataclass(frozen=True)
class Shape:
    """Lengths and heads of a problem; `q_offset` None is the default, the last positions."""

    batch: int = 1
    kv_heads: int = 1
    group: int = 1
    q_len: int = 1
    kv_len: int = 1
    q_offset: int | torch.Tensor | None = None
    kv_lens: torch.Tensor | None = None

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def lens(self) -> np.ndarray:
        """[B]: how many keys are valid."""
        if self.kv_lens is None:
            return np.full(self.batch, self.kv_len)
        return self.kv_lens.numpy().astype(np.int64)

    @property
    def offsets(self) -> np.ndarray:
        """[B]: the position of the first query."""
        if self.q_offset is None:
            return self.lens - self.q_len
        return np.array(np.broadcast_to(np.asarray(self.q_offset), (self.batch,)))

    @property
    def env(self) -> dict[str, np.ndarray]:
        """Every index as an array that broadcasts to [B, Hq, Sq, Skv]."""
        h = np.arange(self.heads).reshape(1, -1, 1, 1)
        return {
            "b": np.arange(self.batch).reshape(-1, 1, 1, 1),
            "h": h,
            "h_kv": h // self.group,
            "q_idx": np.arange(self.q_len).reshape(1, 1, -1, 1) + self.offsets.reshape(-1, 1, 1, 1),
            "kv_idx": np.arange(self.kv_len).reshape(1, 1, 1, -1),
            "q_len": np.asarray(self.q_len),
            "kv_len": self.lens.reshape(-1, 1, 1, 1),
        }

    @property
    def valid(self) -> np.ndarray:
        """Keys inside the lengths, [B, 1, 1, Skv]."""
        return self.env["kv_idx"] < self.env["kv_len"]

    @property
    def last(self) -> int:
        """Positions that data must have."""
        return max(1, self.kv_len, int((self.offsets + self.q_len).max()))


@dataclass(frozen=True)
class Problem:
    """A mask, the data it reads, and the shapes it is used with."""

    tree: Tree
    shape: Shape
    scalars: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def _repr_pretty_(self, printer: Any, _: bool) -> None:
        """How hypothesis shows a failing example."""
        lines = [f"{name} = {value}" for name, value in self.data.items()]
        printer.text("\n".join([str(self.tree), str(self.shape), *lines]))

    @property
    def data(self) -> dict[str, Any]:
        return {**self.scalars, **self.tensors}

    @property
    def function(self) -> Callable[..., Any]:
        return function_of(self.tree, self.scalars, self.tensors)

    @property
    def expected(self) -> np.ndarray:
        """The matrix [B, Hq, Sq, Skv], before lengths."""
        return evaluate(self.tree, self)

    @property
    def allowed(self) -> np.ndarray:
        """The matrix, and no key beyond a length."""
        return self.expected & self.shape.valid


def evaluate(tree: Tree, problem: Problem) -> np.ndarray:
    """NumPy's value of a tree on a problem's shapes and data, [B, Hq, Sq, Skv]."""
    shape = problem.shape
    scalars = {n: np.asarray(x) for n, x in problem.scalars.items()}
    tensors = {n: t.numpy() for n, t in problem.tensors.items()}
    value = tree.value({**shape.env, **scalars, **tensors})
    return np.broadcast_to(value, (shape.batch, shape.heads, shape.q_len, shape.kv_len))


def function_of(
    tree: Tree, scalars: dict[str, Any], tensors: dict[str, torch.Tensor], score: str = ""
) -> Callable[..., Any]:
    """The function a user would write, with annotated parameters."""
    named = [f"{n}: {type(x).__name__}" for n, x in scalars.items()]
    named += [f"{n}: Tensor" for n in tensors]
    parameters = ", ".join([*([score] if score else []), *INDICES, *named])
    scope: dict[str, Any] = {"Tensor": fg.Tensor, "inf": float("inf"), **CALLS, "tanh": fg.tanh}
    exec(f"def random({parameters}):\n    return {tree.source}\n", scope)
    made: Callable[..., Any] = scope["random"]
    return made


def leaf(attr: Any, kind: str) -> Tree:
    return Tree("leaf", kind, (), attr)


SCALARS = {"int": "w", "float": "x", "bool": "on"}
_NUMBERS = {"int": st.integers(-5, 40), "float": st.sampled_from([-2.5, 0.25, 3.0, 40.0])}


class Grower:
    """Draws trees of a wanted kind; notes the data they read."""

    def __init__(self, draw: Callable[[Any], Any], pool: tuple[Data, ...] = POOL) -> None:
        self.draw, self.pool, self.used = draw, pool, set()

    def pick(self, *options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def grow(self, kind: str, depth: int) -> Tree:
        grow: Callable[[int], Tree] = getattr(self, f"_{kind}")
        return grow(depth)

    def _bool(self, depth: int) -> Tree:
        if depth <= 0:
            return self._compare(0)
        form = self.pick("compare", "compare", "logic", "logic", "not", "load", "where", "isnan")
        if form == "logic":
            op = self.pick("&", "&", "|", "|", "^")
            return Tree(op, "bool", (self._bool(depth - 1), self._bool(depth - 1)))
        if form == "not":
            return Tree("~x", "bool", (self._bool(depth - 1),))
        if form == "where":
            return Tree("where", "bool", tuple(self._bool(depth - 1) for _ in range(3)))
        if form == "isnan":
            return Tree("isnan", "bool", (self._float(depth - 1),))
        return self._load("bool", depth) if form == "load" else self._compare(depth)

    def _compare(self, depth: int) -> Tree:
        op = self.pick("<", "<=", ">", ">=", "<", "<=", "==", "!=")
        kind = self.pick("int", "int", "int", "float")
        left = self.grow(kind, depth - 1)
        other = self.pick("int", kind)
        right = self.grow(other, depth - 1) if self.draw(st.booleans()) else self._number(kind)
        return Tree(op, "bool", (left, right))

    def _number(self, kind: str) -> Tree:
        """A constant, or a runtime scalar."""
        if self.draw(st.booleans()):
            self.used.add(SCALARS[kind])
            return leaf(SCALARS[kind], kind)
        return leaf(self.draw(_NUMBERS[kind]), kind)

    def _int(self, depth: int) -> Tree:
        form = self.pick(
            "index", "index", "add", "sub", "scale", "divide", "divide", "unary", "extreme",
            "where", "load", "load", "bits", "shift", "truth", "round",
        )  # fmt: skip
        if depth <= 0 or form == "index":
            return leaf(self.pick("q_idx", "kv_idx", "q_idx", "kv_idx", *INDICES), "int")
        inner = self._int(depth - 1)
        if form in ("add", "sub"):
            other = self._number("int") if self.draw(st.booleans()) else self._int(depth - 1)
            return Tree({"add": "+", "sub": "-"}[form], "int", (inner, other))
        if form == "scale":
            return Tree("*", "int", (inner, leaf(self.draw(st.integers(-3, 5)), "int")))
        if form == "divide":
            return Tree(self.pick("//", "%"), "int", (inner, self._divisor(depth)))
        if form == "unary":
            return Tree(self.pick("-x", "abs"), "int", (inner,))
        if form == "extreme":
            other = self._number("int") if self.draw(st.booleans()) else self._int(depth - 1)
            return Tree(self.pick("minimum", "maximum"), "int", (inner, other))
        if form == "where":
            return Tree("where", "int", (self._bool(depth - 1), inner, self._int(depth - 1)))
        if form == "bits":
            return Tree(self.pick("&", "|", "^"), "int", (inner, self._int(depth - 1)))
        if form == "shift":
            count = leaf(self.draw(st.integers(0, 4)), "int")
            return Tree(self.pick("<<", ">>"), "int", (inner, count))
        if form == "truth":
            return Tree("int", "int", (self._bool(depth - 1),))
        if form == "round":
            return self._rounded(depth)
        return self._load("int", depth)

    def _divisor(self, depth: int) -> Tree:
        if self.draw(st.booleans()):
            return leaf(self.pick(1, 2, 3, 7, 8, 16, -1, -3, -8), "int")
        return self._load("int", depth) if self.draw(st.booleans()) else leaf("q_idx", "int")

    def _rounded(self, depth: int) -> Tree:
        """A float cut to an integer, where that has a meaning: finite and small."""
        value = self._float(depth - 1)
        value = Tree("where", "float", (Tree("isnan", "bool", (value,)), leaf(0.5, "float"), value))
        value = Tree("minimum", "float", (value, leaf(99.75, "float")))
        return Tree("int", "int", (Tree("maximum", "float", (value, leaf(-99.75, "float"))),))

    def _float(self, depth: int) -> Tree:
        form = self.pick(
            "load", "load", "cast", "add", "sub", "mul", "div", "unary", "extreme", "where"
        )
        if depth <= 0 or form == "cast":
            return Tree("float", "float", (self._int(depth - 1),))
        if form == "load":
            return self._load("float", depth)
        inner = self._float(depth - 1)
        if form in ("add", "sub", "mul", "div", "extreme"):
            op = {"add": "+", "sub": "-", "mul": "*", "div": "/"}.get(form) or self.pick(
                "minimum", "maximum"
            )
            kind = self.pick("float", "float", "int")
            other = (
                self._number("float") if self.draw(st.booleans()) else self.grow(kind, depth - 1)
            )
            return Tree(op, "float", (inner, other))
        if form == "where":
            kind = self.pick("float", "int")
            return Tree(
                "where", "float", (self._bool(depth - 1), inner, self.grow(kind, depth - 1))
            )
        return Tree(self.pick("-x", "abs", "floor", "ceil", "sqrt"), "float", (inner,))

    def _load(self, kind: str, depth: int) -> Tree:
        options = [d for d in self.pool if d.kind == kind]
        if not options:
            return self.grow(kind, depth - 1)
        data = self.pick(*options)
        self.used.add(data.name)
        return Tree("load", kind, tuple(self._place(d, depth) for d in data.dims), data.name)

    def _place(self, dim: str, depth: int) -> Tree:
        """What may stand in a dimension: its own index bare, or any expression (clamped)."""
        bare = {"position": ("q_idx", "kv_idx"), "one": ("b",)}.get(dim, (dim,))
        if dim != "free" and self.draw(st.booleans()):
            return leaf(self.pick(*bare), "int")
        # Never a bare index, however the rest may fold: those are checked, not clamped.
        inner = self._int(min(depth - 1, 2))
        return Tree("-", "int", (inner, leaf(self.draw(st.integers(1, 9)), "int")))


def tensor_of(data: Data, shape: Shape, draw: Callable[[Any], Any]) -> torch.Tensor:
    """Values for a tensor: ordered or not, with NaN and infinities among floats."""
    sizes = {
        "b": draw(st.sampled_from([1, shape.batch])),
        "h": shape.heads,
        "h_kv": draw(st.sampled_from([1, shape.kv_heads])),
        "position": shape.last,
        "one": 1,
    }
    dims = [sizes[d] if d != "free" else draw(st.integers(1, 12)) for d in data.dims]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    high = draw(st.sampled_from([2, 5, 40]))
    values = torch.randint(-3, high, dims, generator=generator)
    if draw(st.booleans()):
        values = values.sort(-1).values
    if data.kind == "bool":
        return values > draw(st.sampled_from([-3, 0, high]))
    if data.kind == "int":
        spread = 2**33 if data.dtype == torch.int64 and draw(st.booleans()) else 1
        return (values * spread).to(data.dtype)
    floats = values.float() / 2
    odd = draw(st.sampled_from([[], [torch.nan], [torch.inf], [torch.nan, torch.inf, -torch.inf]]))
    for value in odd:
        floats[torch.rand(floats.shape, generator=generator) < 0.1] = value
    return floats


def scalars_of(used: set[str], draw: Callable[[Any], Any]) -> dict[str, Any]:
    values = {"w": _NUMBERS["int"], "x": _NUMBERS["float"], "on": st.booleans()}
    return {n: draw(values[n]) for n in sorted(used & set(values))}


@st.composite
def shapes(
    draw: Any, most: int = 150, batch: int = 3, groups: tuple[int, ...] = (1, 2, 3)
) -> Shape:
    """Lengths (queries and keys differ), heads, offsets of every form, lengths of each sequence."""
    B = draw(st.integers(1, batch))
    q_len, kv_len = draw(st.integers(1, most)), draw(st.integers(1, most))
    kv_lens = draw(st.sampled_from([None, None, "random"]))
    if kv_lens is not None:
        lens = draw(st.lists(st.integers(0, kv_len), min_size=B, max_size=B))
        kv_lens = torch.tensor(lens, dtype=torch.int32)
    numbers = st.integers(-40, 200)
    offset = draw(st.sampled_from([None, None, "int", "0-d", "[1]", "[B]"]))
    if offset is not None:
        count = B if offset == "[B]" else 1
        values = torch.tensor(draw(st.lists(numbers, min_size=count, max_size=count)))
        offset = int(values[0]) if offset == "int" else values[0] if offset == "0-d" else values
    heads = draw(st.sampled_from([1, 1, 2]))
    return Shape(B, heads, draw(st.sampled_from(groups)), q_len, kv_len, offset, kv_lens)


@st.composite
def problems(
    draw: Any, shape: st.SearchStrategy[Shape] | None = None, depth: int = 5, **limits: Any
) -> Problem:
    """A random mask on random shapes with random data."""
    chosen = draw(shape if shape is not None else shapes(**limits))
    grower = Grower(draw)
    tree = grower.grow("bool", draw(st.integers(2, depth)))
    tensors = {d.name: tensor_of(d, chosen, draw) for d in POOL if d.name in grower.used}
    return Problem(tree, chosen, scalars_of(grower.used, draw), tensors)


tile_sizes = st.sampled_from(
    [(16, 16), (16, 32), (32, 16), (48, 96), (96, 48), (64, 64), (128, 16)]
)
