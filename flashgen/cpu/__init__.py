"""The `cpu` backend: a walk over the schedule's tiles with PyTorch's own operations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..errors import FlashgenError
from ..expr import leaves
from ..geometry import Geometry
from ..schedule import Schedule
from ..spec import Bound
from .blocks import split
from .passes import Problem, Saved, backward, forward, sink_gradient
from .scores import Rules


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    bound: Bound,
    geometry: Geometry,
    schedule: Schedule,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the visited tiles, differentiable once.

    q [B, Hq, Sq, D], k [B, Hkv, Skv, D], v [B, Hkv, Skv, Dv], any strides; `sinks` [Hq].
    Returns out [B, Hq, Sq, Dv] in q's dtype and the natural-log LSE [B, Hq, Sq] in float32
    (float64 for float64 queries), which is also what everything is computed in. Gradients reach
    q, k, v, sinks and the float data of the score function.
    Raises FlashgenError where a second derivative is asked for."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    # Autograd holds the tensors, and sees when they change; the problem must not hold them too.
    rules = Rules(replace(bound, tensors={}), geometry, softcap, dtype)
    problem = Problem(rules, split(schedule, geometry), scale, None)
    tensors = [bound.tensors[tensor.name] for tensor in bound.spec.tensors]
    out, lse = _Attention.apply(problem, q, k, v, sinks, *tensors)  # type: ignore[no-untyped-call]
    return out, lse


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        problem: Problem,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(q.device.type, enabled=False):
            out, lse = forward(_with_tensors(problem, sinks, tensors), q, k, v)
        ctx.problem = problem
        ctx.save_for_backward(q, k, v, out, lse, sinks, *tensors)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor, grad_lse: torch.Tensor) -> Any:
        spec = ctx.problem.rules.bound.spec
        loaded = leaves(spec.score, "load")
        needed = zip(spec.tensors, ctx.needs_input_grad[5:], strict=True)
        wanted = [tensor.name for tensor, need in needed if need and tensor.name in loaded]
        given = (ctx.problem, wanted, grad_out, grad_lse, *ctx.saved_tensors)
        return None, *_Gradients.apply(*given)  # type: ignore[no-untyped-call]


class _Gradients(torch.autograd.Function):
    """The backward, as a function whose own derivative is an error that says so."""

    @staticmethod
    def forward(
        ctx: Any,
        problem: Problem,
        wanted: list[str],
        grad_out: torch.Tensor,
        grad_lse: torch.Tensor,
        *saved: Any,
    ) -> Any:
        q, k, v, out, lse, sinks, *tensors = saved
        with torch.autocast(q.device.type, enabled=False):
            problem = _with_tensors(problem, sinks, tensors)
            wide = [x.to(problem.dtype) for x in (q, k, v, out, lse, grad_out, grad_lse)]
            grads = backward(problem, Saved(*wide), wanted)
            of_sinks = sink_gradient(problem.sinks, lse, grads.delta)
        data = [grads.data.get(tensor.name) for tensor in problem.rules.bound.spec.tensors]
        exact = (grads.q, grads.k, grads.v, of_sinks, *data)
        pairs = zip(exact, (q, k, v, sinks, *tensors), strict=True)
        return tuple(None if grad is None else grad.to(x.dtype) for grad, x in pairs)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise FlashgenError(
            "the gradient of attention is differentiated again, and has no derivative here",
            write="create_graph=False; for second derivatives, plain PyTorch operations on the "
            "dense mask (`mask.dense(q_len, kv_len)`)",
        )


def _with_tensors(problem: Problem, sinks: torch.Tensor | None, tensors: Any) -> Problem:
    """The problem with what autograd handed over."""
    bound = problem.rules.bound
    names = (tensor.name for tensor in bound.spec.tensors)
    bound = replace(bound, tensors=dict(zip(names, tensors, strict=True)))
    if sinks is not None:
        sinks = sinks.to(problem.dtype).reshape(1, -1, 1)
    return replace(problem, rules=replace(problem.rules, bound=bound), sinks=sinks)
