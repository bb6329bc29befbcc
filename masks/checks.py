"""What masks ask of their scalars: host-side checks, which never read a tensor's elements."""

from __future__ import annotations

from inspect import Parameter, Signature, signature
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


class counts_rows:
    """A check for masks whose rows count from the first query given: positions must be the default.

    `**rows`: the dimension along which a tensor has a row for each query, and how many more."""

    def __init__(self, **rows: tuple[int, int]) -> None:
        self.rows = rows

    @property
    def __signature__(self) -> Signature:
        """The names whose values the check waits for, and those it takes if they are known."""
        must = [Parameter(name, Parameter.KEYWORD_ONLY) for name in self.rows]
        known = ("q_len", "kv_len", "q_offset")
        may = [Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in known]
        return Signature([*must, *may])

    def __call__(self, **given: Any) -> None:
        q_len, kv_len = given.get("q_len"), given.get("kv_len")
        check_rows(q_len, kv_len, given.get("q_offset"))
        for name, (dim, more) in self.rows.items():
            shape = tuple(getattr(given[name], "shape", ()))
            if q_len is not None and len(shape) > dim and shape[dim] - more > q_len:
                raise ValueError(
                    f"{name} has shape {list(shape)}, data for {shape[dim] - more} queries, and "
                    f"there are {q_len}; write the mask of these queries, or all queries at once"
                )


def check_rows(q_len: Any, kv_len: Any, q_offset: Any) -> None:
    """Raises ValueError for queries that aren't the last ones, where the host knows."""
    if q_offset is not None and kv_len is not None and q_offset != kv_len - q_len:
        raise ValueError(
            f"rows count from the first query given, and q_offset is {q_offset}; write no "
            f"q_offset: by default it is {kv_len - q_len}"
        )


class both:
    """Two checks as one."""

    def __init__(self, *checks: Any) -> None:
        self.checks = checks

    @property
    def __signature__(self) -> Signature:
        """What either waits for."""
        asked = [signature(check).parameters for check in self.checks]
        return Signature(sorted({k: v for p in asked for k, v in p.items()}.values(), key=_kind))

    def __call__(self, **given: Any) -> None:
        for check in self.checks:
            check(**{name: given[name] for name in signature(check).parameters if name in given})


def _kind(parameter: Parameter) -> bool:
    return parameter.default is not Parameter.empty
