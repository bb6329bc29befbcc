"""Kernels of packed and paged tensors compile for GPUs that aren't here, and cost what they may."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from spilling import IS_EARLY, at_most
from test_backward import compile_backward
from test_hopper_backward import compile_backward as compile_hopper_backward

import flashgen as fg
from flashgen import aot, emit, launch, masks, plan, tiling
from flashgen.aot import TARGETS
from flashgen.call import Call
from flashgen.kernel_names import spell
from flashgen.tiling.hopper import shape_for

CAUSAL = fg.Attention(masks.causal_document)


def call_of(keys: str) -> Call:
    """Two sequences packed, or packed queries over pages."""
    q = torch.empty(20, 4, 128, dtype=torch.bfloat16)
    starts = torch.tensor([0, 4, 20], dtype=torch.int32)
    arguments: dict[str, Any] = {"doc": torch.zeros(2, 64).int(), "cu_seqlens_q": starts}
    if keys == "packed":
        return CAUSAL._check_look(q, q, q, {**arguments, "cu_seqlens_kv": starts})
    pages = torch.empty(8, 16, 4, 128, dtype=torch.bfloat16)
    paged = {"page_table": torch.zeros(2, 4).int(), "kv_lens": torch.tensor([4, 60])}
    return CAUSAL._check_look(q, pages, pages, {**arguments, **paged})


def made_of(keys: str, *, planning: bool = False) -> tuple[Any, emit.Variant]:
    call = call_of(keys)
    bound, dims = spell(call.bound), (0, 0) if planning else (128, 128)
    return bound.spec, launch.variant_of(bound, call.geometry, *dims)


@pytest.mark.parametrize(
    ("page_size", "target"),
    [
        (0, "sm_90"),
        pytest.param(1, "sm_90", marks=pytest.mark.slow),
        (16, "sm_90"),
        pytest.param(256, "sm_90", marks=pytest.mark.slow),
        pytest.param(0, "sm_80", marks=pytest.mark.slow),
        (0, "gfx942"),
    ],
)
def test_forward(page_size: int, target: str) -> None:
    """Packed (0), and pages of several sizes."""
    spec, variant = made_of("paged" if page_size else "packed")
    found = aot.compile_forward(spec, target, variant=variant, page_size=page_size)
    # 3.6's assembler keeps arguments of the second pass in memory, outside of loops.
    assert found.spills is not None
    assert found.spills <= (400 if IS_EARLY else 0)
    assert not found.spills or found.spills_in_loops() == 0
    assert found.shared <= tiling.target_of(*TARGETS[target]).shared
    assert not found.warnings


@pytest.mark.parametrize(
    ("dims", "rows", "page_size"),
    [
        ((128, 128), 128, 0),
        pytest.param((64, 64), 192, 0, marks=pytest.mark.slow),
        pytest.param((128, 128), 128, 16, marks=pytest.mark.slow),
        pytest.param((64, 64), 192, 64, marks=pytest.mark.slow),
        pytest.param((128, 128), 128, 128, marks=pytest.mark.slow),
    ],
)
def test_hopper_forward(dims: tuple[int, int], rows: int, page_size: int) -> None:
    """Packed queries; keys too (0), or pages of several sizes."""
    spec, variant = made_of("paged" if page_size else "packed")
    variant = replace(variant, head_dim=dims[0], v_head_dim=dims[1])
    shape = shape_for(*dims, block_m=rows)
    found = aot.compile_hopper_forward(spec, variant=variant, shape=shape, page_size=page_size)
    print(found)
    assert found.warnings == ()
    # The warp that copies pages has registers for few addresses. Of packed keys, each of both
    # warpgroups may fill one register in a cut tile, one of some 820 instructions there; of three,
    # which have 160 registers each, two.
    if rows == 192:
        assert found.spills_in_loops() <= at_most(12, 400)
    else:
        assert found.spills_in_loops() <= (8 if page_size else 2)
    assert found.instructions()["UTMALDG"] > 0


@pytest.mark.parametrize("kind", ["q", "kv"])
def test_backward(kind: str) -> None:
    spec, variant = made_of("packed")
    found = compile_backward(spec, "sm_90", kind, 128, variant=variant)
    dense = compile_backward(spec, "sm_90", kind, 128)
    assert found.spills is not None
    assert dense.spills is not None
    print(found, dense)
    assert found.spills <= dense.spills + 64
    assert not found.warnings


def test_planning() -> None:
    spec, variant = made_of("packed", planning=True)
    for name, found in aot.compile_plan(plan.generate(spec, variant), spec, "sm_90").items():
        # A few bytes that are kept over the search of undecided tiles, outside of its loops.
        assert found.spills is not None
        assert found.spills <= 16, name
    for by_key in (False, True):
        assert aot.compile_compaction("sm_90", by_key=by_key, packed=True).spills == 0


@pytest.mark.parametrize("target", ["sm_80", pytest.param("gfx942", marks=pytest.mark.slow)])
def test_pages_elsewhere(target: str) -> None:
    """Addresses of scattered keys cost registers, which Ampere's large tiles lack."""
    spec, variant = made_of("paged")
    found = aot.compile_forward(spec, target, variant=variant, page_size=16)
    print(found)
    assert found.spills is not None
    assert found.spills <= 256


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "ordered"), [(64, False), (128, True), (192, True)])
def test_hopper_backward(dim: int, ordered: bool) -> None:
    spec, variant = made_of("packed")
    variant = replace(variant, head_dim=dim, v_head_dim=dim)
    found = compile_hopper_backward(spec, variant, ordered=ordered)
    print(found)
    assert found.warnings == ()
    assert found.spills_in_loops() <= 20
    # Up to 128 dimensions dK and dV leave from registers.
    assert (found.instructions()["UTMASTG"] > 0) == (dim > 128)
