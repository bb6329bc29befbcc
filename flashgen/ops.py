"""Generated kernels as PyTorch operations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from . import launch, launch_backward
from .emit_backward import Wanted
from .errors import FlashgenError
from .expr import leaves
from .spec import Bound


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    bound: Bound,
    sinks: torch.Tensor | None = None,
    deterministic: bool = False,
    **arguments: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The generated kernels, differentiable once.

    Arguments and results are those of `launch.forward`. Gradients reach q, k, v, sinks and the
    float data of the score function; only those asked for are computed. `deterministic`: they are
    equal bit by bit from run to run.
    Raises FlashgenError where a second derivative is asked for."""
    # Autograd holds the tensors, and sees when they change; the arguments must not hold them too.
    tensors = [bound.tensors[tensor.name] for tensor in bound.spec.tensors]
    arguments |= {"bound": replace(bound, tensors={})}
    out, lse = _Attention.apply(  # type: ignore[no-untyped-call]
        arguments, deterministic, q, k, v, sinks, *tensors
    )
    return out, lse


def _with_tensors(bound: Bound, tensors: tuple[torch.Tensor, ...]) -> Bound:
    """What the expressions read, as autograd handed it over."""
    names = (tensor.name for tensor in bound.spec.tensors)
    return replace(bound, tensors=dict(zip(names, tensors, strict=True)))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        arguments: dict[str, Any],
        deterministic: bool,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        bound = _with_tensors(arguments["bound"], tensors)
        with torch.autocast(q.device.type, enabled=False):
            out, lse = launch.forward(q, k, v, sinks=sinks, **{**arguments, "bound": bound})
        ctx.arguments, ctx.deterministic = arguments, deterministic
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, sinks, *tensors)
        return out, lse

    @staticmethod
    def backward(
        ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None
    ) -> tuple[Any, ...]:
        given = (ctx.arguments, ctx.deterministic, ctx.needs_input_grad[2:], grad_out, grad_lse)
        if grad_out is None and grad_lse is None:
            return (None,) * len(ctx.needs_input_grad)
        grads = _Gradients.apply(*given, *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        return None, None, *grads


class _Gradients(torch.autograd.Function):
    """The backward, as a function whose own derivative is an error that says so."""

    @staticmethod
    def forward(
        ctx: Any,
        arguments: dict[str, Any],
        deterministic: bool,
        needed: tuple[bool, ...],
        grad_out: torch.Tensor | None,
        grad_lse: torch.Tensor | None,
        *saved: Any,
    ) -> Any:
        q, k, v, out, lse, sinks, *tensors = saved
        bound = _with_tensors(arguments["bound"], tuple(tensors))
        with torch.autocast(q.device.type, enabled=False):
            grads = launch_backward.backward(
                launch_backward.Saved(q, k, v, out, lse, grad_out, grad_lse),
                _wanted(bound, needed),
                sinks=sinks,
                sinks_wanted=needed[3],
                deterministic=deterministic or _must_be_deterministic(),
                **{**arguments, "bound": bound},
            )
        data = [grads.data.get(tensor.name) for tensor in bound.spec.tensors]
        return grads.q, grads.k, grads.v, grads.sinks, *data

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise FlashgenError(
            "the gradient of attention is differentiated again, and has no derivative here",
            write="create_graph=False; for second derivatives, plain PyTorch operations on the "
            "dense mask (`mask.dense(q_len, kv_len)`)",
        )


def _wanted(bound: Bound, needed: tuple[bool, ...]) -> Wanted:
    """From autograd's flags for q, k, v, sinks and data."""
    loaded = leaves(bound.spec.score, "load")
    data = (t.name for t, need in zip(bound.spec.tensors, needed[4:], strict=True) if need)
    q, k, v = needed[:3]
    return Wanted(q, k, v, tuple(name for name in data if name in loaded))


def _must_be_deterministic() -> bool:
    enabled = torch.are_deterministic_algorithms_enabled()
    return enabled and not torch.is_deterministic_algorithms_warn_only_enabled()
