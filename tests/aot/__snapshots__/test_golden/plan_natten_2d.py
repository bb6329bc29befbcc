# flashgen 0.1.0
# spec natten_2d
#   mask    (minimum(maximum(q_idx // 8 - 2, 0), 7) <= kv_idx // 8) & (kv_idx // 8 <
#       minimum(maximum(q_idx // 8 - 2, 0), 7) + 5) & ((minimum(maximum(q_idx % 8 - 1, 0), 5) <=
#       kv_idx % 8) & (kv_idx % 8 < minimum(maximum(q_idx % 8 - 1, 0), 5) + 3))
# tile rule
#   may attend   ~(max[kv](kv_idx // 8) < min[q](minimum(maximum(q_idx // 8 - 2, 0), 7))) &
#       ~(max[q](minimum(maximum(q_idx // 8 - 2, 0), 7) + 5) <= min[kv](kv_idx // 8)) &
#       (~(max[kv](kv_idx % 8) < min[q](minimum(maximum(q_idx % 8 - 1, 0), 5))) &
#       ~(max[q](minimum(maximum(q_idx % 8 - 1, 0), 5) + 3) <= min[kv](kv_idx % 8)))
#   must attend  (max[q](minimum(maximum(q_idx // 8 - 2, 0), 7)) <= min[kv](kv_idx // 8)) &
#       (max[kv](kv_idx // 8) < min[q](minimum(maximum(q_idx // 8 - 2, 0), 7) + 5)) &
#       ((max[q](minimum(maximum(q_idx % 8 - 1, 0), 5)) <= min[kv](kv_idx % 8)) & (max[kv](kv_idx %
#       8) < min[q](minimum(maximum(q_idx % 8 - 1, 0), 5) + 3)))

import triton
import triton.language as tl

FLOAT = tl.constexpr(tl.float32)


