"""Random differentiable score functions, as text: flashgen traces it, PyTorch runs it densely.

The text is written in torch's own words, so that its value and its derivative come from torch's
autograd on dense matrices; nothing of flashgen's tracer, evaluator or derivatives is shared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from strategies import INDICES, Problem, Shape, problems, shapes

import flashgen as fg

# Each draws its arguments `{}` from values of moderate size, and gives one of moderate size.
SMOOTH = (
    "({} + {})", "({} - {})", "({} * {})", "({} / (1.5 + torch.square({})))", "(-{})",
    "torch.tanh({})", "torch.sigmoid({})", "torch.sin({})", "torch.cos({})", "torch.erf({})",
    "torch.exp(-torch.square({}))", "torch.exp2(torch.tanh({}))", "torch.log(torch.abs({}) + 0.5)",
    "torch.log2(torch.square({}) + 0.25)", "torch.sqrt(torch.square({}) + 0.25)",
    "torch.rsqrt(torch.abs({}) + 0.5)", "torch.reciprocal(torch.square({}) + 1.5)",
    "(torch.abs({}) + 0.5) ** torch.tanh({})", "torch.tanh({}) ** 3",
    "(1.5 ** torch.tanh({}))",
)  # fmt: skip
KINKED = (
    "torch.abs({})", "torch.minimum({}, {})", "torch.maximum({}, {})",
    "torch.clamp({}, -0.75, 0.5)", "torch.clamp({}, max={})", "torch.relu({})",
    "torch.where({} > {}, {}, {})",
    "torch.where(q_idx - kv_idx > 1, {}, {})", "torch.where(torch.isnan({}), 0.5, {})",
    "({} * torch.sign({}))", "(torch.floor({}) * 0.25 + {})", "(torch.ceil({}) * {})",
    "torch.remainder({}, 1.5)", "({} % (1.5 + torch.square({})))",
    "(torch.div({}, 0.75, rounding_mode='floor') * 0.25 + {})",
    "torch.where(({} > 0) & (kv_idx % 2 == 0), {}, {})", "({} * (q_idx > kv_idx).float())",
)  # fmt: skip
LEAVES = (
    "score", "score", "slope[h]", "bias[b, h, {q}, kv_idx]", "curve[(q_idx - kv_idx).clamp(0, 4)]",
    "heat", "gate[h_kv, {q}]", "column[kv_idx]", "curve[kv_idx % 3]", "square[{q}, kv_idx]",
    "square[kv_idx, kv_idx]", "curve[steps[kv_idx]]", "((q_idx - kv_idx) * 0.125)",
    "(kv_idx * 0.0 + 0.75)",
)  # fmt: skip


@dataclass(frozen=True)
class ScoreText:
    """A score function's text, and the data that it may read."""

    text: str
    learned: dict[str, torch.Tensor]
    fixed: dict[str, torch.Tensor]

    def _repr_pretty_(self, printer: Any, _: bool) -> None:
        printer.text(self.text)

    @property
    def function(self) -> Callable[..., Any]:
        """What a user would write."""
        data = ", ".join(f"{name}: Tensor" for name in {**self.learned, **self.fixed})
        scope: dict[str, Any] = {"torch": torch, "Tensor": fg.Tensor}
        head = ", ".join(["score", *INDICES, *([data] if data else [])])
        exec(f"def random({head}):\n    return {self.text}\n", scope)
        made: Callable[..., Any] = scope["random"]
        return made

    def dense(
        self, shape: Shape, learned: dict[str, torch.Tensor]
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """The function of scores [B, H, Sq, Skv] that torch computes."""
        index = {name: torch.as_tensor(np.asarray(x)) for name, x in shape.env.items()}

        def score(scores: torch.Tensor) -> torch.Tensor:
            # A tensor without dimensions is no more than a number to torch's promotion: beside
            # `.float()` it would be of float32.
            wide = {name: x.expand(1, 1, 1, 1) if x.ndim == 0 else x for name, x in learned.items()}
            scope = {"torch": torch, **index, **wide, **self.fixed, "score": scores}
            before = torch.get_default_dtype()
            # An integer times 0.5 is of the default dtype, and not exact enough in float32.
            torch.set_default_dtype(scores.dtype)
            try:
                value = torch.as_tensor(eval(self.text, scope))
            finally:
                torch.set_default_dtype(before)
            return value.to(scores.dtype).expand(scores.shape)

        return score


def _grow(draw: Any, depth: int, leaves: tuple[str, ...], forms: tuple[str, ...]) -> str:
    if depth <= 0:
        return str(draw(st.sampled_from(leaves)))
    form = draw(st.sampled_from(forms))
    arguments = [
        _grow(draw, draw(st.integers(0, depth - 1)), leaves, forms) for _ in range(form.count("{}"))
    ]
    return str(form.format(*arguments))


@st.composite
def score_texts(draw: Any, shape: Shape, depth: int = 3) -> ScoreText:
    """A score function for a problem's shapes; every word of the vocabulary may occur."""
    q = "q_idx" if shape.offsets.min() >= 0 else f"q_idx.clamp(0, {shape.last - 1})"
    leaves = tuple(leaf.replace("{q}", q) for leaf in LEAVES)
    text = _grow(draw, draw(st.integers(1, depth)), leaves, SMOOTH + KINKED)
    # Mostly a change of the score; sometimes it is ignored.
    if draw(st.integers(0, 4)):
        text = f"score * 0.5 + {text}"
    sizes: dict[str, tuple[int, ...]] = {
        "slope": (shape.heads,), "bias": (shape.batch, shape.heads, shape.last, shape.last),
        "curve": (5,), "heat": (), "gate": (shape.kv_heads, shape.last), "column": (shape.last,),
        "square": (shape.last, shape.last),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    learned = {
        name: torch.randn(size, generator=generator, dtype=torch.float64)
        for name, size in sizes.items()
        if name in text
    }
    steps = torch.randint(0, 5, (shape.last,), generator=generator)
    return ScoreText(text, learned, {"steps": steps} if "steps" in text else {})


@st.composite
def learning_problems(draw: Any, most: int = 5, depth: int = 3) -> tuple[Problem, ScoreText]:
    """A random mask, and a random score function with learned data beside it."""
    problem = draw(problems(shapes(most=most, batch=2, groups=(1, 2)), depth=3))
    return problem, draw(score_texts(problem.shape, depth))


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor, score: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and LSE by their definition, differentiable; rows without keys have 0 and 0."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = score((q @ k.mT) * q.shape[-1] ** -0.5)
    allowed = allowed.expand(scores.shape)
    seen = allowed.any(-1)
    scores = torch.where(allowed, scores, -torch.inf)
    lse = torch.logsumexp(torch.where(seen[..., None], scores, 0.0), -1)
    weights = torch.where(allowed, torch.exp(scores - lse[..., None]), 0.0)
    return weights @ v, torch.where(seen, lse, 0.0)


def leaves_of(problem: Problem, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    shape = problem.shape
    sizes = (
        (shape.batch, shape.heads, shape.q_len, dim),
        *[(shape.batch, shape.kv_heads, shape.kv_len, dim)] * 2,
    )
    return [torch.randn(size, dtype=dtype) for size in sizes]


def _gradients(
    results: Sequence[torch.Tensor], grads: list[torch.Tensor], leaves: list[torch.Tensor]
) -> Sequence[torch.Tensor | None]:
    """None for what nothing depends on."""
    total = sum((x * g.to(x.dtype)).sum() for x, g in zip(results, grads, strict=True))
    if not total.requires_grad:
        return [None] * len(leaves)
    return torch.autograd.grad(total, leaves, allow_unused=True)


def check_against_dense(
    problem: Problem, score: ScoreText, backend: str, dtype: torch.dtype, tolerance: float
) -> None:
    """Out, LSE, and gradients of everything, beside torch's autograd in float64."""
    attend = fg.Attention(mask=problem.function, score=score.function)
    options = {"q_offset": problem.shape.q_offset, "kv_lens": problem.shape.kv_lens}
    inputs = leaves_of(problem, 16 if backend == "interpret" else 3, dtype)
    mine = [x.requires_grad_() for x in (*inputs, *(t.to(dtype) for t in score.learned.values()))]
    given = dict(zip(score.learned, mine[3:], strict=True))
    out, lse = attend(
        *mine[:3], return_lse=True, backend=backend, **options, **problem.data, **given,
        **score.fixed,
    )  # fmt: skip
    exact = [x.detach().double().requires_grad_() for x in mine]
    wide = dict(zip(score.learned, exact[3:], strict=True))
    allowed = torch.from_numpy(np.array(problem.allowed))
    right = dense_attention(*exact[:3], allowed, score.dense(problem.shape, wide))
    lse = torch.where(lse == -torch.inf, 0.0, lse)
    grads = [torch.randn_like(x) for x in right]
    ours, theirs = _gradients((out, lse), grads, mine), _gradients(right, grads, exact)
    names = ("out", "lse", "q", "k", "v", *score.learned)
    pairs = zip(names, (out, lse, *ours), (*right, *theirs), strict=True)
    for name, actual, expected in pairs:
        zero = torch.zeros(())
        actual = zero if actual is None else actual.double()
        expected = zero if expected is None else expected.detach()
        slack = tolerance * max(1.0, float(expected.abs().max()) if expected.numel() else 1.0)
        difference = (actual - expected).abs()
        assert not difference.numel() or difference.max() <= slack, (
            f"{name} differs by {difference.max()} in {score.text}"
        )
