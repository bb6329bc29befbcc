"""First calls on a GPU: kernels compiled side by side before, and nothing left of that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gradient_checks import check, leaves

import flashgen as fg
from flashgen import ahead, masks

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No binaries of another run, and nothing begun."""
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(ahead, "_seen", set())
    monkeypatch.setattr(ahead, "_promised", {})


def allowed_pairs(length: int, step: int) -> Any:
    i = torch.arange(length, device="cuda")
    return ((i[None] <= i[:, None]) & (i[None] % step != 0))[None, None]


@pytest.mark.parametrize("backend", ["auto", "portable"])
def test_a_call_and_its_gradients(backend: str, nan_filled_empty: None) -> None:
    """A mask that no other test has, so that its kernels are new; its schedule is kept."""
    step = {"auto": 7, "portable": 11}[backend]

    @fg.mask
    def mask(q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx <= q_idx) & (kv_idx % step != 0)

    attend = fg.Attention(mask)
    inputs = leaves(2, 4, 2, 333, 333, 64, 64, torch.bfloat16)
    promised: list[int] = []

    def call(*given: Any) -> Any:
        out = attend(*given, backend=backend)
        promised.append(len(ahead._promised))
        return out

    for _ in range(4):
        check(call, inputs, allowed_pairs(333, step))
    # Those of the gradients were begun by the first call; by its backward each was waited for.
    assert promised[0] > 2
    assert not ahead._promised
    fresh = fg.Attention(mask)
    assert torch.equal(attend(*inputs, backend=backend), fresh(*inputs, backend=backend))


def test_a_step_of_decoding() -> None:
    lens = torch.tensor([300, 41], device="cuda", dtype=torch.int32)
    attend = fg.Attention(masks.sliding_window(window=77))
    q = torch.randn(2, 4, 1, 64, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(2, 2, 300, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    first = attend(q, k, v, kv_lens=lens)
    assert not ahead._promised
    assert ahead._seen
    i = torch.arange(300, device="cuda")
    last = lens[:, None] - 1
    seen = (i <= last) & (last - i < 77)
    scores = (q.double() @ k.double().repeat_interleave(2, 1).mT) / 8
    weights = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
    right = weights @ v.double().repeat_interleave(2, 1)
    torch.testing.assert_close(first.double(), right, rtol=2e-2, atol=2e-2)


def test_packed_sequences_and_new_lengths() -> None:
    """Once for a kind; other lengths are the same one."""
    attend = fg.Attention(masks.local(left=33, right=9))
    for lens in ([100, 30, 200], [64, 21, 17]):
        cu = torch.tensor([0, *lens], device="cuda").cumsum(0).to(torch.int32)
        q, k, v = (
            torch.randn(sum(lens), 2, 64, device="cuda", dtype=torch.float16, requires_grad=True)
            for _ in range(3)
        )
        out = attend(q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu)
        grads = torch.autograd.grad(out.sum(), (q, k, v))
        assert len(ahead._seen) == 1
        whole = torch.cat([one(*each) for each in alone(q, k, v, lens)])
        torch.testing.assert_close(out, whole, rtol=1e-2, atol=1e-2)
        for mine, other in zip(grads, torch.autograd.grad(whole.sum(), (q, k, v)), strict=True):
            torch.testing.assert_close(mine, other, rtol=2e-2, atol=2e-2)


def alone(q: Any, k: Any, v: Any, lens: list[int]) -> Any:
    return zip(*(x.split(lens) for x in (q, k, v)), strict=True)


def one(q: Any, k: Any, v: Any) -> Any:
    """Attention of a sequence [n, H, D] by PyTorch's operations, in float32."""
    i = torch.arange(len(q), device="cuda")
    away = i[:, None] - i
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) / q.shape[-1] ** 0.5
    weights = scores.masked_fill((away > 33) | (away < -9), -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v.float()).to(q.dtype)


def test_a_compiled_function() -> None:
    attend = fg.Attention(masks.prefix_lm(prefix=19))
    inputs = leaves(1, 2, 2, 200, 200, 64, 64, torch.bfloat16)
    grad = torch.randn_like(inputs[0])
    run = torch.compile(lambda *given: attend(*given), fullgraph=True)
    out = run(*inputs)
    mine = (out, *torch.autograd.grad(out, inputs, grad))
    right = attend(*inputs)
    for x, y in zip(mine, (right, *torch.autograd.grad(right, inputs, grad)), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-2)
