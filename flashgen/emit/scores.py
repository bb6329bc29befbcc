"""Score functions in kernels: what they are computed of, and what they call."""

from __future__ import annotations

from ..expr import Expr, leaves, make, scalar
from ..lower import AHEAD, Lowered, with_distances
from ..spec import Spec
from .level import level_of

# 1 / scale, in forward kernels.
BY_SCALE = scalar("by_scale", "float")


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
    if what it adds to them is divided by the scale; once a row block where it can be."""
    if spec.score is None or not is_added(spec):
        return [] if spec.score is None else [spec.score]
    return [make("add", spec.score.args[0], unscaled(spec.score.args[1]))]


def unscaled(added: Expr) -> Expr:
    """What is added to scores, of scores that aren't scaled."""
    if not _has_fixed_factor(added):
        return make("mul", added, BY_SCALE)
    first, second = added.args
    if not _is_fixed(first):
        first, second = second, first
    return make("mul", make("mul", first, BY_SCALE), second)


def slant_of(spec: Spec) -> Expr | None:
    """What a score function adds for each position that a key is ahead of its query, where it adds
    nothing else, and that is fixed for a query."""
    if spec.score is None or spec.softcap or not is_added(spec):
        return None
    if not _has_fixed_factor(spec.score.args[1]):
        return None
    first, second = spec.score.args[1].args
    fixed, distance = (first, second) if _is_fixed(first) else (second, first)
    distance = with_distances(distance)
    if distance == AHEAD:
        return fixed
    return make("neg", fixed) if distance == make("neg", AHEAD) else None


def is_added(spec: Spec) -> bool:
    """Whether the score function adds a product to the score, one of whose factors is fixed for a
    row block, or data that far tiles read one number of."""
    score = spec.score
    if score is None or score.op != "add" or score.args[0].op != "score":
        return False
    added = score.args[1]
    is_product = _has_fixed_factor(added) and not reads_score(added)
    return is_product or level_of(spec) is not None


def _has_fixed_factor(added: Expr) -> bool:
    return added.op == "mul" and any(map(_is_fixed, added.args))


def _is_fixed(expr: Expr) -> bool:
    return "kv_idx" not in leaves(expr, "index")


def full_score(spec: Spec, score: Lowered) -> str | None:
    """The changed score; one that ignores the old score still has its shape."""
    if spec.score is None:
        return None
    text = score.results[0]
    return text if reads_score(spec.score) else f"tl.zeros_like(s) + ({text})"
