"""The `cpu` backend: a walk over the schedule's tiles with PyTorch's own operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch

from .. import launch_backward
from ..dropout import Dropout
from ..expr import leaves
from ..geometry import Geometry
from ..schedule import Schedule
from ..spec import Bound
from .blocks import Block, split
from .passes import Problem, Saved, backward, forward, sink_gradient
from .scores import Rules


class Walk:
    """One attention over the visited tiles, apart from its tensors (see `ops.Engine`).

    Everything is computed in float32 (float64 for float64 queries); gradients are equal bit by
    bit from run to run, so `deterministic` asks for nothing more."""

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
    ) -> None:
        self._bound, self._geometry, self._schedule = bound, geometry, schedule
        self._scale, self._softcap, self._dropout = scale, softcap, dropout

    @cached_property
    def _blocks(self) -> list[Block]:
        return split(self._schedule, self._geometry)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        data: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return forward(self._problem(q.dtype, sinks, data), q, k, v)

    def backward(
        self,
        saved: launch_backward.Saved,
        sinks: torch.Tensor | None,
        data: Sequence[torch.Tensor],
        needed: Sequence[bool],
    ) -> tuple[torch.Tensor | None, ...]:
        problem = self._problem(saved.q.dtype, sinks, data)
        grad_out, grad_lse = (
            torch.zeros_like(result) if grad is None else grad
            for grad, result in ((saved.grad_out, saved.out), (saved.grad_lse, saved.lse))
        )
        tensors = (saved.q, saved.k, saved.v, saved.out, saved.lse, grad_out, grad_lse)
        wide = Saved(*(x.to(problem.dtype) for x in tensors))
        spec = self._bound.spec
        pairs = zip(spec.tensors, needed[4:], strict=True)
        loaded = leaves(spec.score, "load")
        grads = backward(problem, wide, [t.name for t, need in pairs if need and t.name in loaded])
        of_sinks = sink_gradient(problem.sinks, wide.lse, grads.delta)
        of_data = (grads.data.get(tensor.name) for tensor in spec.tensors)
        exact = (grads.q, grads.k, grads.v, of_sinks, *of_data)
        inputs = (saved.q, saved.k, saved.v, sinks, *data)
        return tuple(
            grad.to(x.dtype) if need and grad is not None and x is not None else None
            for grad, x, need in zip(exact, inputs, needed, strict=True)
        )

    def _problem(
        self, dtype: torch.dtype, sinks: torch.Tensor | None, data: Sequence[torch.Tensor]
    ) -> Problem:
        """With the tensors that autograd handed over."""
        dtype = torch.float64 if dtype == torch.float64 else torch.float32
        names = (tensor.name for tensor in self._bound.spec.tensors)
        bound = replace(self._bound, tensors=dict(zip(names, data, strict=True)))
        rules = Rules(bound, self._geometry, self._softcap, dtype)
        wide = None if sinks is None else sinks.to(dtype).reshape(1, -1, 1)
        return Problem(rules, self._blocks, self._scale, wide, self._dropout)
