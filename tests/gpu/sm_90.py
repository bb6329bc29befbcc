"""What marks the tests of Hopper's kernels."""

from __future__ import annotations

import pytest
import torch

only = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a GPU of sm_90",
)


def marks(seconds: float = 100) -> list[pytest.MarkDecorator]:
    """For GPUs of sm_90; `seconds` end a test whose barriers never come."""
    return [pytest.mark.gpu, pytest.mark.timeout(seconds, method="thread"), only]
