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

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashgen import hopper

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
FLOAT = gl.constexpr(gl.float32)
NEVER = gl.constexpr(-3.0e38)


@gluon.jit
def share_of(number, whole, splits):
    """A row block by its number in the queue, and which share of its tiles; -1: all of them."""
    more = number - whole
    item = gl.where(more < 0, number, whole + more // splits)
    return item, gl.where(more < 0, -1, more % splits)


@gluon.jit
def overlap(first, last, before, tiles):
    """Of tiles that stand behind `before` others: how many a share skips, and how many it has."""
    skipped = gl.minimum(gl.maximum(first - before, 0), tiles)
    count = gl.minimum(gl.maximum(last - before, 0), tiles) - skipped
    return gl.where(count > 0, skipped, 0), count


@gluon.jit
def seek(runs, tiles):
    """The run that holds the tile behind so many, and how many of those it holds itself."""
    size = gl.load(runs + 1) - gl.load(runs)
    while tiles >= gl.maximum(size, 1):
        tiles -= size
        runs += 2
        size = gl.load(runs + 1) - gl.load(runs)
    return runs, tiles


@gluon.jit
def place(item, items, q_len, heads, group, last_heads, BLOCK_M: gl.constexpr):
    """A row block, its batch element and its head.

    Heads that share keys work on the same rows side by side, so that keys are read from memory
    once; the last rows first, as under causal masks they are the longest. The last heads go side by
    side, so that what is left at the end are short row blocks."""
    blocks = gl.cdiv(q_len, BLOCK_M)
    first_head = item // (group * blocks) * group
    last_head = items // blocks - last_heads
    side = gl.where(first_head < last_head, group, last_heads)
    first_head = gl.minimum(first_head, last_head)
    rank = item - first_head * blocks
    head = first_head + rank % side
    return blocks - 1 - rank // side, head // heads, head % heads


@gluon.jit
def tell(notes, own, ragged_tiles, masked_tiles, full_tiles, block, b, h, share):
    """What a warpgroup is told of its next row block; a block of -1: that none follows."""
    hopper.note(notes.index(own * 8), ragged_tiles)
    hopper.note(notes.index(own * 8 + 1), masked_tiles)
    hopper.note(notes.index(own * 8 + 2), full_tiles)
    hopper.note(notes.index(own * 8 + 3), block)
    hopper.note(notes.index(own * 8 + 4), b)
    hopper.note(notes.index(own * 8 + 5), h)
    hopper.note(notes.index(own * 8 + 6), share)


@gluon.jit
def produce(
    q0_desc, k0_desc, v0_desc, next_item_ptr, items, whole, splits, last_heads, counts,
    masked_runs, full_runs, schedule_stride_b, schedule_stride_h, masked_width, full_width, heads,
    group, q_len, kv_len, q0_tiles, k0_tiles, v0_tiles, places, notes, q_ready, q_free, ready, free,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr,
):
    """One warp copies: queries, then the keys of a tile with the values of the one before."""
    turn = 0
    round = 0
    last_key = 0
    last_b = 0
    last_h_kv = 0
    number = gl.program_id(0)
    while number < whole + (items - whole) * splits:
        next_number = gl.atomic_add(next_item_ptr, 1) + gl.num_programs(0)
        item, share = share_of(number, whole, splits)
        block, b, h = place(item, items, q_len, heads, group, last_heads, BLOCK_M)
        h_kv = h // group
        schedule_row = b * schedule_stride_b + h * schedule_stride_h + block
        masked_row = masked_runs + schedule_row * (2 * masked_width)
        full_row = full_runs + schedule_row * (2 * full_width)
        masked_tiles = gl.load(counts + 3 * schedule_row)
        full_tiles = gl.load(counts + 3 * schedule_row + 1)
        ragged_tiles = gl.load(counts + 3 * schedule_row + 2)
        masked_skipped = 0
        full_skipped = 0
        if share >= 0:
            tiles = ragged_tiles + masked_tiles + full_tiles
            first = tiles * share // splits
            last = tiles * (share + 1) // splits
            full_skipped, full_tiles = overlap(first, last, ragged_tiles + masked_tiles, full_tiles)
            masked_skipped, masked_tiles = overlap(first, last, ragged_tiles, masked_tiles)
            _, ragged_tiles = overlap(first, last, 0, ragged_tiles)
            masked_row, masked_skipped = seek(masked_row, masked_skipped)
            full_row, full_skipped = seek(full_row, full_skipped)
        masked_tile = gl.load(masked_row) + masked_skipped
        masked_end = gl.load(masked_row + 1)
        full_tile = gl.load(full_row) + full_skipped
        full_end = gl.load(full_row + 1)
        masked_next = gl.load(masked_row + 2)
        masked_next_end = gl.load(masked_row + 3)
        full_next = gl.load(full_row + 2)
        full_next_end = gl.load(full_row + 3)
        ragged_tile = kv_len // BLOCK_N
        # Without a tile: one behind the last key, all masked, as there is always a first one.
        if masked_tiles + full_tiles + ragged_tiles == 0:
            ragged_tiles = 1
            ragged_tile = gl.cdiv(kv_len, BLOCK_N)

        is_first = True
        for part in range(3):
            tiles = gl.where(part == 0, ragged_tiles, gl.where(part == 1, masked_tiles, full_tiles))
            tile = gl.where(part == 0, ragged_tile, gl.where(part == 1, masked_tile, full_tile))
            end = gl.where(part == 1, masked_end, full_end)
            next_tile = gl.where(part == 1, masked_next, full_next)
            next_end = gl.where(part == 1, masked_next_end, full_next_end)
            runs = gl.where(part == 1, masked_row, full_row)
            for _ in range(tiles):
                first_key = tile * BLOCK_N
                slot = turn % STAGES
                hopper.mbarrier.wait(free.index(slot), turn // STAGES & 1 ^ 1)
                hopper.note(places.index(slot), tile)
                hopper.mbarrier.expect(ready.index(slot), k0_desc.block_type.nbytes, pred=turn == 0)
                hopper.mbarrier.expect(
                    ready.index(slot), k0_desc.block_type.nbytes + v0_desc.block_type.nbytes,
                    pred=turn > 0,
                )
                hopper.load_tile(
                    k0_desc, [b, h_kv, first_key, 0], ready.index(slot), k0_tiles.index(slot)
                )
                hopper.load_tile(
                    v0_desc, [last_b, last_h_kv, last_key, 0], ready.index(slot),
                    v0_tiles.index(slot), pred=turn > 0,
                )
                if is_first:
                    for half in gl.static_range(2):
                        own = round % BUFFERS * 2 + half
                        hopper.mbarrier.wait(q_free.index(own), round // BUFFERS & 1 ^ 1)
                        tell(notes, own, ragged_tiles, masked_tiles, full_tiles, block, b, h, share)
                        hopper.mbarrier.expect(q_ready.index(own), q0_desc.block_type.nbytes)
                        hopper.load_tile(
                            q0_desc, [b, h, block * BLOCK_M + half * 64, 0], q_ready.index(own),
                            q0_tiles.index(own),
                        )
                is_first = False
                last_key = first_key
                last_b = b
                last_h_kv = h_kv
                turn += 1
                tile += 1
                is_last = tile == end
                tile = gl.where(is_last, next_tile, tile)
                end = gl.where(is_last, next_end, end)
                runs += gl.where(is_last, 2, 0)
                next_tile = gl.load(runs + 2)
                next_end = gl.load(runs + 3)
        round += 1
        number = next_number

    # The last values, and word that no row block follows. Whoever computes its scores nevertheless
    # reads data of keys that there are.
    slot = turn % STAGES
    hopper.mbarrier.wait(free.index(slot), turn // STAGES & 1 ^ 1)
    hopper.note(places.index(slot), 0)
    hopper.mbarrier.expect(ready.index(slot), v0_desc.block_type.nbytes)
    hopper.load_tile(
        v0_desc, [last_b, last_h_kv, last_key, 0], ready.index(slot), v0_tiles.index(slot)
    )
    for half in gl.static_range(2):
        own = round % BUFFERS * 2 + half
        hopper.mbarrier.wait(q_free.index(own), round // BUFFERS & 1 ^ 1)
        tell(notes, own, 0, 0, 0, -1, 0, 0, -1)
        hopper.mbarrier.arrive(q_ready.index(own), count=1)


@gluon.jit
def finish(
    HALF: gl.constexpr, ROW: gl.constexpr, DTYPE: gl.constexpr,
    block, b, h, share, m, l, acc0,
    out_ptr, lse_ptr, spoilt_ptr, splits, shared_row, parts_ptr, lses_ptr, heads, q_len,
    BLOCK_M: gl.constexpr,
):
    """Outputs and LSE of 64 rows."""
    l = gl.convert_layout(gl.sum(l, 1), ROW)
    row = block * BLOCK_M + HALF * 64 + gl.arange(0, 64, ROW)
    at = (b * heads + h).to(gl.int64) * q_len + row
    # A row without keys: l is 0, the output 0 and the LSE -inf.
    divisor = gl.where(l == 0.0, 1.0, l)
    lse = gl.where(l == 0.0, float("-inf"), m + hopper.log2(divisor))
    acc0 *= gl.convert_layout(
        hopper.reciprocal(divisor), gl.SliceLayout(1, hopper.accumulator(128))
    )[:, None]
    # 0 x inf and 0 x NaN are NaN.
    zero = gl.zeros([64], FLOAT, ROW)
    zero += gl.convert_layout(gl.sum(acc0 * 0.0, 1), ROW)
    gl.store(spoilt_ptr + at, 1, mask=(row < q_len) & (zero != 0.0))
    if share < 0:
        gl.store(lse_ptr + at, lse * LN2, mask=row < q_len)
        hopper.store_rows(out_ptr, acc0, at, row < q_len, DTYPE, 0, 128)
    else:
        part = (at - shared_row) * splits + share
        gl.store(lses_ptr + part, lse, mask=row < q_len)
        hopper.store_part(parts_ptr, acc0, part, row < q_len, 0, 128)
    return acc0


@gluon.jit
def weigh(
    s, m, l, p, acc0, free, slot, scale_log2,
    HALF: gl.constexpr, ROW: gl.constexpr, DTYPE: gl.constexpr,
):
    """Weights of a tile that isn't the first, by the maximum so far: nothing has to be found out
    before the exponentials, and nothing is scaled. Where they are large, or outweigh what was
    there, once more with their own.

    `p`: those of the tile before, which its product still reads."""
    weights = gl.exp2(s * scale_log2 - m[:, None])
    sums = hopper.quad_sums(weights)
    p = weights
    acc0, p = hopper.warpgroup_mma_wait(0, deps=(acc0, p))
    p = hopper.pack(p, DTYPE)
    hopper.mbarrier.arrive(free.index(slot), count=1)
    limit = gl.minimum(gl.maximum(8.0 * l, 16.0), 4096.0)
    is_beyond = hopper.any_beyond(sums, limit, HALF)
    if is_beyond:
        # Rows that aren't among them stay as they are, to the bit: they don't notice who is beside
        # them.
        beyond = gl.convert_layout(gl.max(gl.where(sums <= limit, 0, 1), 1), ROW)
        m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)
        m_new = gl.where(beyond > 0, m_new, m)
        weights = gl.exp2(s * scale_log2 - m_new[:, None])
        p = hopper.pack(weights, DTYPE)
        sums = hopper.quad_sums(weights)
        alpha = gl.exp2(m - m_new)
        l *= hopper.for_quads(alpha)
        acc0 *= gl.convert_layout(alpha, gl.SliceLayout(1, hopper.accumulator(128)))[:, None]
        m = m_new
    l += sums
    return p, m, l, acc0


@gluon.jit
def consume(
    HALF: gl.constexpr,
    out_ptr, lse_ptr, spoilt_ptr, q0_desc, splits, shared_row, parts_ptr, lses_ptr, heads, q_len,
    kv_len, q_offset, scale_log2, columns__ptr, columns__stride_0, columns__size_2,
    columns__stride_2, columns__size_3, columns__stride_3, q0_tiles, k0_tiles, v0_tiles, places,
    notes, q_ready, q_free, ready, free,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr,
):
    """A warpgroup: 64 rows of each row block, from their first scores to their outputs."""
    SCORES: gl.constexpr = hopper.accumulator(BLOCK_N)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    COLUMN: gl.constexpr = gl.SliceLayout(0, SCORES)
    DTYPE: gl.constexpr = q0_desc.dtype
    columns = gl.arange(0, BLOCK_N, COLUMN)[None, :]
    lanes = gl.arange(0, BLOCK_N, gl.BlockedLayout([1], [32], [4], [0]))
    m = gl.full([64], NEVER, FLOAT, ROW)
    l = gl.zeros([64, 4], FLOAT, hopper.quads())
    p = hopper.pack(gl.zeros([64, BLOCK_N], FLOAT, SCORES), DTYPE)
    acc0 = gl.zeros([64, 128], FLOAT, hopper.accumulator(128))
    hopper.name_verdict(HALF)
    is_begun = False
    slot = 0
    parity = 0
    round = 0
    last_block = -1
    last_b = 0
    last_share = -1
    last_h = 0
    goes_on = True
    while goes_on:
        own = round % BUFFERS * 2 + HALF
        hopper.mbarrier.wait(q_ready.index(own), round // BUFFERS & 1)
        ragged_tiles = hopper.read(notes.index(own * 8))
        masked_tiles = hopper.read(notes.index(own * 8 + 1))
        full_tiles = hopper.read(notes.index(own * 8 + 2))
        block = hopper.read(notes.index(own * 8 + 3))
        b = hopper.read(notes.index(own * 8 + 4))
        h = hopper.read(notes.index(own * 8 + 5))
        share = hopper.read(notes.index(own * 8 + 6))
        goes_on = block >= 0
        q0 = q0_tiles.index(own).reshape([64, 128])
        tiles_left = gl.maximum(ragged_tiles + masked_tiles + full_tiles, 1)
        hopper.mbarrier.wait(ready.index(slot), parity)
        s = gl.zeros([64, BLOCK_N], FLOAT, SCORES)
        keys = k0_tiles.index(slot).reshape([BLOCK_N, 128]).permute((1, 0))
        s = hopper.warpgroup_mma(q0, keys, s, use_acc=False, is_async=True)
        values = v0_tiles.index(slot).reshape([BLOCK_N, 128])
        acc0 = hopper.warpgroup_mma(
            hopper.unpack(p, DTYPE, 128), values, acc0, use_acc=is_begun, is_async=True
        )
        is_begun = True

        row = gl.maximum(block, 0) * BLOCK_M + HALF * 64 + gl.arange(0, 64, ROW)
        q_idx = row[:, None] + q_offset
        columns__row = columns__ptr + b * columns__stride_0
        columns__kv_at_2 = gl.minimum(1, columns__size_3 - 1)
        columns__row_2 = columns__ptr + b * columns__stride_0 + columns__kv_at_2 * columns__stride_3
        first_key = hopper.read(places.index(slot)) * BLOCK_N
        own_kv_idx = first_key + lanes
        columns__kv_at = gl.minimum(own_kv_idx, columns__size_2 - 1)
        columns__kv = gl.load(columns__row + columns__kv_at * columns__stride_2)
        columns__kv_2 = gl.load(columns__row_2 + columns__kv_at * columns__stride_2)
        s = hopper.warpgroup_mma_wait(1, deps=(s,))
        acc0 = hopper.warpgroup_mma_wait(0, deps=(acc0,))
        hopper.mbarrier.arrive(free.index(slot), count=1)
        tiles_left -= 1
        if tiles_left == 0:
            hopper.async_copy.mbarrier_arrive(q_free.index(own), increment_count=False)
        if last_block >= 0:
            acc0 = finish(
                HALF, ROW, DTYPE, last_block, last_b, last_h, last_share, m, l, acc0,
                out_ptr, lse_ptr, spoilt_ptr, splits, shared_row, parts_ptr, lses_ptr, heads, q_len,
                BLOCK_M,
            )
        is_begun = False

        # The first tile, whichever kind it is, is masked; a ragged one is the first.
        first_masked = gl.where(ragged_tiles == 0, gl.minimum(masked_tiles, 1), 0)
        first_full = gl.minimum(full_tiles, 1 - ragged_tiles - first_masked)
        m = gl.full([64], NEVER, FLOAT, ROW)
        l = gl.zeros([64, 4], FLOAT, hopper.quads())
        columns__kv_across = hopper.cross(columns__kv, COLUMN)[None, :]
        columns__kv_2_across = hopper.cross(columns__kv_2, COLUMN)[None, :]
        kv_idx = hopper.place_keys(first_key, columns)
        keep = (
            (kv_idx < kv_len)
            & (
                ~((columns__kv_across <= q_idx) & (q_idx < columns__kv_2_across))
                & (kv_idx <= q_idx)
            )
        )
        s = gl.where(keep, s, float("-inf"))
        m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)
        m_safe = m_new
        p = gl.exp2(s * scale_log2 - m_safe[:, None])
        alpha = gl.exp2(m - m_safe)
        l = l * hopper.for_quads(alpha) + hopper.quad_sums(p)
        m = m_new
        p = hopper.pack(p, DTYPE)
        slot += 1
        parity = gl.where(slot == STAGES, parity ^ 1, parity)
        slot = gl.where(slot == STAGES, 0, slot)

        # Tiles that the mask cuts.
        for _ in range(first_masked, masked_tiles):
            hopper.mbarrier.wait(ready.index(slot), parity)
            s = gl.zeros([64, BLOCK_N], FLOAT, SCORES)
            keys = k0_tiles.index(slot).reshape([BLOCK_N, 128]).permute((1, 0))
            s = hopper.warpgroup_mma(q0, keys, s, use_acc=False, is_async=True)
            values = v0_tiles.index(slot).reshape([BLOCK_N, 128])
            acc0 = hopper.warpgroup_mma(
                hopper.unpack(p, DTYPE, 128), values, acc0, use_acc=is_begun, is_async=True
            )
            is_begun = True
            first_key = hopper.read(places.index(slot)) * BLOCK_N
            own_kv_idx = first_key + lanes
            columns__kv_at = gl.minimum(own_kv_idx, columns__size_2 - 1)
            columns__kv = gl.load(columns__row + columns__kv_at * columns__stride_2)
            columns__kv_2 = gl.load(columns__row_2 + columns__kv_at * columns__stride_2)
            s = hopper.warpgroup_mma_wait(1, deps=(s,))
            tiles_left -= 1
            if tiles_left == 0:
                hopper.async_copy.mbarrier_arrive(q_free.index(own), increment_count=False)
            hopper.mbarrier.wait(ready.index(slot), parity)
            columns__kv_across = hopper.cross(columns__kv, COLUMN)[None, :]
            columns__kv_2_across = hopper.cross(columns__kv_2, COLUMN)[None, :]
            kv_idx = hopper.place_keys(first_key, columns)
            keep = (
                ~((columns__kv_across <= q_idx) & (q_idx < columns__kv_2_across))
                & (kv_idx <= q_idx)
            )
            s = gl.where(keep, s, float("-inf"))
            p, m, l, acc0 = weigh(s, m, l, p, acc0, free, slot, scale_log2, HALF, ROW, DTYPE)
            slot += 1
            parity = gl.where(slot == STAGES, parity ^ 1, parity)
            slot = gl.where(slot == STAGES, 0, slot)

        # Tiles whose every pair attends.
        for _ in range(first_full, full_tiles):
            hopper.mbarrier.wait(ready.index(slot), parity)
            s = gl.zeros([64, BLOCK_N], FLOAT, SCORES)
            keys = k0_tiles.index(slot).reshape([BLOCK_N, 128]).permute((1, 0))
            s = hopper.warpgroup_mma(q0, keys, s, use_acc=False, is_async=True)
            values = v0_tiles.index(slot).reshape([BLOCK_N, 128])
            acc0 = hopper.warpgroup_mma(
                hopper.unpack(p, DTYPE, 128), values, acc0, use_acc=is_begun, is_async=True
            )
            is_begun = True
            s = hopper.warpgroup_mma_wait(1, deps=(s,))
            tiles_left -= 1
            if tiles_left == 0:
                hopper.async_copy.mbarrier_arrive(q_free.index(own), increment_count=False)
            p, m, l, acc0 = weigh(s, m, l, p, acc0, free, slot, scale_log2, HALF, ROW, DTYPE)
            slot += 1
            parity = gl.where(slot == STAGES, parity ^ 1, parity)
            slot = gl.where(slot == STAGES, 0, slot)

        last_block = block
        last_b = b
        last_h = h
        last_share = share
        round += 1


# Values never specialise: new lengths, strides, scalars and data run the same binary.
@gluon.jit(
    do_not_specialize=[
        "items", "whole", "splits", "shared_row", "last_heads", "schedule_stride_b",
        "schedule_stride_h", "masked_width", "full_width", "heads", "group", "q_len", "kv_len",
        "q_offset", "scale_log2", "columns__size_0", "columns__stride_0", "columns__size_1",
        "columns__stride_1", "columns__size_2", "columns__stride_2", "columns__size_3",
        "columns__stride_3"
    ],
    do_not_specialize_on_alignment=["columns__ptr"],
)
def attention_forward(
    out_ptr,
    lse_ptr,
    spoilt_ptr,
    q0_desc,
    k0_desc,
    v0_desc,
    next_item_ptr,
    items: gl.int32,
    whole: gl.int32,
    splits: gl.int32,
    shared_row: gl.int64,
    parts_ptr,
    lses_ptr,
    last_heads: gl.int32,
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
    columns__ptr,
    columns__size_0: gl.int32,
    columns__stride_0: gl.int64,
    columns__size_1: gl.int32,
    columns__stride_1: gl.int64,
    columns__size_2: gl.int32,
    columns__stride_2: gl.int64,
    columns__size_3: gl.int32,
    columns__stride_3: gl.int64,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    REGISTERS: gl.constexpr,
    PRODUCER: gl.constexpr,
):
    q0_tiles = gl.allocate_shared_memory(
        q0_desc.dtype, [2 * BUFFERS, 1, 1, 64, 128], q0_desc.layout
    )
    k0_tiles = gl.allocate_shared_memory(
        q0_desc.dtype, [STAGES, 1, 1, BLOCK_N, 128], k0_desc.layout
    )
    v0_tiles = gl.allocate_shared_memory(
        q0_desc.dtype, [STAGES, 1, 1, BLOCK_N, 128], v0_desc.layout
    )
    # Where a turn's keys are; of 64 rows of queries: how many tiles of each kind they look at, and
    # which row block they are, of which batch element and head, -1 if none follows; and so on.
    places = gl.allocate_shared_memory(gl.int32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    notes = gl.allocate_shared_memory(
        gl.int32, [2 * BUFFERS * 8, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    q_ready = gl.allocate_shared_memory(
        gl.int64, [2 * BUFFERS, 1], hopper.mbarrier.MBarrierLayout()
    )
    q_free = gl.allocate_shared_memory(gl.int64, [2 * BUFFERS, 1], hopper.mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for own in gl.static_range(2 * BUFFERS):
        hopper.mbarrier.init(q_ready.index(own), count=1)
        hopper.mbarrier.init(q_free.index(own), count=128)
    for slot in gl.static_range(STAGES):
        hopper.mbarrier.init(ready.index(slot), count=1)
        hopper.mbarrier.init(free.index(slot), count=2)

    gl.warp_specialize(
        [
            (consume, (
                0,
                out_ptr, lse_ptr, spoilt_ptr, q0_desc, splits, shared_row, parts_ptr, lses_ptr,
                heads, q_len, kv_len, q_offset, scale_log2, columns__ptr, columns__stride_0,
                columns__size_2, columns__stride_2, columns__size_3, columns__stride_3, q0_tiles,
                k0_tiles, v0_tiles, places, notes, q_ready, q_free, ready, free,
                BLOCK_M, BLOCK_N, STAGES, BUFFERS,
            )),
            (consume, (
                1,
                out_ptr, lse_ptr, spoilt_ptr, q0_desc, splits, shared_row, parts_ptr, lses_ptr,
                heads, q_len, kv_len, q_offset, scale_log2, columns__ptr, columns__stride_0,
                columns__size_2, columns__stride_2, columns__size_3, columns__stride_3, q0_tiles,
                k0_tiles, v0_tiles, places, notes, q_ready, q_free, ready, free,
                BLOCK_M, BLOCK_N, STAGES, BUFFERS,
            )),
            (produce, (
                q0_desc, k0_desc, v0_desc, next_item_ptr, items, whole, splits, last_heads, counts,
                masked_runs, full_runs, schedule_stride_b, schedule_stride_h, masked_width,
                full_width, heads, group, q_len, kv_len, q0_tiles, k0_tiles, v0_tiles, places,
                notes, q_ready, q_free, ready, free,
                BLOCK_M, BLOCK_N, STAGES, BUFFERS,
            )),
        ],
        [4, 1],
        [REGISTERS, PRODUCER],
    )
