"""The `cpu` backend: a walk over the schedule's tiles with PyTorch's own operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch

from ..dropout import Dropout
from ..expr import leaves
from ..geometry import Geometry
from ..launch import backward as launch_backward
from ..schedule import Schedule
from ..spec import Bound
from .parts import Part, parts_of
from .passes import Problem, Saved, backward, forward, no_gradients, sink_gradient
from .scores import Rules


class Walk:
    """One attention over the visited tiles, apart from its tensors (see `ops.Engine`).

    Everything is computed in float32 (float64 for float64 queries); gradients are equal bit by
    bit from run to run, so `deterministic` asks for nothing more. With `batch_invariant` each
    sequence is computed by itself."""

    def __init__(
        self,
        bound: Bound,
        *,
        geometry: Geometry,
        schedule: Schedule,
        scale: float,
        softcap: float | None = None,
        dropout: Dropout | None = None,
        deterministic: bool = False,
        batch_invariant: bool = False,
    ) -> None:
        self._is_whole = geometry.is_dense and not batch_invariant
        self._bound, self.geometry, self._schedule = bound, geometry, schedule
        self.name = bound.spec.name
        self._scale, self._softcap, self._dropout = scale, softcap, dropout

    @cached_property
    def _parts(self) -> list[Part]:
        return parts_of(self._schedule, self.geometry, self._is_whole)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        data: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        problems = [self._problem(part, q.dtype, sinks, data) for part in self._parts]
        if self._is_whole:
            return forward(problems[0], q, k, v)
        out = q.new_zeros((q.shape[0], q.shape[2], q.shape[1], v.shape[3])).transpose(1, 2)
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=_wide(q.dtype))
        for part, problem in zip(self._parts, problems, strict=True):
            results = forward(problem, part.queries(q), part.keys(k), part.keys(v))
            for total, result in zip((out, lse), results, strict=True):
                part.queries(total)[:] = result
        return out, lse

    def backward(
        self,
        saved: launch_backward.Saved,
        sinks: torch.Tensor | None,
        data: Sequence[torch.Tensor],
        needed: Sequence[bool],
    ) -> tuple[torch.Tensor | None, ...]:
        dtype = _wide(saved.q.dtype)
        grad_out, grad_lse = (
            torch.zeros_like(result) if grad is None else grad
            for grad, result in ((saved.grad_out, saved.out), (saved.grad_lse, saved.lse))
        )
        tensors = (saved.q, saved.k, saved.v, saved.out, saved.lse, grad_out, grad_lse)
        wide = Saved(*(x.to(dtype) for x in tensors))
        spec = self._bound.spec
        given = zip(spec.tensors, data, needed[4:], strict=True)
        loaded = leaves(spec.score, "load")
        grads = no_gradients(wide, {t.name: x for t, x, need in given if need and t.name in loaded})
        for part in self._parts:
            problem = self._problem(part, dtype, sinks, data)
            backward(problem, part.saved(wide), part.gradients(grads))
        of_sinks = sink_gradient(_row_of(sinks, dtype), wide.lse, grads.delta)
        of_data = (grads.data.get(tensor.name) for tensor in spec.tensors)
        exact = (grads.q, grads.k, grads.v, of_sinks, *of_data)
        inputs = (saved.q, saved.k, saved.v, sinks, *data)
        return tuple(
            grad.to(x.dtype) if need and grad is not None and x is not None else None
            for grad, x, need in zip(exact, inputs, needed, strict=True)
        )

    def _problem(
        self,
        part: Part,
        dtype: torch.dtype,
        sinks: torch.Tensor | None,
        data: Sequence[torch.Tensor],
    ) -> Problem:
        """With the tensors that autograd handed over."""
        names = (tensor.name for tensor in self._bound.spec.tensors)
        bound = replace(self._bound, tensors=dict(zip(names, data, strict=True)))
        rules = Rules(bound, part.geometry, self._softcap, _wide(dtype))
        return Problem(rules, part.blocks, self._scale, _row_of(sinks, rules.dtype), self._dropout)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What everything is computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _row_of(sinks: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A sink of inf counts as the largest number, which takes all the weight of its rows."""
    if sinks is None:
        return None
    return sinks.to(dtype).clamp(max=torch.finfo(dtype).max).reshape(1, -1, 1)
