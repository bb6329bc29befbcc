"""Checks that cost time, made where FLASHGEN_DEBUG is set."""

from __future__ import annotations

import torch

from .config import log
from .expr import Expr, evaluate, leaves, walk
from .geometry import Geometry
from .reference import dense_env
from .spec import Bound

# Rows of queries looked at together: the check never holds Sq x Skv numbers.
_ROWS = 256


def report_clamped(bound: Bound, geometry: Geometry) -> int:
    """Log, for each index that leaves its tensor, at how many positions it does; their sum."""
    total = 0
    for load, dim in _indexed(bound):
        count = _outside(load.args[dim], bound.tensors[load.attr].shape[dim], bound, geometry)
        if count:
            log("debug").warning(
                "%s: the index %s leaves [0, %d) at %d positions, and is clamped",
                load, load.args[dim], bound.tensors[load.attr].shape[dim], count,
            )  # fmt: skip
        total += count
    return total


def _indexed(bound: Bound) -> list[tuple[Expr, int]]:
    """Indices that the call didn't check by length already."""
    exprs = [e for e in (bound.spec.mask, bound.spec.score) if e is not None]
    loads = dict.fromkeys(n for e in exprs for n in walk(e) if n.op == "load")
    return [
        (load, dim)
        for load in loads
        for dim, position in enumerate(load.args)
        if not (position.op == "index" and position.attr in ("b", "h", "h_kv"))
        and not leaves(position, "score")
    ]


def _outside(position: Expr, size: int, bound: Bound, geometry: Geometry) -> int:
    used = leaves(position, "index")
    rows = geometry.q_len if "q_idx" in used else 1
    columns = geometry.kv_len if "kv_idx" in used else 1
    count = 0
    for start in range(0, rows, _ROWS):
        shape = (geometry.batch, geometry.heads, geometry.kv_heads)
        env = dense_env(
            bound,
            (*shape, min(_ROWS, rows - start), columns),
            geometry.offset + start,
            geometry.device,
        )
        env.index["q_len"] = torch.tensor(geometry.q_len, device=geometry.device)
        env.index["kv_len"] = torch.tensor(geometry.kv_len, device=geometry.device)
        values = evaluate(position, env)
        count += int(((values < 0) | (values >= size)).sum())
    return count
