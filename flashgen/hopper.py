"""What Hopper kernels are made of: Gluon's names over Triton 3.6 to 3.9, layouts, pieces of code.

The one module that knows how Gluon's names drift. Generated kernels take from here what has
changed its name or has none yet, and from Gluon itself what is the same everywhere. Importing it
imports Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia import hopper as instructions
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as TensorDescriptor
from triton.language import PropagateNan as PropagateNan

tma, mbarrier, async_copy = instructions.tma, instructions.mbarrier, instructions.async_copy
fence_async_shared = instructions.fence_async_shared
warpgroup_mma = instructions.warpgroup_mma
warpgroup_mma_wait = instructions.warpgroup_mma_wait
# 3.8 calls copies of tiles loads and stores, and 3.9 keeps the old names only as deprecated ones.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
# Until the threads of a partition have arrived: 3.7 renamed it.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


def _wait_stores(pendings: int, _semantic: Any = None) -> None:
    """Until at most `pendings` stores still read shared memory; 3.8 asks what is waited for."""
    tma.store_wait(pendings, _semantic=_semantic)


wait_stores = builtin(_wait_stores)


def _reinterpret(
    tile: Any, dtype: Any, shape: Sequence[Any], layout: Any, _semantic: Any = None
) -> Any:
    """Shared memory seen in another shape and layout; 3.9 gave it a public name alone."""
    view = getattr(tile, "reinterpret", None) or tile._reinterpret
    return view(dtype, shape, layout, _semantic=_semantic)


reinterpret = builtin(_reinterpret)


@gluon.jit  # type: ignore[untyped-decorator]
def sync_at(number, threads: gl.constexpr = 256):  # type: ignore[no-untyped-def]
    """Until so many threads are at a named barrier: they arrive here, or by `arrive_at`.

    Gluon has no named barriers; Triton takes the numbers below 8 for itself."""
    gl.inline_asm_elementwise(
        f"bar.sync $1, {threads}; mov.u32 $0, 0;", "=r,r,~{memory}", [number], gl.int32, False, 1
    )


@gluon.jit  # type: ignore[untyped-decorator]
def arrive_at(number, threads: gl.constexpr = 256):  # type: ignore[no-untyped-def]
    """Arrive at a named barrier, and go on."""
    gl.inline_asm_elementwise(
        f"bar.arrive $1, {threads}; mov.u32 $0, 0;", "=r,r,~{memory}", [number], gl.int32, False, 1
    )


@gluon.jit
def turn_at(place):  # type: ignore[no-untyped-def]
    """A counter in memory; what was added before its passing is there for who is told of it."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.u32 $0, [$1];",
        "=r,l,~{memory}",
        [place.to(gl.int64)],
        gl.int32,
        False,
        1,
    )


@gluon.jit
def await_turn(place, number):  # type: ignore[no-untyped-def]
    """Until a counter in memory is at `number`."""
    gl.inline_asm_elementwise(
        "{ .reg .pred again; await:"
        " ld.acquire.gpu.global.u32 $0, [$1]; setp.ne.u32 again, $0, $2; @again bra await; }",
        "=&r,l,r,~{memory}",
        [place.to(gl.int64), number],
        gl.int32,
        False,
        1,
    )


@gluon.jit
def pass_turn(place):  # type: ignore[no-untyped-def]
    """Add 1 to a counter in memory, behind all that this warp knows of; one warp calls it."""
    gl.inline_asm_elementwise(
        "{ .reg .pred one; mov.u32 $0, %laneid; setp.eq.u32 one, $0, 0; fence.acq_rel.gpu;"
        " @one red.relaxed.gpu.global.add.u32 [$1], 1; mov.u32 $0, 0; }",
        "=&r,l,~{memory}",
        [place.to(gl.int64)],
        gl.int32,
        False,
        1,
    )


