"""Dropout of attention weights: the same pairs on every backend, whatever the tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .errors import FlashgenError, show

_LOW = 0xFFFFFFFF
# Keys that share one draw: Philox gives four numbers.
_GROUP = 4


@dataclass(frozen=True)
class Dropout:
    """Each weight is 0 with probability `p`, and else larger by 1 / (1 - p).

    What a pair draws follows from `seed` (64 bits) and from its batch element, query head and
    positions alone."""

    p: float
    seed: int

    @property
    def threshold(self) -> int:
        """A pair whose 31 random bits are a smaller number is dropped."""
        return min(round(self.p * 2**31), 2**31 - 1)

    @property
    def scale(self) -> float:
        """What weights that are kept are multiplied by; 0 where none is."""
        return 0.0 if self.p == 1 else 1 / (1 - self.p)

    def dropped(
        self, b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor
    ) -> torch.Tensor:
        """Booleans [B, Hq, Sq, Skv] for indices that broadcast to it; `kv_idx` [1, 1, 1, Skv]."""
        groups, place = torch.unique(kv_idx.reshape(-1) // _GROUP, return_inverse=True)
        drawn = philox(self.seed, (groups, q_idx, h, b))
        shape = torch.broadcast_shapes(*(x.shape for x in drawn))  # type: ignore[no-untyped-call]
        numbers = torch.stack([x.expand(shape) for x in drawn], -1).flatten(-2)
        numbers = numbers[..., place * _GROUP + kv_idx.reshape(-1) % _GROUP]
        return numbers >> 1 < self.threshold


def check_dropout(p: Any, seed: Any, call: object) -> Dropout | None:
    """What a call asks for; None where nothing is dropped. Raises FlashgenError."""
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 <= p <= 1:
        raise FlashgenError(
            f"dropout_p is {show(p)}", call=call, write="a probability: a Python number from 0 to 1"
        )
    if p == 0:
        return None
    if seed is None:
        raise FlashgenError(
            f"dropout_p is {p}, and no seed says which weights are dropped",
            call=call,
            write="seed=<int>, a new one for each layer and step: "
            "seed=int(torch.randint(2**62, ()))",
        )
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
        raise FlashgenError(
            f"the seed is {show(seed)}", call=call, write="seed=1234, a Python int of 64 bits"
        )
    return Dropout(float(p), seed)


def philox(seed: int, counter: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Philox4x32-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3; SC 2011).

    `counter`: four integer tensors, of which the lower 32 bits count. Returns four int64 tensors
    of numbers below 2^32, in the shape that their counters broadcast to or a smaller one."""
    c0, c1, c2, c3 = (c.long() & _LOW for c in counter)
    k0, k1 = seed & _LOW, seed >> 32 & _LOW
    for _ in range(10):
        (high0, low0), (high2, low2) = _product(0xD2511F53, c0), _product(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return [c0, c1, c2, c3]


def _product(factor: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The high and low 32 bits of a product of 32-bit numbers, in integers of 63 bits."""
    upper, lower = factor * (x >> 16), factor * (x & 0xFFFF)
    high = (upper + (lower >> 16)) >> 16
    return high, ((upper & 0xFFFF) << 16) + lower & _LOW
