"""Partial results: attention over parts of the keys, put together exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .errors import CallText, FlashgenError
from .graphs import outside_graphs

if TYPE_CHECKING:
    from .api import Attention

State = tuple[torch.Tensor, torch.Tensor]
_WRITE = (
    "fg.merge(out, lse, out, lse, ...) or fg.merge([out, ...], [lse, ...]), all of one shape: out "
    "[B, H, S, Dv] and lse [B, H, S], or packed: out [T, H, Dv] and lse [H, T]"
)


def merge(*states: torch.Tensor | Sequence[torch.Tensor]) -> State:
    """Attention over all keys, from its results over disjoint parts of them.

    Args:
        *states: out, lse, out, lse, ..., as calls with `return_lse=True` give them: out
            [B, H, S, Dv] with lse [B, H, S] (natural logarithm), or packed out [T, H, Dv] with lse
            [H, T]; or a list of the outputs and a list of the LSEs.

    Returns (out, lse) in the same shapes; computed in float32 (float64 for such states). A state
    without keys (lse -inf) changes nothing, bit by bit, whatever its output holds. Differentiable
    by both. A sink belongs to one of the states alone.
    Raises FlashgenError for states that don't fit together."""
    outs, lses = _checked(states)
    kind = torch.float64 if torch.float64 in (x.dtype for x in (*outs, *lses)) else torch.float32
    is_packed = outs[0].ndim == 3
    wide = torch.stack([lse.to(kind) for lse in lses])
    most = wide.detach().amax(0)
    weights = torch.exp(wide - torch.where(most == -torch.inf, 0, most))
    total = weights.sum(0)
    safe = torch.where(total == 0, 1, total)
    lse = torch.where(total == 0, -torch.inf, most + torch.log(safe))
    shares = (weights / safe)[..., None]
    if is_packed:
        shares = shares.transpose(1, 2)
    # What an empty state holds is selected away, not multiplied by 0.
    parts = (torch.where(w == 0, 0, x.to(kind)) * w for w, x in zip(shares, outs, strict=True))
    out: torch.Tensor = sum(parts, torch.zeros((), dtype=kind, device=lse.device))
    return out.to(_common(outs)), lse


def _common(outs: Sequence[torch.Tensor]) -> torch.dtype:
    dtype = outs[0].dtype
    for out in outs[1:]:
        dtype = torch.promote_types(dtype, out.dtype)
    return dtype


def _checked(states: Sequence[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs and LSEs. Raises FlashgenError."""
    if len(states) == 2 and all(isinstance(x, (list, tuple)) for x in states):
        outs, lses = list(states[0]), list(states[1])
    else:
        outs, lses = list(states[::2]), list(states[1::2])
    if not outs or len(outs) != len(lses):
        problem = f"there are {len(outs)} outputs and {len(lses)} LSEs"
        raise _refuse(states, problem)
    if not all(isinstance(x, torch.Tensor) for x in (*outs, *lses)):
        raise _refuse(states, "a state is a pair of tensors")
    shape = outs[0].shape
    lines = (shape[1], shape[0]) if outs[0].ndim == 3 else shape[:-1]
    if outs[0].ndim not in (3, 4) or any(x.shape != shape for x in outs):
        problem = f"the outputs' shapes are {', '.join(str(list(x.shape)) for x in outs)}"
        raise _refuse(states, problem)
    if any(x.shape != torch.Size(lines) for x in lses):
        problem = f"the LSEs' shapes are {', '.join(str(list(x.shape)) for x in lses)}"
        raise _refuse(states, problem)
    return outs, lses


@outside_graphs("fg.merge is given states that don't fit together, and says why outside a graph")
def _refuse(states: Sequence[Any], problem: str) -> FlashgenError:
    return FlashgenError(problem, call=CallText("fg.merge", {}, states), write=_WRITE)


def shared_prefix_attention(
    attend: Attention,
    q: torch.Tensor,
    prefix_k: torch.Tensor,
    prefix_v: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: bool = False,
    scale: float | None = None,
    backend: Any = "auto",
    **arguments: Any,
) -> Any:
    """Attention of several sequences that begin with the same keys ("cascade"): all queries
    together over the prefix, which is read once, then each over its own keys, then `merge`.

    Args:
        attend: says what a query sees of its own keys, whose positions count from the first one
            behind the prefix; every query sees the whole prefix. So `masks.causal` means causal.
            Its sinks and softcap count once; a score function is refused.
        q: [B, Hq, Sq, D], or packed [T, Hq, D] with `cu_seqlens_q`.
        prefix_k, prefix_v: [Hkv, P, D], [Hkv, P, Dv].
        k, v, **arguments: each sequence's own keys, as `attend` takes them: dense, packed, paged.

    Returns out, or (out, lse), in the shapes of `attend`. Differentiable where `attend` is.
    Raises FlashgenError like it."""
    program = attend._program
    shown = {"q": q, "prefix_k": prefix_k, "prefix_v": prefix_v, "k": k, "v": v, **arguments}
    call = CallText("fg.shared_prefix_attention", shown)
    if program.score is not None:
        raise FlashgenError(
            f"{attend.name} changes scores by position, and the prefix has none of its own here",
            call=call,
            write="an fg.Attention without a score function, or one call over all keys",
        )
    if prefix_k.ndim != 3 or prefix_v.ndim != 3:
        problem = f"the prefix has {prefix_k.ndim} dimensions"
        raise FlashgenError(problem, call=call, write="prefix_k [Hkv, P, D], prefix_v [Hkv, P, Dv]")
    given = {"return_lse": True, "scale": scale, "backend": backend}
    own, own_lse = attend(q, k, v, **given, **arguments)
    whole = type(attend)(softcap=program.softcap)
    is_packed = q.ndim == 3
    rows = q.transpose(0, 1) if is_packed else q.transpose(0, 1).flatten(1, 2)
    out, lse = whole(rows[None], prefix_k[None], prefix_v[None], **given)
    out, lse = out[0], lse[0]
    if is_packed:
        out = out.transpose(0, 1)
    else:
        out, lse = (x.unflatten(1, (q.shape[0], q.shape[2])).transpose(0, 1) for x in (out, lse))
    merged = merge(out, lse, own, own_lse)
    return merged if return_lse else merged[0]
