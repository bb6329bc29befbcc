"""Tests that compile generated kernels ahead of time, which a process that interprets can't.

Lets the tests here import what they share by its bare name."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from flashgen import assembler

if os.environ.get("TRITON_INTERPRET", "0") != "0":
    raise pytest.UsageError(
        "tests/aot compiles kernels, and Triton's interpreter is on: unset TRITON_INTERPRET"
    )

sys.path.insert(0, str(Path(__file__).parent))

# What `flashgen doctor` advises where Hopper's kernels are compiled, before anything is.
if better := assembler.better_for_hopper():
    os.environ[assembler.VARIABLE] = better
