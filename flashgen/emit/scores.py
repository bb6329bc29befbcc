"""Score functions in kernels: what they are computed of, and what they call."""

from __future__ import annotations

from ..expr import Expr, leaves, make, scalar
from ..lower import Lowered
from ..spec import Spec


def reads_score(expr: Expr) -> bool:
    """Whether an expression reads the score that it changes."""
    return bool(leaves(expr, "score"))


def called(
    spec: Spec, approximates: bool, of_mask: frozenset[str], of_score: frozenset[str]
) -> set[str]:
    """Functions that the mask, the score function and softcap call; a mask's own are exact."""
    helpers = of_mask | of_score | ({"tanh"} if spec.softcap else set())
    if approximates and "tanh" in helpers and "tanh" not in of_mask:
        helpers = helpers - {"tanh"} | {"short_tanh"}
    return set(helpers)


def scores_of(spec: Spec) -> list[Expr]:
    """The score function of a forward kernel, if there is one: of scores that aren't scaled yet,
    if what it adds to them can be divided by the scale once a row block."""
    if spec.score is None or not is_added(spec):
        return [] if spec.score is None else [spec.score]
    first, second = spec.score.args[1].args
    if not _is_fixed(first):
        first, second = second, first
    fixed = make("mul", first, scalar("by_scale", "float"))
    return [make("add", spec.score.args[0], make("mul", fixed, second))]


def is_added(spec: Spec) -> bool:
    """Whether the score function adds a product to the score, one of whose factors is fixed for a
    row block."""
    score = spec.score
    if score is None or score.op != "add" or score.args[0].op != "score":
        return False
    added = score.args[1]
    return added.op == "mul" and not reads_score(added) and any(map(_is_fixed, added.args))


def _is_fixed(expr: Expr) -> bool:
    return "kv_idx" not in leaves(expr, "index")


def full_score(spec: Spec, score: Lowered) -> str | None:
    """The changed score; one that ignores the old score still has its shape."""
    if spec.score is None:
        return None
    text = score.results[0]
    return text if reads_score(spec.score) else f"tl.zeros_like(s) + ({text})"
