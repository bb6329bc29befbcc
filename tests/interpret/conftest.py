"""Tests that run generated kernels in Triton's interpreter, which is chosen at process start.

Most of the interpreter's time would go into two things that are done here in less of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError(
        "tests/interpret needs Triton's interpreter: TRITON_INTERPRET=1 pytest tests/interpret"
    )

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_EXACT = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_patch_language = interpreter._patch_lang


def _patch_language_once(fn: FunctionType) -> Any:
    """Triton does this for each function that a kernel calls, again; once a kernel is enough."""
    languages = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
    if any(tl.core.is_builtin(language.load) for language in languages):
        return _patch_language(fn)
    return interpreter._LangPatchScope()


def _check_overflow(_: Any, left: Any, right: Any, operation: Callable[..., Any]) -> None:
    """An integer operation that overflows fails; its result is worked out once more, by NumPy."""
    kind = left.type.scalar
    if kind.int_bitwidth >= 64:
        return
    wide = (x.handle.data.astype(np.int64) for x in (left, right))
    exact, name = _EXACT[operation.__name__](*wide), operation.__name__
    fits = kind.get_int_min_value() <= exact.min() and exact.max() <= kind.get_int_max_value()
    assert fits, f"int{kind.int_bitwidth} overflow detected for operation {name}"


interpreter._patch_lang = _patch_language_once
TritonSemantic.binary_op_sanitize_overflow_impl = _check_overflow
