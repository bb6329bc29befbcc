# flashgen 0.1.0
# spec causal
#   mask    kv_idx <= q_idx
# tile rule
#   may attend   ~(max[q](q_idx) < min[kv](kv_idx))
#   must attend  max[kv](kv_idx) <= min[q](q_idx)

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(noinline=True)
def select_rows(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, masked_runs, full_runs, stride_qs, stride_ks, stride_vs,
    stride_os, q_len, scale_log2, kv_len, q_offset, b, h, h_kv, block, masked_tiles, full_tiles,
    ragged_tiles, ragged_tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILE_N: tl.constexpr,
    OFFSET: tl.constexpr, FLOAT: tl.constexpr, PRECISION: tl.constexpr,
):
    """0 x inf is NaN: a value that a row must not see has reached its sum. These rows once more,
    from the LSE, with values selected instead of multiplied by 0."""
    columns = tl.arange(0, BLOCK_N)
    dims_128 = tl.arange(0, 128)[None, :]

    k_rows = columns[:, None] * stride_ks.to(OFFSET)
    v_rows = columns[:, None] * stride_vs.to(OFFSET)
    for row in range(block * BLOCK_M, block * BLOCK_M + BLOCK_M, 16):
        rows = row + tl.arange(0, 16)[:, None]
        inside = rows < q_len
        q0 = tl.load(
            q_ptr + rows * stride_qs + dims_128,
            mask=inside,
            other=0.0,
        )
        q_idx = rows + q_offset

        lse = tl.load(lse_ptr + rows, mask=inside, other=0.0)
        # exp2(s - inf) is 0 for every s, -inf included: a row without weights has none here either.
        lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
        acc0 = tl.zeros([16, 128], FLOAT)
        for part in range(3):
            runs = masked_runs
            tiles = masked_tiles
            if part == 1:
                runs = full_runs
                tiles = full_tiles
            tile = tl.load(runs) * (TILE_N // BLOCK_N)
            end = tl.load(runs + 1) * (TILE_N // BLOCK_N)
            next_tile = tl.load(runs + 2) * (TILE_N // BLOCK_N)
            next_end = tl.load(runs + 3) * (TILE_N // BLOCK_N)
            if part == 2:
                tiles = ragged_tiles
                tile = ragged_tile
                end = -1
            for _ in tl.range(tiles, num_stages=1):
                first_key = tile * BLOCK_N
                k_tile = k_ptr + first_key * stride_ks
                v_tile = v_ptr + first_key * stride_vs
                valid = columns[:, None] < kv_len - first_key
                k0 = tl.load(k_tile + (k_rows + dims_128), mask=valid, other=0.0)
                s = tl.dot(q0, tl.trans(k0), input_precision=PRECISION, out_dtype=FLOAT)
                kv_idx = first_key + columns[None, :]
                keep = (kv_idx < kv_len) & (kv_idx <= q_idx)
                s = tl.where(keep, s, float("-inf"))

                # A score of -inf takes a key away as a mask does.
                keep &= ~(s == float("-inf"))
                p = tl.where(keep, tl.exp2(s * scale_log2 - lse), 0.0)
                v0 = tl.load(v_tile + (v_rows + dims_128), mask=valid, other=0.0)
                if tl.sum((~(tl.abs(v0) < float("inf"))).to(tl.int32)) > 0:
                    for j in range(BLOCK_N):
                        chosen = columns == j
                        weight = tl.sum(tl.where(chosen[None, :], p, 0.0), 1)[:, None]
                        seen = tl.max((keep & chosen[None, :]).to(tl.int32), 1)[:, None] > 0
                        value = tl.sum(tl.where(chosen[:, None], v0, 0.0).to(FLOAT), 0)
                        acc0 += tl.where(seen, weight * value[None, :], 0.0)
                else:
                    acc0 = tl.dot(
                        p.to(v0.dtype), v0, acc0, input_precision=PRECISION, out_dtype=FLOAT
                    )
                tile += 1
                is_last = tile == end
                tile = tl.where(is_last, next_tile, tile)
                end = tl.where(is_last, next_end, end)
                runs += tl.where(is_last, 2, 0)
                next_tile = tl.load(runs + 2) * (TILE_N // BLOCK_N)
                next_end = tl.load(runs + 3) * (TILE_N // BLOCK_N)
        tl.store(
            out_ptr + rows * stride_os + dims_128,
            acc0.to(out_ptr.dtype.element_ty),
            mask=inside,
        )


# Values never specialise: new lengths, strides, scalars and data run the same binary.
@triton.jit(
    do_not_specialize=[
        "stride_qb", "stride_qh", "stride_qs", "stride_kb", "stride_kh", "stride_ks",
        "stride_vb", "stride_vh", "stride_vs", "stride_ob", "stride_oh", "stride_os",
        "schedule_stride_b", "schedule_stride_h", "masked_width", "full_width", "heads",
        "group", "q_len", "q_offset_stride", "scale_log2"
    ],
    do_not_specialize_on_alignment=["kv_lens_ptr", "q_offset_ptr"],
)
def attention_forward(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    counts,
    masked_runs,
    full_runs,
    stride_qb: tl.int64,
    stride_qh: tl.int64,
    stride_qs: tl.int64,
    stride_kb: tl.int64,
    stride_kh: tl.int64,
    stride_ks: tl.int64,
    stride_vb: tl.int64,
    stride_vh: tl.int64,
    stride_vs: tl.int64,
    stride_ob: tl.int64,
    stride_oh: tl.int64,
    stride_os: tl.int64,
    schedule_stride_b: tl.int64,
    schedule_stride_h: tl.int64,
    masked_width: tl.int32,
    full_width: tl.int32,
    heads: tl.int32,
    group: tl.int32,
    q_len: tl.int32,
    kv_lens_ptr,
    q_offset_ptr,
    q_offset_stride: tl.int32,
    scale_log2: tl.float32,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    ALIGN: tl.constexpr,
    OFFSET: tl.constexpr,
    FLOAT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # Last row blocks first: under causal masks they are the longest.
    blocks = tl.cdiv(q_len, BLOCK_M)
    block = blocks - 1 - tl.program_id(0) % blocks
    h = (tl.program_id(0) // blocks) % heads
    b = tl.program_id(0) // blocks // heads
    h_kv = h // group
    kv_len = tl.load(kv_lens_ptr + b)
    q_offset = tl.load(q_offset_ptr + b * q_offset_stride).to(tl.int32)

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
    stride_ob = stride_ob // ALIGN * ALIGN
    stride_oh = stride_oh // ALIGN * ALIGN
    stride_os = stride_os // ALIGN * ALIGN
    q_ptr += b * stride_qb + h * stride_qh
    k_ptr += b * stride_kb + h_kv * stride_kh
    v_ptr += b * stride_vb + h_kv * stride_vh
    out_ptr += b * stride_ob + h * stride_oh
    lse_ptr += (b * heads + h).to(tl.int64) * q_len

    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    columns = tl.arange(0, BLOCK_N)
    dims_128 = tl.arange(0, 128)[None, :]

    k_rows = columns[:, None] * stride_ks.to(OFFSET)
    v_rows = columns[:, None] * stride_vs.to(OFFSET)
    inside = rows < q_len
    q0 = tl.load(
        q_ptr + rows * stride_qs + dims_128,
        mask=inside,
        other=0.0,
    )
    q_idx = rows + q_offset

    m = tl.full([BLOCK_M], float("-inf"), FLOAT)
    l = tl.zeros([BLOCK_M], FLOAT)
    acc0 = tl.zeros([BLOCK_M, 128], FLOAT)

    schedule_row = b * schedule_stride_b + h * schedule_stride_h + block * BLOCK_M // TILE_M
    masked_runs += schedule_row * (2 * masked_width)
    full_runs += schedule_row * (2 * full_width)
    masked_tiles = tl.load(counts + 3 * schedule_row) * (TILE_N // BLOCK_N)
    full_tiles = tl.load(counts + 3 * schedule_row + 1) * (TILE_N // BLOCK_N)
    ragged_tiles = tl.load(counts + 3 * schedule_row + 2) * (TILE_N // BLOCK_N)
    ragged_tile = kv_len // TILE_N * (TILE_N // BLOCK_N)

    # Tiles that the mask cuts.
    runs = masked_runs
    tile = tl.load(runs) * (TILE_N // BLOCK_N)
    end = tl.load(runs + 1) * (TILE_N // BLOCK_N)
    next_tile = tl.load(runs + 2) * (TILE_N // BLOCK_N)
    next_end = tl.load(runs + 3) * (TILE_N // BLOCK_N)
    for _ in range(masked_tiles):
        first_key = tile * BLOCK_N
        k_tile = k_ptr + first_key * stride_ks
        v_tile = v_ptr + first_key * stride_vs
        k0 = tl.load(k_tile + (k_rows + dims_128))
        s = tl.dot(q0, tl.trans(k0), input_precision=PRECISION, out_dtype=FLOAT)
        kv_idx = first_key + columns[None, :]
        keep = kv_idx <= q_idx
        s = tl.where(keep, s, float("-inf"))

        m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s * scale_log2 - m_safe[:, None])
        alpha = tl.exp2(m - m_safe)
        l = l * alpha + tl.sum(p, 1)
        m = m_new
        v0 = tl.load(v_tile + (v_rows + dims_128))
        acc0 *= alpha[:, None]
        acc0 = tl.dot(p.to(v0.dtype), v0, acc0, input_precision=PRECISION, out_dtype=FLOAT)

        tile += 1
        is_last = tile == end
        tile = tl.where(is_last, next_tile, tile)
        end = tl.where(is_last, next_end, end)
        runs += tl.where(is_last, 2, 0)
        next_tile = tl.load(runs + 2) * (TILE_N // BLOCK_N)
        next_end = tl.load(runs + 3) * (TILE_N // BLOCK_N)

    # The tile that sticks out of the keys.
    tile = ragged_tile
    for _ in range(ragged_tiles):
        first_key = tile * BLOCK_N
        k_tile = k_ptr + first_key * stride_ks
        v_tile = v_ptr + first_key * stride_vs
        valid = columns[:, None] < kv_len - first_key
        k0 = tl.load(k_tile + (k_rows + dims_128), mask=valid, other=0.0)
        s = tl.dot(q0, tl.trans(k0), input_precision=PRECISION, out_dtype=FLOAT)
        kv_idx = first_key + columns[None, :]
        keep = (kv_idx < kv_len) & (kv_idx <= q_idx)
        s = tl.where(keep, s, float("-inf"))

        m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s * scale_log2 - m_safe[:, None])
        alpha = tl.exp2(m - m_safe)
        l = l * alpha + tl.sum(p, 1)
        m = m_new
        v0 = tl.load(v_tile + (v_rows + dims_128), mask=valid, other=0.0)
        acc0 *= alpha[:, None]
        acc0 = tl.dot(p.to(v0.dtype), v0, acc0, input_precision=PRECISION, out_dtype=FLOAT)

        tile += 1

    # Tiles whose every pair attends.
    runs = full_runs
    tile = tl.load(runs) * (TILE_N // BLOCK_N)
    end = tl.load(runs + 1) * (TILE_N // BLOCK_N)
    next_tile = tl.load(runs + 2) * (TILE_N // BLOCK_N)
    next_end = tl.load(runs + 3) * (TILE_N // BLOCK_N)
    for _ in range(full_tiles):
        first_key = tile * BLOCK_N
        k_tile = k_ptr + first_key * stride_ks
        v_tile = v_ptr + first_key * stride_vs
        k0 = tl.load(k_tile + (k_rows + dims_128))
        s = tl.dot(q0, tl.trans(k0), input_precision=PRECISION, out_dtype=FLOAT)

        m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
        m_safe = m_new
        p = tl.exp2(s * scale_log2 - m_safe[:, None])
        alpha = tl.exp2(m - m_safe)
        l = l * alpha + tl.sum(p, 1)
        m = m_new
        v0 = tl.load(v_tile + (v_rows + dims_128))
        acc0 *= alpha[:, None]
        acc0 = tl.dot(p.to(v0.dtype), v0, acc0, input_precision=PRECISION, out_dtype=FLOAT)

        tile += 1
        is_last = tile == end
        tile = tl.where(is_last, next_tile, tile)
        end = tl.where(is_last, next_end, end)
        runs += tl.where(is_last, 2, 0)
        next_tile = tl.load(runs + 2) * (TILE_N // BLOCK_N)
        next_end = tl.load(runs + 3) * (TILE_N // BLOCK_N)

    # A row without keys: l is 0, the output 0 and the LSE -inf.
    divisor = tl.where(l == 0.0, 1.0, l)
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(lse_ptr + row, (m + tl.log2(divisor)) * LN2, mask=row < q_len)
    spoilt = 0
    acc0 /= divisor[:, None]
    spoilt += tl.sum((~(tl.abs(acc0) < float("inf"))).to(tl.int32))
    tl.store(
        out_ptr + rows * stride_os + dims_128,
        acc0.to(out_ptr.dtype.element_ty),
        mask=inside,
    )
    if spoilt > 0:
        tl.debug_barrier()
        select_rows(
            q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, masked_runs, full_runs, stride_qs, stride_ks,
            stride_vs, stride_os, q_len, scale_log2, kv_len, q_offset, b, h, h_kv, block,
            masked_tiles, full_tiles, ragged_tiles, ragged_tile, BLOCK_M, BLOCK_N, TILE_N, OFFSET,
            FLOAT, PRECISION,
        )
