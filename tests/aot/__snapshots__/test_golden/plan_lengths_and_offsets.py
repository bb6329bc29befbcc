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


@triton.jit
def select(
    state, tile, row, kv_len, FULL: tl.constexpr, TILE_N: tl.constexpr, BY_KEY: tl.constexpr
):
    """Members of one list. The tile that sticks out of the keys is kept apart from rows of
    queries; a row of that tile itself is masked throughout."""
    if BY_KEY:
        whole = (state == 2) & ((row + 1) * TILE_N <= kv_len)
        return whole if FULL else (state != 0) & ~whole
    inside = (tile + 1) * TILE_N <= kv_len
    return (state == 2) & inside if FULL else (state == 1) & inside


@triton.jit
def write_runs(
    states_ptr, step, tiles, row, kv_len, runs_ptr, width,
    FULL: tl.constexpr, TILE_N: tl.constexpr, BY_KEY: tl.constexpr, CHUNK: tl.constexpr,
):
    """Write (first, past the last) of each run, then zeros; return runs, tiles and the span."""
    runs = 0
    ended = 0
    members = 0
    low = tiles
    high = 0
    for start in range(0, tiles + 1, CHUNK):
        tile = start + tl.arange(0, CHUNK)
        state = tl.load(states_ptr + tile * step, mask=tile < tiles, other=0)
        before = tl.load(states_ptr + (tile - 1) * step, mask=(tile > 0) & (tile <= tiles), other=0)
        inside = select(state, tile, row, kv_len, FULL, TILE_N, BY_KEY)
        was_inside = select(before, tile - 1, row, kv_len, FULL, TILE_N, BY_KEY)
        opens = (inside & ~was_inside).to(tl.int32)
        closes = (was_inside & ~inside).to(tl.int32)
        rank = runs + tl.cumsum(opens, 0) - 1
        tl.store(runs_ptr + 2 * rank, tile, mask=(opens > 0) & (rank < width - 2))
        rank = ended + tl.cumsum(closes, 0) - 1
        tl.store(runs_ptr + 2 * rank + 1, tile, mask=(closes > 0) & (rank < width - 2))
        runs += tl.sum(opens, 0)
        ended += tl.sum(closes, 0)
        members += tl.sum(inside.to(tl.int32), 0)
        low = tl.minimum(low, tl.min(tl.where(inside, tile, tiles), 0))
        high = tl.maximum(high, tl.max(tl.where(inside, tile + 1, 0), 0))
    # A kernel reads two runs ahead.
    past = 2 * tl.minimum(runs, width - 2) + tl.arange(0, 4)
    tl.store(runs_ptr + past, tl.zeros([4], tl.int32))
    return runs, members, low, high


@triton.jit
def write_row(
    states_ptr, step, tiles, row, kv_len, index, counts_ptr, masked_ptr, full_ptr, width,
    TILE_N: tl.constexpr, BY_KEY: tl.constexpr, CHUNK: tl.constexpr,
):
    """Runs and counts of one row of tiles, the one at `index` of the lists."""
    masked_ptr += index.to(tl.int64) * (2 * width)
    full_ptr += index.to(tl.int64) * (2 * width)
    runs, masked, low, high = write_runs(
        states_ptr, step, tiles, row, kv_len, masked_ptr, width, False, TILE_N, BY_KEY, CHUNK
    )
    full_runs, full, full_low, full_high = write_runs(
        states_ptr, step, tiles, row, kv_len, full_ptr, width, True, TILE_N, BY_KEY, CHUNK
    )
    # More runs than there is room for: one run over everything, masked element by element.
    if (runs > width - 2) | (full_runs > width - 2):
        low = tl.minimum(low, full_low)
        high = tl.maximum(high, full_high)
        tl.debug_barrier()
        tl.store(masked_ptr, low)
        tl.store(masked_ptr + 1, high)
        tl.store(masked_ptr + 2 + tl.arange(0, 4), tl.zeros([4], tl.int32))
        tl.store(full_ptr + tl.arange(0, 4), tl.zeros([4], tl.int32))
        masked = high - low
        full = 0
    counts_ptr += 3 * index.to(tl.int64)
    tl.store(counts_ptr, masked)
    tl.store(counts_ptr + 1, full)
    ragged = 0
    if not BY_KEY:
        last = kv_len // TILE_N
        is_ragged = (kv_len % TILE_N != 0) & (last < tiles)
        state = tl.load(states_ptr + last * step, mask=is_ragged, other=0)
        ragged = (state != 0).to(tl.int32)
    tl.store(counts_ptr + 2, ragged)


@triton.jit(
    do_not_specialize=[
        "width", "q_tiles", "kv_tiles", "grids", "heads", "group", "q_len", "q_offset_stride"
    ],
    do_not_specialize_on_alignment=["kv_lens_ptr", "q_offset_ptr"],
)
def classify(
    states_ptr,
    counts_ptr,
    masked_ptr,
    full_ptr,
    width: tl.int32,
    q_tiles: tl.int32,
    kv_tiles: tl.int32,
    grids: tl.int32,
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
            # Until a pair that attends and one that doesn't are found: most tiles end at once.
            any_pair = 0
            all_pairs = 1
            first = 0
            while (first < TILE_M) & ((first == 0) | (any_pair == all_pairs)):
                q_idx = tl.minimum(q_low + first + tl.arange(0, 16)[:, None], q_high)
                here = (kv_idx >= 0) & (q_idx <= q_high)
                keep = here & allowed(
                    b, h, h_kv, q_idx, kv_idx, q_len, kv_len,
                )
                any_pair |= tl.max(tl.max(keep.to(tl.int32), 1), 0)
                all_pairs &= tl.min(tl.min(keep.to(tl.int32), 1), 0)
                first += 16
            states = tl.where(tiles == last, any_pair + all_pairs, states)
    states_ptr += row.to(tl.int64) * kv_tiles
    tl.store(states_ptr + tiles, states.to(tl.int8), mask=tiles < kv_tiles)

    # A row that one program has seen whole needs no other kernel.
    if chunks == 1:
        tl.debug_barrier()
        write_row(
            states_ptr, 1, kv_tiles, q_tile, kv_len, row, counts_ptr, masked_ptr, full_ptr, width,
            TILE_N, False, CHUNK,
        )
