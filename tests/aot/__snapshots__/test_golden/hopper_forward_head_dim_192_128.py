# flashgen 0.1.0
# spec causal_document
#   mask    (kv_idx <= q_idx) & (doc[b, q_idx] == doc[b, kv_idx])
#   data    doc: int32[2-d]
# tile rule
#   may attend   ~(max[q](q_idx) < min[kv](kv_idx)) & ~((max[q](doc[b, q_idx]) < min[kv](doc[b,
#       kv_idx])) | (max[kv](doc[b, kv_idx]) < min[q](doc[b, q_idx])))
#   must attend  (max[kv](kv_idx) <= min[q](q_idx)) & ((min[q](doc[b, q_idx]) == max[q](doc[b,
#       q_idx])) & (min[kv](doc[b, kv_idx]) == max[kv](doc[b, kv_idx])) & (min[q](doc[b, q_idx]) ==
#       min[kv](doc[b, kv_idx])))

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashgen import hopper

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
FLOAT = gl.constexpr(gl.float32)


@gluon.jit
def produce(
    q0_desc, q1_desc, k0_desc, k1_desc, v0_desc, q0_tiles, q1_tiles, k0_tiles, k1_tiles, v0_tiles,
    q_ready, ready, free, masked_runs, full_runs, masked_tiles, full_tiles, ragged_tiles,
    ragged_tile, b, h, h_kv, block,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):
    """One warp copies: queries once, then the keys of a tile with the values of the one before."""
    for half in gl.static_range(2):
        hopper.mbarrier.expect(
            q_ready.index(half), q0_desc.block_type.nbytes + q1_desc.block_type.nbytes
        )
        hopper.load_tile(
            q0_desc, [b, h, block * BLOCK_M + half * 64, 0], q_ready.index(half),
            q0_tiles.index(half),
        )
        hopper.load_tile(
            q1_desc, [b, h, block * BLOCK_M + half * 64, 128], q_ready.index(half),
            q1_tiles.index(half),
        )
    turn = 0
    last_key = 0
    for part in range(3):
        tiles = gl.where(part == 2, full_tiles, masked_tiles)
        runs = gl.where(part == 2, full_runs, masked_runs)
        tile = gl.load(runs)
        end = gl.load(runs + 1)
        next_tile = gl.load(runs + 2)
        next_end = gl.load(runs + 3)
        if part == 0:
            tiles = ragged_tiles
            tile = ragged_tile
            end = -1
        for _ in range(tiles):
            first_key = tile * BLOCK_N
            slot = turn % STAGES
            hopper.mbarrier.wait(free.index(slot), turn // STAGES & 1 ^ 1)
            hopper.mbarrier.expect(
                ready.index(slot), k0_desc.block_type.nbytes + k1_desc.block_type.nbytes,
                pred=turn == 0,
            )
            hopper.mbarrier.expect(
                ready.index(slot),
                k0_desc.block_type.nbytes + k1_desc.block_type.nbytes + v0_desc.block_type.nbytes,
                pred=turn > 0,
            )
            hopper.load_tile(
                k0_desc, [b, h_kv, first_key, 0], ready.index(slot), k0_tiles.index(slot)
            )
            hopper.load_tile(
                k1_desc, [b, h_kv, first_key, 128], ready.index(slot), k1_tiles.index(slot)
            )
            hopper.load_tile(
                v0_desc, [b, h_kv, last_key, 0], ready.index(slot), v0_tiles.index(slot),
                pred=turn > 0,
            )
            last_key = first_key
            turn += 1
            tile += 1
            is_last = tile == end
            tile = gl.where(is_last, next_tile, tile)
            end = gl.where(is_last, next_end, end)
            runs += gl.where(is_last, 2, 0)
            next_tile = gl.load(runs + 2)
            next_end = gl.load(runs + 3)
    slot = turn % STAGES
    hopper.mbarrier.wait(free.index(slot), turn // STAGES & 1 ^ 1)
    hopper.mbarrier.expect(ready.index(slot), v0_desc.block_type.nbytes)
    hopper.load_tile(v0_desc, [b, h_kv, last_key, 0], ready.index(slot), v0_tiles.index(slot))


@gluon.jit
def consume(
    HALF: gl.constexpr,
    q0_desc, out0_desc, q0_tiles, q1_tiles, k0_tiles, k1_tiles, v0_tiles, q_ready, ready, free,
    masked_runs, full_runs, masked_tiles, full_tiles, ragged_tiles, ragged_tile, b, h, h_kv, block,
    lse_ptr, spoilt_ptr, q_len, kv_len, q_offset, scale_log2, doc_ptr, doc_size_0, doc_stride_0,
    doc_size_1, doc_stride_1,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):
    """A warpgroup: 64 rows, from their first scores to their outputs."""
    SCORES: gl.constexpr = hopper.accumulator(BLOCK_N)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    COLUMN: gl.constexpr = gl.SliceLayout(0, SCORES)
    DTYPE: gl.constexpr = q0_desc.dtype
    row = block * BLOCK_M + HALF * 64 + gl.arange(0, 64, ROW)
    columns = gl.arange(0, BLOCK_N, COLUMN)[None, :]
    lanes = gl.arange(0, BLOCK_N, gl.BlockedLayout([1], [32], [4], [0]))
    q_idx = row[:, None] + q_offset
    doc_q_at = gl.minimum(gl.maximum(q_idx, 0), doc_size_1 - 1)
    doc_q = gl.load(doc_ptr + b * doc_stride_0 + doc_q_at * doc_stride_1)
    doc_row = doc_ptr + b * doc_stride_0
    m = gl.full([64], float("-inf"), FLOAT, ROW)
    l = gl.zeros([64], FLOAT, ROW)
    acc0 = gl.zeros([64, 128], FLOAT, hopper.accumulator(128))
    hopper.mbarrier.wait(q_ready.index(HALF), 0)
    q0 = q0_tiles.index(HALF).reshape([64, 128])
    q1 = q1_tiles.index(HALF).reshape([64, 64])

    # The first tile, whichever kind it is, is masked; the ragged one comes first if there is one.
    first_masked = gl.where(ragged_tiles == 0, gl.minimum(masked_tiles, 1), 0)
    first_full = 1 - ragged_tiles - first_masked
    first_tile = ragged_tile
    if first_masked > 0:
        first_tile = gl.load(masked_runs)
    if first_full > 0:
        first_tile = gl.load(full_runs)
    slot = 0
    hopper.mbarrier.wait(ready.index(slot), 0)
    s = gl.zeros([64, BLOCK_N], FLOAT, SCORES)
    keys = k0_tiles.index(slot).reshape([BLOCK_N, 128]).permute((1, 0))
    s = hopper.warpgroup_mma(q0, keys, s, use_acc=False, is_async=True)
    keys = k1_tiles.index(slot).reshape([BLOCK_N, 64]).permute((1, 0))
    s = hopper.warpgroup_mma(q1, keys, s, use_acc=True, is_async=True)
    first_key = first_tile * BLOCK_N
    kv_idx = first_key + lanes
    doc_kv_at = gl.minimum(kv_idx, doc_size_1 - 1)
    doc_kv = gl.load(doc_row + doc_kv_at * doc_stride_1)
    doc_kv = gl.convert_layout(doc_kv, COLUMN)[None, :]
    kv_idx = first_key + columns
    s = hopper.warpgroup_mma_wait(0, deps=(s,))
    hopper.mbarrier.arrive(free.index(slot), count=1)
    keep = (kv_idx < kv_len) & ((kv_idx <= q_idx) & (doc_q == doc_kv))
    s = gl.where(keep, s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)
    m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(s * scale_log2 - m_safe[:, None])
    alpha = gl.exp2(m - m_safe)
    l = l * alpha + gl.sum(p, 1)
    m = m_new
    p = gl.convert_layout(p.to(DTYPE), hopper.operand(128))
    turn = 1

    # Tiles that the mask cuts.
    runs = masked_runs
    tile = gl.load(runs)
    end = gl.load(runs + 1)
    next_tile = gl.load(runs + 2)
    next_end = gl.load(runs + 3)
    tile += first_masked
    is_last = tile == end
    tile = gl.where(is_last, next_tile, tile)
    end = gl.where(is_last, next_end, end)
    runs += gl.where(is_last, 2, 0)
    next_tile = gl.load(runs + 2)
    next_end = gl.load(runs + 3)
    for _ in range(first_masked, masked_tiles):
        slot = turn % STAGES
        hopper.mbarrier.wait(ready.index(slot), turn // STAGES & 1)
        s = gl.zeros([64, BLOCK_N], FLOAT, SCORES)
        keys = k0_tiles.index(slot).reshape([BLOCK_N, 128]).permute((1, 0))
        s = hopper.warpgroup_mma(q0, keys, s, use_acc=False, is_async=True)
        keys = k1_tiles.index(slot).reshape([BLOCK_N, 64]).permute((1, 0))
        s = hopper.warpgroup_mma(q1, keys, s, use_acc=True, is_async=True)
        values = v0_tiles.index(slot).reshape([BLOCK_N, 128])
        acc0 = hopper.warpgroup_mma(p, values, acc0, is_async=True)
        first_key = tile * BLOCK_N
        kv_idx = first_key + lanes
        doc_kv_at = gl.minimum(kv_idx, doc_size_1 - 1)
        doc_kv = gl.load(doc_row + doc_kv_at * doc_stride_1)
        doc_kv = gl.convert_layout(doc_kv, COLUMN)[None, :]
        kv_idx = first_key + columns
        s = hopper.warpgroup_mma_wait(1, deps=(s,))
        keep = (kv_idx <= q_idx) & (doc_q == doc_kv)
        s = gl.where(keep, s, float("-inf"))
        m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)
        m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
        p = gl.exp2(s * scale_log2 - m_safe[:, None])
        alpha = gl.exp2(m - m_safe)
        l = l * alpha + gl.sum(p, 1)
        m = m_new
        p = gl.convert_layout(p.to(DTYPE), hopper.operand(128))
        acc0 = hopper.warpgroup_mma_wait(0, deps=(acc0,))
        hopper.mbarrier.arrive(free.index(slot), count=1)
        acc0 *= gl.convert_layout(alpha, gl.SliceLayout(1, hopper.accumulator(128)))[:, None]
        turn += 1
        tile += 1
        is_last = tile == end
        tile = gl.where(is_last, next_tile, tile)
        end = gl.where(is_last, next_end, end)
        runs += gl.where(is_last, 2, 0)
        next_tile = gl.load(runs + 2)
        next_end = gl.load(runs + 3)

    # Tiles whose every pair attends.
    for _ in range(first_full, full_tiles):
        slot = turn % STAGES
        hopper.mbarrier.wait(ready.index(slot), turn // STAGES & 1)
        s = gl.zeros([64, BLOCK_N], FLOAT, SCORES)
        keys = k0_tiles.index(slot).reshape([BLOCK_N, 128]).permute((1, 0))
        s = hopper.warpgroup_mma(q0, keys, s, use_acc=False, is_async=True)
        keys = k1_tiles.index(slot).reshape([BLOCK_N, 64]).permute((1, 0))
        s = hopper.warpgroup_mma(q1, keys, s, use_acc=True, is_async=True)
        values = v0_tiles.index(slot).reshape([BLOCK_N, 128])
        acc0 = hopper.warpgroup_mma(p, values, acc0, is_async=True)
        s = hopper.warpgroup_mma_wait(1, deps=(s,))
        m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)
        m_safe = m_new
        p = gl.exp2(s * scale_log2 - m_safe[:, None])
        alpha = gl.exp2(m - m_safe)
        l = l * alpha + gl.sum(p, 1)
        m = m_new
        p = gl.convert_layout(p.to(DTYPE), hopper.operand(128))
        acc0 = hopper.warpgroup_mma_wait(0, deps=(acc0,))
        hopper.mbarrier.arrive(free.index(slot), count=1)
        acc0 *= gl.convert_layout(alpha, gl.SliceLayout(1, hopper.accumulator(128)))[:, None]
        turn += 1

    slot = turn % STAGES
    hopper.mbarrier.wait(ready.index(slot), turn // STAGES & 1)
    values = v0_tiles.index(slot).reshape([BLOCK_N, 128])
    acc0 = hopper.warpgroup_mma(p, values, acc0, is_async=True)
    acc0 = hopper.warpgroup_mma_wait(0, deps=(acc0,))

    # A row without keys: l is 0, the output 0 and the LSE -inf.
    divisor = gl.where(l == 0.0, 1.0, l)
    gl.store(lse_ptr + row, (m + gl.log2(divisor)) * LN2, mask=row < q_len)
    acc0 *= gl.convert_layout(1.0 / divisor, gl.SliceLayout(1, hopper.accumulator(128)))[:, None]
    spoilt = gl.zeros([64], gl.int32, ROW)
    odd = gl.sum((~(gl.abs(acc0) < float("inf"))).to(gl.int32), 1)
    spoilt += gl.convert_layout(odd, ROW)
    gl.store(spoilt_ptr + row, (spoilt > 0).to(gl.int8), mask=row < q_len)
    # The queries have done their work: their place is the output's on its way out.
    q0.store(acc0.to(DTYPE))
    hopper.fence_async_shared()
    hopper.barrier()
    hopper.store_tile(out0_desc, [b, h, block * BLOCK_M + HALF * 64, 0], q0_tiles.index(HALF))
    hopper.wait_stores(0)


# Values never specialise: new lengths, strides, scalars and data run the same binary.
@gluon.jit(
    do_not_specialize=[
        "schedule_stride_b", "schedule_stride_h", "masked_width", "full_width", "heads",
        "group", "q_len", "kv_len", "q_offset", "scale_log2", "doc_size_0", "doc_stride_0",
        "doc_size_1", "doc_stride_1"
    ],
    do_not_specialize_on_alignment=["doc_ptr"],
)
def attention_forward(
    lse_ptr,
    spoilt_ptr,
    q0_desc,
    q1_desc,
    k0_desc,
    k1_desc,
    v0_desc,
    out0_desc,
    counts,
    masked_runs,
    full_runs,
    schedule_stride_b: gl.int64,
    schedule_stride_h: gl.int64,
    masked_width: gl.int32,
    full_width: gl.int32,
    heads: gl.int32,
    group: gl.int32,
    q_len: gl.int32,
    kv_len: gl.int32,
    q_offset: gl.int32,
    scale_log2: gl.float32,
    doc_ptr,
    doc_size_0: gl.int32,
    doc_stride_0: gl.int64,
    doc_size_1: gl.int32,
    doc_stride_1: gl.int64,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    # The heads that share keys work on the same rows side by side, so that keys are read from
    # memory once; the last rows first, as under causal masks they are the longest.
    blocks = gl.cdiv(q_len, BLOCK_M)
    first_head = gl.program_id(0) // (group * blocks) * group
    place = gl.program_id(0) - first_head * blocks
    block = blocks - 1 - place // group
    b = first_head // heads
    h = first_head % heads + place % group
    h_kv = h // group

    lse_ptr += (b * heads + h).to(gl.int64) * q_len
    spoilt_ptr += (b * heads + h).to(gl.int64) * q_len

    schedule_row = b * schedule_stride_b + h * schedule_stride_h + block
    masked_runs += schedule_row * (2 * masked_width)
    full_runs += schedule_row * (2 * full_width)
    masked_tiles = gl.load(counts + 3 * schedule_row)
    full_tiles = gl.load(counts + 3 * schedule_row + 1)
    ragged_tiles = gl.load(counts + 3 * schedule_row + 2)
    ragged_tile = kv_len // BLOCK_N
    # Rows that see nothing look at the first tile, all masked: there is always a first one.
    if masked_tiles + full_tiles + ragged_tiles == 0:
        ragged_tiles = 1
        ragged_tile = 0

    q0_tiles = gl.allocate_shared_memory(q0_desc.dtype, [2, 1, 1, 64, 128], q0_desc.layout)
    k0_tiles = gl.allocate_shared_memory(
        q0_desc.dtype, [STAGES, 1, 1, BLOCK_N, 128], k0_desc.layout
    )
    q1_tiles = gl.allocate_shared_memory(q0_desc.dtype, [2, 1, 1, 64, 64], q1_desc.layout)
    k1_tiles = gl.allocate_shared_memory(q0_desc.dtype, [STAGES, 1, 1, BLOCK_N, 64], k1_desc.layout)
    v0_tiles = gl.allocate_shared_memory(
        q0_desc.dtype, [STAGES, 1, 1, BLOCK_N, 128], v0_desc.layout
    )
    q_ready = gl.allocate_shared_memory(gl.int64, [2, 1], hopper.mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for half in gl.static_range(2):
        hopper.mbarrier.init(q_ready.index(half), count=1)
    for slot in gl.static_range(STAGES):
        hopper.mbarrier.init(ready.index(slot), count=1)
        hopper.mbarrier.init(free.index(slot), count=2)

    gl.warp_specialize(
        [
            (consume, (
                0, q0_desc, out0_desc, q0_tiles, q1_tiles, k0_tiles, k1_tiles, v0_tiles, q_ready,
                ready, free, masked_runs, full_runs, masked_tiles, full_tiles, ragged_tiles,
                ragged_tile, b, h, h_kv, block, lse_ptr, spoilt_ptr, q_len, kv_len, q_offset,
                scale_log2, doc_ptr, doc_size_0, doc_stride_0, doc_size_1, doc_stride_1,
                BLOCK_M, BLOCK_N, STAGES,
            )),
            (consume, (
                1, q0_desc, out0_desc, q0_tiles, q1_tiles, k0_tiles, k1_tiles, v0_tiles, q_ready,
                ready, free, masked_runs, full_runs, masked_tiles, full_tiles, ragged_tiles,
                ragged_tile, b, h, h_kv, block, lse_ptr, spoilt_ptr, q_len, kv_len, q_offset,
                scale_log2, doc_ptr, doc_size_0, doc_stride_0, doc_size_1, doc_stride_1,
                BLOCK_M, BLOCK_N, STAGES,
            )),
            (produce, (
                q0_desc, q1_desc, k0_desc, k1_desc, v0_desc, q0_tiles, q1_tiles, k0_tiles,
                k1_tiles, v0_tiles, q_ready, ready, free, masked_runs, full_runs, masked_tiles,
                full_tiles, ragged_tiles, ragged_tile, b, h, h_kv, block,
                BLOCK_M, BLOCK_N, STAGES,
            )),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
