"""Generated kernels compile for GPUs that aren't here, and cost what they may.

The default suite compiles representative ones; the slow one every golden kernel for every target
and dtype."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from golden_kernels import GOLDEN, HEADS, LENGTH, PLANS, Golden

import flashgen as fg
from flashgen import aot, emit, masks, tiling
from flashgen.aot import TARGETS, Compiled
from flashgen.order import tables_of
from flashgen.tiling.hopper import shape_for

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# (golden kernel, dtype, target, whether its rows are long)
SOME = [
    ("causal_document", BF16, "sm_90", False),
    ("causal", BF16, "sm_90", True),
    ("softcap_sinks", FP16, "sm_90", False),
    ("head_dim_256", BF16, "sm_90", True),
    ("causal_document", BF16, "sm_80", False),
    ("alibi", FP32, "sm_80", False),
    ("sliding_window", BF16, "sm_100", False),
    ("head_dim_40", FP16, "sm_120", False),
    ("flashmask", FP16, "gfx942", False),
    ("lengths_and_offsets", FP32, "gfx942", False),
]
EVERY = [
    (name, dtype, target, long_rows)
    for name in GOLDEN
    for dtype in (BF16, FP16, FP32)
    for target in TARGETS
    for long_rows in ((False, True) if target == "sm_90" else (False,))
]


def described(case: object) -> str:
    return "long" if case is True else "" if case is False else str(case).removeprefix("torch.")


@functools.cache
def compiled(name: str, dtype: torch.dtype, target: str, long_rows: bool) -> Compiled:
    golden = GOLDEN[name]
    variant = golden.variant()
    dims = (variant.head_dim, variant.v_head_dim)
    chosen = tiling.choose(tiling.target_of(*TARGETS[target]), dtype, *dims, long_rows)
    return aot.compile_forward(golden.spec(), target, dtype=dtype, variant=variant, tiling=chosen)


def check(name: str, dtype: torch.dtype, target: str, long_rows: bool) -> None:
    found = compiled(name, dtype, target, long_rows)
    assert found.shared <= tiling.target_of(*TARGETS[target]).shared
    assert not found.warnings
    variant = GOLDEN[name].variant()
    if max(variant.head_dim, variant.v_head_dim) <= 128:
        # What a row block sets aside between its loops costs nothing to speak of.
        assert found.spills <= 256
        assert found.spills == 0 or found.spills_in_loops() == 0
    assert_uses_tensor_cores(found, dtype)


def assert_uses_tensor_cores(found: Compiled, dtype: torch.dtype) -> None:
    """The instructions that a target's matrix products should be made of."""
    if found.target.startswith("gfx"):
        assert "v_mfma" in found.assembly
    elif dtype == FP32:
        # True fp32: tensor cores would round to TF32.
        assert not any(word in found.assembly for word in ("mma.", "wgmma", "tcgen05.mma"))
    else:
        wanted = {"sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma"}
        assert wanted.get(found.target, "mma.sync") in found.assembly


@pytest.mark.parametrize(("name", "dtype", "target", "long_rows"), SOME, ids=described)
def test_some_forward_kernels(name, dtype, target, long_rows):
    check(name, dtype, target, long_rows)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "target", "long_rows"), EVERY, ids=described)
def test_every_forward_kernel(name, dtype, target, long_rows):
    check(name, dtype, target, long_rows)


def check_planning(name: str, target: str) -> None:
    golden = GOLDEN[name]
    for found in aot.compile_plan(golden.planning(), golden.spec(), target).values():
        assert found.spills == 0
        assert found.shared <= 4096


@pytest.mark.parametrize(
    ("name", "target"), [("causal_document", "sm_90"), ("natten_2d", "gfx942")]
)
def test_planning_kernels(name, target):
    check_planning(name, target)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", PLANS)
def test_every_planning_kernel(name, target):
    check_planning(name, target)


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_compaction(target, by_key):
    assert aot.compile_compaction(target, by_key=by_key).spills == 0


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_compaction_for_every_target(target):
    assert aot.compile_compaction(target).spills == 0


def test_a_cost_prints_well():
    found = Compiled("sm_90", 200, 0, 8, 1024, ("(C7511) serialized",), "")
    assert str(found).splitlines() == [
        "sm_90: 200 registers, 0 spilled, 1024 bytes shared",
        "(C7511) serialized",
    ]


