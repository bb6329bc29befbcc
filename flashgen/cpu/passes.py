"""Forward and backward, block by block: memory is linear in the lengths."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..dropout import Dropout
from .blocks import Block
from .scores import Changed, Rules, is_finite

_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, eq=False)
class Problem:
    """One attention, apart from its queries, keys and values."""

    rules: Rules
    blocks: Sequence[Block]
    scale: float
    sinks: torch.Tensor | None
    dropout: Dropout | None = None

    def dropped(self, block: Block) -> torch.Tensor | None:
        """Booleans [B, Hq, rows, columns]; None without dropout."""
        return None if self.dropout is None else self.rules.dropped(self.dropout, block)

    def drop(self, x: torch.Tensor, dropped: torch.Tensor | None) -> torch.Tensor:
        """0 where a pair is dropped, larger elsewhere."""
        if self.dropout is None or dropped is None:
            return x
        return (x * self.dropout.scale).masked_fill_(dropped, 0)

    @property
    def dtype(self) -> torch.dtype:
        """What everything is computed in."""
        return self.rules.dtype


@dataclass(frozen=True, eq=False)
class Saved:
    """What the backward reads."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    grad_out: torch.Tensor
    grad_lse: torch.Tensor


@dataclass(frozen=True, eq=False)
class Gradients:
    """Sums in the dtype of the computation; `data` has the float tensors that want one.

    `delta` [B, Hq, Sq] is what is subtracted from every weight's gradient of a row."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    data: dict[str, torch.Tensor]
    delta: torch.Tensor


def forward(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [B, Hq, Sq, Dv] in q's dtype, and the LSE [B, Hq, Sq]."""
    rules, sinks = problem.rules, problem.sinks
    out = q.new_zeros((*q.shape[:3], v.shape[3]))
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=problem.dtype)
    if sinks is not None:
        lse[:] = sinks
    q, k, v = (x.to(problem.dtype) for x in (q, k, v))
    for block in problem.blocks:
        queries = block.by_kv_head(q[block.queries] * problem.scale)
        raw = block.by_head(queries @ block.gather(k).mT)
        scores = rules.mask(rules.change(raw, block), raw, block)
        sink = None if sinks is None else sinks[:, block.heads]
        weights, total, lse[block.queries] = _softmax(scores, sink)
        weights = problem.drop(weights, problem.dropped(block))
        product = block.by_head(_product(block.by_kv_head(weights), block.gather(v)))
        out[block.queries] = product / torch.where(total == 0, 1, total)[..., None]
    return out, lse


def _softmax(
    scores: torch.Tensor, sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """exp(scores - max), in place of the scores; its sum along the rows; the LSE."""
    most = scores.amax(-1)
    if sink is not None:
        most = torch.maximum(most, sink)
    most = torch.where(most == -torch.inf, 0, most)
    weights = _exp_(scores.sub_(most[..., None]))
    total = weights.sum(-1)
    if sink is not None:
        total += torch.exp(sink - most)
    return weights, total, most + torch.log(total)


def _exp_(x: torch.Tensor) -> torch.Tensor:
    """exp in place, by exp2: on CPUs exp is twenty times slower at -inf than elsewhere.

    Results too small for a normal number are 0: products with them are as slow."""
    smallest = math.log2(torch.finfo(x.dtype).tiny)
    return torch.threshold_(x.mul_(_LOG2_E), smallest, -torch.inf).exp2_()


def no_gradients(saved: Saved, data: Mapping[str, torch.Tensor]) -> Gradients:
    """Sums of nothing yet; `data` has the tensors that want a gradient."""
    return Gradients(
        torch.zeros_like(saved.q),
        torch.zeros_like(saved.k),
        torch.zeros_like(saved.v),
        {name: torch.zeros_like(x, dtype=saved.q.dtype) for name, x in data.items()},
        -saved.grad_lse,
    )


def backward(problem: Problem, saved: Saved, grads: Gradients) -> None:
    """Recompute each block, and add its gradients to `grads`."""
    for block in problem.blocks:
        _backward_block(problem, block, saved, grads)


def _backward_block(problem: Problem, block: Block, saved: Saved, grads: Gradients) -> None:
    keys, values = block.gather(saved.k), block.gather(saved.v)
    queries = block.by_kv_head(saved.q[block.queries] * problem.scale)
    out, grad_out, lse, delta = (
        x[block.queries] for x in (saved.out, saved.grad_out, saved.lse, grads.delta)
    )
    # A row without keys has out 0, and whatever its gradient holds is selected away.
    delta += torch.where(out == 0, 0, out * grad_out).sum(-1)
    grad_out = block.by_kv_head(grad_out)

    changed = Changed(problem.rules, block, block.by_head(queries @ keys.mT), grads.data)
    scores = problem.rules.mask(changed.scores, changed.raw, block)
    # Weights of a row without keys are 0, not NaN, which would take the slower way below.
    lse = torch.where(lse == -torch.inf, 0, lse)
    weights = _exp_(scores - lse[..., None])
    dropped = problem.dropped(block)
    grad = problem.drop(block.by_head(grad_out @ values.mT), dropped)
    grad = grad.sub_(delta[..., None]).mul_(weights)
    if not is_finite(grad):
        grad, weights = (torch.where(scores == -torch.inf, 0, x) for x in (grad, weights))
    grad = block.by_kv_head(changed.pull_back(grad, scores))

    weights = problem.drop(weights, dropped)
    block.scatter_add(grads.v, _product(block.by_kv_head(weights).mT, grad_out))
    block.scatter_add(grads.k, _product(grad.mT, queries))
    grads.q[block.queries] = block.by_head(_product(grad, keys)) * problem.scale


def sink_gradient(
    sinks: torch.Tensor | None, lse: torch.Tensor, delta: torch.Tensor
) -> torch.Tensor | None:
    """[Hq], from all rows: those without keys have their share in the LSE's gradient.

    Only rows behind the last packed sequence, and those of a sink of -inf, have an LSE of -inf."""
    if sinks is None:
        return None
    share = torch.exp(sinks - lse) * -delta
    return torch.where((sinks == -torch.inf) | (lse == -torch.inf), 0, share).sum((0, 2))


def _product(weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """weights @ x, where a pair of weight 0 takes no part: not even as 0 * inf or 0 * NaN."""
    product = weights @ x
    if is_finite(product):
        return product
    infinite, dtype = x.isinf(), x.dtype
    # The sum of what a row meets: each product of a weight and an infinity is one of its signs.
    signs = weights.nan_to_num(0.0).sign() @ torch.where(infinite, x.sign(), 0)
    met = (weights != 0).to(dtype) @ infinite.to(dtype)
    mixed = signs.abs() != met
    seen_nan = (weights != 0).to(dtype) @ x.isnan().to(dtype) > 0
    finite = weights @ torch.where(x.isfinite(), x, 0)
    special = torch.where(mixed | seen_nan, torch.nan, signs.sign() * torch.inf)
    return torch.where((met > 0) | seen_nan, special, finite)
