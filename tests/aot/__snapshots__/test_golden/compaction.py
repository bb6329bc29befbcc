# flashgen: runs of tiles

import triton
import triton.language as tl


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
        "step", "row_step", "grid_step", "rows", "tiles", "heads", "kv_len", "width"
    ],
    do_not_specialize_on_alignment=["kv_lens_ptr"],
)
def compact(
    states_ptr,
    counts_ptr,
    masked_ptr,
    full_ptr,
    step: tl.int64,
    row_step: tl.int64,
    grid_step: tl.int64,
    rows: tl.int32,
    tiles: tl.int32,
    heads: tl.int32,
    kv_len: tl.int32,
    kv_lens_ptr,
    width: tl.int32,
    HAS_LENS: tl.constexpr,
    TILE_N: tl.constexpr,
    BY_KEY: tl.constexpr,
    CHUNK: tl.constexpr,
):
    index = tl.program_id(0)
    row = index % rows
    grid = index // rows
    if HAS_LENS:
        kv_len = tl.load(kv_lens_ptr + grid // heads)
    states_ptr += grid * grid_step + row * row_step
    write_row(
        states_ptr, step, tiles, row, kv_len, index, counts_ptr, masked_ptr, full_ptr, width,
        TILE_N, BY_KEY, CHUNK,
    )
