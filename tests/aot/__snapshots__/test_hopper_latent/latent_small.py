# flashgen 0.1.0
# spec full
#   mask    every key
#   with    MLA(rank=128, rope=16)
# tile rule
#   may attend   True
#   must attend  True

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashgen import hopper

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
FLOAT = gl.constexpr(gl.float32)
# Named barriers: what one warpgroup tells the other is there, and has been read.
READ, FACTORS, WEIGHTS = gl.constexpr(8), gl.constexpr(9), gl.constexpr(10)


@gluon.jit
def produce(
    q_half_desc, q_rope_desc, k_half_desc, k_rope_desc, q_left, q_right, q_rope, left, right, rope,
    q_ready, left_ready, right_ready, left_free, right_free, b, q_block, chunk, loads, first_tile,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, QUERIES: gl.constexpr,
    PARTIAL: gl.constexpr,
):
    """One warp copies: queries once, then tiles of keys, each half as soon as there is room."""
    if loads == 0:
        # The tile that stands for none is all masked and cleared: it may hold anything.
        hopper.mbarrier.expect(q_ready.index(0), 0)
        hopper.mbarrier.expect(left_ready.index(0), 0)
        hopper.mbarrier.expect(right_ready.index(0), 0)
    else:
        hopper.mbarrier.expect(
            q_ready.index(0), 2 * q_half_desc.block_type.nbytes + q_rope_desc.block_type.nbytes
        )
        hopper.load_tile(
            q_rope_desc, [b, chunk * GROUP, q_block * QUERIES, 128], q_ready.index(0), q_rope
        )
        hopper.load_tile(
            q_half_desc, [b, chunk * GROUP, q_block * QUERIES, 0], q_ready.index(0), q_left
        )
        hopper.load_tile(
            q_half_desc, [b, chunk * GROUP, q_block * QUERIES, 64], q_ready.index(0), q_right
        )
    tile = first_tile
    for turn in range(loads):
        slot = turn % STAGES
        phase = turn // STAGES & 1 ^ 1
        first_key = tile * BLOCK_N
        hopper.mbarrier.wait(right_free.index(slot), phase)
        hopper.mbarrier.expect(right_ready.index(slot), k_half_desc.block_type.nbytes)
        hopper.load_tile(
            k_half_desc, [b, 0, first_key, 64], right_ready.index(slot), right.index(slot)
        )
        hopper.mbarrier.wait(left_free.index(slot), phase)
        hopper.mbarrier.expect(
            left_ready.index(slot), k_half_desc.block_type.nbytes + k_rope_desc.block_type.nbytes
        )
        hopper.load_tile(
            k_half_desc, [b, 0, first_key, 0], left_ready.index(slot), left.index(slot)
        )
        hopper.load_tile(
            k_rope_desc, [b, 0, first_key, 128], left_ready.index(slot), rope.index(slot)
        )
        tile += 1


