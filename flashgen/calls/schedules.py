"""Schedules that an attention keeps: of masks that read no data, they depend on lengths and scalars
only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from ..call import Call
from ..records.tape import Tapes
from ..schedule import Planner, Schedule
from ..schedule.make import make_schedule
from ..schedule.value import is_capturing

_MOST = 16


class Schedules:
    """The latest ones, by what they depend on (`routes.kept_key`)."""

    def __init__(self) -> None:
        self._latest: OrderedDict[Any, Schedule] = OrderedDict()
        # Those that CUDA graphs read: they stay while the attention does.
        self._pinned: dict[Any, Schedule] = {}

    def __iter__(self) -> Iterator[Schedule]:
        return iter(self._latest.values())

    def clear(self) -> None:
        """Keep none, but those that CUDA graphs read."""
        self._latest.clear()

    def of(
        self, call: Call, block: tuple[int, int], planner: Planner, key: Any, tapes: Tapes
    ) -> Schedule:
        """The schedule that is kept by this key, or a new one; without a key it isn't kept."""
        capturing = is_capturing(call.q.device)
        if key is not None and key in self._latest:
            self._latest.move_to_end(key)
            if capturing:
                self._pinned[key] = self._latest[key]
            return self._latest[key]
        made = make_schedule(call.bound, call.geometry, block, planner, call.text, tapes)
        # What a CUDA graph makes has no contents before it is replayed.
        if key is not None and not capturing:
            self._latest[key] = made
            while len(self._latest) > _MOST:
                self._latest.popitem(last=False)
        return made
