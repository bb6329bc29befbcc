"""What Hopper kernels are made of compiles under this Triton, and becomes what it should."""

from __future__ import annotations

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashgen import aot, hopper
from flashgen.launch import tma
from flashgen.records.direct import count_parameters
from flashgen.tiling import Tiling


@gluon.jit
def product(a_desc, b_desc, out_desc, sum_ptr, num_warps: gl.constexpr):
    """out = a @ b of one tile, and added to a sum: each name that drifts, once."""
    tile = gl.allocate_shared_memory(a_desc.dtype, [2, 1, 1, 64, 64], a_desc.layout)
    sums = gl.allocate_shared_memory(gl.float32, [1, 1, 64, 64], out_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], hopper.mbarrier.MBarrierLayout())
    hopper.mbarrier.init(ready, count=1)
    hopper.mbarrier.expect(ready, 2 * a_desc.block_type.nbytes)
    hopper.load_tile(a_desc, [0, 0, 0, 0], ready, tile.index(0))
    hopper.load_tile(b_desc, [0, 0, 0, 0], ready, tile.index(1))
    hopper.mbarrier.wait(ready, 0)
    layout: gl.constexpr = hopper.accumulator(64)
    a = tile.index(0).reshape([64, 64]).load(hopper.operand(64))
    acc = gl.zeros([64, 64], gl.float32, layout)
    acc = hopper.warpgroup_mma(a, tile.index(1).reshape([64, 64]), acc, is_async=True)
    acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
    sums.reshape([64, 64]).store(acc)
    hopper.fence_async_shared()
    hopper.barrier()
    hopper.store_tile(out_desc, [0, 0, 0, 0], sums)
    hopper.wait_stores(0)
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    columns = gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    hopper.add_quads(sum_ptr + rows * 64 + columns, acc)


def test_every_name_compiles():
    x = torch.empty(2, 3, 100, 64, dtype=torch.bfloat16)
    tile = (64, 64)
    values = [*(tma.descriptor(t, tile) for t in (x, x, x.float())), torch.empty(4096)]
    found = aot.compile_kernel("sm_90", product, values, {}, Tiling(64, 64, 4, 1))
    assert found.spills == 0
    count = found.instructions()
    assert count["HGMMA"] == 4
    assert count["UTMALDG"] == 2
    assert count["REDG"] == 8, "four numbers each"
    assert count["UTMASTG"] == 1
    # Of a descriptor a map, four lengths and four strides; a pointer; scratch of two kinds.
    assert count_parameters(found.assembly) == 3 * 9 + 1 + 2


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda x: x, ""),
        (lambda x: x.transpose(1, 2), ""),
        (lambda x: x[:, :1], ""),
        (lambda x: x[:, :, 1:], ""),
        (lambda x: x[..., 1:], "data that doesn't start at a multiple of 16 bytes"),
        (lambda x: x[:, :, :, :65], "strides that aren't multiples of 16 bytes"),
        (lambda x: x[:, :1].expand(-1, 3, -1, -1), "strides of 0 or beyond 2^40 bytes"),
        (lambda x: x[:, :, :0], "no elements"),
    ],
)
def test_what_can_be_described(change, why):
    x = torch.empty(2, 3, 100, 64, dtype=torch.float16)
    if "strides that" in why:
        x = torch.empty(2, 3, 100, 65, dtype=torch.float16)
    assert tma.can_describe(change(x)) == why
    if not why:
        tma.descriptor(change(x), (64, 64))
