"""Buffers for gradients of data: where each element has one owner, and how the others add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from .emit.gradients import EXACT_WORDS, Wanted
from .expr import Expr, leaves, walk
from .geometry import Geometry
from .spec import Bound, Spec

# What the integers of an exact sum count (templates/functions.j2), the smallest first.
_UNITS = tuple(2.0 ** (24 * i - 149) for i in range(EXACT_WORDS - 2))


def wanted(bound: Bound, needed: Sequence[bool]) -> tuple[str, ...]:
    """Names of the data whose gradient is `needed` (of each tensor) and isn't zero."""
    loaded = leaves(bound.spec.score, "load")
    pairs = zip(bound.spec.tensors, needed, strict=True)
    return tuple(tensor.name for tensor, need in pairs if need and tensor.name in loaded)


def stored(spec: Spec, names: tuple[str, ...], geometry: Geometry) -> tuple[str, ...]:
    """Those of the tensors that no two pairs read the same element of: `bias[b, h, q_idx, kv_idx]`.

    Positions below 0 are clamped, so that several rows share an element; so are those beyond the
    data, which packed calls don't check."""
    offset = geometry.offset
    if spec.score is None or isinstance(offset, torch.Tensor) or offset < 0:
        return ()
    if not geometry.is_dense:
        return ()
    told_apart = {"q_idx", "kv_idx"} | (geometry.spread & {"b", "h"})
    loads = [node for node in walk(spec.score) if node.op == "load"]
    own = {name: [load for load in loads if load.attr == name] for name in names}
    return tuple(n for n, reads in own.items() if len(reads) == 1 and told_apart <= _bare(reads[0]))


def _bare(load: Expr) -> set[str]:
    """Indices that stand alone in a dimension."""
    return {position.attr for position in load.args if position.op == "index"}


def allocate(wanted: Wanted, bound: Bound, kind: torch.dtype) -> dict[str, torch.Tensor]:
    """Zeros for the kernels: stored gradients in the data's dtype, sums in `kind`, or in integers
    [..., EXACT_WORDS]."""
    buffers = {}
    for name in wanted.data:
        data = bound.tensors[name]
        shape, dtype = tuple(data.shape), kind
        if name in wanted.stored:
            dtype = data.dtype
        elif wanted.exact:
            shape, dtype = (*shape, EXACT_WORDS), torch.int64
        buffers[name] = torch.zeros(shape, dtype=dtype, device=data.device)
    return buffers


def finish(buffers: Mapping[str, torch.Tensor], bound: Bound) -> dict[str, torch.Tensor]:
    """Gradients in their tensors' dtypes, rounded once."""
    return {
        name: (buffer if buffer.dtype.is_floating_point else _rounded(buffer)).to(
            bound.tensors[name].dtype
        )
        for name, buffer in buffers.items()
    }


def _rounded(words: torch.Tensor) -> torch.Tensor:
    """Exact sums [..., EXACT_WORDS] as float64 [...]."""
    total = torch.zeros(words.shape[:-1], dtype=torch.float64, device=words.device)
    for i in reversed(range(len(_UNITS))):
        total += words[..., i].double() * _UNITS[i]
    for i, infinity in ((-2, torch.inf), (-1, -torch.inf)):
        total += torch.where(words[..., i] > 0, infinity, 0.0)
    return total
