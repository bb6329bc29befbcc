"""Triton compiles a kernel for a target that this machine doesn't have."""

from __future__ import annotations

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def double(source, target, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(target + at, tl.load(source + at) * 2)


@pytest.mark.parametrize(
    ("target", "assembly"),
    [(GPUTarget("cuda", 80, 32), "ptx"), (GPUTarget("hip", "gfx942", 64), "amdgcn")],
)
def test_a_kernel_compiles_without_a_gpu(target, assembly):
    signature = {"source": "*fp32", "target": "*fp32", "COUNT": "constexpr"}
    source = ASTSource(fn=double, signature=signature, constexprs={"COUNT": 16})
    assert "double" in triton.compile(source, target=target).asm[assembly]