@gluon.jit
def clear_rows(tile, first, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Zeros in all rows of a tile in shared memory from `first` on, before it is multiplied."""
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 // (COLUMNS // 8), COLUMNS // 8], [4, 1], [1, 0]
    )
    rows = gl.arange(0, 16, gl.SliceLayout(1, layout))[:, None]
    for start in gl.static_range(0, ROWS, 16):
        if first < start + 16:
            part = tile.slice(start, 16, dim=0)
            x = part.load(layout)
            part.store(gl.where(start + rows < first, x, gl.zeros_like(x)))
    hopper.fence_async_shared()
    hopper.barrier()


@gluon.jit
def store_half(
    acc, out_ptr, spoilt_ptr, b, q_block, chunk, split, splits, heads, q_len,
    HALF: gl.constexpr, GROUP: gl.constexpr, QUERIES: gl.constexpr,
):
    """Half of the output's columns, and whether they are finite."""
    ROW: gl.constexpr = gl.SliceLayout(1, hopper.accumulator(64))
    COLUMN: gl.constexpr = gl.SliceLayout(0, hopper.accumulator(64))
    index = gl.arange(0, GROUP * QUERIES, ROW)
    q_row = q_block * QUERIES + index % QUERIES
    head = chunk * GROUP + index // QUERIES
    inside = (q_row < q_len) & (head < heads)
    result = ((b * heads + head).to(gl.int64) * q_len + q_row) * splits + split
    odd = gl.sum((~(gl.abs(acc) < float("inf"))).to(gl.int32), 1)
    gl.store(spoilt_ptr + 2 * result + HALF, (odd > 0).to(gl.int8), mask=inside)
    dims = HALF * 64 + gl.arange(0, 64, COLUMN)
    address = out_ptr + result[:, None] * 128 + dims[None, :]
    gl.store(address, acc.to(out_ptr.dtype.element_ty), mask=inside[:, None])


@gluon.jit
def weigh(
    out_ptr, lse_ptr, spoilt_ptr, k_half_desc, q_left, q_right, q_rope, left, right, rope, q_ready,
    left_ready, right_ready, left_free, right_free, weights, factors, tiles, first_tile, b,
    q_block, chunk, split, splits, heads, q_len, kv_len, q_offset, scale_log2,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, QUERIES: gl.constexpr,
    PARTIAL: gl.constexpr,
):
    """A warpgroup: all scores and their weights, and the left half of the output."""
    BLOCK_M: gl.constexpr = GROUP * QUERIES
    SCORES: gl.constexpr = hopper.accumulator(BLOCK_N)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    COLUMN: gl.constexpr = gl.SliceLayout(0, SCORES)
    OUT: gl.constexpr = hopper.accumulator(64)
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    DTYPE: gl.constexpr = k_half_desc.dtype
    index = gl.arange(0, BLOCK_M, ROW)
    q_row = q_block * QUERIES + index % QUERIES
    head = gl.minimum(chunk * GROUP + index // QUERIES, heads - 1)
    h = head[:, None]
    columns = gl.arange(0, BLOCK_N, COLUMN)[None, :]
    acc = gl.zeros([BLOCK_M, 64], FLOAT, OUT)
    hopper.name_verdict(0)
    tile = first_tile
    hopper.mbarrier.wait(q_ready.index(0), 0)
    q_left = q_left.reshape([BLOCK_M, 64])
    q_right = q_right.reshape([BLOCK_M, 64])
    # Shared memory, which the scores' product keeps busy, needn't be read for these.
    q_rope = q_rope.reshape([BLOCK_M, 16]).load(hopper.operand(BLOCK_N))
    q_held = q_right.slice(0, 64, dim=1).load(hopper.operand(BLOCK_N))
    slot = 0
    phase = 0
    s = gl.zeros([BLOCK_M, BLOCK_N], FLOAT, SCORES)
    hopper.mbarrier.wait(right_ready.index(slot), phase)
    keys = right.index(slot).reshape([BLOCK_N, 64])
    s = hopper.warpgroup_mma(
        q_held, keys.slice(0, 64, dim=1).permute((1, 0)), s, use_acc=False, is_async=True
    )
    hopper.mbarrier.wait(left_ready.index(slot), phase)
    s = hopper.warpgroup_mma(
        q_left, left.index(slot).reshape([BLOCK_N, 64]).permute((1, 0)), s, use_acc=True,
        is_async=True,
    )
    s = hopper.warpgroup_mma(
        q_rope, rope.index(slot).reshape([BLOCK_N, 16]).permute((1, 0)), s, use_acc=True,
        is_async=True,
    )
    first_key = tile * BLOCK_N
    kv_idx = first_key + columns
    s = hopper.warpgroup_mma_wait(0, deps=(s,))
    if first_key + BLOCK_N > kv_len:
        # Keys beyond the length are anything, as they are values.
        s = gl.where(kv_idx < kv_len, s, float("-inf"))
        clear_rows(left.index(slot).reshape([BLOCK_N, 64]), kv_len - first_key, BLOCK_N, 64)
    m = gl.max(s, 1) * scale_log2
    p = gl.exp2(s * scale_log2 - gl.where(m == float("-inf"), 0.0, m)[:, None])
    l = hopper.quad_sums(p)
    p = hopper.pack(p, DTYPE)
    alpha = gl.full([BLOCK_M], 1.0, FLOAT, ROW)

    # Tiles: the output of one beside the scores of the next.
    for turn in range(1, tiles):
        tile += 1
        acc = hopper.warpgroup_mma(
            hopper.unpack(p, DTYPE, 64), left.index(slot).reshape([BLOCK_N, 64]), acc, is_async=True
        )
        hopper.sync_at(READ)
        factors.store(alpha)
        weights.store(gl.convert_layout(hopper.unpack(p, DTYPE, 64), SCORES))
        hopper.fence_async_shared()
        hopper.arrive_at(WEIGHTS)
        last = slot
        slot = turn % STAGES
        phase = turn // STAGES & 1
        s = gl.zeros([BLOCK_M, BLOCK_N], FLOAT, SCORES)
        hopper.mbarrier.wait(right_ready.index(slot), phase)
        keys = right.index(slot).reshape([BLOCK_N, 64])
        s = hopper.warpgroup_mma(
            q_held, keys.slice(0, 64, dim=1).permute((1, 0)), s, use_acc=False, is_async=True
        )
        acc, p = hopper.warpgroup_mma_wait(1, deps=(acc, p))
        # Thread by thread; mbarrier.arrive would first wait for all of them.
        hopper.async_copy.mbarrier_arrive(left_free.index(last), increment_count=False)
        hopper.mbarrier.wait(left_ready.index(slot), phase)
        s = hopper.warpgroup_mma(
            q_left, left.index(slot).reshape([BLOCK_N, 64]).permute((1, 0)), s, use_acc=True,
            is_async=True,
        )
        s = hopper.warpgroup_mma(
            q_rope, rope.index(slot).reshape([BLOCK_N, 16]).permute((1, 0)), s, use_acc=True,
            is_async=True,
        )
        first_key = tile * BLOCK_N
        kv_idx = first_key + columns
        s = hopper.warpgroup_mma_wait(0, deps=(s,))
        if first_key + BLOCK_N > kv_len:
            # Keys beyond the length are anything, as they are values.
            s = gl.where(kv_idx < kv_len, s, float("-inf"))
            clear_rows(left.index(slot).reshape([BLOCK_N, 64]), kv_len - first_key, BLOCK_N, 64)
        p = gl.exp2(s * scale_log2 - m[:, None])
        sums = hopper.quad_sums(p)
        p = hopper.pack(p, DTYPE)
        alpha = gl.full([BLOCK_M], 1.0, FLOAT, ROW)
        limit = gl.minimum(gl.maximum(4.0 * l, 2.0), 4096.0)
        if hopper.any_beyond(sums, limit, 0):
            # Rows that aren't among them stay as they are, to the bit. One that had no key yet is.
            beyond = gl.convert_layout(gl.max(gl.where(sums <= limit, 0, 1), 1), ROW)
            m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)
            m_new = gl.where(beyond > 0, m_new, m)
            m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
            again = gl.exp2(s * scale_log2 - m_safe[:, None])
            p = hopper.pack(again, DTYPE)
            sums = hopper.quad_sums(again)
            alpha = gl.exp2(m - m_safe)
            l *= hopper.for_quads(alpha)
            acc *= gl.convert_layout(alpha, OUT_ROW)[:, None]
            m = m_new
        l += sums

    acc = hopper.warpgroup_mma(
        hopper.unpack(p, DTYPE, 64), left.index(slot).reshape([BLOCK_N, 64]), acc, is_async=True
    )
    hopper.sync_at(READ)
    factors.store(alpha)
    weights.store(gl.convert_layout(hopper.unpack(p, DTYPE, 64), SCORES))
    hopper.fence_async_shared()
    hopper.arrive_at(WEIGHTS)
    acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
    l = gl.convert_layout(gl.sum(l, 1), ROW)
    last_factor = gl.full([BLOCK_M], 1.0, FLOAT, ROW)

    # A row without keys: l is 0, the output 0 and the LSE -inf.
    divisor = gl.where(l == 0.0, 1.0, l)
    last_factor /= divisor
    hopper.sync_at(READ)
    factors.store(last_factor)
    hopper.arrive_at(FACTORS)
    lse = m + gl.log2(divisor)
    if not PARTIAL:
        lse *= LN2
    head = chunk * GROUP + index // QUERIES
    result = ((b * heads + head).to(gl.int64) * q_len + q_row) * splits + split
    gl.store(lse_ptr + result, lse, mask=(q_row < q_len) & (head < heads))
    acc *= gl.convert_layout(last_factor, OUT_ROW)[:, None]
    store_half(
        acc, out_ptr, spoilt_ptr, b, q_block, chunk, split, splits, heads, q_len, 0, GROUP, QUERIES
    )


@gluon.jit
def add_values(
    out_ptr, lse_ptr, spoilt_ptr, left, right, rope, q_ready, left_ready, right_ready, left_free,
    right_free, weights, factors, tiles, first_tile, b, q_block, chunk, split, splits, heads,
    q_len, kv_len,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, QUERIES: gl.constexpr,
    PARTIAL: gl.constexpr,
):
    """The other warpgroup: the right half of the output."""
    OUT: gl.constexpr = hopper.accumulator(64)
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    acc = gl.zeros([GROUP * QUERIES, 64], FLOAT, OUT)
    nothing = gl.zeros([GROUP * QUERIES, 4], FLOAT, hopper.quads())
    hopper.name_verdict(1)
    tile = first_tile
    hopper.arrive_at(READ)
    for turn in range(tiles):
        slot = turn % STAGES
        hopper.sync_at(WEIGHTS)
        factor = factors.load(gl.SliceLayout(1, hopper.quads()))
        if hopper.any_beyond(nothing + (1.0 - factor)[:, None], nothing, 1):
            acc *= gl.convert_layout(factor, OUT_ROW)[:, None]
        hopper.mbarrier.wait(right_ready.index(slot), turn // STAGES & 1)
        first_key = tile * BLOCK_N
        if first_key + BLOCK_N > kv_len:
            clear_rows(right.index(slot).reshape([BLOCK_N, 64]), kv_len - first_key, BLOCK_N, 64)
        acc = hopper.warpgroup_mma(
            weights, right.index(slot).reshape([BLOCK_N, 64]), acc, is_async=True
        )
        acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
        hopper.arrive_at(READ)
        hopper.async_copy.mbarrier_arrive(right_free.index(slot), increment_count=False)
        tile += 1
    # The last factor divides by the sum of weights.
    hopper.sync_at(FACTORS)
    acc *= factors.load(OUT_ROW)[:, None]
    store_half(
        acc, out_ptr, spoilt_ptr, b, q_block, chunk, split, splits, heads, q_len, 1, GROUP, QUERIES
    )


# Values never specialise: new lengths, strides, scalars and data run the same binary.
@gluon.jit(
    do_not_specialize=[
        "heads", "splits", "split_tiles", "q_len", "kv_len", "q_offset", "scale_log2"
    ],
    do_not_specialize_on_alignment=[],
)
def attention_latent(
    out_ptr,
    lse_ptr,
    spoilt_ptr,
    q_half_desc,
    q_rope_desc,
    k_half_desc,
    k_rope_desc,
    heads: gl.int32,
    splits: gl.int32,
    split_tiles: gl.int32,
    q_len: gl.int32,
    kv_len: gl.int32,
    q_offset: gl.int32,
    scale_log2: gl.float32,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    QUERIES: gl.constexpr,
    PARTIAL: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    # Blocks of the same keys are neighbours: the second finds them in the cache.
    chunks = gl.cdiv(heads, GROUP)
    blocks = chunks * gl.cdiv(q_len, QUERIES)
    chunk = gl.program_id(0) % chunks
    q_block = gl.program_id(0) % blocks // chunks
    split = gl.program_id(0) // blocks % splits
    b = gl.program_id(0) // blocks // splits

    # Tiles of the row, and this split's share of them.
    visited = gl.cdiv(kv_len, BLOCK_N)
    share = gl.where(split_tiles > 0, split_tiles, gl.cdiv(visited, splits))
    share_from = gl.minimum(split * share, visited)
    loads = gl.minimum(share_from + share, visited) - share_from
    first_tile = share_from
    # Without a tile: one behind the last key, all masked, stands for it.
    tiles = gl.maximum(loads, 1)
    first_tile = gl.where(loads == 0, gl.cdiv(kv_len, BLOCK_N), first_tile)

    DTYPE: gl.constexpr = k_half_desc.dtype
    q_left = gl.allocate_shared_memory(DTYPE, [1, GROUP, QUERIES, 64], q_half_desc.layout)
    q_right = gl.allocate_shared_memory(DTYPE, [1, GROUP, QUERIES, 64], q_half_desc.layout)
    q_rope = gl.allocate_shared_memory(DTYPE, [1, GROUP, QUERIES, 16], q_rope_desc.layout)
    left = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, 64], k_half_desc.layout)
    right = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, 64], k_half_desc.layout)
    rope = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, 16], k_rope_desc.layout)
    WEIGHTS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(
        [GROUP * QUERIES, BLOCK_N], DTYPE
    )
    weights = gl.allocate_shared_memory(DTYPE, [GROUP * QUERIES, BLOCK_N], WEIGHTS_LAYOUT)
    factors = gl.allocate_shared_memory(
        FLOAT, [GROUP * QUERIES], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    q_ready = gl.allocate_shared_memory(gl.int64, [1, 1], hopper.mbarrier.MBarrierLayout())
    left_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    right_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    left_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    right_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    hopper.mbarrier.init(q_ready.index(0), count=1)
    for slot in gl.static_range(STAGES):
        hopper.mbarrier.init(left_ready.index(slot), count=1)
        hopper.mbarrier.init(right_ready.index(slot), count=1)
        # Every thread of a warpgroup.
        hopper.mbarrier.init(left_free.index(slot), count=128)
        hopper.mbarrier.init(right_free.index(slot), count=128)

    gl.warp_specialize(
        [
            (weigh, (
                out_ptr, lse_ptr, spoilt_ptr, k_half_desc, q_left, q_right, q_rope, left, right,
                rope, q_ready, left_ready, right_ready, left_free, right_free, weights, factors,
                tiles, first_tile, b, q_block, chunk, split, splits, heads, q_len, kv_len,
                q_offset, scale_log2,
                BLOCK_N, STAGES, GROUP, QUERIES, PARTIAL,
            )),
            (add_values, (
                out_ptr, lse_ptr, spoilt_ptr, left, right, rope, q_ready, left_ready, right_ready,
                left_free, right_free, weights, factors, tiles, first_tile, b, q_block, chunk,
                split, splits, heads, q_len, kv_len,
                BLOCK_N, STAGES, GROUP, QUERIES, PARTIAL,
            )),
            (produce, (
                q_half_desc, q_rope_desc, k_half_desc, k_rope_desc, q_left, q_right, q_rope, left,
                right, rope, q_ready, left_ready, right_ready, left_free, right_free, b, q_block,
                chunk, loads, first_tile,
                BLOCK_N, STAGES, GROUP, QUERIES, PARTIAL,
            )),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
