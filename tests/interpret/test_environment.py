"""The interpreter runs a kernel on this machine."""

from __future__ import annotations

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
