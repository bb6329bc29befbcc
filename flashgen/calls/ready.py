"""Calls like one that was done: nothing is checked, and nothing is chosen.

Where no gradient is wanted, the whole call is one record (`records/tape.py`), planning included.
Where one is, autograd gets an engine and the tensors of the call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad as fwAD

from .. import ops
from ..call import Call
from ..decoding import wants_gradient
from ..launch import hopper_forward as launch_hopper
from ..launch import precision_of
from ..schedule import Schedule
from ..schedule.value import is_capturing
from .known import Known
from .routes import Route

Results = tuple[torch.Tensor, "torch.Tensor | None"]
# What a call asks for beside its data.
Asked = tuple[str, bool, bool, bool]
ASKED = ("backend", "deterministic", "batch_invariant", "return_lse")
_UNKNOWN = object()


@dataclass(frozen=True, eq=False)
class Ready:
    """What calls need that agree with one that was done.

    `kept`: the schedule, while it is kept; `fit`: what one that is given must be like; neither
    where each call plans, or nothing is planned. `read`: what is read of a schedule, and how that
    is laid out. `engine`: what calls run on whose gradients are wanted, but for the schedule."""

    kept: Callable[[], Schedule | None] | None
    fit: str | None
    read: Callable[[Schedule], tuple[Any, str]]
    engine: ops.Kernels | ops.Planned | None

    def schedule(self, given: Any) -> Any:
        """The schedule that is read, None where there is none; _UNKNOWN if it isn't like this."""
        if given is not None:
            return given if getattr(given, "fit_text", None) == self.fit else _UNKNOWN
        if self.kept is None:
            return None
        found = self.kept()
        return _UNKNOWN if found is None else found


def run(
    known: Known,
    asked: Asked,
    qkv: tuple[torch.Tensor, torch.Tensor, Any],
    given: Mapping[str, Any],
    data: Mapping[str, Any],
    schedule: Any,
    work: Callable[[], Results],
) -> Results:
    """What `work()` returns, by what was found before where that is enough."""
    tensors = [given[name] for name in known.given]
    tensors += [data[name] for name in known.data]
    graded = _wants_gradient(*qkv, *tensors, *known.own)
    found: Ready | None = known.ready.get((asked, graded, schedule is None))
    if found is None or _is_looked_at(qkv[0].device):
        return work()
    made = found.schedule(schedule)
    if made is _UNKNOWN:
        return work()
    if found.engine is not None:
        sinks = given["sinks"]
        sinks = None if sinks is None else sinks.contiguous()
        return ops.again(found.engine.again(made), *qkv, sinks, known.read(data))
    read, layout = ((), "") if made is None else found.read(made)
    key = ("call", asked, precision_of(qkv[0].dtype), layout)
    out, lse = known.tapes.run(key, (*qkv, *tensors, *known.own, *read), work)
    return out, lse


def remember(
    known: Known,
    asked: Asked,
    call: Call,
    route: Route,
    given: Schedule | None,
    schedule: Schedule | None,
    engine: ops.Engine | None,
) -> None:
    """Keep what a call was done with: a schedule that was `given`, or the one it found; the engine,
    unless it decoded."""
    kept, fit, graded = None, None, wants_gradient(call)
    if given is not None:
        fit = given.fit_text
    elif schedule is not None and route.kept_by is not None:
        kept = weakref.ref(schedule)
    if route.backend == "cpu":
        return
    bare: ops.Kernels | ops.Planned | None = None
    if graded:
        if known.is_stored:
            # The engine holds lengths and places, which are others in the next call.
            return
        assert isinstance(engine, ops.Kernels)
        bare = engine.on(None)
        if kept is None and fit is None:
            bare = ops.Planned(bare, call.bound, route.tile, known.tapes)
    # Nothing here may hold the call, and its tensors.
    group, has_mask = call.geometry.group, call.bound.spec.mask is not None
    apart = None
    if given is not None and route.backend == "hopper":
        dims = call.q.shape[-1], call.v.shape[-1]
        apart = launch_hopper.apart_in(given, call.bound, call.geometry, dims)

    def read(schedule: Schedule) -> tuple[Any, str]:
        if not route.decodes:
            return schedule.read_by(hopper=route.backend == "hopper", apart=apart)
        return schedule.read_by_decoding(group) if has_mask else ((), "")

    known.ready[asked, graded, given is None] = Ready(kept, fit, read, bare)


def _wants_gradient(*tensors: torch.Tensor | None) -> bool:
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    return False


def _is_looked_at(device: torch.device) -> bool:
    """Whether a graph is being captured, which must keep what it reads, or derivatives are taken in
    another way than by autograd."""
    if torch._C._are_functorch_transforms_active() or fwAD._current_level >= 0:
        return True
    return is_capturing(device)