def test_compiling_leaves_the_driver_as_it_was():
    from triton.runtime import driver

    before = driver._active
    with aot.compiling_for("gfx942"):
        assert driver.active.get_current_target().warp_size == 64
    assert driver._active is before


def test_spills_and_a_serialised_wgmma_are_seen():
    """A tile too large for its warps: the numbers that the other tests rest on aren't always 0."""
    spec = GOLDEN["causal"].spec()
    variant = emit.Variant(64, 64)
    big = tiling.Tiling(128, 128, 4, 3)
    found = aot.compile_forward(spec, "sm_90", variant=variant, tiling=big)
    assert found.spills > 0
    assert found.spills_in_loops() > 0
    assert found.registers == 255
    assert any("C7511" in line for line in found.warnings)


# Where a mask reads keys' data, a few values of the epilogue are kept in local memory meanwhile.
KEPT_ASIDE = 256


@functools.cache
def hopper_compiled(name: str, dtype: torch.dtype) -> Compiled:
    golden = GOLDEN[name]
    return aot.compile_hopper_forward(golden.spec(), dtype=dtype, variant=golden.variant())


def check_hopper(name: str, dtype: torch.dtype) -> None:
    """No spills in the loops, nothing serialised, and all products and copies where they belong."""
    found = hopper_compiled(name, dtype)
    variant = GOLDEN[name].variant()
    shape = shape_for(variant.head_dim, variant.v_head_dim)
    q_parts, v_parts = (emit.parts_of(d) for d in (variant.head_dim, variant.v_head_dim))
    assert found.registers == 168
    assert found.spills <= KEPT_ASIDE
    assert not found.warnings
    assert found.shared <= tiling.target_of("cuda", 90).shared
    count = found.instructions()
    # Two warpgroups; the first tile, a loop of cut tiles if there is a mask, another one where data
    # may be in order, and one of full tiles.
    mask = GOLDEN[name].spec().mask
    loops = 1 + (mask is not None) + bool(tables_of(mask))
    scores = sum(part.size // 16 for part in q_parts)
    outputs = len(v_parts) * (shape.block_n // 16)
    assert count["HGMMA"] == 2 * ((1 + loops) * scores + (1 + loops) * outputs)
    # Of queries for two warpgroups; of keys; of values in the loop and after it. A first turn that
    # stands before the loop has its own.
    boxes = [sum(-(-part.size // 64) for part in parts) for parts in (q_parts, v_parts)]
    copies = 3 * boxes[0] + 2 * boxes[1]
    assert count["UTMALDG"] in (copies, copies + boxes[0] + boxes[1])


@pytest.mark.parametrize(
    ("name", "dtype"), [("causal_document", BF16), ("head_dim_96", FP16)], ids=described
)
def test_hopper_forward_kernels(name, dtype):
    check_hopper(name, dtype)


@pytest.mark.parametrize(
    "name",
    [
        "causal",
        pytest.param("sliding_window", marks=pytest.mark.slow),
        pytest.param("softcap_sinks", marks=pytest.mark.slow),
    ],
)
def test_three_warpgroups_of_narrow_heads(name):
    """Their registers are few: scores, weights, outputs, and little else.

    A few are filled where both ends of a window cut a tile; rows that are long have one end."""
    golden = GOLDEN[name]
    shape = shape_for(64, 64, 128, 192)
    variant = replace(golden.variant(), head_dim=64, v_head_dim=64)
    found = aot.compile_hopper_forward(golden.spec(), variant=variant, shape=shape)
    assert found.registers == 128
    assert found.spills_in_loops() <= (0 if name == "causal" else 9)
    assert not found.warnings


@fg.attention(mask=masks.causal)
def biased(score, h, q_idx, kv_idx, column: fg.Tensor, bias: fg.Tensor):
    return score + column[kv_idx] + bias[h, q_idx, kv_idx]


def test_hopper_forward_reads_data_of_keys_and_of_pairs():
    """A pair's address has parts of its key, which stands one to a thread, and of its query."""
    data = {"column": torch.zeros(LENGTH), "bias": torch.zeros(HEADS, LENGTH, LENGTH)}
    golden = Golden(biased, data, 64)
    found = aot.compile_hopper_forward(golden.spec(), variant=golden.variant())
    assert not found.warnings


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=described)
@pytest.mark.parametrize("name", GOLDEN)
def test_every_hopper_forward_kernel(name, dtype):
    check_hopper(name, dtype)
