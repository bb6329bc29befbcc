"""The interpreter runs a kernel on this machine."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def double(source, target, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(target + at, tl.load(source + at) * 2)


def test_a_kernel_is_interpreted():
    source = torch.randn(16)
    target = torch.empty(16)
    double[(1,)](source, target, COUNT=16)
    torch.testing.assert_close(target, source * 2)


@triton.jit
def multiply(x_ptr, factor):
    tl.store(x_ptr, tl.load(x_ptr) * factor)


def test_an_integer_that_overflows_fails():
    x = torch.tensor([2**30], dtype=torch.int32)
    multiply[(1,)](x, 1)
    assert x.item() == 2**30
    with pytest.raises(Exception, match="int32 overflow detected for operation mul"):
        multiply[(1,)](x, 2)