@gluon.jit
def add_quads(places, values):  # type: ignore[no-untyped-def]
    """Add an accumulator's numbers to memory, the four together that a thread has of 8 columns.

    `places`: pointers of its shape, of which the first of each four counts."""
    gl.inline_asm_elementwise(
        "red.relaxed.gpu.global.add.v4.f32 [$4], {$8, $9, $10, $11};"
        "mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0;",
        "=r,=r,=r,=r,l,l,l,l,f,f,f,f,~{memory}",
        [places.to(gl.int64), values],
        gl.int32,
        False,
        4,
    )


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def accumulator(columns: int, warps: int = 4) -> Any:
    """wgmma's accumulator, [16 x warps, n] with n up to 256 columns at a time."""
    shape = [16, min(columns, 256), 16]
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=shape)


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def operand(columns: int, warps: int = 4) -> Any:
    """wgmma's first operand in registers, for an accumulator of so many columns."""
    parent = accumulator(columns, warps)
    return gl.DotOperandLayout(operand_index=0, parent=parent, k_width=2)


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def wide_rows(columns: int) -> Any:
    """[64, n / 2] pairs: each thread has two neighbours of a row, and a quad of threads 32 bytes.

    From an accumulator, half of them cross over to a thread's neighbour, by shuffles."""
    across = [[0, 1 << bit] for bit in range(columns.bit_length() - 2)]
    registers = [across[0], [8, 0], *across[3:]]
    lanes = [across[2], across[1], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, columns // 2])


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def quads() -> Any:
    """[64, 4]: a number for each row and thread of an accumulator; a quad of threads has a row."""
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[8, 0]], lanes, [[16, 0], [32, 0]], [], [64, 4])


