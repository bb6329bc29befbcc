"""compute-sanitizer's memcheck over every family of kernels, on small shapes.

Each case is a process of its own (`python test_sanitizer.py CASE`), whose tensors are allocated
apart, so that an access beside one of them meets nothing of another."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import sm_90
import torch

import flashgen as fg
from flashgen import masks

pytestmark = [
    *sm_90.marks(300),
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("compute-sanitizer") is None, reason="needs CUDA's compute-sanitizer"
    ),
]


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_()


def train(
    mask: Any, heads: tuple[int, int], S: int, T: int, dims: tuple[int, int], **how: Any
) -> None:
    attend = fg.Attention(mask, softcap=how.pop("softcap", None))
    q, k, v = (
        leaf(1, heads[0], S, dims[0]),
        leaf(1, heads[1], T, dims[0]),
        leaf(1, heads[1], T, dims[1]),
    )
    out = attend(q, k, v, backend=how.pop("backend", "hopper"), **how)
    out.backward(torch.randn_like(out))


def documents(S: int) -> torch.Tensor:
    return (torch.arange(S, device="cuda")[None] // 70).int()


def causal() -> None:
    train(masks.causal, (2, 1), 200, 200, (128, 128))
    train(masks.causal, (2, 2), 129, 300, (64, 64))


def document() -> None:
    train(masks.causal_document, (3, 1), 257, 257, (128, 128), doc=documents(257))
    train(masks.document, (2, 2), 200, 200, (64, 64), deterministic=True, doc=documents(200))


def wide() -> None:
    train(masks.causal, (2, 2), 150, 150, (192, 128))
    train(masks.causal, (2, 1), 150, 150, (256, 256))


def window() -> None:
    train(
        masks.sliding_window,
        (2, 2),
        300,
        300,
        (128, 128),
        deterministic=True,
        softcap=20.0,
        window=100,
    )


def portable() -> None:
    train(masks.causal_document, (2, 1), 257, 257, (64, 64), backend="portable", doc=documents(257))


def packed() -> None:
    ends = torch.tensor([0, 100, 100, 300], dtype=torch.int32, device="cuda")
    q, k, v = leaf(300, 4, 128), leaf(300, 2, 128), leaf(300, 2, 128)
    out = fg.Attention(masks.causal)(
        q, k, v, cu_seqlens_q=ends, cu_seqlens_kv=ends, backend="hopper"
    )
    out.backward(torch.randn_like(out))


def decode() -> None:
    attend = fg.Attention(masks.causal)
    pages = torch.randperm(50, device="cuda", dtype=torch.int32)[:39].reshape(3, 13)
    lens = torch.tensor([200, 7, 64], dtype=torch.int32, device="cuda")
    with torch.no_grad():
        q = leaf(3, 8, 1, 128)
        attend(q, leaf(50, 16, 2, 128), leaf(50, 16, 2, 128), page_table=pages, kv_lens=lens)
        attend(q, leaf(3, 2, 300, 128), leaf(3, 2, 300, 128))


def latent() -> None:
    attend = fg.Attention(mask=masks.causal, heads=fg.MLA(rank=512, rope=64))
    lens = torch.tensor([100, 200], device="cuda", dtype=torch.int32)
    with torch.no_grad():
        q, rows = leaf(2, 64, 1, 576), leaf(2, 1, 200, 576)
        attend(q, rows, scale=192**-0.5, kv_lens=lens, backend="hopper")


CHECKED: tuple[Callable[[], None], ...] = (
    causal,
    document,
    wide,
    window,
    portable,
    packed,
    decode,
    latent,
)


@pytest.mark.parametrize("case", CHECKED, ids=lambda case: case.__name__)
def test_memcheck(case: Callable[[], None]) -> None:
    command = [sys.executable, __file__, case.__name__]
    kept = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    # Kernels are compiled first: the tool would follow the compilers too.
    subprocess.run(command, env=kept, check=True)
    tool = ["compute-sanitizer", "--tool", "memcheck"]
    done = subprocess.run([*tool, *command], env=kept, capture_output=True, text=True)
    if "Device not supported" in done.stdout:
        pytest.skip("compute-sanitizer doesn't support this machine")
    assert f"done: {case.__name__}" in done.stdout, done.stdout
    assert "ERROR SUMMARY: 0 errors" in done.stdout, done.stdout


if __name__ == "__main__":
    next(case for case in CHECKED if case.__name__ == sys.argv[1])()
    torch.cuda.synchronize()
    print("done:", sys.argv[1])
