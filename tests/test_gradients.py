"""Gradients of score functions: finite differences, and random ones beside torch's autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from score_strategies import ScoreText, check_against_dense, learning_problems, leaves_of
from strategies import Problem, bounded

import flashgen as fg
from flashgen import masks
from flashgen.reference import attention_reference

S = 4


def bias_by_head(score, h, bias: fg.Tensor):
    return score + bias[h] * score


def bias_of_pairs(score, b, h, q_idx, kv_idx, bias: fg.Tensor):
    return score + bias[b, h, q_idx, kv_idx]


def bias_shared_by_sequences(score, h, q_idx, kv_idx, bias: fg.Tensor):
    return score + bias[h, q_idx, kv_idx]


def relative_table(score, q_idx, kv_idx, table: fg.Tensor):
    return score + table[q_idx - kv_idx + 3]


def buckets(score, h, q_idx, kv_idx, table: fg.Tensor):
    return score + table[h, fg.minimum(fg.abs(q_idx - kv_idx), 2)]


def alibi(score, h, q_idx, kv_idx, slope: fg.Tensor):
    return score - slope[h] * fg.abs(q_idx - kv_idx)


def temperature(score, heat: fg.Tensor):
    return score * heat


def read_twice(score, q_idx, kv_idx, x: fg.Tensor):
    return score * x[q_idx] + fg.tanh(x[kv_idx])


def gated(score, h, q_idx, kv_idx, gate: fg.Tensor, bias: fg.Tensor):
    return score + fg.sigmoid(gate[h, q_idx]) * bias[q_idx, kv_idx]


def piecewise(score, h, kv_idx, knee: fg.Tensor, level: fg.Tensor):
    bent = fg.where(score > knee[h], score * 0.5, fg.minimum(score, level[kv_idx]))
    return bent + fg.abs(score - knee[h]) + torch.clamp(score, -0.75, 0.5) * level[kv_idx]


def ignored(score, q_idx, kv_idx, bias: fg.Tensor):
    return bias[q_idx, kv_idx]


FORMS: dict[str, tuple[Any, dict[str, tuple[int, ...]]]] = {
    "bias[h]": (bias_by_head, {"bias": (2,)}),
    "bias[b, h, q, k]": (bias_of_pairs, {"bias": (2, 2, S, S)}),
    "bias[1, h, q, k]": (bias_of_pairs, {"bias": (1, 2, S, S)}),
    "bias[h, q, k]": (bias_shared_by_sequences, {"bias": (2, S, S)}),
    "table[q - k]": (relative_table, {"table": (2 * S,)}),
    "buckets of distances": (buckets, {"table": (2, 3)}),
    "slopes": (alibi, {"slope": (2,)}),
    "temperature": (temperature, {"heat": ()}),
    "a tensor read twice": (read_twice, {"x": (S,)}),
    "a gated bias": (gated, {"gate": (2, S), "bias": (S, S)}),
    "pieces": (piecewise, {"knee": (2,), "level": (S,)}),
    "the score ignored": (ignored, {"bias": (S, S)}),
}


def inputs() -> list[torch.Tensor]:
    shapes = ((2, 2, 3, 2), (2, 1, S, 2), (2, 1, S, 2))
    return [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]


@pytest.mark.parametrize("name", FORMS)
def test_finite_differences(name: str) -> None:
    score, shapes = FORMS[name]
    attend = fg.Attention(masks.causal, score)
    data = {n: torch.randn(s, dtype=torch.float64, requires_grad=True) for n, s in shapes.items()}

    def run(q: Any, k: Any, v: Any, *given: Any) -> Any:
        return attend(q, k, v, return_lse=True, **dict(zip(data, given, strict=True)))

    assert torch.autograd.gradcheck(run, (*inputs(), *data.values()))


@bounded(40)
@given(learning_problems())
def test_finite_differences_of_random_functions(drawn: tuple[Problem, ScoreText]) -> None:
    """Along random directions, at points that meet a kink with probability 0."""
    problem, score = drawn
    attend = fg.Attention(mask=problem.function, score=score.function)
    options = {"q_offset": problem.shape.q_offset, "kv_lens": problem.shape.kv_lens}
    every = [*leaves_of(problem, 2, torch.float64), *score.learned.values()]

    def run(q: Any, k: Any, v: Any, *learned: Any) -> Any:
        data = {**problem.data, **score.fixed, **dict(zip(score.learned, learned, strict=True))}
        out, lse = attend(q, k, v, return_lse=True, **options, **data)
        return out, torch.where(lse == -torch.inf, 0.0, lse)

    leaves = tuple(x.clone().requires_grad_() for x in every)
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True, atol=1e-4, rtol=1e-3)


@bounded(60)
@given(learning_problems(most=40, depth=4))
def test_random_functions(drawn: tuple[Problem, ScoreText]) -> None:
    check_against_dense(*drawn, backend="cpu", dtype=torch.float64, tolerance=1e-9)


@pytest.mark.slow
@bounded(1500)
@given(learning_problems(most=60, depth=6))
def test_many_random_functions(drawn: tuple[Problem, ScoreText]) -> None:
    check_against_dense(*drawn, backend="cpu", dtype=torch.float64, tolerance=1e-8)


def test_large_scores_in_half_precision() -> None:
    """Distances up to 1024 are added in float32, so that bfloat16 inputs do no harm."""

    def far(score, q_idx, kv_idx):
        return score + (kv_idx - q_idx)

    leaves = [torch.randn(1, 1, 1025, 16).bfloat16().requires_grad_() for _ in range(3)]
    out = fg.Attention(masks.causal, far)(*leaves)
    grad = torch.randn_like(out)
    ours = torch.autograd.grad(out, leaves, grad)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    away = torch.arange(1025) - torch.arange(1025)[:, None]
    right, _ = attention_reference(*exact, mask=away <= 0, score=lambda s: s + away)
    theirs = torch.autograd.grad(right, exact, grad.double())
    for mine, wanted in zip((out, *ours), (right, *theirs), strict=True):
        assert mine.isfinite().all()
        # The result is rounded to 8 bits, and so is `out`, of which 16 products make delta.
        torch.testing.assert_close(mine.double(), wanted, rtol=2**-8, atol=16 * 2**-9)
