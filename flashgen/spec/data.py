"""A call's data against its shapes: lengths, broadcasting, devices, divisors."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

import torch

from ..errors import FlashgenError
from ..expr import Env, Expr, evaluate, leaves
from .spec import Bound, Spec

BROADCAST = ("b", "h", "h_kv")


def fit_data(
    bound: Bound, extents: Mapping[str, int | None], device: torch.device, call: object
) -> Bound:
    """Check every dimension that a bare index reads, and expand those of size 1 under b, h, h_kv.

    `extents` says how many values each index takes (the largest position + 1 for `q_idx` and
    `kv_idx`); None where only the device knows. Raises FlashgenError."""
    tensors = {name: tensor.resolve_neg() for name, tensor in bound.tensors.items()}
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise FlashgenError(
                f"{name} is on {tensor.device}, and the queries are on {device}",
                call=call,
                write=f"{name}.to(q.device); a mask with data bound to it: mask.to(q.device)",
            )
    _check_not_empty(bound, extents, call)
    for name, dim, symbol in _bare_dimensions(bound.spec):
        extent, size = extents.get(symbol), tensors[name].shape[dim]
        if extent is None or size == extent:
            continue
        if size == 1 and symbol in BROADCAST:
            shape = [-1] * tensors[name].ndim
            shape[dim] = extent
            tensors[name] = tensors[name].expand(shape)
        elif size < extent or symbol in BROADCAST:
            raise _length_error(name, tensors[name], dim, symbol, extent, call)
    _check_divisors(bound, device, call)
    return replace(bound, tensors=tensors)


def _check_not_empty(bound: Bound, extents: Mapping[str, int | None], call: object) -> None:
    """An index is clamped to what there is, so there must be something."""
    if any(extents[name] == 0 for name in ("b", "h", "kv_idx")):
        return
    for node in bound.spec.nodes:
        if node.op == "load" and not bound.tensors[node.attr].numel():
            raise FlashgenError(
                f"{node.attr} has shape {list(bound.tensors[node.attr].shape)}: there is nothing "
                f"that {node} could read",
                call=call,
                write=f"{node.attr} with at least one element along each dimension",
            )


def _length_error(
    name: str, tensor: torch.Tensor, dim: int, symbol: str, extent: int, call: object
) -> FlashgenError:
    allowed = f"at least {extent}"
    if symbol in BROADCAST:
        allowed = f"{extent} or 1" if extent != 1 else "1"
    why = "" if symbol in BROADCAST else " (positions are absolute: the largest, plus 1)"
    return FlashgenError(
        f"{name} has shape {list(tensor.shape)}; its dimension {dim} is indexed by {symbol} and "
        f"needs a length of {allowed}{why}",
        call=call,
        write=_enough(name, tensor.shape[dim], dim, symbol, extent, call),
    )


def _enough(name: str, size: int, dim: int, symbol: str, extent: int, call: object) -> str:
    write = f"{name} with {extent} element{'s' if extent > 1 else ''} along dimension {dim}"
    asked = {"b": "batch", "h": "heads"}.get(symbol)
    if asked and ".dense(" in str(call):
        return f"{asked}={size}, or {write}"
    return write


@functools.lru_cache(maxsize=1024)
def _bare_dimensions(spec: Spec) -> tuple[tuple[str, int, str], ...]:
    found: dict[tuple[str, int, str], None] = {}
    for node in spec.nodes:
        if node.op == "load":
            for dim, position in enumerate(node.args):
                if position.op == "index":
                    found[node.attr, dim, position.attr] = None
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def _host_divisors(spec: Spec) -> tuple[Expr, ...]:
    """Divisions of integers by what is made of scalars only."""
    return tuple(
        node
        for node in spec.nodes
        if node.op in ("floordiv", "mod")
        and node.kind == "int"
        and leaves(node.args[1], "scalar")
        and not any(leaves(node.args[1], op) for op in ("index", "load", "score", "size"))
    )


def _check_divisors(bound: Bound, device: torch.device, call: object) -> None:
    """A divisor made of scalars only is known on the host, and must not be zero."""
    for node in _host_divisors(bound.spec):
        divisor = node.args[1]
        first = torch.zeros((), dtype=torch.int64, device="cpu")
        env = Env({"b": first}, scalars=dict(bound.scalars))
        if not evaluate(divisor, env).item():
            names = sorted(leaves(divisor, "scalar"))
            given = ", ".join(f"{n}={bound.scalars[n]}" for n in names)
            raise FlashgenError(
                f"{node} divides by zero, as {given}", call=call, write="a divisor that isn't zero"
            )
