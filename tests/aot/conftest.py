"""Tests that compile generated kernels ahead of time, which a process that interprets can't."""

from __future__ import annotations

import os

import pytest

if os.environ.get("TRITON_INTERPRET", "0") != "0":
    raise pytest.UsageError(
        "tests/aot compiles kernels, and Triton's interpreter is on: unset TRITON_INTERPRET"
    )
