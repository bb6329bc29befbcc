"""What masks ask of their scalars: host-side checks, which never read a tensor's elements."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any


def at_least(**least: int) -> Callable[..., None]:
    """A check for `fg.mask(check=...)`: these integers are no smaller than the bounds given."""

    def check(**given: Any) -> None:
        for name, bound in least.items():
            value = given[name]
            # What isn't an integer is refused later, with the parameter's type.
            if isinstance(value, int) and value < bound:
                raise ValueError(f"{name} must be at least {bound}, and is {value}")

    return named(check, *least)


def named(check: Callable[..., None], *names: str) -> Callable[..., None]:
    """Say which values a check written with `**given` waits for."""
    parameters = [Parameter(name, Parameter.KEYWORD_ONLY) for name in names]
    check.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return check
