"""Hopper's backward compiles ahead of time, to the instructions that it is written for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from golden_kernels import GOLDEN, Golden
from spilling import at_most

import flashgen as fg
from flashgen import aot, cache, emit, launch, masks
from flashgen.emit.gradients import Wanted
from flashgen.emit.hopper_backward import keys_of, stages_of, width_of
from flashgen.emit.sums import NO_DATA, summed
from flashgen.launch import tma
from flashgen.launch.hopper_backward import BLOCK_M, generate
from flashgen.spec import Spec
from flashgen.tiling import Tiling

LIMIT = 232448


def compile_backward(
    spec: Spec,
    variant: emit.Variant,
    *,
    shared_heads: bool = False,
    ordered: bool = False,
    wanted: Wanted = NO_DATA,
) -> Any:
    made = generate(spec, variant, ordered, wanted)
    module = cache.module(made.name, made.text, launch.key_parts())
    block_n = keys_of(variant.head_dim, variant.v_head_dim)
    constants = {
        "BLOCK_M": BLOCK_M, "BLOCK_N": block_n, "TILE_M": 128, "TILE_N": 128,
        "STAGES": stages_of(variant.head_dim, variant.v_head_dim), "SHARED_HEADS": shared_heads,
    }  # fmt: skip
    values = _placeholders(made.attention, spec, variant, shared_heads)
    tiling = Tiling(0, 0, 4, 1)
    return aot.compile_kernel("sm_90", module.attention_backward, values, constants, tiling)


def _placeholders(
    names: tuple[str, ...], spec: Spec, variant: emit.Variant, shared_heads: bool
) -> list[Any]:
    width, v_width = width_of(variant.head_dim), width_of(variant.v_head_dim)
    block_n = keys_of(variant.head_dim, variant.v_head_dim)
    rows = torch.empty(1, 2, 256, 256, dtype=torch.bfloat16)
    given = {
        "q_tiles": tma.descriptor(rows, (BLOCK_M, width)),
        "k_tiles": tma.descriptor(rows, (block_n, width)),
        "v_tiles": tma.descriptor(rows, (block_n, v_width)),
        "grad_out_tiles": tma.descriptor(rows, (BLOCK_M, v_width)),
        "lse_tiles": tma.descriptor(torch.empty(512), (BLOCK_M,)),
        "minus_delta_tiles": tma.descriptor(torch.empty(512), (BLOCK_M,)),
        "dk_tiles": tma.descriptor(rows, (64, width)),
        "dv_tiles": tma.descriptor(rows, (64, v_width)),
    }
    counters = ("spoilt_kv_ptr", "next_item_ptr", "longest_ptr", "row_turns_ptr", "key_turns_ptr")
    kinds = dict.fromkeys((*counters, "visits", "ranks"), torch.int32) | {"states": torch.int8}
    kinds |= dict.fromkeys(("dq_sum_ptr", "dk_sum_ptr", "dv_sum_ptr"), torch.float32)
    kinds |= dict.fromkeys((f"grad_{tensor.name}_ptr" for tensor in spec.tensors), torch.float32)
    others = aot._placeholders(names, spec, torch.bfloat16, kinds)
    return [given.get(name, other) for name, other in zip(names, others, strict=True)]


# Bytes: three products' sums fill the registers, and what is spilled belongs to addresses and to
# items as a whole; in instructions of the loop.
@pytest.mark.parametrize(
    ("name", "spills", "in_loop"),
    [
        ("causal", at_most(120, 240), at_most(4, 6)),
        ("sliding_window", 60, 6),
    ],
    ids=("causal", "sliding_window"),
)
def test_instructions(name: str, spills: int, in_loop: int) -> None:
    golden = GOLDEN[name]
    variant = golden.variant()
    found = compile_backward(golden.spec(), variant)
    print(found)
    assert found.warnings == (), "wgmma must stay asynchronous"
    assert found.spills <= spills
    assert found.spills_in_loops() <= in_loop
    assert found.shared <= LIMIT
    count = found.instructions()
    # Of five products the loop has all, and so has a block's last step; before both stand the first
    # scores, and where a third warpgroup adds dQ the first dP; behind them the last dQ.
    # Each of the two warpgroups sums over dimensions, over a step's queries and the block's keys;
    # a third one where registers hold it computes dQ, from all keys, in one place.
    over_dims, over_queries, over_keys = golden.head_dim // 16, BLOCK_M // 16, 128 // 16
    of_dims, of_dq = (6, 1) if golden.head_dim <= 64 else (5, 2 * 3)
    assert count["HGMMA"] == 2 * (of_dims * over_dims + 4 * over_queries) + of_dq * over_keys
    assert count["UTMALDG"] > 0
    # dQ in fours: half of the head dimension, in each of these places; or all of it.
    assert count["REDG"] == golden.head_dim // (8 if golden.head_dim <= 64 else 16) * of_dq
    # dK and dV leave from registers.
    assert count["UTMASTG"] == 0


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("causal_document", marks=pytest.mark.slow),
        "flashmask",
        pytest.param("alibi", marks=pytest.mark.slow),
        pytest.param("softcap_sinks", marks=pytest.mark.slow),
        "lengths_and_offsets",
        "head_dim_192_128",
        pytest.param("head_dim_256", marks=pytest.mark.slow),
        pytest.param("head_dim_96", marks=pytest.mark.slow),
    ],
)
def test_masks_and_scores(name: str) -> None:
    """Data of queries comes through shared memory, and takes no registers for addresses."""
    golden = GOLDEN[name]
    found = compile_backward(
        golden.spec(), golden.variant(), shared_heads=name == "alibi", ordered=name == "flashmask"
    )
    print(found)
    assert found.warnings == ()
    assert found.shared <= LIMIT
    assert found.spills_in_loops() <= at_most(60, 80)


def biased(score, h, q_idx, kv_idx, table: fg.Tensor):
    return score + table[h, (q_idx - kv_idx).clamp(0, 511)]


@pytest.mark.parametrize(
    ("head_dim", "spills", "in_loop"),
    [(64, at_most(80, 3000), at_most(4, 500)), (128, at_most(700, 4500), at_most(90, 800))],
    ids=str,
)
def test_gradients_of_data(head_dim: int, spills: int, in_loop: int) -> None:
    """Pairs near the diagonal read their own numbers; what is spilled is mostly for these."""
    attend = fg.Attention(masks.causal, score=biased)
    golden = Golden(attend, {"table": torch.zeros(4, 512)}, head_dim)
    spec, variant = golden.spec(), golden.variant()
    wanted = summed(spec, replace(NO_DATA, data=(spec.tensors[0].name,)), variant, BLOCK_M)
    found = compile_backward(spec, variant, wanted=wanted)
    print(found)
    assert found.warnings == ()
    assert found.spills <= spills
    assert found.spills_in_loops() <= in_loop
