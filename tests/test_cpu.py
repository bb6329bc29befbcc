"""The cpu backend against a dense float64 oracle written by hand."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cpu_calls import (
    CPU,
    INF,
    MASKS,
    assert_same,
    causal,
    causal_document,
    every_other_query,
    gradients,
    head_window,
    inputs,
    oracle,
    positions,
    run,
    window,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import flashgen as fg
from flashgen import masks
from flashgen.cpu.blocks import split
from flashgen.geometry import Geometry
from flashgen.ops import attention, engine
from flashgen.reference import attention_reference
from flashgen.schedule import Schedule
from flashgen.spec import Program, mask


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(
    ("q_len", "kv_len", "block_size"),
    [
        (50, 50, (16, 16)),
        (33, 70, (16, 32)),
        (70, 33, (32, 16)),
        (1, 65, (16, 16)),
        (65, 1, (8, 8)),
    ],
)
def test_equals_the_oracle(name: str, q_len: int, kv_len: int, block_size: Any) -> None:
    pattern, formula = MASKS[name]
    heads, kv_heads = 6, 2
    leaves = inputs(2, heads, kv_heads, q_len, kv_len, dim=5, v_dim=3)
    allowed = formula(*positions(heads, kv_heads, q_len, kv_len))
    assert_same(run(*leaves, pattern, block_size=block_size), oracle(*leaves, allowed), leaves)


@pytest.mark.parametrize("planner", ["auto", "bounds", "exact"])
def test_documents_differ_by_sequence(planner: str) -> None:
    leaves = inputs(3, 4, 2, 90, 90)
    doc = torch.randint(0, 2, (3, 90)).cumsum(1) // 12
    doc[1] = torch.randint(0, 3, (90,))
    i, j, *_ = positions(4, 2, 90, 90)
    allowed = ((doc[:, :, None] == doc[:, None]) & (j <= i))[:, None]
    ours = run(*leaves, causal_document, data={"doc": doc}, planner=planner)
    assert_same(ours, oracle(*leaves, allowed), leaves)


@pytest.mark.parametrize("group", [1, 3, 5, 7])
@pytest.mark.parametrize(("dim", "v_dim"), [(1, 1), (72, 40), (16, 128)])
def test_groups_and_head_dimensions(group: int, dim: int, v_dim: int) -> None:
    leaves = inputs(1, 2 * group, 2, 20, 24, dim, v_dim)
    allowed = MASKS["causal"][1](*positions(2 * group, 2, 20, 24))
    assert_same(run(*leaves, causal), oracle(*leaves, allowed), leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 12), (1, 300), (200, 200)])
def test_a_sequence_s_bits_don_t_depend_on_the_batch(q_len: int, kv_len: int, dtype: Any) -> None:
    q = torch.randn(3, 4, q_len, 64, dtype=dtype)
    k, v = torch.randn(2, 3, 2, kv_len, 64, dtype=dtype)
    for attend in (fg.Attention(masks.causal), fg.Attention()):
        found = attend(q, k, v, batch_invariant=True)
        alone = attend(q[1:2], k[1:2], v[1:2], batch_invariant=True)
        assert torch.equal(found[1:2], alone)
        torch.testing.assert_close(found, attend(q, k, v))


def test_many_blocks_of_one_row_of_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that doesn't fit is cut by sequences, heads and rows."""
    leaves = inputs(3, 4, 2, 60, 60)
    allowed = MASKS["causal"][1](*positions(4, 2, 60, 60))
    for elements in (1 << 10, 300, 7):
        monkeypatch.setattr("flashgen.cpu.blocks._ELEMENTS", elements)
        assert_same(run(*leaves, causal), oracle(*leaves, allowed), leaves)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_error_beside_sdpa(dtype: torch.dtype) -> None:
    leaves = inputs(1, 4, 4, 257, 257, 64, 64, dtype)
    i, j, *_ = positions(4, 4, 257, 257)
    theirs = F.scaled_dot_product_attention(*leaves, attn_mask=j <= i)
    ours, lse = run(*leaves, causal)
    exact, exact_lse = oracle(*leaves, j <= i)
    assert ours.dtype == dtype
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
    seed = torch.randn(ours.shape)
    results = [
        (out, *torch.autograd.grad(out, leaves, seed.to(out.dtype)))
        for out in (ours, theirs, exact)
    ]
    for mine, other, right in zip(*results, strict=True):
        worst = (other.double() - right.double()).abs().max()
        assert (mine.double() - right.double()).abs().max() <= 2 * worst


