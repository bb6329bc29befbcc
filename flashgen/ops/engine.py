"""One attention, ready to run: what autograd functions and operators have in common."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch

from .. import data_gradients, launch
from ..config import config
from ..emit.gradients import Wanted
from ..geometry import Geometry
from ..kernel_names import spell
from ..launch import backward as launch_backward
from ..launch import hopper_forward as launch_hopper
from ..launch.backward import Saved
from ..records.tape import Tapes
from ..schedule import Schedule
from ..spec import Bound

if TYPE_CHECKING:
    from ..call import Call

Gradients = tuple["torch.Tensor | None", ...]


class Engine(Protocol):
    """A call apart from the tensors that autograd holds: q, k, v, sinks, and the spec's data."""

    name: str
    geometry: Geometry

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        data: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """out and the natural-log LSE; new tensors."""

    def backward(
        self,
        saved: Saved,
        sinks: torch.Tensor | None,
        data: Sequence[torch.Tensor],
        needed: Sequence[bool],
    ) -> Gradients:
        """Gradients of q, k, v, sinks and data, in this order; None where `needed` is false."""


def engine(backend: str, bound: Bound, **arguments: Any) -> Engine:
    """The engine of a backend; `arguments` are those of `launch.forward`."""
    # Autograd holds the tensors, and sees when they change; the engine must not hold them too.
    bound = Bound(bound.spec, bound.scalars, {})
    if backend == "cpu":
        from .. import cpu

        arguments.pop("tapes", None)
        return cpu.Walk(bound, **arguments)
    return Kernels(bound, hopper=backend == "hopper", **arguments)


def arguments_of(
    call: Call, schedule: Schedule, deterministic: bool, batch_invariant: bool = False
) -> dict[str, Any]:
    """What an engine is made with, beside its spec."""
    return {
        "geometry": call.geometry,
        "schedule": schedule,
        "scale": call.scale,
        "softcap": call.softcap,
        "dropout": call.dropout,
        "deterministic": deterministic,
        "batch_invariant": batch_invariant,
    }


class Kernels:
    """The generated kernels; `hopper`: of its own family where it has them.

    `tapes`: the records of calls like this one, which decide alike about tensors laid out alike."""

    def __init__(
        self,
        bound: Bound,
        *,
        deterministic: bool = False,
        batch_invariant: bool = False,
        hopper: bool = False,
        tapes: Tapes | None = None,
        **arguments: Any,
    ) -> None:
        self._run_forward: Any = launch.forward
        if hopper:
            self._run_forward = functools.partial(
                launch_hopper.forward, batch_invariant=batch_invariant
            )
        self._batch_invariant = batch_invariant
        self._hopper = hopper
        self._bound, self._deterministic = spell(bound), deterministic
        self.name = bound.spec.name
        self.geometry = arguments["geometry"]
        schedule: Schedule | None = arguments.pop("schedule")
        # None of an engine that waits for one.
        self._schedule: Any = None if schedule is None else schedule.for_call()
        self._arguments = arguments
        self._tapes = tapes or Tapes()
        self._overrides = config.overrides()

    def on(self, schedule: Schedule | None) -> Kernels:
        """The same on another schedule of the same tiles, outside of CUDA graphs."""
        made = object.__new__(Kernels)
        made.__dict__.update(self.__dict__)
        made._schedule = schedule
        return made

    def again(self, schedule: Schedule | None) -> Kernels:
        """The same for another call, under the settings of now."""
        made = self.on(schedule)
        made._overrides = config.overrides()
        return made

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        data: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        def run() -> tuple[torch.Tensor, torch.Tensor]:
            given = {"bound": with_tensors(self._bound, data), "schedule": self._schedule}
            out, lse = self._run_forward(q, k, v, sinks=sinks, **given, **self._arguments)
            return out, lse

        apart = None
        if self._hopper:
            dims = q.shape[-1], v.shape[-1]
            apart = launch_hopper.apart_in(self._schedule, self._bound, self.geometry, dims)
        read, layout = self._schedule.read_by(hopper=self._hopper, apart=apart)
        precision = launch.precision_of(q.dtype)
        key = ("forward", self._hopper, self._batch_invariant, precision, layout)
        tensors = (q, k, v, sinks, *data, *self.geometry.tensors, *read)
        out, lse = self._tapes.run(key, tensors, run)
        return out, lse

    def backward(
        self,
        saved: Saved,
        sinks: torch.Tensor | None,
        data: Sequence[torch.Tensor],
        needed: Sequence[bool],
    ) -> Gradients:
        hopper, deterministic, *_ = how = self.way_back(needed, saved.q.dtype)

        def run() -> Gradients:
            bound = with_tensors(self._bound, data)
            of_data = data_gradients.wanted(bound, needed[4:])
            wanted = Wanted(needed[0], needed[1], needed[2], of_data)
            with config.under(self._overrides):
                grads = launch_backward.backward(
                    saved,
                    wanted,
                    bound=bound,
                    sinks=sinks,
                    sinks_wanted=needed[3],
                    deterministic=deterministic,
                    hopper=hopper,
                    schedule=self._schedule,
                    **self._arguments,
                )
            found = (grads.data.get(tensor.name) for tensor in bound.spec.tensors)
            return grads.q, grads.k, grads.v, grads.sinks, *found

        read, layout = self._schedule.read_by(by_key=True, hopper=hopper, ordered=deterministic)
        # What was saved may have been put elsewhere in between.
        others = (*saved, sinks, *data)
        tensors = (*self.geometry.tensors, *read)
        return tuple(self._tapes.run(("backward", how, layout), tensors, run, others))

    def way_back(self, needed: Sequence[bool], dtype: torch.dtype) -> tuple[Any, ...]:
        """What gradients depend on beside tensors: `hopper`, `deterministic`, and more."""
        deterministic = self._deterministic or _must_be_deterministic()
        return self._hopper, deterministic, tuple(needed), launch.precision_of(dtype)


def with_tensors(bound: Bound, data: Sequence[torch.Tensor]) -> Bound:
    """What the expressions read, as autograd handed it over."""
    names = (tensor.name for tensor in bound.spec.tensors)
    return Bound(bound.spec, bound.scalars, dict(zip(names, data, strict=True)))


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Operations inside an attention compute in the dtypes they are given."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _must_be_deterministic() -> bool:
    enabled = torch.are_deterministic_algorithms_enabled()
    return enabled and not torch.is_deterministic_algorithms_warn_only_enabled()
