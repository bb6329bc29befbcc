"""A process that finds what another one compiled asks no compiler, and computes the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu

SCRIPT = """
import sys
import torch
import flashgen as fg
from flashgen import ahead, masks

folder, turn = sys.argv[1:]
if turn == "later":
    import triton.compiler.compiler, triton.runtime.jit

    def refuse(*given, **more):
        raise AssertionError("Triton was asked")

    triton.compiler.compiler.compile = triton.runtime.jit.JITFunction.run = refuse
    ahead._identify = refuse
torch.manual_seed(0)
results = []
attend = fg.Attention(masks.sliding_window(window=77))
for backend in ("auto", "portable"):
    for length in (300, 300, 300, 333):
        q, k, v = (
            torch.randn(2, 4, length, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        )
        out = attend(q, k, v, backend=backend)
        results += [out, *torch.autograd.grad(out.sum(), (q, k, v))]
q = torch.randn(2, 4, 1, 64, device="cuda", dtype=torch.bfloat16)
lens = torch.tensor([300, 41], device="cuda", dtype=torch.int32)
results += [attend(q, k.detach(), v.detach(), kv_lens=lens) for _ in range(3)]
torch.save([x.detach().cpu() for x in results], f"{folder}/{turn}.pt")
"""


def test_a_later_process_compiles_nothing(tmp_path: Path) -> None:
    caches = {"FLASHGEN_CACHE_DIR": f"{tmp_path}/kernels", "TRITON_CACHE_DIR": f"{tmp_path}/triton"}
    for turn in ("first", "later"):
        command = [sys.executable, "-c", SCRIPT, str(tmp_path), turn]
        subprocess.run(command, env=os.environ | caches, check=True, timeout=120)
    found = [torch.load(tmp_path / f"{turn}.pt") for turn in ("first", "later")]
    for number, (one, other) in enumerate(zip(*found, strict=True)):
        # What is added up in no order differs by rounding.
        torch.testing.assert_close(other, one, rtol=2e-2, atol=2e-2, msg=f"result {number}")
    for place in (0, 4, 16, 20, 32, 33, 34):
        assert torch.equal(found[0][place], found[1][place]), f"result {place}"