def test_float32_is_float32() -> None:
    leaves = inputs(1, 2, 2, 300, 300, 64, 64, torch.float32)
    i, j, *_ = positions(2, 2, 300, 300)
    out, lse = run(*leaves, causal)
    exact = oracle(*leaves, j <= i)
    assert (out - exact[0]).abs().max() < 1e-5
    assert (lse - exact[1]).abs().max() < 1e-5


def test_autocast_changes_nothing() -> None:
    leaves = inputs(1, 2, 2, 40, 40, dtype=torch.float32)
    plain = run(*leaves, causal)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = run(*leaves, causal)
        assert cast[0].dtype == torch.float32
        for mine, right in zip(gradients(cast, leaves), gradients(plain, leaves), strict=True):
            torch.testing.assert_close(mine, right, rtol=0, atol=0)
    torch.testing.assert_close(cast, plain, rtol=0, atol=0)


def test_any_strides() -> None:
    packed = torch.randn(2, 40, 3, 4, 8, dtype=torch.float64, requires_grad=True)
    shared = torch.randn(1, 1, 40, 8, dtype=torch.float64, requires_grad=True)
    q = packed[:, :, 0].transpose(1, 2)
    k = packed[:, :, 1].transpose(1, 2)[..., ::2].mT.contiguous().mT.repeat(1, 1, 1, 2)
    v = shared.expand(2, 4, 40, 8)
    i, j, *_ = positions(4, 4, 40, 40)
    ours, theirs = run(q, k, v, causal), oracle(q, k, v, j <= i)
    assert_same(ours, theirs, (packed, shared))


@pytest.mark.parametrize(
    ("batch", "heads", "q_len", "kv_len"),
    [(0, 2, 5, 5), (2, 0, 5, 5), (2, 2, 0, 5), (2, 2, 5, 0), (2, 2, 0, 0)],
)
@pytest.mark.parametrize("pattern", [None, causal, head_window])
def test_lengths_of_zero(pattern: Any, batch: int, heads: int, q_len: int, kv_len: int) -> None:
    leaves = inputs(batch, heads, heads, q_len, kv_len)
    out, lse = run(*leaves, pattern)
    assert out.shape == (batch, heads, q_len, 8)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full((batch, heads, q_len), -INF, dtype=torch.float64))
    for leaf, grad in zip(leaves, gradients((out, lse), leaves), strict=True):
        assert torch.equal(grad, torch.zeros_like(leaf))


@pytest.mark.usefixtures("nan_filled_empty")
def test_rows_without_keys_and_keys_without_queries() -> None:
    leaves = inputs()
    out, lse = run(*leaves, every_other_query)
    grads = torch.autograd.grad((out * out).sum() + lse[:, :, ::2].sum(), leaves)
    assert torch.equal(out[:, :, 1::2], torch.zeros_like(out[:, :, 1::2]))
    assert (lse[:, :, 1::2] == -INF).all()
    assert torch.equal(grads[0][:, :, 1::2], torch.zeros_like(out[:, :, 1::2]))
    for grad in grads[1:]:
        assert torch.equal(grad[:, :, 1::3], torch.zeros_like(grad[:, :, 1::3]))
        assert (grad[:, :, 0::3] != 0).all()


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("name", MASKS)
def test_everything_is_written(name: str) -> None:
    leaves = inputs(2, 2, 2, 40, 60)
    outputs = run(*leaves, MASKS[name][0])
    for result in (*outputs, *gradients(outputs, leaves)):
        assert not result.isnan().any()


