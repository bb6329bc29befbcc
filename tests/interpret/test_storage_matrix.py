"""Every mask on every storage, interpreted: prefill, a chunk of it, and decoding."""

from __future__ import annotations

from typing import Any

import pytest
import storage_matrix
import torch
from storage_matrix import LATENT_PAIRS, OF_ROWS, PAIRS, Way, each

import flashgen as fg

pytestmark = pytest.mark.usefixtures("nan_filled_empty")

INTERPRET = Way("interpret", "cpu", torch.float32, out=1e-5, lse=1e-5)
MLA = fg.MLA(rank=16, rope=8)


# 67 and 6 have no common divisor: six masks, one for each storage.
@each(PAIRS[::67])
def test_some_masks_of_positions(case: Any, storage: str) -> None:
    storage_matrix.check(case, storage, INTERPRET)


@pytest.mark.slow
@each(PAIRS)
def test_masks_of_positions(case: Any, storage: str) -> None:
    storage_matrix.check(case, storage, INTERPRET)


@each(LATENT_PAIRS[::80])
def test_some_masks_of_latent_heads(case: Any, storage: str) -> None:
    storage_matrix.check(case, storage, INTERPRET, MLA)


@pytest.mark.slow
@each(LATENT_PAIRS[::5])
def test_masks_of_latent_heads(case: Any, storage: str) -> None:
    storage_matrix.check(case, storage, INTERPRET, MLA)


@pytest.mark.slow
@pytest.mark.parametrize("case", OF_ROWS, ids=lambda case: case.id)
def test_masks_of_rows(case: Any) -> None:
    storage_matrix.check_rows(case, INTERPRET)
