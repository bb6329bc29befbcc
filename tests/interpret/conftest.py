"""Tests that run generated kernels in Triton's interpreter, which is chosen at process start."""

from __future__ import annotations

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError(
        "tests/interpret needs Triton's interpreter: TRITON_INTERPRET=1 pytest tests/interpret"
    )