@pytest.mark.parametrize("offset", [0, 7, -20, 100])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_offsets(offset: int, as_tensor: bool) -> None:
    leaves = inputs(2, 2, 2, 30, 64)
    i, j, *_ = positions(2, 2, 30, 64, offset)
    given_ = torch.tensor([offset], dtype=torch.int32) if as_tensor else offset
    ours = run(*leaves, window(width=9), q_offset=given_)
    assert_same(ours, oracle(*leaves, (j <= i) & (j > i - 9)), leaves)


@pytest.mark.parametrize("pattern", [causal, None])
def test_offsets_and_lengths_of_each_sequence(pattern: Any) -> None:
    leaves = inputs(4, 2, 2, 20, 64)
    offsets = torch.tensor([0, 44, -5, 10])
    lens = torch.tensor([64, 1, 0, 37], dtype=torch.int32)
    i, j, *_ = positions(2, 2, 20, 64, 0)
    seen = j < lens[:, None, None]
    for q_offset, start in ((offsets, offsets), (None, lens - 20)):
        allowed = (
            (j <= i + start[:, None, None]) & seen if pattern is causal else seen.expand(4, 20, 64)
        )
        ours = run(*leaves, pattern, q_offset=q_offset, kv_lens=lens)
        assert_same(ours, oracle(*leaves, allowed[:, None]), leaves)


def test_a_schedule_shared_by_sequences_of_different_lengths() -> None:
    leaves = inputs(3, 2, 2, 20, 40)
    lens = torch.tensor([40, 3, 17])
    geometry = Geometry(3, 2, 2, 20, 40, CPU, 0, lens)
    states = torch.full((1, 1, 2, 3), 2, dtype=torch.int8)
    bound = Program().bind({}, "test")
    schedule = Schedule(states, (16, 16), 20, 40, 0, lens, "full", "", "auto")
    made = engine("cpu", bound, geometry=geometry, schedule=schedule, scale=8**-0.5)
    ours = attention(made, *leaves, None, [])
    allowed = (torch.arange(40) < lens[:, None]).reshape(3, 1, 1, 40)
    assert_same(ours, oracle(*leaves, allowed), leaves)


