"""The first call of a kind: its kernels are compiled side by side, those of its gradients too."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .. import ahead, launch, ops
from ..call import Call
from ..decoding import decode, wants_gradient
from ..kernel_names import spell
from ..launch.backward import Saved
from ..schedule.make import make_schedule
from .known import Known
from .routes import Route, is_planned


def compile_ahead(
    known: Known,
    call: Call,
    route: Route,
    tile: tuple[int, int],
    deterministic: bool,
    invariant: bool,
    is_given: bool,
) -> None:
    """Begin to compile what a call launches on a schedule of this tile, unless that was done;
    `is_given`: on one that was made before."""
    if call.q.device.type != "cuda":
        return
    needed = _needed(call)
    how = tile, needed, deterministic, invariant, is_given
    asked = ("ahead", route.backend, route.decodes, *how)

    def begin() -> bool:
        key = (*asked, *_kind_of(call))
        ahead.once(key, call.q.device, functools.partial(_go_through, call, route, *how))
        return True

    known.once(asked, begin)


def _kind_of(call: Call) -> tuple[Any, ...]:
    """What kernels depend on, all but alignment and such."""
    geometry, bound = call.geometry, spell(call.bound)
    dims = (call.q.shape[-1], call.v.shape[-1])
    variant = launch.variant_of(bound, geometry, *dims, call.dropout is not None)
    size = None if geometry.pages is None else geometry.pages.size
    how = (call.q.dtype, call.q.device, geometry.group > 1, size, launch.precision_of(call.q.dtype))
    return bound.spec, variant, call.softcap, *how


def _needed(call: Call) -> tuple[bool, ...]:
    """For each of q, k, v, sinks and data, whether its gradient is wanted; () if none is."""
    if not wants_gradient(call) or call.geometry.pages is not None:
        return ()
    inputs = (call.q, call.k, call.v, call.sinks, *call.data)
    return tuple(x is not None and x.requires_grad for x in inputs)


def _go_through(
    call: Call,
    route: Route,
    tile: tuple[int, int],
    needed: tuple[bool, ...],
    deterministic: bool,
    invariant: bool,
    is_given: bool,
) -> None:
    """The call on a schedule of its own, which is dropped, with results that nobody sees."""
    with torch.no_grad():
        schedule = None
        if is_planned(call, route.decodes):
            schedule = make_schedule(call.bound, call.geometry, tile, "auto", call.text)
            schedule = schedule.shared() if is_given else schedule
        if route.decodes:
            decode(call, schedule, invariant, route.backend)
            return
        assert schedule is not None
        arguments = ops.arguments_of(call, schedule, deterministic, invariant)
        engine = ops.engine(route.backend, call.bound, **arguments)
        q, k, v = (x.detach() for x in (call.q, call.k, call.v))
        with ops.no_autocast(q.device):
            out, lse = engine.forward(q, k, v, call.sinks, call.data)
            if needed:
                saved = Saved(q, k, v, out, lse, torch.empty_like(out), None)
                # The forward's own kernel first, then these, then what is small.
                with ahead.behind(0.5):
                    engine.backward(saved, call.sinks, call.data, needed)
