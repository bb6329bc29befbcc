# flashgen 0.1.0
# spec full
#   mask    every key
# tile rule
#   may attend   True
#   must attend  True

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(noinline=True)
def select_rows(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, stride_qh, stride_qs, stride_ks, stride_vs, heads,
    group, splits, q_len, scale_log2, kv_len, q_offset, b, h_kv, chunk, q_block, split, share_from,
    share_to, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
    PARTIAL: tl.constexpr, OFFSET: tl.constexpr, FLOAT: tl.constexpr, PRECISION: tl.constexpr,
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
        results = (((b * heads + head).to(tl.int64) * q_len + q_row) * splits + split)[:, None]
        q_rows = (head * stride_qh + q_row * stride_qs)[:, None]
        q0 = tl.load(
            q_ptr + q_rows + dims_128,
            mask=inside[:, None],
            other=0.0,
        )
        h = head[:, None]

        lse = tl.load(lse_ptr + results, mask=inside[:, None], other=0.0)
        if not PARTIAL:
            lse *= LOG2E
        acc0 = tl.zeros([16, 128], FLOAT)
        tile = share_from

        for _ in tl.range(share_to - share_from, num_stages=1):
            first_key = tile * BLOCK_N
            k_tile = k_ptr + first_key * stride_ks
            v_tile = v_ptr + first_key * stride_vs
            valid = columns[:, None] < kv_len - first_key
            k0 = tl.load(k_tile + (k_rows + dims_128), mask=valid, other=0.0)
            s = tl.dot(q0, tl.trans(k0), input_precision=PRECISION, out_dtype=FLOAT)
            kv_idx = first_key + columns[None, :]
            keep = (kv_idx < kv_len) & (kv_idx >= 0)
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
def attend_share(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, stride_qb, stride_qh, stride_qs, stride_kb, stride_kh,
    stride_ks, stride_vb, stride_vh, stride_vs, heads, group, splits, split_tiles, q_len, kv_len,
    q_offset, scale_log2, chunk, q_block, split, h_kv, b, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, GROUP: tl.constexpr, PARTIAL: tl.constexpr, ALIGN: tl.constexpr,
    OFFSET: tl.constexpr, FLOAT: tl.constexpr, PRECISION: tl.constexpr,
):
    """A share of a row's tiles."""

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
    results = (((b * heads + head).to(tl.int64) * q_len + q_row) * splits + split)[:, None]
    q_rows = (head * stride_qh + q_row * stride_qs)[:, None]
    q0 = tl.load(
        q_ptr + q_rows + dims_128,
        mask=inside[:, None],
        other=0.0,
    )
    q0 = tl.trans(q0)
    h = head[None, :]

    m = tl.full([BLOCK_M], float("-inf"), FLOAT)
    l = tl.zeros([BLOCK_N, BLOCK_M], FLOAT)
    acc0 = tl.zeros([128, BLOCK_M], FLOAT)

    # Tiles of the row, and the share of them.
    visited = tl.cdiv(kv_len, BLOCK_N)
    share = tl.where(split_tiles > 0, split_tiles, tl.cdiv(visited, splits))
    share_from = tl.minimum(split * share, visited)
    share_to = tl.minimum(share_from + share, visited)
    tile = share_from

    for _ in range(share_to - share_from):
        first_key = tile * BLOCK_N
        k_tile = k_ptr + first_key * stride_ks
        v_tile = v_ptr + first_key * stride_vs
        valid = columns[:, None] < kv_len - first_key
        tile += 1

        k0 = tl.load(k_tile + (k_rows + dims_128), mask=valid, other=0.0)
        s = tl.dot(k0, q0, input_precision=PRECISION, out_dtype=FLOAT)
        kv_idx = first_key + columns[:, None]
        keep = (kv_idx < kv_len) & (kv_idx >= 0)
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

    # A row without keys: the sum is 0, the output 0 and the LSE -inf.
    divisor = tl.where(total == 0.0, 1.0, total)
    lse = m + tl.log2(divisor)
    if not PARTIAL:
        lse *= LN2
    tl.store(lse_ptr + results, lse[:, None], mask=inside[:, None])
    spoilt = 0
    acc0 /= divisor[None, :]
    spoilt += tl.sum((~(tl.abs(acc0) < float("inf"))).to(tl.int32))
    tl.store(
        out_ptr + results * 128 + dims_128,
        tl.trans(acc0).to(out_ptr.dtype.element_ty),
        mask=inside[:, None],
    )
    if spoilt > 0:
        tl.debug_barrier()
        select_rows(
            q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, stride_qh, stride_qs, stride_ks, stride_vs,
            heads, group, splits, q_len, scale_log2, kv_len, q_offset, b, h_kv, chunk, q_block,
            split, share_from, share_to, BLOCK_M, BLOCK_N, GROUP, PARTIAL, OFFSET, FLOAT, PRECISION,
        )


# Values never specialise: new lengths, strides, scalars and data run the same binary.
@triton.jit(
    do_not_specialize=[
        "stride_qb", "stride_qh", "stride_qs", "stride_kb", "stride_kh", "stride_ks",
        "stride_vb", "stride_vh", "stride_vs", "heads", "group", "splits", "split_tiles",
        "q_len", "kv_len", "q_offset", "scale_log2"
    ],
    do_not_specialize_on_alignment=[],
)
def attention_decode(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    stride_qb: tl.int64,
    stride_qh: tl.int64,
    stride_qs: tl.int64,
    stride_kb: tl.int64,
    stride_kh: tl.int64,
    stride_ks: tl.int64,
    stride_vb: tl.int64,
    stride_vh: tl.int64,
    stride_vs: tl.int64,
    heads: tl.int32,
    group: tl.int32,
    splits: tl.int32,
    split_tiles: tl.int32,
    q_len: tl.int32,
    kv_len: tl.int32,
    q_offset: tl.int32,
    scale_log2: tl.float32,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    PARTIAL: tl.constexpr,
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
    kv_heads = heads // group
    h_kv = tl.program_id(0) // blocks // splits % kv_heads
    b = tl.program_id(0) // blocks // splits // kv_heads
    attend_share(
        q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, stride_qb, stride_qh, stride_qs, stride_kb,
        stride_kh, stride_ks, stride_vb, stride_vh, stride_vs, heads, group, splits, split_tiles,
        q_len, kv_len, q_offset, scale_log2, chunk, q_block, split, h_kv, b, BLOCK_M, BLOCK_N,
        GROUP, PARTIAL, ALIGN, OFFSET, FLOAT, PRECISION,
    )
