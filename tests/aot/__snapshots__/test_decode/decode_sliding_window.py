# flashgen 0.1.0
# spec sliding_window
#   mask    (kv_idx <= q_idx) & (q_idx - kv_idx < window)
#   with    softcap, sinks
#   scalars window: int
# tile rule
#   may attend   ~(max[q](q_idx) < min[kv](kv_idx)) & ~(window <= min[q](q_idx) - max[kv](kv_idx))
#   must attend  (max[kv](kv_idx) <= min[q](q_idx)) & (max[q](q_idx) - min[kv](kv_idx) < window)

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tanh(x):
    """From one exponential that can't overflow; near 0, where that cancels, by its series."""
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    y = x * x
    near = 9.691537956929451e-05
    near = near * y - 0.00023912911424355248
    near = near * y + 0.000590027440945586
    near = near * y - 0.0014558343870513183
    near = near * y + 0.003592128036572481
    near = near * y - 0.008863235529902197
    near = near * y + 0.021869488536155203
    near = near * y - 0.05396825396825397
    near = near * y + 0.13333333333333333
    near = near * y - 0.3333333333333333
    t = tl.where(x < 0, -t, tl.where(x == x, t, x))
    return tl.where(tl.abs(x) < 0.25, x + x * y * near, t)


@triton.jit
def seek(list, width, tiles, is_wanted, RATIO: tl.constexpr):
    """The run that holds what comes after so many tiles of a list, and the tiles before the run.
    The first run where none is wanted, as a program has no share."""
    before = 0
    run = 0
    passed = 0
    start = 0
    # Most rows are one run.
    is_wanted = is_wanted & ((tl.load(list + 1) - tl.load(list)) * RATIO <= tiles)
    while (start < width - 2) & is_wanted:
        lane = start + tl.arange(0, 128)
        first = tl.load(list + 2 * lane, mask=lane < width - 2, other=0)
        past = tl.load(list + 2 * lane + 1, mask=lane < width - 2, other=0)
        size = (past - first) * RATIO
        ends = before + tl.cumsum(size, 0)
        # What lies behind the last run is never written; a run that is looked for comes before it.
        run = tl.min(tl.where(ends > tiles, lane, width), 0)
        passed = tl.sum(tl.where(lane == run, ends - size, 0), 0)
        is_wanted = run == width
        before = tl.sum(tl.where(lane == start + 127, ends, 0), 0)
        start += 128
    return run, passed