def test_lengths_as_symbols() -> None:
    @mask
    def second_half(q_idx, kv_idx, q_len, kv_len):
        return (kv_idx >= kv_len // 2) & (q_idx >= kv_len - q_len)

    leaves = inputs(2, 2, 2, 20, 40)
    lens = torch.tensor([40, 21])
    j = torch.arange(40)
    allowed = ((j >= lens[:, None] // 2) & (j < lens[:, None]))[:, None, None].expand(2, 1, 20, 40)
    assert_same(run(*leaves, second_half, kv_lens=lens), oracle(*leaves, allowed), leaves)


def test_mean_of_the_allowed_keys() -> None:
    q = torch.zeros(1, 1, 128, 4, dtype=torch.float64)
    k = torch.randn(1, 1, 128, 4, dtype=torch.float64)
    v = torch.arange(128, dtype=torch.float64)[:, None].expand(1, 1, 128, 4)
    i = torch.arange(128, dtype=torch.float64)
    out, lse = run(q, k, v, causal)
    torch.testing.assert_close(out[0, 0, :, 0], i / 2)
    torch.testing.assert_close(lse[0, 0], torch.log(i + 1))
    out, lse = run(q, k, v, window(width=11))
    torch.testing.assert_close(out[0, 0, :, 0], ((i - 10).clamp(0) + i) / 2)
    torch.testing.assert_close(lse[0, 0], torch.log((i + 1).clamp(max=11)))


@settings(max_examples=60)
@given(st.data())
def test_blocks_cover_the_schedule(data: st.DataObject) -> None:
    """Each visited pair is in one block, and full columns are full for every row."""
    rows, columns = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 7))
    batch, heads = data.draw(st.sampled_from([1, 2])), data.draw(st.sampled_from([1, 4]))
    states = torch.randint(0, 3, (batch, heads, rows, columns), dtype=torch.int8)
    q_len, kv_len = (
        rows * 8 - data.draw(st.integers(0, 7)),
        columns * 4 - data.draw(st.integers(0, 3)),
    )
    schedule = Schedule(states, (8, 4), q_len, kv_len, None, None, "random", "", "auto")
    geometry = Geometry(2, 4, 2, q_len, kv_len, CPU)
    dense = states.repeat_interleave(8, 2).repeat_interleave(4, 3)[:, :, :q_len, :kv_len]
    dense = dense.expand(2, 4, -1, -1)
    seen = torch.zeros(2, 4, q_len, kv_len, dtype=torch.int64)
    for block in split(schedule, geometry):
        wanted = range(block.heads.start // 2, (block.heads.stop - 1) // 2 + 1)
        assert range(block.kv_heads.start, block.kv_heads.stop) == wanted
        place = torch.cat([torch.arange(c.start, c.stop) for c in block.columns])
        tile = dense[block.queries][..., place]
        assert (tile[..., : block.full] == 2).all()
        part = seen[block.queries]
        part[..., place] += 1
    assert seen.max() <= 1
    assert (seen[dense != 0] == 1).all()


def test_full_tiles_pay_for_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashgen.cpu import scores

    masked = 0

    def count(expr: Any, env: Any) -> torch.Tensor:
        nonlocal masked
        values = scores_evaluate(expr, env)
        masked += values.numel()
        return values

    scores_evaluate = scores.evaluate
    monkeypatch.setattr(scores, "evaluate", count)
    monkeypatch.setattr("flashgen.cpu.blocks._OVERHEAD", 0)
    run(*inputs(2, 2, 2, 128, 128, dtype=torch.float32), causal)
    assert masked == 8 * 16 * 16


MEMORY = """
import resource, torch
from flashgen.geometry import Geometry
from flashgen.ops import attention, engine
from flashgen.schedule.make import make_schedule
from flashgen.spec import Program, mask

@mask
def causal(q_idx, kv_idx):
    return kv_idx <= q_idx

def peak(length):
    bound = Program(causal).bind({}, "test")
    geometry = Geometry(1, 1, 1, length, length, torch.device("cpu"))
    schedule = make_schedule(bound, geometry, (128, 128), "auto", "test")
    q, k, v = (torch.randn(1, 1, length, 16, requires_grad=True) for _ in range(3))
    made = engine("cpu", bound, geometry=geometry, schedule=schedule, scale=0.25)
    out, lse = attention(made, q, k, v, None, [])
    (out.sum() + lse.sum()).backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

before = peak(256)
print(peak(10240) - before)
"""


def test_memory_is_linear() -> None:
    """10240 squared floats are 400 MiB; what is held is a few MB and the blocks at hand."""
    result = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True
    )
    assert int(result.stdout) < 128


def test_a_sink_of_infinity_takes_all_the_weight():
    q, k, v = (torch.randn(1, 2, 9, 8, requires_grad=True) for _ in range(3))
    sinks = torch.tensor([INF, 0.5], requires_grad=True)
    out, lse = fg.Attention(masks.causal, sinks=True)(q, k, v, sinks=sinks, return_lse=True)
    assert not out[0, 0].any()
    assert (lse[0, 0] == torch.finfo(torch.float32).max).all()
    right, _ = attention_reference(q, k, v, mask=masks.causal.dense(9, 9), sinks=sinks)
    torch.testing.assert_close(out, right.float())
    grads = torch.autograd.grad(out.square().sum(), [q, k, v, sinks])
    assert all(g.isfinite().all() for g in grads)
    assert not any(g[0, 0].any() for g in grads[:3])
    assert grads[3][0] == 0
