"""Gradients of interpreted kernels beside a dense oracle's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

import flashgen as fg
from flashgen import masks

Score = Callable[[torch.Tensor], torch.Tensor]
INF = math.inf


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    score: Score | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and LSE by their definition; differentiable, rows without keys included."""
    group = q.shape[1] // max(1, k.shape[1])
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if score is None else score(scores)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    allowed = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask
    scores = torch.where(allowed, scores, -INF)
    most = torch.nn.functional.pad(scores.detach(), (0, 1), value=-INF).amax(-1, keepdim=True)
    if sinks is not None:
        most = torch.maximum(most, sinks.detach().reshape(1, -1, 1, 1))
    most = torch.where(most == -INF, 0.0, most)
    weights = torch.where(allowed, torch.exp(scores - most), 0.0)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.reshape(1, -1, 1, 1) - most)
    divisor = torch.where(total == 0, 1.0, total)
    lse = torch.where(total == 0, -INF, most + torch.log(divisor))
    return weights @ v / divisor, lse[..., 0]


class Problem:
    """Random inputs in float32, the same in float64, and random gradients of the results."""

    def __init__(
        self,
        batch: int = 1,
        heads: int = 2,
        kv_heads: int = 2,
        q_len: int = 70,
        kv_len: int = 70,
        dim: int = 16,
        v_dim: int = 16,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        shapes = (
            (batch, heads, q_len, dim), (batch, kv_heads, kv_len, dim),
            (batch, kv_heads, kv_len, v_dim), (batch, heads, q_len, v_dim), (batch, heads, q_len),
        )  # fmt: skip
        made = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        self.inputs, (self.grad_out, self.grad_lse) = made[:3], made[3:]

    def leaves(self, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        return [x.detach().to(dtype or x.dtype).requires_grad_() for x in self.inputs]


def loss(
    problem: Problem, out: torch.Tensor, lse: torch.Tensor, of_out: bool, of_lse: bool
) -> torch.Tensor:
    """A linear function of what has a gradient; rows without keys have no LSE to speak of."""
    total = out.new_zeros(())
    if of_out:
        total = total + (out * problem.grad_out.to(out.dtype)).sum()
    if of_lse:
        total = total + torch.where(lse == -INF, 0.0, lse * problem.grad_lse.to(lse.dtype)).sum()
    return total


def check(
    attention: Any,
    problem: Problem,
    mask: torch.Tensor | None = None,
    score: Callable[..., torch.Tensor] | None = None,
    learned: dict[str, torch.Tensor] | None = None,
    of_out: bool = True,
    of_lse: bool = False,
    tolerance: float = 1e-4,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    **given: Any,
) -> list[torch.Tensor]:
    """Compare gradients of q, k, v, learned data and sinks; returns ours.

    `score(scores, **learned)` is the score function, by hand."""
    mine, exact = problem.leaves(), problem.leaves(torch.float64)
    parameters = {**(learned or {}), **({} if sinks is None else {"sinks": sinks})}
    own = {n: t.detach().clone().requires_grad_() for n, t in parameters.items()}
    wide = {n: t.detach().double().requires_grad_() for n, t in parameters.items()}
    out, lse = attention(*mine, return_lse=True, backend="interpret", scale=scale, **own, **given)
    expected_sinks = wide.get("sinks")
    data = {n: t for n, t in wide.items() if n != "sinks"}
    by_hand = None if score is None else (lambda scores: score(scores, **data))
    exact_out, exact_lse = dense(
        *exact, mask=mask, score=by_hand, softcap=softcap, sinks=expected_sinks, scale=scale
    )
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-4, atol=1e-4)
    ours = torch.autograd.grad(
        loss(problem, out, lse, of_out, of_lse), [*mine, *own.values()], allow_unused=True
    )
    theirs = torch.autograd.grad(
        loss(problem, exact_out, exact_lse, of_out, of_lse),
        [*exact, *wide.values()],
        allow_unused=True,
    )
    names = ["q", "k", "v", *own]
    results = []
    for name, leaf, actual, expected in zip(
        names, [*mine, *own.values()], ours, theirs, strict=True
    ):
        actual = torch.zeros_like(leaf) if actual is None else actual
        expected = torch.zeros_like(leaf).double() if expected is None else expected
        assert actual.dtype == leaf.dtype
        assert actual.shape == leaf.shape
        atol = tolerance * max(1.0, float(expected.abs().max()) if expected.numel() else 0.0)
        torch.testing.assert_close(
            actual.double(), expected, rtol=0, atol=atol, msg=lambda m, n=name: f"grad of {n}: {m}"
        )
        results.append(actual)
    if mask is not None:
        check_unseen(mask, *results[:3])
    return results


def check_unseen(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Rows without keys and keys that no query of their heads sees have exactly 0."""
    seen = mask.expand(*q.shape[:3], k.shape[2])
    if not seen.numel():
        return
    assert (q[~seen.any(-1)] == 0).all()
    by_head = seen.any(-2).reshape(*k.shape[:2], -1, k.shape[2])
    hidden = ~by_head.any(2)
    assert (k[hidden] == 0).all()
    assert (v[hidden] == 0).all()


def causal(q_len: int, kv_len: int, offset: int | None = None) -> torch.Tensor:
    offset = kv_len - q_len if offset is None else offset
    return torch.arange(kv_len) <= torch.arange(q_len).reshape(-1, 1) + offset


CAUSAL = fg.Attention(mask=masks.causal)
