"""Partial results: attention over parts of the keys, put together exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .errors import CallText, FlashgenError
from .graphs import outside_graphs

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
    without keys (lse -inf) changes no number, whatever its output holds. Differentiable
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
    if len({x.device for x in (*outs, *lses)}) > 1:
        devices = ", ".join(dict.fromkeys(str(x.device) for x in (*outs, *lses)))
        raise _refuse(states, f"the states are on {devices}")
    if odd := [x.dtype for x in (*outs, *lses) if not x.dtype.is_floating_point]:
        raise _refuse(states, f"a state has dtype {odd[0]}")
    if any(x.shape != torch.Size(lines) for x in lses):
        problem = f"the LSEs' shapes are {', '.join(str(list(x.shape)) for x in lses)}"
        raise _refuse(states, problem)
    return outs, lses


@outside_graphs("fg.merge is given states that don't fit together, and says why outside a graph")
def _refuse(states: Sequence[Any], problem: str) -> FlashgenError:
    return FlashgenError(problem, call=CallText("fg.merge", {}, states), write=_WRITE)
