"""Eager calls: autograd functions around an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad as fwAD

from .. import transforms
from ..errors import CallText, FlashgenError
from ..geometry import refuse_paged
from ..launch.backward import Saved
from .engine import Engine, Gradients, no_autocast


def attention(
    made: Engine,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    data: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the visited tiles by an engine, differentiable once.

    q [B, Hq, Sq, D], k [B, Hkv, Skv, D], v [B, Hkv, Skv, Dv], any strides; `sinks` [Hq]; `data`:
    what the spec's expressions read, in its order. Returns out [B, Hq, Sq, Dv] in q's dtype and the
    natural-log LSE [B, Hq, Sq] in float32 (float64 for float64 queries). Packed: q, out
    [1, H, T, D], the LSE [1, H, T]; paged: k, v [pages, Hkv, page size, D], without gradients.
    Gradients reach q, k, v, sinks and the float data of the score function; only those asked for
    are computed.
    Raises FlashgenError where a second derivative is asked for, or a batched or forward one."""
    if not _is_watched(q, k, v, sinks, *data):
        with no_autocast(q.device):
            return made.forward(q, k, v, sinks, data)
    function = _Transformed if transforms.are_active() else _Attention
    out, lse = function.apply(made, q, k, v, sinks, *data)  # type: ignore[no-untyped-call]
    return out, lse


def again(
    made: Engine,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    data: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention` where a gradient is wanted, by an engine that one like it was done with: no
    function transform is active, and no tensor is one's."""
    # What a function's own `apply` does beside this looks for function transforms.
    apply: Any = super(torch.autograd.Function, _Attention).apply
    out, lse = apply(made, q, k, v, sinks, *data)
    return out, lse


def _is_watched(*inputs: torch.Tensor | None) -> bool:
    """Whether autograd or a function transform wants to know of the call."""
    if transforms.are_active() or fwAD._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def refuse_forward_mode(name: str, *inputs: torch.Tensor) -> None:
    """Raise FlashgenError where one of an operator's tensors has a tangent, which it would lose."""
    if fwAD._current_level < 0:
        return
    # An operator runs where autograd is behind it, and a tangent isn't seen.
    guard: Any = torch._C._ForceDispatchKeyGuard
    none = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
    with guard(torch._C._dispatch_tls_local_include_set(), none):
        pairs = (fwAD.unpack_dual(x) for x in inputs)  # type: ignore[no-untyped-call]
        has_tangent = any(pair.tangent is not None for pair in pairs)
    if has_tangent:
        raise _only_gradients(name)


def _only_gradients(name: str) -> FlashgenError:
    return FlashgenError(
        "a forward-mode derivative of attention is asked for, and there are only gradients",
        call=f"{name}(q, k, v, ...)",
        write="torch.autograd.grad or torch.func.grad; for forward mode, plain PyTorch "
        "operations on the dense mask (`mask.dense(q_len, kv_len)`)",
    )


class _Function(torch.autograd.Function):
    """What neither direction has: rules for vmap and for forward derivatives."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, made: Engine, *inputs: Any) -> Any:
        raise transforms.mapped(_restated(made, *inputs))

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise _only_gradients(ctx.made.name)


class _Attention(_Function):
    """Attention as autograd sees it: a function of an engine, q, k, v, sinks and data."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        made, q, k, v, sinks, *data = inputs
        with no_autocast(q.device):
            output = made.forward(q, k, v, sinks, data)
        _save(ctx, inputs, output)
        return output

    @staticmethod
    def backward(
        ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None
    ) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad
        if grad_out is None and grad_lse is None:
            return (None,) * len(needed)
        saved = ctx.saved_tensors[: len(needed) + 1]
        try:
            refuse_paged(ctx.made.geometry)
            transforms.refuse_mapped(grad_out, grad_lse)
        except FlashgenError as error:
            error.call = str(_restated(ctx.made, *saved))
            raise
        given = (ctx.made, needed[1:], grad_out, grad_lse, *saved)
        # Only where the gradient gets a graph is there a use for a function, whose backward is an
        # error.
        run = _Gradients.apply if torch.is_grad_enabled() else _gradients
        return None, *run(*given)


class _Transformed(_Attention):
    """The same with the `setup_context` that function transforms want, which costs a signature
    read at each call."""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        made, q, k, v, sinks, *data = inputs
        with no_autocast(q.device):
            return made.forward(q, k, v, sinks, data)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _save(ctx, inputs, output)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    made = ctx.made = inputs[0]
    ctx.set_materialize_grads(False)
    # Lengths and places are the engine's; autograd sees when they are edited.
    watched = (x for x in made.geometry.tensors if x is not None)
    ctx.save_for_backward(*map(saveable, (*inputs[1:4], *output, *inputs[4:], *watched)))


def saveable(x: torch.Tensor | None) -> torch.Tensor | None:
    """A copy of what was made in inference mode, as data may be: autograd doesn't save that."""
    return x.clone() if x is not None and x.is_inference() else x


def _gradients(
    made: Engine,
    needed: tuple[bool, ...],
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    *saved: Any,
) -> Gradients:
    q, k, v, out, lse, sinks, *data = saved
    # As in calls, views that stand for negated numbers are written out.
    grad_out, grad_lse = (x if x is None else x.resolve_neg() for x in (grad_out, grad_lse))
    with no_autocast(q.device):
        return made.backward(Saved(q, k, v, out, lse, grad_out, grad_lse), sinks, data, needed)


class _Gradients(_Function):
    """The backward, as a function whose own derivative is an error that says so."""

    forward = staticmethod(_gradients)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        made, _, _, _, *saved = inputs
        ctx.made, ctx.text = made, str(_restated(made, *saved))

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise twice(ctx.text)


def _restated(made: Engine, q: Any, k: Any, v: Any, *_: Any) -> CallText:
    """The call as kernels see it."""
    return CallText(made.name, {"q": q, "k": k, "v": v})


def twice(call: object | None = None) -> FlashgenError:
    """The error for a second derivative."""
    return FlashgenError(
        "the gradient of attention is differentiated again, and has no derivative here",
        call=call,
        write="create_graph=False; for second derivatives, plain PyTorch operations on the "
        "dense mask (`mask.dense(q_len, kv_len)`)",
    )
