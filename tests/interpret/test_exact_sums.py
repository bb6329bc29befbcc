"""Sums in integers: the same bits in every order, and rounded once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import triton

from flashgen import cache, launch
from flashgen.data_gradients import _rounded
from flashgen.emit import environment
from flashgen.emit.gradients import EXACT_WORDS

INF, NAN = math.inf, math.nan
TEXT = """import triton
import triton.language as tl


{function}


@triton.jit
def add_all(sums, numbers, places, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(numbers + at, mask=at < n, other=0.0)
    place = tl.load(places + at, mask=at < n, other=0)
    add_exactly(sums + place * {words}, x)
"""


def kernel() -> Any:
    template = environment().from_string(
        '{% import "functions.j2" as functions %}{{ functions.define("add_exactly") | trim }}'
    )
    text = TEXT.format(function=template.render(), words=EXACT_WORDS)
    return cache.module("exact_sums", text, launch.key_parts()).add_all


def sums(numbers: torch.Tensor, places: torch.Tensor, size: int) -> torch.Tensor:
    words = torch.zeros(size, EXACT_WORDS, dtype=torch.int64)
    kernel()[(triton.cdiv(len(numbers), 64),)](words, numbers, places, len(numbers), BLOCK=64)
    return words


def test_every_order_gives_the_same_bits() -> None:
    numbers = torch.randn(500) * torch.exp2(torch.randint(-120, 120, (500,)).float())
    places = torch.randint(0, 7, (500,))
    first = sums(numbers, places, 7)
    for _ in range(3):
        order = torch.randperm(500)
        assert torch.equal(sums(numbers[order], places[order], 7), first)
    exact = [math.fsum(numbers[places == i].double().tolist()) for i in range(7)]
    torch.testing.assert_close(
        _rounded(first), torch.tensor(exact, dtype=torch.float64), rtol=1e-15, atol=0
    )


@pytest.mark.parametrize(
    "number",
    [0.0, -0.0, 1.0, -1.5, 2.0**-149, -(2.0**-126), 3.4028234663852886e38, 0.1, INF, -INF, NAN],
)
def test_one_number_comes_back(number: float) -> None:
    x = torch.tensor([number])
    found = _rounded(sums(x, torch.zeros(1, dtype=torch.int64), 1)).float()
    torch.testing.assert_close(found, x, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("numbers", "total"),
    [
        ([1e30, 1.0, -1e30], 1.0),
        ([INF, -1e38, 3.0], INF),
        ([INF, -INF], NAN),
        ([NAN, INF, 1.0], NAN),
        ([-INF, 1.0, -INF], -INF),
        ([3e38, 3e38], INF),
        ([3e38, 3e38, -3e38], 3e38),
    ],
)
def test_cancellation_and_infinities(numbers: list[float], total: float) -> None:
    x = torch.tensor(numbers)
    found = _rounded(sums(x, torch.zeros(len(x), dtype=torch.int64), 1)).float()
    torch.testing.assert_close(found, torch.tensor([total]), rtol=0, atol=0, equal_nan=True)
