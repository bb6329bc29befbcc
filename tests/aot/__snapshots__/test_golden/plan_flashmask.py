# flashgen 0.1.0
# spec flashmask
#   mask    ~((columns_[b, 0, kv_idx, 0] <= q_idx) & (q_idx < columns_[b, 0, kv_idx, 1])) & (kv_idx
#       <= q_idx)
#   data    columns_: int32[4-d]
# tile rule
#   may attend   ~((max[kv](columns_[b, 0, kv_idx, 0]) <= min[q](q_idx)) & (max[q](q_idx) <
#       min[kv](columns_[b, 0, kv_idx, 1]))) & ~(max[q](q_idx) < min[kv](kv_idx))
#   must attend  ~(~(max[q](q_idx) < min[kv](columns_[b, 0, kv_idx, 0])) & ~(max[kv](columns_[b, 0,
#       kv_idx, 1]) <= min[q](q_idx))) & (max[kv](kv_idx) <= min[q](q_idx))

import triton
import triton.language as tl

FLOAT = tl.constexpr(tl.float32)


@triton.jit(
    do_not_specialize=[
        "tiles", "heads", "group", "q_len", "kv_len", "q_offset", "columns__size_0",
        "columns__stride_0", "columns__size_1", "columns__stride_1", "columns__size_2",
        "columns__stride_2", "columns__size_3", "columns__stride_3"
    ],
    do_not_specialize_on_alignment=["columns__ptr"],
)
def summarize_kv(
    kv_summary_0_min_ptr,
    kv_summary_0_max_ptr,
    kv_summary_1_min_ptr,
    kv_summary_1_max_ptr,
    tiles: tl.int32,
    heads: tl.int32,
    group: tl.int32,
    q_len: tl.int32,
    kv_len: tl.int32,
    q_offset: tl.int32,
    columns__ptr,
    columns__size_0: tl.int32,
    columns__stride_0: tl.int64,
    columns__size_1: tl.int32,
    columns__stride_1: tl.int64,
    columns__size_2: tl.int32,
    columns__stride_2: tl.int64,
    columns__size_3: tl.int32,
    columns__stride_3: tl.int64,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Least and greatest values over each tile of keys."""
    tile = tl.program_id(0) % tiles
    b = tl.program_id(0) // tiles // heads

    position = tile * TILE + tl.minimum(tl.arange(0, BLOCK), TILE - 1)
    kv_idx = tl.maximum(tl.minimum(position, kv_len - 1), 0)
    columns__kv_at = tl.minimum(kv_idx, columns__size_2 - 1)
    columns__kv = tl.load(columns__ptr + b * columns__stride_0 + columns__kv_at * columns__stride_2)
    columns__kv_at_2 = tl.minimum(1, columns__size_3 - 1)
    columns__kv_2 = tl.load(
        columns__ptr
        + b * columns__stride_0
        + columns__kv_at * columns__stride_2
        + columns__kv_at_2 * columns__stride_3
    )
    value = columns__kv + tl.zeros([BLOCK], tl.int32)
    tl.store(kv_summary_0_min_ptr + tl.program_id(0), tl.min(value, 0))
    tl.store(kv_summary_0_max_ptr + tl.program_id(0), tl.max(value, 0))
    value = columns__kv_2 + tl.zeros([BLOCK], tl.int32)
    tl.store(kv_summary_1_min_ptr + tl.program_id(0), tl.min(value, 0))
    tl.store(kv_summary_1_max_ptr + tl.program_id(0), tl.max(value, 0))


@triton.jit
def allowed(
    b, h, h_kv, q_idx, kv_idx, q_len, kv_len, columns__ptr, columns__size_0, columns__stride_0,
    columns__size_1, columns__stride_1, columns__size_2, columns__stride_2, columns__size_3,
    columns__stride_3,
):
    """The mask: ~((columns_[b, 0, kv_idx, 0] <= q_idx) & (q_idx < columns_[b, 0, kv_idx, 1])) &
    (kv_idx <= q_idx)"""
    columns__kv_at = tl.minimum(kv_idx, columns__size_2 - 1)
    columns__kv = tl.load(columns__ptr + b * columns__stride_0 + columns__kv_at * columns__stride_2)
    columns__kv_at_2 = tl.minimum(1, columns__size_3 - 1)
    columns__kv_2 = tl.load(
        columns__ptr
        + b * columns__stride_0
        + columns__kv_at * columns__stride_2
        + columns__kv_at_2 * columns__stride_3
    )
    return ~((columns__kv <= q_idx) & (q_idx < columns__kv_2)) & (kv_idx <= q_idx)


@triton.jit(
    do_not_specialize=[
        "q_tiles", "kv_tiles", "heads", "group", "q_len", "kv_len", "q_offset",
        "columns__size_0", "columns__stride_0", "columns__size_1", "columns__stride_1",
        "columns__size_2", "columns__stride_2", "columns__size_3", "columns__stride_3"
    ],
    do_not_specialize_on_alignment=["columns__ptr"],
)
def classify(
    states_ptr,
    kv_summary_0_min_ptr,
    kv_summary_0_max_ptr,
    kv_summary_1_min_ptr,
    kv_summary_1_max_ptr,
    q_tiles: tl.int32,
    kv_tiles: tl.int32,
    heads: tl.int32,
    group: tl.int32,
    q_len: tl.int32,
    kv_len: tl.int32,
    q_offset: tl.int32,
    columns__ptr,
    columns__size_0: tl.int32,
    columns__stride_0: tl.int64,
    columns__size_1: tl.int32,
    columns__stride_1: tl.int64,
    columns__size_2: tl.int32,
    columns__stride_2: tl.int64,
    columns__size_3: tl.int32,
    columns__stride_3: tl.int64,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """States of CHUNK key tiles in a row: by the rule, then by corners, then by elements."""
    chunks = tl.cdiv(kv_tiles, CHUNK)
    chunk = tl.program_id(0) % chunks
    row = tl.program_id(0) // chunks
    q_tile = row % q_tiles
    h = (row // q_tiles) % heads
    b = row // q_tiles // heads
    h_kv = h // group

    tiles = chunk * CHUNK + tl.arange(0, CHUNK)
    q_low = q_tile * TILE_M + q_offset
    q_high = tl.minimum(q_tile * TILE_M + TILE_M, q_len) - 1 + q_offset
    kv_low = tiles * TILE_N
    kv_high = tl.minimum(kv_low + TILE_N, kv_len) - 1
    alive = (kv_low < kv_len) & (tiles < kv_tiles)
    column = tl.minimum(tiles, kv_tiles - 1)
    kv_summary_0_min = tl.load(kv_summary_0_min_ptr + (b * heads + h) * kv_tiles + column)
    kv_summary_0_max = tl.load(kv_summary_0_max_ptr + (b * heads + h) * kv_tiles + column)
    kv_summary_1_min = tl.load(kv_summary_1_min_ptr + (b * heads + h) * kv_tiles + column)
    kv_summary_1_max = tl.load(kv_summary_1_max_ptr + (b * heads + h) * kv_tiles + column)
    may = (
        (~((kv_summary_0_max <= q_low) & (q_high < kv_summary_1_min)) & ~(q_high < kv_low))
        & alive
    )
    must = (
        (~(~(q_high < kv_summary_0_min) & ~(kv_summary_1_max <= q_low)) & (kv_high <= q_low))
        & may
    )
    states = may.to(tl.int32) + must.to(tl.int32)

    if ELEMENTS:
        # A tile with both an allowed and a forbidden corner is partial.
        some = alive & False
        every = alive
        for corner in tl.static_range(4):
            q_corner = q_high if corner // 2 else q_low
            kv_corner = kv_high if corner % 2 else kv_low
            allows = allowed(
                b, h, h_kv, q_corner, kv_corner, q_len, kv_len, columns__ptr, columns__size_0,
                columns__stride_0, columns__size_1, columns__stride_1, columns__size_2,
                columns__stride_2, columns__size_3, columns__stride_3,
            )
            some |= allows & alive
            every &= allows
        undecided = (may & ~must & ~(some & ~every)).to(tl.int32)
        last = -1
        for _ in range(tl.sum(undecided, 0)):
            last = tl.min(tl.where((undecided > 0) & (tiles > last), tiles, kv_tiles), 0)
            kv_idx = last * TILE_N + tl.minimum(tl.arange(0, BLOCK_N), TILE_N - 1)[None, :]
            kv_idx = tl.minimum(kv_idx, kv_len - 1)
            any_pair = 0
            all_pairs = 1
            for first in range(0, TILE_M, 16):
                q_idx = tl.minimum(q_low + first + tl.arange(0, 16)[:, None], q_high)
                here = (kv_idx >= 0) & (q_idx <= q_high)
                keep = allowed(
                    b, h, h_kv, q_idx, kv_idx, q_len, kv_len, columns__ptr, columns__size_0,
                    columns__stride_0, columns__size_1, columns__stride_1, columns__size_2,
                    columns__stride_2, columns__size_3, columns__stride_3,
                )
                counted = (keep & here).to(tl.int32)
                any_pair = tl.maximum(any_pair, tl.max(tl.max(counted, 1), 0))
                all_pairs = tl.minimum(all_pairs, tl.min(tl.min(counted, 1), 0))
            states = tl.where(tiles == last, any_pair + all_pairs, states)
    position = row.to(tl.int64) * kv_tiles + tiles
    tl.store(states_ptr + position, states.to(tl.int8), mask=tiles < kv_tiles)
