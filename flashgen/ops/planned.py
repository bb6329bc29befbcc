"""An engine whose calls plan: nobody gave a schedule, and the mask's data may be another's.

Planning is a part of the forward, and finding the runs along the keys one of the backward, so that
each of them is one record, and what only kernels see no tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..launch import precision_of
from ..launch.backward import Saved
from ..records.tape import Tapes
from ..schedule import Schedule
from ..schedule.make import make_schedule, of_states
from ..schedule.runs import Runs
from ..spec import Bound
from .engine import Gradients, Kernels, with_tensors


class Planned:
    """`kernels`, without a schedule, on one of these tiles that each call makes; `bound`: the call
    as users named it. Serves one call; `again` makes the next one's."""

    def __init__(
        self, kernels: Kernels, bound: Bound, block: tuple[int, int], tapes: Tapes
    ) -> None:
        self.name, self.geometry = kernels.name, kernels.geometry
        self._kernels, self._block, self._tapes = kernels, block, tapes
        self._bound = Bound(bound.spec, bound.scalars, {})
        self._tiles: Sequence[torch.Tensor] = ()

    def again(self, schedule: None) -> Planned:
        """The same for another call, under the settings of now."""
        return Planned(self._kernels.again(None), self._bound, self._block, self._tapes)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        data: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        def run() -> tuple[torch.Tensor, ...]:
            bound = with_tensors(self._bound, data)
            how: Any = (self.geometry, self._block, "auto", bound.spec.name, self._tapes)
            schedule = make_schedule(bound, *how)
            results = self._kernels.on(schedule).forward(q, k, v, sinks, data)
            return *results, *schedule.made

        key = ("plan, forward", precision_of(q.dtype))
        out, lse, *self._tiles = self._tapes.run(key, (q, k, v, sinks, *data), run)
        return out, lse

    def backward(
        self,
        saved: Saved,
        sinks: torch.Tensor | None,
        data: Sequence[torch.Tensor],
        needed: Sequence[bool],
    ) -> Gradients:
        def run() -> Gradients:
            return self._kernels.on(self._schedule(data)).backward(saved, sinks, data, needed)

        key = ("planned, backward", self._kernels.way_back(needed, saved.q.dtype))
        others = (*saved, sinks, *data)
        return tuple(self._tapes.run(key, self._tiles, run, others))

    def _schedule(self, data: Sequence[torch.Tensor]) -> Schedule:
        """The one that the forward made."""
        states, *runs = self._tiles
        bound = with_tensors(self._bound, data)
        made = Runs(*runs) if runs else None
        return of_states(states, made, bound, self.geometry, self._block, "auto", self._tapes)
