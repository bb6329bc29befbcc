"""What an operator's string names: the declaration, and how its lists are to be read."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch

from ..calls.known import KnownCalls
from ..errors import FlashgenError
from ..expr import leaves
from ..geometry import Geometry
from ..schedule import Runs, Schedule
from ..schedule.classify import grid_of
from ..schedule.make import mask_scalars, sources_of
from ..schedule.runs import column_capacity, run_capacity
from ..spec import MLA, Bound, Spec
from ..spec.leaf import Leaf
from . import flat


@dataclass(frozen=True)
class Form:
    """A call through an operator, apart from its tensors and the integers that may vary.

    Operators take tensors and integers as lists, whose order is `tensors`, `data`, `numbers`,
    and the schedule's; and `ints`, `counts`, and the schedule's. It holds no tensor, so that what
    is registered costs a few kilobytes for each declaration, whatever it is called with."""

    spec: Spec
    name: str
    flex_function: str | None
    softcap: float | None
    sinks: bool
    # Arguments of the call by name: tensors, integers, and what never varies.
    tensors: tuple[str, ...]
    ints: tuple[str, ...]
    static: tuple[tuple[str, Any], ...]
    # What the expressions read: tensors, float and integer scalars given, scalars bound early.
    data: tuple[str, ...]
    numbers: tuple[str, ...]
    counts: tuple[str, ...]
    fixed: tuple[tuple[str, Any], ...]
    backend: str
    deterministic: bool
    block_size: tuple[int, int]
    # What a given schedule was made for: its mask's name and digest, and the scalars.
    made_for: tuple[str, str, tuple[str, ...]] | None
    # Lists of runs that an operator makes on a GPU: along rows, and for gradients along columns.
    lists: int
    # Masks with a check of their own, and the names their parameters have in the call.
    checks: tuple[tuple[Leaf, tuple[tuple[str, str], ...]], ...] = field(compare=False)
    calls: KnownCalls = field(default_factory=KnownCalls, compare=False, repr=False)

    @property
    def heads(self) -> MLA | None:
        return self.spec.heads

    @property
    def digest(self) -> str:
        """Names the form in the registry; equal for equal declarations called alike."""
        parts = [self.spec.digest, *(repr(getattr(self, name)) for name in _IN_DIGEST)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    def bind(
        self,
        data: Mapping[str, Any],
        call: object,
        spread: frozenset[str] = frozenset(),
        lengths: Mapping[str, int] = MappingProxyType({}),
    ) -> Bound:
        """As `Program.bind`, but nothing is traced."""
        values = {**dict(self.fixed), **data}
        for leaf, names in self.checks:
            own = {own: values[name] for own, name in names if name in values}
            leaf.run_check({**lengths, **own}, call)
        scalars = {s.name: _number(values[s.name]) for s in self.spec.scalars}
        return Bound(self.spec, scalars, {t.name: values[t.name] for t in self.spec.tensors})

    @cached_property
    def places(self) -> dict[str, int]:
        """Where in the list of tensors the sinks are, and each of the data."""
        places = {name: at for at, name in enumerate(self.tensors)}
        start = len(self.tensors)
        return places | {f"data {name}": start + at for at, name in enumerate(self.data)}

    @cached_property
    def differentiable(self) -> frozenset[int]:
        """Places of what gradients reach."""
        names = ("sinks", *(f"data {name}" for name in leaves(self.spec.score, "load")))
        return frozenset(self.places[name] for name in names if name in self.places)

    def read(
        self, others: Sequence[torch.Tensor], ints: Sequence[int]
    ) -> tuple[dict[str, Any], dict[str, Any], Sequence[torch.Tensor], Sequence[int]]:
        """The call's arguments, its data, and what is left: the schedule's."""
        tensors, whole = iter(others), iter(ints)
        arguments = dict(self.static)
        arguments |= {name: next(tensors) for name in self.tensors}
        arguments |= {name: next(whole) for name in self.ints}
        data: dict[str, Any] = {name: next(tensors) for name in self.data}
        data |= {name: next(tensors) for name in self.numbers}
        data |= {name: next(whole) for name in self.counts}
        return arguments, data, list(tensors), list(whole)

    def grid(self, geometry: Geometry) -> tuple[int, ...]:
        """Batch, heads, rows and columns of the schedule's tiles."""
        return grid_of(Bound(self.spec, {}, {}), geometry, self.block_size)

    def axes(self, grid: Sequence[int]) -> tuple[tuple[tuple[int, ...], int], ...]:
        """The shape (batch, heads, lists) and capacity of runs along rows, and along columns."""
        batch, heads, rows, columns = grid
        along_rows = (batch, heads, rows), run_capacity(self.spec.mask, columns)
        return along_rows, ((batch, heads, columns), column_capacity(rows))

    def schedule_of(
        self, bound: Bound, geometry: Geometry, tensors: Sequence[torch.Tensor], ints: Sequence[int]
    ) -> Schedule:
        """From the lists' ends: states, runs along rows and along columns. A schedule that was
        given comes as it is, and with what it was made for; one that was made here in one
        dimension."""
        if self.made_for is None:
            return self._planned(bound, geometry, tensors)
        name, digest, names = self.made_for
        numbers = dict(zip(names, ints[2:], strict=True))
        scalars = tuple((n, numbers.get(n, value)) for n, value in mask_scalars(bound))
        columns = None
        if len(tensors) == 5:
            columns = flat.runs_of(tensors[4], *self.axes(tensors[0].shape)[1])
        return Schedule(
            tensors[0],
            self.block_size,
            ints[0],
            ints[1],
            geometry.q_offset,
            geometry.kv_lens,
            name,
            digest,
            "auto",
            scalars,
            Runs(*tensors[1:4]) if len(tensors) > 1 else None,
            geometry.group if bound.spec.uses("h_kv") else None,
            geometry.packing,
            sources_of(bound),
            columns,
        )

    def _planned(
        self, bound: Bound, geometry: Geometry, tensors: Sequence[torch.Tensor]
    ) -> Schedule:
        grid = self.grid(geometry)
        runs = [
            flat.runs_of(x, *axis) for x, axis in zip(tensors[1:], self.axes(grid), strict=False)
        ]
        return Schedule(
            flat.states_of(tensors[0], grid),
            self.block_size,
            geometry.q_len,
            geometry.kv_len,
            geometry.q_offset,
            geometry.kv_lens,
            bound.spec.name,
            bound.spec.mask_digest,
            "auto",
            mask_scalars(bound),
            runs[0] if runs else None,
            geometry.group if bound.spec.uses("h_kv") else None,
            None,
            sources_of(bound),
            runs[1] if len(runs) > 1 else None,
        )


_IN_DIGEST = (
    "name flex_function softcap sinks tensors ints static data numbers counts fixed backend "
    "deterministic block_size made_for lists".split()
)


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


# Beside the cache and the settings, the only state of this package: operators carry a string, and
# what it names must be found when a graph runs.
_forms: dict[str, Form] = {}
_lock = threading.Lock()


def register(form: Form) -> str:
    """Keep a form, and give the digest that operators carry."""
    digest = form.digest
    with _lock:
        kept = _forms.setdefault(digest, form)
    if kept != form:
        raise FlashgenError(f"two declarations have the digest {digest}", call=form.name)
    return digest


def form_of(digest: str) -> Form:
    """Raises FlashgenError where nothing was registered: a graph of another process."""
    try:
        return _forms[digest]
    except KeyError:
        raise FlashgenError(
            f"no declaration {digest!r} is known in this process",
            call="torch.ops.flashgen",
            write="a call of the fg.Attention, which registers it, before the graph is run",
        ) from None
