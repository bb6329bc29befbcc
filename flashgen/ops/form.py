"""What an operator's string names: the declaration, and how its lists are to be read."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import FlashgenError
from ..spec import Bound, Spec


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
    # Calls the masks' own checks on a call's values.
    check: Callable[[Mapping[str, Any], object], None]

    @property
    def digest(self) -> str:
        """Names the form in the registry; equal for equal declarations called alike."""
        parts = [self.spec.digest, *(repr(getattr(self, name)) for name in _IN_DIGEST)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    def bind(
        self, data: Mapping[str, Any], call: object, spread: frozenset[str] = frozenset()
    ) -> Bound:
        """As `Program.bind`, but nothing is traced."""
        values = {**dict(self.fixed), **data}
        self.check(values, call)
        scalars = {s.name: _number(values[s.name]) for s in self.spec.scalars}
        return Bound(self.spec, scalars, {t.name: values[t.name] for t in self.spec.tensors})

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


_IN_DIGEST = (
    "name flex_function softcap sinks tensors ints static data numbers counts fixed backend "
    "deterministic block_size".split()
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
    if replace(kept, check=form.check) != form:
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
