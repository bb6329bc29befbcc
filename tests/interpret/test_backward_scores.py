"""Gradients of score functions and their data by Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dense_gradients import Problem, causal, check

import flashgen as fg
from flashgen import masks

N = 70
POSITIONS = torch.arange(N)
BACK = (POSITIONS - POSITIONS.reshape(-1, 1)).float()


@fg.attention(mask=masks.causal)
def alibi(score, h, q_idx, kv_idx, slope: fg.Tensor):
    return score + slope[h] * (kv_idx - q_idx)


@fg.attention(mask=masks.causal)
def biased(score, b, h, q_idx, kv_idx, bias: fg.Tensor):
    return score + bias[b, h, q_idx, kv_idx]


@fg.attention(mask=masks.causal)
def by_head(score, h, bias: fg.Tensor):
    return score * bias[h] + bias[h]


@fg.attention(mask=masks.causal)
def relative(score, q_idx, kv_idx, table: fg.Tensor):
    return score + table[q_idx - kv_idx + 70]


@fg.attention(mask=masks.causal)
def clipped(score, q_idx, kv_idx, table: fg.Tensor):
    return score + table[q_idx - kv_idx]


@fg.attention(mask=masks.causal)
def tempered(score, t: fg.Tensor):
    return score * t


@fg.attention(mask=masks.causal)
def twice(score, q_idx, kv_idx, x: fg.Tensor):
    return score + x[q_idx] * x[kv_idx]


@fg.attention(mask=masks.causal)
def gated(score, h, q_idx, kv_idx, gate: fg.Tensor, bias: fg.Tensor):
    return score + fg.sigmoid(gate[h, q_idx]) * bias[kv_idx]


@fg.attention(mask=masks.causal)
def piecewise(score, h, q_idx, kv_idx, knee: fg.Tensor):
    bent = fg.where(score > knee[h], score * 0.5, fg.minimum(score, 0.3))
    return bent + fg.abs(score) * 0.1 + fg.maximum(score, knee[h])


@fg.attention(mask=masks.causal)
def by_bucket(score, q_idx, kv_idx, bucket: fg.Tensor, bias: fg.Tensor):
    return score + bias[bucket[q_idx - kv_idx]]


# The declaration, the shapes of what it learns, and the score function by hand.
LEARNED: dict[str, tuple[Any, dict[str, tuple[int, ...]], Callable[..., torch.Tensor]]] = {
    "alibi": (alibi, {"slope": (2,)}, lambda s, slope: s + slope.reshape(-1, 1, 1) * BACK),
    "bias": (biased, {"bias": (2, 2, N, N)}, lambda s, bias: s + bias),
    "bias of one batch element": (biased, {"bias": (1, 2, N, N)}, lambda s, bias: s + bias),
    "bias by head": (
        by_head, {"bias": (2,)}, lambda s, bias: (s + 1) * bias.reshape(-1, 1, 1),
    ),
    "relative": (
        relative, {"table": (2 * N,)}, lambda s, table: s + table[N - BACK.long()],
    ),
    "clamped index": (
        clipped, {"table": (9,)}, lambda s, table: s + table[(-BACK.long()).clamp(0, 8)],
    ),
    "temperature": (tempered, {"t": ()}, lambda s, t: s * t),
    "twice": (twice, {"x": (N,)}, lambda s, x: s + x.reshape(-1, 1) * x),
    "gated": (
        gated, {"gate": (2, N), "bias": (N,)},
        lambda s, gate, bias: s + torch.sigmoid(gate).unsqueeze(-1) * bias,
    ),
    "piecewise": (
        piecewise, {"knee": (2,)},
        lambda s, knee: torch.where(s > knee.reshape(-1, 1, 1), s * 0.5, s.clamp(max=0.3))
        + s.abs() * 0.1 + torch.maximum(s, knee.reshape(-1, 1, 1)),
    ),
}  # fmt: skip
# Sums in integers are the same code whatever is read: a few stand for the others.
IN_ORDER = [
    pytest.param(name, True, marks=[] if number % 4 == 0 else [pytest.mark.slow])
    for number, name in enumerate(LEARNED)
]


@pytest.mark.parametrize(
    ("name", "deterministic"), [*((name, False) for name in LEARNED), *IN_ORDER]
)
def test_learned_data(name: str, deterministic: bool) -> None:
    attention, shapes, score = LEARNED[name]
    generator = torch.Generator().manual_seed(3)
    learned = {n: torch.randn(shape, generator=generator) for n, shape in shapes.items()}
    check(
        attention, Problem(batch=2), causal(N, N), score, learned, of_lse=True,
        deterministic=deterministic,
    )  # fmt: skip


@pytest.mark.parametrize("offset", [-5, torch.tensor([3, -4])])
def test_rows_before_the_first_position_share_a_bias(offset: Any) -> None:
    """Their index is clamped to 0, so their gradients add up."""
    attention = fg.Attention(score=biased.__wrapped__)
    rows = torch.arange(N) + torch.as_tensor(offset).reshape(-1, 1)
    rows = rows.expand(2, N).clamp(0, N - 1)

    def score(s: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return s + torch.stack([bias[b][:, rows[b]] for b in range(2)])

    check(attention, Problem(batch=2), None, score, {"bias": torch.randn(2, 2, N, N)},
          q_offset=offset)  # fmt: skip


def test_a_bias_is_stored_in_its_own_dtype() -> None:
    """Where no two pairs read the same element, nothing is added up, and no fp32 copy is made."""
    q, k, v = Problem(dtype=torch.float16).leaves()
    bias = torch.randn(1, 2, N, N, dtype=torch.float16, requires_grad=True)
    wide = bias.detach().float().requires_grad_()
    grads = [
        torch.autograd.grad(biased(q, k, v, bias=x, backend="interpret").sum(), x)[0]
        for x in (bias, wide)
    ]
    assert torch.equal(grads[0], grads[1].half())
    assert grads[0].dtype == torch.float16


def test_learned_data_with_softcap_and_groups() -> None:
    attention = fg.Attention(mask=masks.causal, score=alibi.__wrapped__, softcap=2.0)
    check(attention, Problem(heads=4, kv_heads=2), causal(N, N),
          lambda s, slope: s + slope.reshape(-1, 1, 1) * BACK,
          {"slope": torch.tensor([0.3, 0.1, -0.2, 0.01])}, softcap=2.0)  # fmt: skip


def test_learned_data_read_through_an_index_tensor() -> None:
    bucket = torch.arange(N) // 9
    check(by_bucket, Problem(), causal(N, N),
          lambda s, bias: s + bias[bucket[(-BACK.long()).clamp(0)]],
          {"bias": torch.randn(8)}, bucket=bucket)  # fmt: skip


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("heads", [2, 4])
def test_a_score_function_that_ignores_the_score(heads: int) -> None:
    @fg.attention(mask=masks.causal)
    def fixed(score, q_idx, kv_idx, bias: fg.Tensor):
        return bias[q_idx, kv_idx]

    q, k, _, _ = check(
        fixed, Problem(heads=heads), causal(N, N), lambda s, bias: bias + 0 * s,
        {"bias": torch.randn(N, N)},
    )  # fmt: skip
    assert (q == 0).all()
    assert (k == 0).all()


def test_poisoned_data_of_masked_pairs() -> None:
    learned = {"bias": torch.randn(1, 2, N, N)}
    clean = check(biased, Problem(), causal(N, N), lambda s, bias: s + bias, learned)
    learned["bias"] = torch.where(causal(N, N), learned["bias"], torch.nan).requires_grad_()
    mine = Problem().leaves()
    out = biased(*mine, backend="interpret", **learned)
    inputs = [*mine, learned["bias"]]
    grads = torch.autograd.grad(out, inputs, Problem().grad_out)
    for actual, expected in zip(grads, clean, strict=True):
        torch.testing.assert_close(actual, expected)


def test_gradcheck_of_a_score_function_and_sinks() -> None:
    attention = fg.Attention(mask=masks.causal, score=twice.__wrapped__, softcap=3.0, sinks=True)
    q, k, v = Problem(heads=2, kv_heads=1, q_len=3, kv_len=3, dim=2, v_dim=1).leaves(torch.float64)
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)

    def run(q: Any, k: Any, v: Any, x: Any, sinks: Any) -> Any:
        return attention(
            q, k, v, x=x, sinks=sinks, q_offset=0, return_lse=True, backend="interpret"
        )

    # The cpu backend's gradients, from the same expressions, are checked number by number.
    assert torch.autograd.gradcheck(run, (q, k, v, x, sinks), atol=1e-4, fast_mode=True)


def test_gradcheck_of_a_window_with_a_table() -> None:
    attention = fg.Attention(mask=masks.sliding_window(window=3), score=clipped.__wrapped__)
    inputs = Problem(heads=1, kv_heads=1, q_len=3, kv_len=5, dim=2, v_dim=1).leaves(torch.float64)
    table = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def run(q: Any, k: Any, v: Any, table: Any) -> Any:
        return attention(q, k, v, table=table, backend="interpret")

    assert torch.autograd.gradcheck(run, (*inputs, table), atol=1e-4, fast_mode=True)
