# flashgen 0.1.0
# spec causal
#   mask    kv_idx <= q_idx
# tile rule
#   may attend   ~(max[q](q_idx) < min[kv](kv_idx))
#   must attend  max[kv](kv_idx) <= min[q](q_idx)

import triton
import triton.language as tl

FLOAT = tl.constexpr(tl.float32)


@triton.jit
def allowed(
    b, h, h_kv, q_idx, kv_idx, q_len, kv_len,
):
    """The mask: kv_idx <= q_idx"""
    return kv_idx <= q_idx


@triton.jit(
    do_not_specialize=["q_tiles", "kv_tiles", "heads", "group", "q_len", "q_offset_stride"],
    do_not_specialize_on_alignment=["kv_lens_ptr", "q_offset_ptr"],
)
def classify(
    states_ptr,
    q_tiles: tl.int32,
    kv_tiles: tl.int32,
    heads: tl.int32,
    group: tl.int32,
    q_len: tl.int32,
    kv_lens_ptr,
    q_offset_ptr,
    q_offset_stride: tl.int32,
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
    kv_len = tl.load(kv_lens_ptr + b)
    q_offset = tl.load(q_offset_ptr + b * q_offset_stride).to(tl.int32)

    tiles = chunk * CHUNK + tl.arange(0, CHUNK)
    q_low = q_tile * TILE_M + q_offset
    q_high = tl.minimum(q_tile * TILE_M + TILE_M, q_len) - 1 + q_offset
    kv_low = tiles * TILE_N
    kv_high = tl.minimum(kv_low + TILE_N, kv_len) - 1
    alive = (kv_low < kv_len) & (tiles < kv_tiles)
    may = (~(q_high < kv_low)) & alive
    must = (kv_high <= q_low) & may
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
