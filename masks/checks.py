"""What masks ask of their scalars: host-side checks, which never read a tensor's elements."""

from __future__ import annotations

from inspect import Parameter, Signature
from typing import Any


class at_least:
    """A check for `fg.mask(check=...)`: these integers are no smaller than the bounds given.

    An object and not a closure, so that masks pickle."""

    def __init__(self, **least: int) -> None:
        self.least = least

    @property
    def __signature__(self) -> Signature:
        """The names whose values the check waits for."""
        return Signature([Parameter(name, Parameter.KEYWORD_ONLY) for name in self.least])

    def __call__(self, **given: Any) -> None:
        for name, bound in self.least.items():
            value = given[name]
            # What isn't an integer is refused later, with the parameter's type.
            if isinstance(value, int) and value < bound:
                problem = f"{name} must be at least {bound}, and is {value}"
                raise ValueError(f"{problem}; write {name}={bound} or more")