@triton.jit(noinline=True)
def select_rows(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, runs, stride_qh, stride_qs, stride_ks, stride_vs,
    runs_width, heads, group, splits, batch, q_len, scale_log2, to_cap, window, kv_len, q_offset,
    b, h_kv, chunk, q_block, split, share_from, share_to, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, GROUP: tl.constexpr, TILE_N: tl.constexpr, PARTIAL: tl.constexpr,
    OFFSET: tl.constexpr, FLOAT: tl.constexpr, PRECISION: tl.constexpr,
):
    """0 x inf is NaN: a value that a row must not see has reached its sum. These rows once more,
    from the LSE: first the finite values, then what the rows see of NaN, inf and -inf."""
    columns = tl.arange(0, BLOCK_N)
    dims_128 = tl.arange(0, 128)[None, :]

    k_rows = columns[:, None] * stride_ks.to(OFFSET)
    v_rows = columns[:, None] * stride_vs.to(OFFSET)
    # Sixteen rows at a time, which aren't turned: no wgmma, as it must not cross a call.
    for step in range(BLOCK_M // 16 * 4):
        kind = step % 4
        index = step // 4 * 16 + tl.arange(0, 16)
        q_row = q_block * (BLOCK_M // GROUP) + index // GROUP
        member = chunk * GROUP + index % GROUP
        inside = (q_row < q_len) & (member < group)
        head = h_kv * group + tl.minimum(member, group - 1)
        results = ((head.to(tl.int64) * q_len + q_row) * (splits + batch) + split + b)[:, None]
        q_rows = (head * stride_qh + q_row * stride_qs)[:, None]
        q0 = tl.load(
            q_ptr + q_rows + dims_128,
            mask=inside[:, None],
            other=0.0,
        )
        h = head[:, None]
        q_idx = q_row[:, None] + q_offset
        q_sub = q_idx - window

        lse = tl.load(lse_ptr + results, mask=inside[:, None], other=0.0)
        if not PARTIAL:
            lse *= LOG2E
        acc0 = tl.zeros([16, 128], FLOAT)
        run, passed = seek(runs, runs_width, share_from, share_from < share_to, TILE_N // BLOCK_N)
        walk = runs + 2 * run
        tile = tl.load(walk) * (TILE_N // BLOCK_N)
        end = tl.load(walk + 1) * (TILE_N // BLOCK_N)
        next_tile = tl.load(walk + 2) * (TILE_N // BLOCK_N)
        next_end = tl.load(walk + 3) * (TILE_N // BLOCK_N)
        tile += share_from - passed

        for _ in tl.range(share_to - share_from, num_stages=1):
            first_key = tile * BLOCK_N
            k_tile = k_ptr + first_key * stride_ks
            v_tile = v_ptr + first_key * stride_vs
            valid = columns[:, None] < kv_len - first_key
            k0 = tl.load(k_tile + (k_rows + dims_128), mask=valid, other=0.0)
            s = tl.dot(q0, tl.trans(k0), input_precision=PRECISION, out_dtype=FLOAT)
            kv_idx = first_key + columns[None, :]
            s = tanh(s * to_cap)
            keep = (kv_idx < kv_len) & ((kv_idx <= q_idx) & (q_sub < kv_idx))
            s = tl.where(keep, s, float("-inf"))

            p = tl.where(kind == 0, tl.exp2(s * scale_log2 - lse), 1.0)
            p = tl.where(s == float("-inf"), 0.0, p)
            v0 = tl.load(v_tile + (v_rows + dims_128), mask=valid, other=0.0)
            chosen = v0 == tl.where(kind == 2, float("inf"), float("-inf"))
            chosen = tl.where(kind == 1, v0 != v0, chosen).to(v0.dtype)
            is_finite = tl.abs(v0) < float("inf")
            v0 = tl.where(kind == 0, tl.where(is_finite, v0, 0.0), chosen)
            acc0 = tl.dot(p.to(v0.dtype), v0, acc0, input_precision=PRECISION, out_dtype=FLOAT)
            tile += 1
            is_last = tile == end
            tile = tl.where(is_last, next_tile, tile)
            end = tl.where(is_last, next_end, end)
            walk += tl.where(is_last, 2, 0)
            next_tile = tl.load(walk + 2) * (TILE_N // BLOCK_N)
            next_end = tl.load(walk + 3) * (TILE_N // BLOCK_N)

        seen = tl.where(kind == 2, float("inf"), float("-inf"))
        seen = tl.where(kind == 1, float("nan"), seen)
        tl.debug_barrier()
        address = out_ptr + results * 128 + dims_128
        is_stored = inside[:, None]
        if kind > 0:
            before = tl.load(address, mask=is_stored, other=0.0).to(FLOAT)
            acc0 = before + tl.where(acc0 > 0, seen, 0.0)
        tl.store(address, acc0.to(out_ptr.dtype.element_ty), mask=is_stored)


@triton.jit
def deal(
    counts, schedule_stride_b, schedule_stride_h, splits, batch, kv_lens_ptr, kv_room, split, h_kv,
    q_block, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, COUNT: tl.constexpr,
):
    """The tiles of all sequences, dealt to the programs of a line. Of a program: its first
    sequence, the one past its last, and where its share begins and ends, in tiles from the first
    sequence's."""
    lanes = tl.arange(0, 32)
    counted = tl.zeros([32], COUNT)
    for start in range(0, batch, 32):
        b = start + lanes
        row = (
            b * schedule_stride_b
            + h_kv * schedule_stride_h
            + q_block * (BLOCK_M // GROUP) // TILE_M
        )
        is_there = b < batch
        visited = tl.load(counts + row, mask=is_there, other=0) * (TILE_N // BLOCK_N)
        tiles = tl.maximum(visited, 1)
        tiles = tl.where(b < batch, tiles, 0)

        counted += tiles
    total = tl.sum(counted, 0)
    # Programs that get a tile are neighbours, so that the parts of a row are.
    used = tl.minimum(splits, tl.maximum(total, 1))
    share_from = tl.minimum(split * total // used, total)
    share_to = tl.minimum((split + 1) * total // used, total)
    first = 0
    past = 0
    passed = tl.zeros([], COUNT)
    before = tl.zeros([], COUNT)
    for start in range(0, batch, 32):
        b = start + lanes
        row = (
            b * schedule_stride_b
            + h_kv * schedule_stride_h
            + q_block * (BLOCK_M // GROUP) // TILE_M
        )
        is_there = b < batch
        visited = tl.load(counts + row, mask=is_there, other=0) * (TILE_N // BLOCK_N)
        tiles = tl.maximum(visited, 1)
        tiles = tl.where(b < batch, tiles, 0)

        ends = before + tl.cumsum(tiles.to(COUNT), 0)
        is_there = b < batch
        is_passed = (ends <= share_from) & is_there
        # Both numbers of sequences in one sum.
        ended = tl.where(is_passed, 1, 0) + tl.where((ends < share_to) & is_there, 64, 0)
        ended = tl.sum(ended, 0)
        first += ended % 64
        past += ended // 64
        passed = tl.maximum(passed, tl.max(tl.where(is_passed, ends, 0), 0))
        before = tl.max(ends, 0)
    past = tl.where(share_from < share_to, past + 1, first)
    return first, past, share_from - passed, share_to - passed


@triton.jit
def attend_share(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, spans_ptr, whole_ptr, whole_lse_ptr, sinks_ptr, counts,
    runs, stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh,
    stride_vs, schedule_stride_b, schedule_stride_h, runs_width, heads, group, splits, batch,
    q_len, kv_lens_ptr, kv_room, scale_log2, to_cap, window, chunk, q_block, split, h_kv, b,
    share_from, share_to, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, PARTIAL: tl.constexpr, ALIGN: tl.constexpr,
    OFFSET: tl.constexpr, FLOAT: tl.constexpr, PRECISION: tl.constexpr,
):
    """Part of a share: what lies in one sequence; returns the sequence's tiles."""
    kv_len = tl.load(kv_lens_ptr + b)
    kv_len = tl.minimum(tl.maximum(kv_len, 0), kv_room)
    q_offset = kv_len - q_len

    # Strides that keep 16-byte alignment say so.
    stride_qb = stride_qb // ALIGN * ALIGN
    stride_qh = stride_qh // ALIGN * ALIGN
    stride_qs = stride_qs // ALIGN * ALIGN
    stride_kb = stride_kb // ALIGN * ALIGN
    stride_kh = stride_kh // ALIGN * ALIGN
    stride_ks = stride_ks // ALIGN * ALIGN
    stride_vb = stride_vb // ALIGN * ALIGN
    stride_vh = stride_vh // ALIGN * ALIGN
    stride_vs = stride_vs // ALIGN * ALIGN
    q_ptr += b * stride_qb
    k_ptr += b * stride_kb + h_kv * stride_kh
    v_ptr += b * stride_vb + h_kv * stride_vh

    index = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    dims_128 = tl.arange(0, 128)[None, :]

    k_rows = columns[:, None] * stride_ks.to(OFFSET)
    v_rows = columns[:, None] * stride_vs.to(OFFSET)
    q_row = q_block * (BLOCK_M // GROUP) + index // GROUP
    member = chunk * GROUP + index % GROUP
    inside = (q_row < q_len) & (member < group)
    head = h_kv * group + tl.minimum(member, group - 1)
    results = ((head.to(tl.int64) * q_len + q_row) * (splits + batch) + split + b)[:, None]
    q_rows = (head * stride_qh + q_row * stride_qs)[:, None]
    q0 = tl.load(
        q_ptr + q_rows + dims_128,
        mask=inside[:, None],
        other=0.0,
    )
    q0 = tl.trans(q0)
    h = head[None, :]
    q_idx = q_row[None, :] + q_offset
    q_sub = q_idx - window

    m = tl.full([BLOCK_M], float("-inf"), FLOAT)
    l = tl.zeros([BLOCK_N, BLOCK_M], FLOAT)
    acc0 = tl.zeros([128, BLOCK_M], FLOAT)

    # Tiles of the row, and the share of them.
    schedule_row = (
        b * schedule_stride_b
        + h_kv * schedule_stride_h
        + q_block * (BLOCK_M // GROUP) // TILE_M
    )
    runs += schedule_row * (2 * runs_width)
    visited = tl.load(counts + schedule_row) * (TILE_N // BLOCK_N)
    tiles = tl.maximum(visited, 1)
    share_from = tl.maximum(share_from, 0).to(tl.int32)
    share_to = tl.minimum(share_to, tiles).to(tl.int32)
    begins = share_from == 0
    ends = share_to == tiles
    share_to = tl.minimum(share_to, visited)
    run, passed = seek(runs, runs_width, share_from, share_from < share_to, TILE_N // BLOCK_N)
    walk = runs + 2 * run
    tile = tl.load(walk) * (TILE_N // BLOCK_N)
    end = tl.load(walk + 1) * (TILE_N // BLOCK_N)
    next_tile = tl.load(walk + 2) * (TILE_N // BLOCK_N)
    next_end = tl.load(walk + 3) * (TILE_N // BLOCK_N)
    tile += share_from - passed

    for _ in range(share_to - share_from):
        first_key = tile * BLOCK_N
        k_tile = k_ptr + first_key * stride_ks
        v_tile = v_ptr + first_key * stride_vs
        valid = columns[:, None] < kv_len - first_key
        tile += 1
        is_last = tile == end
        tile = tl.where(is_last, next_tile, tile)
        end = tl.where(is_last, next_end, end)
        walk += tl.where(is_last, 2, 0)
        next_tile = tl.load(walk + 2) * (TILE_N // BLOCK_N)
        next_end = tl.load(walk + 3) * (TILE_N // BLOCK_N)

        k0 = tl.load(k_tile + (k_rows + dims_128), mask=valid, other=0.0)
        s = tl.dot(k0, q0, input_precision=PRECISION, out_dtype=FLOAT)
        kv_idx = first_key + columns[:, None]
        s = tanh(s * to_cap)
        keep = (kv_idx < kv_len) & ((kv_idx <= q_idx) & (q_sub < kv_idx))
        s = tl.where(keep, s, float("-inf"))

        m_new = tl.maximum(m, tl.max(s, 0) * scale_log2)
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s * scale_log2 - m_safe[None, :])
        alpha = tl.exp2(m - m_safe)[None, :]
        l = l * alpha + p
        m = m_new
        v0 = tl.load(v_tile + (v_rows + dims_128), mask=valid, other=0.0)
        acc0 *= alpha
        acc0 = tl.dot(
            tl.trans(v0), p.to(v0.dtype), acc0, input_precision=PRECISION, out_dtype=FLOAT
        )

    total = tl.sum(l, 0)
    # The sink is one more score in the denominator, of the first part alone.
    sink = tl.load(sinks_ptr + head).to(FLOAT) * LOG2E
    sink = tl.where(begins, sink, float("-inf"))
    m_new = tl.maximum(m, sink)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2(m - m_safe)
    total = total * alpha + tl.exp2(sink - m_safe)
    acc0 *= alpha[None, :]
    m = m_new

    # A row without keys: the sum is 0, the output 0 and the LSE -inf.
    divisor = tl.where(total == 0.0, 1.0, total)
    lse = m + tl.log2(divisor)
    if not PARTIAL:
        lse *= LN2
    spoilt = 0
    acc0 /= divisor[None, :]
    spoilt += tl.sum((~(tl.abs(acc0) < float("inf"))).to(tl.int32))
    line = (b * heads + head).to(tl.int64) * q_len + q_row
    if begins & ends & (spoilt == 0):
        tl.store(spans_ptr + 2 * line[:, None], -1, mask=inside[:, None])
        whole_lse = whole_lse_ptr + line
        tl.store(whole_lse[:, None], (lse * LN2)[:, None], mask=inside[:, None])
        tl.store(
            whole_ptr + line[:, None] * 128 + dims_128,
            tl.trans(acc0).to(whole_ptr.dtype.element_ty),
            mask=inside[:, None],
        )
    else:
        tl.store(spans_ptr + 2 * line[:, None], results, mask=(inside & begins)[:, None])
        tl.store(spans_ptr + 2 * line[:, None] + 1, results, mask=(inside & ends)[:, None])
        tl.store(lse_ptr + results, lse[:, None], mask=inside[:, None])
        tl.store(
            out_ptr + results * 128 + dims_128,
            tl.trans(acc0).to(out_ptr.dtype.element_ty),
            mask=inside[:, None],
        )
    if spoilt > 0:
        tl.debug_barrier()
        select_rows(
            q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, runs, stride_qh, stride_qs, stride_ks,
            stride_vs, runs_width, heads, group, splits, batch, q_len, scale_log2, to_cap, window,
            kv_len, q_offset, b, h_kv, chunk, q_block, split, share_from, share_to, BLOCK_M,
            BLOCK_N, GROUP, TILE_N, PARTIAL, OFFSET, FLOAT, PRECISION,
        )
    return tiles


# Values never specialise: new lengths, strides, scalars and data run the same binary.
@triton.jit(
    do_not_specialize=[
        "stride_qb", "stride_qh", "stride_qs", "stride_kb", "stride_kh", "stride_ks",
        "stride_vb", "stride_vh", "stride_vs", "schedule_stride_b", "schedule_stride_h",
        "runs_width", "heads", "group", "splits", "batch", "q_len", "kv_room", "scale_log2",
        "to_cap", "window"
    ],
    do_not_specialize_on_alignment=["sinks_ptr", "kv_lens_ptr"],
)
def attention_decode(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    spans_ptr,
    whole_ptr,
    whole_lse_ptr,
    sinks_ptr,
    counts,
    runs,
    stride_qb: tl.int64,
    stride_qh: tl.int64,
    stride_qs: tl.int64,
    stride_kb: tl.int64,
    stride_kh: tl.int64,
    stride_ks: tl.int64,
    stride_vb: tl.int64,
    stride_vh: tl.int64,
    stride_vs: tl.int64,
    schedule_stride_b: tl.int64,
    schedule_stride_h: tl.int64,
    runs_width: tl.int32,
    heads: tl.int32,
    group: tl.int32,
    splits: tl.int32,
    batch: tl.int32,
    q_len: tl.int32,
    kv_lens_ptr,
    kv_room: tl.int32,
    scale_log2: tl.float32,
    to_cap: tl.float32,
    window: tl.int32,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    PARTIAL: tl.constexpr,
    COUNT: tl.constexpr,
    ALIGN: tl.constexpr,
    OFFSET: tl.constexpr,
    FLOAT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # Blocks of the same keys are neighbours: the second finds them in the cache.
    chunks = tl.cdiv(group, GROUP)
    blocks = chunks * tl.cdiv(q_len, BLOCK_M // GROUP)
    chunk = tl.program_id(0) % chunks
    q_block = tl.program_id(0) % blocks // chunks
    split = tl.program_id(0) // blocks % splits
    h_kv = tl.program_id(0) // blocks // splits
    first, past, share_from, share_to = deal(
        counts, schedule_stride_b, schedule_stride_h, splits, batch, kv_lens_ptr, kv_room, split,
        h_kv, q_block, BLOCK_M, BLOCK_N, GROUP, TILE_M, TILE_N, COUNT,
    )
    for b in range(first, past):
        tiles = attend_share(
            q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, spans_ptr, whole_ptr, whole_lse_ptr, sinks_ptr,
            counts, runs, stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks,
            stride_vb, stride_vh, stride_vs, schedule_stride_b, schedule_stride_h, runs_width,
            heads, group, splits, batch, q_len, kv_lens_ptr, kv_room, scale_log2, to_cap, window,
            chunk, q_block, split, h_kv, b, share_from, share_to, BLOCK_M, BLOCK_N, GROUP, TILE_M,
            TILE_N, PARTIAL, ALIGN, OFFSET, FLOAT, PRECISION,
        )
        share_from -= tiles
        share_to -= tiles