@gluon.jit
def note(place, x):  # type: ignore[no-untyped-def]
    """Write a number into shared memory."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    place.store(gl.full([1], 0, place.dtype, lanes) + x)


@gluon.jit
def read(place):  # type: ignore[no-untyped-def]
    """A number from shared memory."""
    return gl.max(place.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def halves(x):  # type: ignore[no-untyped-def]
    """The left and the right half of a tile's columns."""
    parts: gl.constexpr = [x.shape[0], 2, x.shape[1] // 2]
    return x.reshape(parts).permute((0, 2, 1)).split()


@gluon.jit
def note_pointer(place, pointer):  # type: ignore[no-untyped-def]
    """Write a pointer into shared memory."""
    note(place, pointer.to(gl.int64))


@gluon.jit  # type: ignore[untyped-decorator]
def read_pointer(place, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    """A pointer to float32 from shared memory, [1, 1] of a layout."""
    pointer = place.load(gl.SliceLayout(0, layout))[None, :]
    return pointer.to(gl.pointer_type(gl.float32), bitcast=True)


@gluon.jit  # type: ignore[untyped-decorator]
def pack(p, dtype: gl.constexpr):  # type: ignore[no-untyped-def]
    """float32 [m, n] as int32 [m, n / 2]: pairs of 16-bit floats, the left one low.

    Carried through a loop as single 16-bit values, pairs would be put together at each use."""
    left, right = gl.split(p.reshape([p.shape[0], p.shape[1] // 2, 2]))
    name: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    return gl.inline_asm_elementwise(
        f"cvt.rn.{name}.f32 $0, $2, $1;", "=r,r,r", [left, right], gl.int32, True, 1
    )


@gluon.jit  # type: ignore[untyped-decorator]
def unpack(pairs, dtype: gl.constexpr, columns: gl.constexpr):  # type: ignore[no-untyped-def]
    """The 16-bit floats that `pack` put together, as wgmma's first operand."""
    left = pairs.to(gl.int16).to(dtype, bitcast=True)
    right = (pairs >> 16).to(gl.int16).to(dtype, bitcast=True)
    whole = gl.join(left, right).reshape([pairs.shape[0], 2 * pairs.shape[1]])
    return gl.convert_layout(whole, operand(columns))


@gluon.jit
def log2(x):  # type: ignore[no-untyped-def]
    """Within 2^-22, of floats that are normal: one instruction."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def reciprocal(x):  # type: ignore[no-untyped-def]
    """Within a unit of the last place, of floats that are normal: one instruction."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def own_sum(x):  # type: ignore[no-untyped-def]
    """What a thread has of each row of an accumulator, added up."""
    return gl.sum(gl.sum(x.reshape([x.shape[0], x.shape[1] // 8, 4, 2]), 1), 2)


@gluon.jit
def sum_of_warps(x, rows):  # type: ignore[no-untyped-def]
    """Sums of what each of four warps has, in the first rows, of what `own_sum` gave."""
    row = gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))[:, None]
    x = gl.where(row < rows, x, 0.0)
    return gl.sum(gl.sum(gl.sum(x, 1).reshape([4, 2, 8]), 2), 1)


@gluon.jit
def lifted_max(s, lift):  # type: ignore[no-untyped-def]
    """Maxima of rows of s + lift; a thread's columns of a row all have the same lift."""
    shape: gl.constexpr = [s.shape[0], s.shape[1] // 8, 4, 2]
    lift = gl.max(gl.max(lift.reshape(shape), 3), 1)
    most = gl.max(gl.max(s.reshape(shape), 3), 1)
    return gl.convert_layout(gl.max(most + lift, 1), gl.SliceLayout(1, s.type.layout))


@gluon.jit
def quad_sums(x):  # type: ignore[no-untyped-def]
    """`own_sum` as [64, 4] numbers of `quads`."""
    return gl.convert_layout(own_sum(x), quads())


@gluon.jit
def for_quads(x):  # type: ignore[no-untyped-def]
    """A number of each row, for each thread that has some of it."""
    return gl.convert_layout(x, gl.SliceLayout(1, quads()))[:, None]


@gluon.jit  # type: ignore[untyped-decorator]
def name_verdict(number: gl.constexpr):  # type: ignore[no-untyped-def]
    """Before `any_beyond` is asked: a predicate for a partition's warps, by the partition's number.

    Gluon has no way from a tensor to each warp's own truth value."""
    gl.inline_asm_elementwise(
        f".reg .pred beyond{number}; mov.u32 $0, 0;", "=r,r", [0], gl.int32, False, 1
    )


@gluon.jit  # type: ignore[untyped-decorator]
def any_beyond(x, limit, number: gl.constexpr):  # type: ignore[no-untyped-def]
    """Whether a thread of this warp has a number of [64, 4] that is above its limit, or a NaN.

    Warps may disagree: behind it, they must not wait for each other."""
    gl.inline_asm_elementwise(
        "{ .reg .pred one, other; setp.gtu.f32 one, $2, $4; setp.gtu.f32 other, $3, $5;"
        f" or.pred one, one, other; vote.sync.any.pred beyond{number}, one, -1;"
        " mov.b32 $0, 0; mov.b32 $1, 0; }",
        "=r,=r,f,f,f,f",
        [x, limit],
        gl.int32,
        False,
        2,
    )
    text: gl.constexpr = f"selp.b32 $0, 1, 0, beyond{number};"
    return gl.inline_asm_elementwise(text, "=r,r", [0], gl.int32, False, 1) != 0


@gluon.jit
def opaque(x):  # type: ignore[no-untyped-def]
    """The same 32-bit numbers, which LLVM knows nothing of.

    It would compare several keys at a time, and put the results together bit by bit."""
    if x.dtype == gl.int32:
        x = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], gl.int32, True, 1)
    if x.dtype == gl.float32:
        x = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], gl.float32, True, 1)
    return x


@gluon.jit
def pinned(x):  # type: ignore[no-untyped-def]
    """The same floats, computed where this stands and not where they are used."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], gl.float32, False, 1)


@gluon.jit
def place_keys(first, columns):  # type: ignore[no-untyped-def]
    """first + columns: what a thread adds to its own first key is known beforehand."""
    own = columns & 6
    return opaque(first + own) + (columns - own)


@gluon.jit
def moved(x, zero):  # type: ignore[no-untyped-def]
    """The same in other registers."""
    return gl.inline_asm_elementwise("or.b32 $0, $1, $2;", "=r,r,r", [x, zero], gl.int32, False, 1)


@gluon.jit
def keys_before(s, place, first_key, including):  # type: ignore[no-untyped-def]
    """Which keys of scores [64, n], of a tile that begins at `first_key`, are before a place, or
    at it if `including`: [64, 4], a bit for each that a thread has of a row.

    `place`: an integer, of all or of each row [64, 1]."""
    layout: gl.constexpr = s.type.layout
    place = gl.maximum(place + gl.zeros([s.shape[0], 1], gl.int32, layout), -1)
    place = gl.minimum(place - first_key, s.shape[1]).to(gl.int32) + including
    own = 2 * gl.arange(0, 4, gl.SliceLayout(0, quads()))[None, :]
    past = gl.maximum(for_quads(gl.max(place, 1)) - own, 0)
    count = (past >> 3) * 2 + gl.minimum(past & 7, 2)
    return gl.inline_asm_elementwise(
        "bmsk.clamp.b32 $0, 0, $1;", "=r,r", [count], gl.int32, True, 1
    )


@gluon.jit
def keep_keys(s, bits):  # type: ignore[no-untyped-def]
    """Scores of keys whose bits are set, as `keys_before` has them; -inf for others."""
    parts = s.reshape([s.shape[0], s.shape[1] // 8, 4, 2])
    whole: gl.constexpr = parts.type.layout
    bits = gl.convert_layout(bits, gl.SliceLayout(1, gl.SliceLayout(3, whole)))
    far: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, whole)))
    near: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, whole)))
    far_key = gl.arange(0, parts.shape[1], far)[None, :, None, None]
    near_key = gl.arange(0, 2, near)[None, None, None, :]
    own = opaque(bits[:, None, :, None] & (1 << (2 * far_key + near_key)))
    parts = gl.where(own != 0, parts, float("-inf"))
    layout: gl.constexpr = s.type.layout
    return gl.convert_layout(parts.reshape([s.shape[0], s.shape[1]]), layout)


@gluon.jit
def place_rows(first, columns):  # type: ignore[no-untyped-def]
    """The same where registers are scarce: what a thread adds to its own place are constants."""
    return opaque(first + (columns & 6)) + (columns & ~6)


@gluon.jit
def stay():  # type: ignore[no-untyped-def]
    """What is behind it in a branch is not computed ahead of the branch."""
    gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r,r", [0], gl.int32, False, 1)


@gluon.jit
def zero_again():  # type: ignore[no-untyped-def]
    """0, of which LLVM knows nothing: what follows from it is computed in each turn of a loop."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [0], gl.int32, False, 1)


@gluon.jit  # type: ignore[untyped-decorator]
def cross(x, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    """What was read with one key a thread, where the scores need it."""
    if x.dtype == gl.int1:
        return opaque(gl.convert_layout(x.to(gl.int32), layout)) != 0
    return opaque(gl.convert_layout(x, layout))


@gluon.jit  # type: ignore[untyped-decorator]
def store_rows(  # type: ignore[no-untyped-def]
    pointer, x, rows, inside, dtype: gl.constexpr, first: gl.constexpr, width: gl.constexpr
):
    """Write an accumulator [64, n] as 16-bit floats into rows of `width` numbers, a multiple of 8.

    `rows`: which ones, of those `inside`; `first`: the accumulator's first column there."""
    layout: gl.constexpr = wide_rows(x.shape[1])
    pairs = gl.convert_layout(pack(x, dtype), layout)
    columns = first // 2 + gl.arange(0, x.shape[1] // 2, gl.SliceLayout(0, layout))[None, :]
    places = gl.convert_layout(rows, gl.SliceLayout(1, layout))[:, None] * (width // 2) + columns
    kept = gl.convert_layout(inside, gl.SliceLayout(1, layout))[:, None]
    if first + x.shape[1] > width:
        kept = kept & (columns < width // 2)
    gl.store(pointer.to(gl.pointer_type(gl.int32), bitcast=True) + places, pairs, mask=kept)


@gluon.jit  # type: ignore[untyped-decorator]
def store_parted_rows(  # type: ignore[no-untyped-def]
    pointer, x, starts, inside, dtype: gl.constexpr, width: gl.constexpr
):
    """The same where rows begin at `starts`, multiples of 8."""
    layout: gl.constexpr = wide_rows(x.shape[1])
    pairs = gl.convert_layout(pack(x, dtype), layout)
    columns = gl.arange(0, x.shape[1] // 2, gl.SliceLayout(0, layout))[None, :]
    starts = gl.convert_layout(starts, gl.SliceLayout(1, layout))[:, None] // 8 * 4
    places = starts + columns
    kept = gl.convert_layout(inside, gl.SliceLayout(1, layout))[:, None]
    kept = kept & (columns < width // 2)
    gl.store(pointer.to(gl.pointer_type(gl.int32), bitcast=True) + places, pairs, mask=kept)


@gluon.jit  # type: ignore[untyped-decorator]
def store_part(pointer, x, rows, inside, first: gl.constexpr, width: gl.constexpr):  # type: ignore[no-untyped-def]
    """Write an accumulator [64, n] as it is; the rest is as for `store_rows`."""
    layout: gl.constexpr = accumulator(x.shape[1])
    columns = first + gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))[None, :]
    line = pointer + gl.convert_layout(rows, gl.SliceLayout(1, layout))[:, None] * width
    kept = gl.convert_layout(inside, gl.SliceLayout(1, layout))[:, None]
    if first + x.shape[1] > width:
        kept = kept & (columns < width)
    gl.store(line + columns, x, mask=kept)
