"""Random score functions beside random masks, which share their data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from strategies import (
    POOL,
    Grower,
    Problem,
    Shape,
    evaluate,
    function_of,
    leaf,
    scalars_of,
    shapes,
    tensor_of,
)
from trees import Tree


@dataclass(frozen=True)
class Score:
    """A score function: its source with `{}` for each tree, and its value from theirs."""

    form: str
    trees: tuple[Tree, ...]

    @property
    def source(self) -> str:
        return self.form.format(*(tree.source for tree in self.trees))

    def _repr_pretty_(self, printer: Any, _: bool) -> None:
        printer.text(self.source)

    def function(self, problem: Problem) -> Callable[..., Any]:
        tree = Tree("leaf", "float", (), self.source)
        return function_of(tree, problem.scalars, problem.tensors, "score")

    def value(self, score: np.ndarray, problem: Problem) -> np.ndarray:
        """The changed scores in float64."""
        values = [evaluate(tree, problem) for tree in self.trees]
        with np.errstate(all="ignore"):
            return np.asarray(SCORES[self.form](score, *values))


SCORES: dict[str, Callable[..., Any]] = {
    "score": lambda s: s,
    "score * 0.5 + {}": lambda s, f: s * 0.5 + f.astype(np.float64),
    "score * {}": lambda s, f: s * f.astype(np.float64),
    "tanh(score) * 4.0 - {}": lambda s, f: np.tanh(s) * 4 - f.astype(np.float64),
    "where({}, score, -inf)": lambda s, keep: np.where(keep, s, -np.inf),
    "where({}, {}, score)": lambda s, c, f: np.where(c, f.astype(np.float64), s),
    "{}": lambda s, f: f.astype(np.float64) + np.zeros_like(s),
}
_WANTS = {"where({}, score, -inf)": ("bool",), "where({}, {}, score)": ("bool", "float")}


def _moderate(value: Tree) -> Tree:
    """A score that keeps softmax away from its limits."""
    value = Tree("where", "float", (Tree("isnan", "bool", (value,)), leaf(0.5, "float"), value))
    value = Tree("minimum", "float", (value, leaf(3.0, "float")))
    return Tree("maximum", "float", (value, leaf(-3.0, "float")))


@st.composite
def scored_problems(
    draw: Any, shape: st.SearchStrategy[Shape] | None = None, depth: int = 4, **limits: Any
) -> tuple[Problem, Score]:
    """A random mask and a random score function, which share their data."""
    chosen = draw(shape if shape is not None else shapes(**limits))
    grower = Grower(draw)
    tree = grower.grow("bool", draw(st.integers(1, depth)))
    used = set(grower.used)
    form = draw(st.sampled_from(list(SCORES)))
    kinds = _WANTS.get(form, ("float",) * form.count("{}"))
    trees = [grower.grow(kind, draw(st.integers(0, 2))) for kind in kinds]
    trees = [_moderate(t) if t.kind == "float" else t for t in trees]
    tensors = {d.name: tensor_of(d, chosen, draw) for d in POOL if d.name in grower.used}
    # Scalars of both functions are the call's, by name.
    problem = Problem(tree, chosen, scalars_of(grower.used | used, draw), tensors)
    return problem, Score(form, tuple(trees))
