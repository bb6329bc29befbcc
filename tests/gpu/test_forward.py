"""Forward on a GPU: right in every dtype, planned there, without waiting for it.

Where nothing is said, `auto` chooses: Hopper's own kernels on an H200, for 16-bit floats."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import CASES
from dense_checks import FIRST, check_against_sdpa, inputs, oracle, to_gpu

import flashgen as fg
from flashgen import masks
from flashgen.call import check
from flashgen.check_storage import Storage
from flashgen.errors import CallText
from flashgen.plan import plan
from flashgen.schedule import classify, compact

pytestmark = pytest.mark.gpu

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("case", FIRST, ids=lambda case: case.id)
def test_every_mask_in_bf16(case: Any, nan_filled_empty: None) -> None:
    B, H, S, T = 2, 2, 200, 333
    if not case.below_zero:
        S = T
    data = case.build(B, H, S, T, torch.Generator().manual_seed(0))
    allowed = case.expected(B, H, S, T, data).cuda()
    attend = fg.Attention(mask=case.bound(to_gpu(data)).to("cuda"))
    tensors = inputs(B, H, H, S, T, 64, 64, torch.bfloat16)
    check_against_sdpa(attend, tensors, allowed, backend="portable")


@pytest.mark.parametrize("case", CASES[::3], ids=lambda case: case.id)
def test_planned_as_on_the_cpu(case: Any) -> None:
    B, H, S, T = 2, 2, 130, 300
    if not case.below_zero:
        S = T
    data = case.build(B, H, S, T, torch.Generator().manual_seed(1))
    program = fg.Attention(mask=case.bound(to_gpu(data)).to("cuda"))._program
    q, k, v = inputs(B, H, H, S, T, 16, 16, torch.float16)
    options: dict[str, Any] = {"scale": None, "q_offset": None, "sinks": None}
    options["storage"] = Storage()
    call = check(program, CallText("test", {}), q, k, v, data={}, **options)
    for block in ((128, 64), (48, 96)):
        states, runs = plan(call.bound, call.geometry, block, "exact")
        assert torch.equal(states, classify(call.bound, call.geometry, block, "exact"))
        ends = (torch.arange(states.shape[3], device="cuda") + 1) * block[1]
        expected = compact(states, (ends > T).expand(1, 1, 1, -1))
        assert torch.equal(runs.counts, expected.counts)
        for got, wanted in ((runs.masked, expected.masked), (runs.full, expected.full)):
            width = min(got.shape[-2], wanted.shape[-2])
            valid = torch.arange(width, device="cuda") < (wanted[..., :width, 1] > 0).sum(
                -1, keepdim=True
            )
            assert torch.equal(got[..., :width, :][valid], wanted[..., :width, :][valid])


DIMS = [(64, 64), (128, 128), (192, 128), (256, 256)]
# Each is a compile: every dimension and dtype with one mask, the others with the commonest.
COMBINED = [("causal", dims, dtype) for dims in DIMS for dtype in DTYPES]
COMBINED += [
    (name, (128, 128), dtype)
    for name in ("causal_document", "flashmask")
    for dtype in (torch.bfloat16, torch.float32)
]


@pytest.mark.parametrize("heads", [(4, 4), (8, 1)], ids=str)
@pytest.mark.parametrize(("name", "dims", "dtype"), COMBINED, ids=str)
def test_dtypes_heads_and_dims(
    name: str, dims: tuple[int, int], dtype: torch.dtype, heads: tuple[int, int]
) -> None:
    S = 517
    i = torch.arange(S, device="cuda")
    doc = torch.randint(0, 5, (2, S), device="cuda").sort(-1).values
    start = (i + 1 + torch.randint(0, S, (2, 1, S), device="cuda")).clamp(max=S).int()
    causal = i[None, :] <= i[:, None]
    wanted = {
        "causal": (masks.causal, {}, causal),
        "causal_document": (
            masks.causal_document,
            {"doc": doc},
            causal & (doc[:, None, :, None] == doc[:, None, None, :]),
        ),
        "flashmask": (
            masks.from_flashmask(start[..., None], causal=True),
            {},
            causal & (i[:, None] < start[:, :, None, :]),
        ),
    }
    mask, data, allowed = wanted[name]
    tensors = inputs(2, *heads, S, S, *dims, dtype)
    check_against_sdpa(fg.Attention(mask=mask), tensors, allowed, **data)


def test_nothing_waits_for_the_device() -> None:
    attend = fg.Attention(mask=masks.causal_document)
    q, k, v = inputs(2, 2, 2, 300, 300, 64, 64, torch.bfloat16)
    doc = torch.zeros(2, 300, dtype=torch.int32, device="cuda")
    attend(q, k, v, doc=doc)
    torch.cuda.set_sync_debug_mode("error")
    try:
        schedule = attend.schedule(q, k, v, doc=doc)
        attend(q, k, v, doc=doc, schedule=schedule)
        attend(q, k, v, doc=doc)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_new_lengths_and_values_compile_nothing() -> None:
    from triton import knobs

    compiled: list[Any] = []
    attend = fg.Attention(mask=masks.sliding_window & masks.document)
    q, k, v = inputs(1, 2, 2, 777, 777, 64, 64, torch.bfloat16)
    doc = torch.zeros(1, 777, dtype=torch.int32, device="cuda")
    # Kernels for few queries, which come in powers of two, and one for many.
    for n in (1, 16, 777):
        attend(*(x[:, :, :n] for x in (q, k, v)), doc=doc, window=100)
    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = lambda **info: compiled.append(info)
    try:
        for n in (1, 16, 128, 129, 500, 776):
            attend(*(x[:, :, :n] for x in (q, k, v)), doc=doc, window=n)
    finally:
        knobs.runtime.jit_post_compile_hook = before
    assert not compiled


def test_more_heads_than_a_grid_axis_holds() -> None:
    q, k, v = inputs(70000, 1, 1, 3, 3, 16, 16, torch.float16)
    out = fg.Attention(mask=masks.causal)(q, k, v)
    allowed = torch.ones(3, 3, dtype=torch.bool, device="cuda").tril()
    torch.testing.assert_close(out.double(), oracle(q, k, v, allowed, 0.25)[0], rtol=0, atol=4e-3)


def test_beyond_32_bit_offsets() -> None:
    """Rows 2^20 elements apart, and more than 2^31 elements in all."""
    S, D = 2100, 64
    buffers = [torch.empty(S, 1 << 20, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    q, k, v = (x[:, -D:].normal_()[None, None] for x in buffers)
    allowed = torch.ones(S, S, dtype=torch.bool, device="cuda").tril()
    check_against_sdpa(fg.Attention(mask=masks.causal), [q, k, v], allowed)


def test_hidden_values_that_are_not_finite() -> None:
    S = 300
    q, k, v = inputs(1, 2, 2, S, S, 64, 64, torch.bfloat16)
    attend = fg.Attention(mask=masks.causal)
    clean = attend(q, k, v)
    v[:, :, 150, 3], k[:, :, 200], v[:, :, 250] = float("nan"), float("nan"), float("inf")
    out = attend(q, k, v)
    torch.testing.assert_close(out[:, :, :150], clean[:, :, :150], rtol=2e-2, atol=1e-2)
    assert torch.isfinite(out[:, :, :200, 4:]).all()
    assert out[:, :, 150:, 3].isnan().all()
