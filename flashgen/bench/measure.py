"""Timing several backends side by side: interleaved, so that they share a machine's moods."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Attend = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Times:
    """Medians in milliseconds."""

    forward_ms: float
    backward_ms: float | None = None

    @property
    def total_ms(self) -> float:
        return self.forward_ms + (self.backward_ms or 0.0)


def check_equal(
    attends: Mapping[str, Attend],
    leaves: Sequence[torch.Tensor],
    grad: torch.Tensor,
    tolerance: float,
) -> None:
    """Outputs and gradients of all backends agree; AssertionError says where they don't."""
    base: tuple[torch.Tensor, ...] | None = None
    for name, attend in attends.items():
        out = attend()
        results = (out, *torch.autograd.grad(out, leaves, grad))
        base = base or results
        for what, mine, right in zip(("out", "dq", "dk", "dv"), results, base, strict=True):
            try:
                torch.testing.assert_close(mine, right, rtol=tolerance, atol=tolerance)
            except AssertionError as error:
                raise AssertionError(f"{what} of {name} differs: {error}") from None


def interleave(
    attends: Mapping[str, Attend],
    leaves: Sequence[torch.Tensor],
    grad: torch.Tensor,
    rounds: int,
) -> dict[str, Times]:
    """Forward and backward of every backend, in turn; one round to warm up isn't counted."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in attends}
    for _ in range(rounds + 1):
        for name, attend in attends.items():
            start = time.perf_counter()
            out = attend()
            middle = time.perf_counter()
            torch.autograd.grad(out, leaves, grad)
            seconds[name].append((middle - start, time.perf_counter() - middle))
    return {name: _medians(measured[1:]) for name, measured in seconds.items()}


def _medians(seconds: Sequence[tuple[float, float]]) -> Times:
    forward, backward = (1e3 * statistics.median(part) for part in zip(*seconds, strict=True))
    return Times(forward, backward)
