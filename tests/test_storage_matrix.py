"""Every mask on every storage, on the cpu backend: prefill, a chunk of it, and decoding."""

from __future__ import annotations

from typing import Any

import pytest
import storage_matrix
import torch
from storage_matrix import LATENT_PAIRS, OF_ROWS, PAIRS, Way, each

import flashgen as fg

CPU = Way("cpu", "cpu", torch.float32, out=1e-5, lse=1e-5)
MLA = fg.MLA(rank=16, rope=8)


# 7 and 6 have no common divisor, so each storage gets its share of the masks.
@each(PAIRS[::11])
def test_some_masks_of_positions(case: Any, storage: str) -> None:
    storage_matrix.check(case, storage, CPU)


@pytest.mark.slow
@each(PAIRS)
def test_masks_of_positions(case: Any, storage: str) -> None:
    storage_matrix.check(case, storage, CPU)


@each(LATENT_PAIRS[::13])
def test_some_masks_of_latent_heads(case: Any, storage: str) -> None:
    storage_matrix.check(case, storage, CPU, MLA)


@pytest.mark.slow
@each(LATENT_PAIRS)
def test_masks_of_latent_heads(case: Any, storage: str) -> None:
    storage_matrix.check(case, storage, CPU, MLA)


@pytest.mark.parametrize("case", OF_ROWS, ids=lambda case: case.id)
def test_masks_of_rows(case: Any) -> None:
    storage_matrix.check_rows(case, CPU)