@triton.jit(
    do_not_specialize=["tiles", "heads", "group", "q_len", "kv_len", "q_offset"],
    do_not_specialize_on_alignment=[],
)
def summarize_q(
    q_summary_0_min_ptr,
    q_summary_0_max_ptr,
    q_summary_1_min_ptr,
    q_summary_1_max_ptr,
    q_summary_2_min_ptr,
    q_summary_2_max_ptr,
    q_summary_3_min_ptr,
    q_summary_3_max_ptr,
    tiles: tl.int32,
    heads: tl.int32,
    group: tl.int32,
    q_len: tl.int32,
    kv_len: tl.int32,
    q_offset: tl.int32,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Least and greatest values over each tile of queries."""
    tile = tl.program_id(0) % tiles

    position = tile * TILE + tl.minimum(tl.arange(0, BLOCK), TILE - 1)
    q_idx = tl.minimum(position, q_len - 1) + q_offset
    value = tl.minimum(tl.maximum((q_idx >> 3) - 2, 0), 7) + tl.zeros([BLOCK], tl.int32)
    tl.store(q_summary_0_min_ptr + tl.program_id(0), tl.min(value, 0))
    tl.store(q_summary_0_max_ptr + tl.program_id(0), tl.max(value, 0))
    value = tl.minimum(tl.maximum((q_idx >> 3) - 2, 0), 7) + 5 + tl.zeros([BLOCK], tl.int32)
    tl.store(q_summary_1_min_ptr + tl.program_id(0), tl.min(value, 0))
    tl.store(q_summary_1_max_ptr + tl.program_id(0), tl.max(value, 0))
    value = tl.minimum(tl.maximum((q_idx & 7) - 1, 0), 5) + tl.zeros([BLOCK], tl.int32)
    tl.store(q_summary_2_min_ptr + tl.program_id(0), tl.min(value, 0))
    tl.store(q_summary_2_max_ptr + tl.program_id(0), tl.max(value, 0))
    value = tl.minimum(tl.maximum((q_idx & 7) - 1, 0), 5) + 3 + tl.zeros([BLOCK], tl.int32)
    tl.store(q_summary_3_min_ptr + tl.program_id(0), tl.min(value, 0))
    tl.store(q_summary_3_max_ptr + tl.program_id(0), tl.max(value, 0))


@triton.jit(
    do_not_specialize=["tiles", "heads", "group", "q_len", "kv_len", "q_offset"],
    do_not_specialize_on_alignment=[],
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
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Least and greatest values over each tile of keys."""
    tile = tl.program_id(0) % tiles

    position = tile * TILE + tl.minimum(tl.arange(0, BLOCK), TILE - 1)
    kv_idx = tl.maximum(tl.minimum(position, kv_len - 1), 0)
    value = kv_idx >> 3 + tl.zeros([BLOCK], tl.int32)
    tl.store(kv_summary_0_min_ptr + tl.program_id(0), tl.min(value, 0))
    tl.store(kv_summary_0_max_ptr + tl.program_id(0), tl.max(value, 0))
    value = kv_idx & 7 + tl.zeros([BLOCK], tl.int32)
    tl.store(kv_summary_1_min_ptr + tl.program_id(0), tl.min(value, 0))
    tl.store(kv_summary_1_max_ptr + tl.program_id(0), tl.max(value, 0))


@triton.jit
def allowed(
    b, h, h_kv, q_idx, kv_idx, q_len, kv_len,
):
    """The mask: (minimum(maximum(q_idx // 8 - 2, 0), 7) <= kv_idx // 8) & (kv_idx // 8 <
    minimum(maximum(q_idx // 8 - 2, 0), 7) + 5) & ((minimum(maximum(q_idx % 8 - 1, 0), 5) <= kv_idx
    % 8) & (kv_idx % 8 < minimum(maximum(q_idx % 8 - 1, 0), 5) + 3))"""
    q_minimum = tl.minimum(tl.maximum((q_idx >> 3) - 2, 0), 7)
    kv_floordiv = kv_idx >> 3
    q_minimum_2 = tl.minimum(tl.maximum((q_idx & 7) - 1, 0), 5)
    kv_mod = kv_idx & 7
    return (
        (q_minimum <= kv_floordiv)
        & (kv_floordiv < q_minimum + 5)
        & ((q_minimum_2 <= kv_mod) & (kv_mod < q_minimum_2 + 3))
    )


@triton.jit(
    do_not_specialize=["q_tiles", "kv_tiles", "heads", "group", "q_len", "kv_len", "q_offset"],
    do_not_specialize_on_alignment=[],
)
def classify(
    states_ptr,
    kv_summary_0_min_ptr,
    kv_summary_0_max_ptr,
    q_summary_0_min_ptr,
    q_summary_0_max_ptr,
    q_summary_1_min_ptr,
    q_summary_1_max_ptr,
    kv_summary_1_min_ptr,
    kv_summary_1_max_ptr,
    q_summary_2_min_ptr,
    q_summary_2_max_ptr,
    q_summary_3_min_ptr,
    q_summary_3_max_ptr,
    q_tiles: tl.int32,
    kv_tiles: tl.int32,
    heads: tl.int32,
    group: tl.int32,
    q_len: tl.int32,
    kv_len: tl.int32,
    q_offset: tl.int32,
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
    q_summary_0_min = tl.load(q_summary_0_min_ptr + row)
    q_summary_0_max = tl.load(q_summary_0_max_ptr + row)
    q_summary_1_min = tl.load(q_summary_1_min_ptr + row)
    q_summary_1_max = tl.load(q_summary_1_max_ptr + row)
    kv_summary_1_min = tl.load(kv_summary_1_min_ptr + (b * heads + h) * kv_tiles + column)
    kv_summary_1_max = tl.load(kv_summary_1_max_ptr + (b * heads + h) * kv_tiles + column)
    q_summary_2_min = tl.load(q_summary_2_min_ptr + row)
    q_summary_2_max = tl.load(q_summary_2_max_ptr + row)
    q_summary_3_min = tl.load(q_summary_3_min_ptr + row)
    q_summary_3_max = tl.load(q_summary_3_max_ptr + row)
    may = (
        (
            ~(kv_summary_0_max < q_summary_0_min)
            & ~(q_summary_1_max <= kv_summary_0_min)
            & (~(kv_summary_1_max < q_summary_2_min) & ~(q_summary_3_max <= kv_summary_1_min))
        )
        & alive
    )
    must = (
        (
            (q_summary_0_max <= kv_summary_0_min)
            & (kv_summary_0_max < q_summary_1_min)
            & ((q_summary_2_max <= kv_summary_1_min) & (kv_summary_1_max < q_summary_3_min))
        )
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
                b, h, h_kv, q_corner, kv_corner, q_len, kv_len,
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
                    b, h, h_kv, q_idx, kv_idx, q_len, kv_len,
                )
                counted = (keep & here).to(tl.int32)
                any_pair = tl.maximum(any_pair, tl.max(tl.max(counted, 1), 0))
                all_pairs = tl.minimum(all_pairs, tl.min(tl.min(counted, 1), 0))
            states = tl.where(tiles == last, any_pair + all_pairs, states)
    position = row.to(tl.int64) * kv_tiles + tiles
    tl.store(states_ptr + position, states.to(tl.int8), mask=tiles < kv_tiles)
