"""One user function inside a declaration: its names, and what is bound early."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, Literal

from ..errors import FlashgenError, did_you_mean
from ..trace import Function, Traced, trace
from ..trace.reads import Reads
from ..trace.signature import Parameter


@dataclass(frozen=True)
class Argument:
    """A parameter as the call sees it. `type`: int, float, bool or tensor."""

    name: str
    type: str
    const: bool = False

    def __str__(self) -> str:
        kind = {"tensor": "fg.Tensor"}.get(self.type, self.type)
        return f"{self.name}: {f'fg.Const[{kind}]' if self.const else kind}"


class Traces(dict[Any, "Traced"]):
    """Traces of a function by types and names of its arguments; `changes`: how often one was
    replaced by another that means something else. All who share the function count by it."""

    changes = 0


@dataclass(frozen=True)
class Leaf:
    """A function, the public names of its parameters, and the values bound to some of them."""

    function: Function
    wants: Literal["mask", "score"]
    names: Mapping[str, str] = field(default_factory=dict)
    bound: Mapping[str, Any] = field(default_factory=dict)
    check: Callable[..., None] | None = None
    # Traces live and die with the function they came from: captured tensors must not leak.
    _traces: Traces = field(default_factory=Traces, compare=False, repr=False)

    @staticmethod
    def of(
        function: Any, wants: Literal["mask", "score"], check: Callable[..., None] | None = None
    ) -> Leaf:
        read = Function.of(function, wants)
        defaults = {
            p.name: p.default for p in read.arguments if p.default is not inspect.Parameter.empty
        }
        return Leaf(read, wants, {}, defaults, check)

    def __reduce__(self) -> Any:
        return _leaf, (self.function, self.wants, dict(self.names), dict(self.bound), self.check)

    def __deepcopy__(self, memo: Any) -> Leaf:
        import copy

        bound = copy.deepcopy(dict(self.bound), memo)
        if not inspect.ismethod(self.function.function):
            return replace(self, bound=bound, _traces=self._traces)
        # The method of a copied module reads the copy's tensors.
        method = copy.deepcopy(self.function.function, memo)
        function = replace(self.function, function=method)
        return replace(self, function=function, bound=bound, _traces=Traces())

    def public(self, parameter: Parameter) -> str:
        return self.names.get(parameter.name, parameter.name)

    @functools.cached_property
    def arguments(self) -> tuple[Argument, ...]:
        return tuple(self._argument(p) for p in self.function.arguments)

    def _argument(self, parameter: Parameter) -> Argument:
        return Argument(self.public(parameter), parameter.type, parameter.role == "const")

    @functools.cached_property
    def defaults(self) -> frozenset[str]:
        """Names whose value is the function's own default, so that a call may still give them."""
        return frozenset(
            self.public(p)
            for p in self.function.arguments
            if p.default is not inspect.Parameter.empty
            and self.bound.get(p.name, None) is p.default
        )

    @functools.cached_property
    def free(self) -> tuple[Argument, ...]:
        taken = {self.names.get(own, own) for own in self.bound} - self.defaults
        return tuple(a for a in self.arguments if a.name not in taken)

    @functools.cached_property
    def required(self) -> tuple[Argument, ...]:
        taken = {self.names.get(own, own) for own in self.bound}
        return tuple(a for a in self.arguments if a.name not in taken)

    def bind(self, values: Mapping[str, Any]) -> Leaf:
        own = {self.public(p): p.name for p in self.function.arguments}
        free = {a.name for a in self.free}
        new = {own[name]: value for name, value in values.items() if name in free}
        return replace(self, bound={**self.bound, **new}, _traces=Traces()) if new else self

    def to(self, device: Any) -> Leaf:
        moved = {n: x.to(device) if hasattr(x, "shape") else x for n, x in self.bound.items()}
        return replace(self, bound=moved, _traces=Traces())

    def rename(self, changes: Mapping[str, str]) -> Leaf:
        names = dict(self.names)
        for parameter in self.function.arguments:
            public = self.public(parameter)
            is_bound = parameter.name in self.bound and public not in self.defaults
            if public in changes and not is_bound:
                names[parameter.name] = changes[public]
        return replace(self, names=names, _traces=Traces())

    def without_data(self) -> Leaf:
        """The function alone, nothing bound to it and nothing traced."""
        return replace(self, bound={}, _traces=Traces())

    def traced(self, types: Mapping[str, Any], names: Mapping[str, str]) -> Traced:
        key = (tuple(sorted(types.items())), tuple(sorted(names.items())))
        found = self._traces.get(key)
        if found is None or not found.read.are_current():
            found = self._run(key, found)
        return found

    def _run(self, key: Any, before: Traced | None) -> Traced:
        """Trace for types and names, and keep that: the trace `before`, if it is as good."""
        types, names = map(dict, key)
        found = trace(self.function, types, wants=self.wants, names=names)
        if before is not None:
            if before.agrees(found):
                found = replace(before, read=found.read)
            else:
                self._traces.changes += 1
        self._traces[key] = found
        return found

    def changes(self) -> int:
        """How often the function was found to mean something else than before, now included: it
        is traced again where it read something that may have changed."""
        for key, found in [*self._traces.items()]:
            if not found.read.are_current():
                try:
                    self._run(key, found)
                except FlashgenError:
                    # Raised for the call, if it is of these types.
                    self._traces.pop(key, None)
                    self._traces.changes += 1
        return self._traces.changes

    @property
    def read(self) -> Reads:
        """What its traces read besides their arguments."""
        return Reads.joined(traced.read for traced in [*self._traces.values()])

    @functools.cached_property
    def _checked(self) -> dict[str, bool]:
        """The function's own names of what the mask's check asks for, and whether it must know."""
        if self.check is None:
            return {}
        asked = inspect.signature(self.check).parameters.values()
        return {p.name: p.default is inspect.Parameter.empty for p in asked}

    def run_check(self, values: Mapping[str, Any], call: object) -> None:
        """Run the mask's own check, on values by the function's own names, once all that it must
        know is known: data and scalars, and of a call `q_len`, `kv_len` and `q_offset`.

        Raises FlashgenError."""
        wanted = [name for name in self._checked if name in values]
        if self.check is None or any(self._checked[n] and n not in values for n in self._checked):
            return
        try:
            self.check(**{name: values[name] for name in wanted})
        except ValueError as error:
            if isinstance(error, FlashgenError):
                raise
            problem, _, advice = str(error).partition("; write ")
            raise FlashgenError(
                problem,
                call=call,
                line=self.function.line,
                write=advice or f"other values of {', '.join(wanted)}: the mask's docs say which",
            ) from None


def _leaf(function: Function, wants: Any, names: Any, bound: Any, check: Any) -> Leaf:
    return Leaf(function, wants, names, bound, check)


def unknown_name(
    name: str, known: list[str], call: object, others: Sequence[str] = ()
) -> FlashgenError:
    """The error for data that nothing asks for; `others`: what else a call takes."""
    if name in others:
        return FlashgenError(
            f"{name} is an argument of calls, and isn't taken here",
            call=call,
            write=f"no {name} here; `attend(q, k, v, {name}=...)`",
        )
    names = known if others and not get_close_matches(name, others, n=1) else [*known, *others]
    return FlashgenError(
        f"nothing here is called {name}",
        call=call,
        write=did_you_mean(name, names) or "no data: nothing is left to give",
    )
