"""Every mask on every storage, on a GPU: prefill, a chunk of it, and decoding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import sm_90
import storage_matrix
import torch
from storage_matrix import (
    LATENT_PAIRS,
    OF_ROWS,
    PAIRS,
    POSITIONAL,
    SLICES,
    STORAGES,
    Way,
    each,
)

import flashgen as fg

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nan_filled_empty")]

# Outputs are averages of values of about 1: a rounding of the weights and one of the result.
# A key too many or too few changes an LSE by 1/150 and more.
CUDA = Way("portable", "cuda", torch.bfloat16, out=1.6e-2, lse=2e-5)
# Small tiles are many, and quick to compile. 32 heads on one fill a block of decoding's kernel
# whatever the queries, which then is one kernel.
QUICK = replace(CUDA, heads=(32, 1), tile=(32, 32))
MLA = fg.MLA(rank=128, rope=64)
# Tiles that calls make for themselves, and what can be asked of Hopper's kernels by name.
HOPPER = replace(CUDA, backend="hopper")
ON_HOPPER = ("pages of 16", "pages of 64", "pages of 256")


# 37 and 6 have no common divisor, so each storage gets its share of the masks.
@each(PAIRS[::37])
def test_some_masks_of_positions(case: Any, storage: str) -> None:
    storage_matrix.check(case, storage, QUICK)


@pytest.mark.slow
@sm_90.only
@each([pair for pair in PAIRS if pair[1] in ON_HOPPER][::4])
def test_masks_of_positions_on_hopper(case: Any, storage: str) -> None:
    storage_matrix.check(case, storage, HOPPER)


# The storages of a mask share kernels that plan.
@pytest.mark.slow
@pytest.mark.parametrize("case", POSITIONAL, ids=lambda case: case.id)
def test_masks_of_positions(case: Any) -> None:
    for storage in STORAGES if case not in SLICES else ("packed",):
        storage_matrix.check(case, storage, QUICK)


@each(LATENT_PAIRS[::31])
def test_some_masks_of_latent_heads(case: Any, storage: str) -> None:
    storage_matrix.check(case, storage, replace(CUDA, backend="auto"), MLA)


@pytest.mark.slow
@each(LATENT_PAIRS[::4])
def test_masks_of_latent_heads(case: Any, storage: str) -> None:
    storage_matrix.check(case, storage, replace(CUDA, backend="auto"), MLA)


@pytest.mark.parametrize("case", OF_ROWS[::9], ids=lambda case: case.id)
def test_some_masks_of_rows(case: Any) -> None:
    storage_matrix.check_rows(case, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("case", OF_ROWS, ids=lambda case: case.id)
def test_masks_of_rows(case: Any) -> None:
    storage_matrix.check_rows(case, QUICK)
