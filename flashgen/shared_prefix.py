"""Attention of sequences that begin with the same keys: the prefix once, suffixes apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .call import autocast
from .errors import CallText, FlashgenError
from .graphs import outside_graphs
from .states import State, merge

if TYPE_CHECKING:
    from .api import Attention

_CALL = "fg.shared_prefix_attention"
_ONE_CALL = "one call over all keys, the prefix before each sequence's own"
_SHAPES = "prefix_k [Hkv, P, D], prefix_v [Hkv, P, Dv], of the dtype and on the device of q"


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
    batch_invariant: bool = False,
    **arguments: Any,
) -> Any:
    """Attention of several sequences that begin with the same keys ("cascade"): all queries
    together over the prefix, which is read once, then each over its own keys, then `merge`.

    Args:
        attend: says what a query sees of its own keys, whose positions count from the first one
            behind the prefix; every query sees the whole prefix. So `masks.causal` means causal.
            Its sinks and softcap count once; a score function and latent heads are refused.
        q: [B, Hq, Sq, D], or packed [T, Hq, D] with `cu_seqlens_q`.
        prefix_k, prefix_v: [Hkv, P, D], [Hkv, P, Dv].
        batch_invariant: as in calls; the prefix is then read once for each sequence. Packed
            queries are refused.
        k, v, **arguments: each sequence's own keys, as `attend` takes them: dense, packed, paged;
            but no dropout, whose positions the prefix hasn't.

    Returns out, or (out, lse), in the shapes of `attend`. Differentiable where `attend` is.
    Raises FlashgenError like it. In `torch.compile` it breaks the graph."""
    q, prefix_k, prefix_v, k, v = autocast(q, prefix_k, prefix_v, k, v)
    shown = {"q": q, "prefix_k": prefix_k, "prefix_v": prefix_v, "k": k, "v": v, **arguments}
    if batch_invariant:
        shown["batch_invariant"] = batch_invariant
    _check(attend, shown, CallText(_CALL, shown, (attend,)))
    given = {
        "return_lse": True, "scale": scale, "backend": backend, "batch_invariant": batch_invariant
    }  # fmt: skip
    own, own_lse = attend(q, k, v, **given, **arguments)
    out, lse = _over_prefix(attend, q, prefix_k[None], prefix_v[None], given)
    merged = merge(out, lse, own, own_lse)
    return merged if return_lse else merged[0]


def _over_prefix(
    attend: Attention,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    given: dict[str, Any],
) -> State:
    """All queries as those of one sequence, or each sequence's by themselves."""
    whole = type(attend)(softcap=attend._program.softcap)
    if given["batch_invariant"] and len(q):
        parts = [whole(one[None], keys, values, **given) for one in q]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])
    is_packed = q.ndim == 3
    rows = q.transpose(0, 1) if is_packed else q.transpose(0, 1).flatten(1, 2)
    out, lse = (x[0] for x in whole(rows[None], keys, values, **given))
    if is_packed:
        return out.transpose(0, 1), lse
    out, lse = (x.unflatten(1, (q.shape[0], q.shape[2])).transpose(0, 1) for x in (out, lse))
    return out, lse


@outside_graphs("fg.shared_prefix_attention looks at what it is given outside a graph")
def _check(attend: Any, given: dict[str, Any], call: CallText) -> None:
    """Raises FlashgenError for what the prefix can't have; the rest is looked at by calls."""
    program = getattr(attend, "_program", None)
    if program is None:
        problem, write = "attend is no fg.Attention", "fg.Attention(mask), or fg.Attention()"
        raise FlashgenError(problem, call=call, write=write)
    if program.score is not None:
        raise FlashgenError(
            f"{attend.name} changes scores by position, and the prefix has none of its own here",
            call=call,
            write=f"an fg.Attention without a score function, or {_ONE_CALL}",
        )
    if program.heads is not None:
        raise FlashgenError("it has no latent heads", call=call, write=_ONE_CALL)
    if given.get("dropout_p"):
        raise FlashgenError("the prefix has no positions to drop", call=call, write=_ONE_CALL)
    q, k, v = (given[name] for name in ("q", "prefix_k", "prefix_v"))
    for name, x in (("q", q), ("prefix_k", k), ("prefix_v", v)):
        if not isinstance(x, torch.Tensor):
            raise FlashgenError(f"{name} is a {type(x).__name__}", call=call, write=_SHAPES)
    if given.get("batch_invariant") and q.ndim == 3:
        problem = "packed queries of all sequences meet the prefix together"
        raise FlashgenError(problem, call=call, write="q [B, Hq, Sq, D]")
    if k.ndim != 3 or v.ndim != 3:
        problem = f"the prefix has {k.ndim if k.ndim != 3 else v.ndim} dimensions"
        raise FlashgenError(problem, call=call, write=_SHAPES)
    if q.ndim in (3, 4) and (problem := _misfit(q, k, v)):
        raise FlashgenError(problem, call=call, write=_SHAPES)


def _misfit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
    """Where the prefix doesn't fit to queries; empty if it does."""
    heads = q.shape[1]
    if k.shape[:2] != v.shape[:2]:
        return f"prefix_k is {list(k.shape)}, and prefix_v {list(v.shape)}"
    if k.shape[0] == 0 or heads % k.shape[0]:
        return f"{heads} query heads can't share {k.shape[0]} heads of the prefix evenly"
    if k.shape[2] != q.shape[-1]:
        return f"queries have {q.shape[-1]} dimensions, and keys of the prefix {k.shape[2]}"
    if any(x.dtype != q.dtype for x in (k, v)):
        return f"q is of {q.dtype}, prefix_k of {k.dtype}, and prefix_v of {v.dtype}"
    if any(x.device != q.device for x in (k, v)):
        return f"q is on {q.device}, prefix_k on {k.device}, and prefix_v on {v.device}"
    return ""
