"""Implementations of the same attention: checked against each other, and timed in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .measure import Times
from .turns import medians

# How far 16-bit results may be apart, as a part of a row's norm.
_APART = 0.03


@dataclass(frozen=True)
class Layout:
    """How an implementation wants tensors [B, H, S, D], and how its own become these again."""

    of: Callable[[torch.Tensor], torch.Tensor]
    heads: Callable[[torch.Tensor], torch.Tensor]


HEADS = Layout(lambda x: x, lambda x: x)
# [B, S, H, D], as FlashAttention has them.
ROWS = Layout(lambda x: x.transpose(1, 2).contiguous(), lambda x: x.transpose(1, 2))


def packed(batch: int) -> Layout:
    """All sequences in one: [B S, H, D]."""
    return Layout(
        lambda x: x.transpose(1, 2).flatten(0, 1).contiguous(),
        lambda x: x.reshape(batch, -1, *x.shape[1:]).transpose(1, 2),
    )


@dataclass(frozen=True)
class Side:
    """`attend(q, k, v)` in a layout; whether it has a backward; what else gets a gradient.

    `compared`: whether it computes what the others do."""

    attend: Callable[..., torch.Tensor]
    layout: Layout = HEADS
    trains: bool = True
    captured: tuple[torch.Tensor, ...] = ()
    compared: bool = True

    def leaves(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """q, k and v in the side's own layout."""
        own = [self.layout.of(x.detach()).detach() for x in tensors]
        return [x.requires_grad_(self.trains) for x in own]

    def results(
        self, tensors: Sequence[torch.Tensor], grad: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """The output, and if there is a backward the gradients, all [B, H, S, D]."""
        leaves = self.leaves(tensors)
        out = self.attend(*leaves)
        found = {"out": self.layout.heads(out.detach())}
        if self.trains:
            grads = torch.autograd.grad(out, [*leaves, *self.captured], self.layout.of(grad))
            names = ["dq", "dk", "dv", *(f"d{n}" for n in range(len(self.captured)))]
            backs = [self.layout.heads] * 3 + [HEADS.heads] * len(self.captured)
            found |= {n: back(x) for n, back, x in zip(names, backs, grads, strict=True)}
        return found


def differences(
    sides: Mapping[str, Side], tensors: Sequence[torch.Tensor], grad: torch.Tensor
) -> list[str]:
    """In what the results of sides differ from those of the first: nothing, if all is well."""
    base: dict[str, torch.Tensor] = {}
    found: list[str] = []
    for name, side in sides.items():
        if not side.compared:
            continue
        results = side.results(tensors, grad)
        base = base or results
        found += [
            f"{what} of {name} differs: {problem}"
            for what, mine in results.items()
            if (problem := _apart(mine, base[what], what))
        ]
    return found


def _apart(mine: torch.Tensor, right: torch.Tensor, what: str) -> str:
    """Rows of D numbers are compared by their norms: there, rounding evens out.

    A gradient is a difference of large terms where a query has few keys, so its rows may also be
    off by a part of what such a term is; a whole tensor may not."""
    if not torch.isfinite(mine).all():
        return "not finite"
    off = torch.linalg.vector_norm(mine - right, dim=-1, dtype=torch.float32)
    norm = torch.linalg.vector_norm(right, dim=-1, dtype=torch.float32)
    if (whole := float(off.norm() / norm.norm().clamp(min=1e-30))) > _APART:
        return f"by {whole:.3f} of its norm"
    floor = 1e-3 if what == "out" else 0.04
    worst = float((off - _APART * norm).amax() / right.shape[-1] ** 0.5)
    return f"a row by {worst:.3f} too much a number" if worst > floor else ""


def times(
    sides: Mapping[str, Side],
    tensors: Sequence[torch.Tensor],
    grad: torch.Tensor,
    rounds: int,
) -> dict[str, Times]:
    """Medians of many calls, in which all sides take turns. They must have run before."""
    leaves = {name: side.leaves(tensors) for name, side in sides.items()}
    calls = {name: partial(side.attend, *leaves[name]) for name, side in sides.items()}
    forward = medians(calls, rounds)
    trained = {name: side for name, side in sides.items() if side.trains}
    backwards = {name: _backward(side, leaves[name], grad) for name, side in trained.items()}
    backward = medians(backwards, rounds) if backwards else {}
    return {name: Times(forward[name], backward.get(name)) for name in sides}


def _backward(side: Side, leaves: list[torch.Tensor], grad: torch.Tensor) -> Callable[[], Any]:
    wanted, out = [*leaves, *side.captured], side.attend(*leaves)
    given = side.layout.of(grad)
    return partial(torch.autograd.grad, out, wanted, given, retain_graph=True)
