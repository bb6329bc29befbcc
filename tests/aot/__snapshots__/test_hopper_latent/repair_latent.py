# flashgen 0.1.0
# spec full
#   mask    every key
#   with    MLA(rank=512, rope=64)
# tile rule
#   may attend   True
#   must attend  True

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(noinline=True)
def select_rows(
    q_ptr, k_ptr, out_ptr, lse_ptr, stride_qh, stride_qs, stride_ks, heads, group, splits, q_len,
    scale_log2, kv_len, q_offset, b, h_kv, chunk, q_block, split, share_from, share_to,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, PARTIAL: tl.constexpr,
    OFFSET: tl.constexpr, FLOAT: tl.constexpr, PRECISION: tl.constexpr,
):
    """0 x inf is NaN: a value that a row must not see has reached its sum. These rows once more,
    from the LSE: first the finite values, then what the rows see of NaN, inf and -inf."""
    columns = tl.arange(0, BLOCK_N)
    dims_128 = tl.arange(0, 128)[None, :]
    dims_64 = tl.arange(0, 64)[None, :]

    k_rows = columns[:, None] * stride_ks.to(OFFSET)
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
        q1 = tl.load(
            q_ptr + q_rows + (128 + dims_128),
            mask=inside[:, None],
            other=0.0,
        )
        q2 = tl.load(
            q_ptr + q_rows + (256 + dims_128),
            mask=inside[:, None],
            other=0.0,
        )
        q3 = tl.load(
            q_ptr + q_rows + (384 + dims_128),
            mask=inside[:, None],
            other=0.0,
        )
        q4 = tl.load(
            q_ptr + q_rows + (512 + dims_64),
            mask=inside[:, None],
            other=0.0,
        )
        h = head[:, None]

        lse = tl.load(lse_ptr + results, mask=inside[:, None], other=0.0)
        if not PARTIAL:
            lse *= LOG2E
        acc0 = tl.zeros([16, 128], FLOAT)
        acc1 = tl.zeros([16, 128], FLOAT)
        acc2 = tl.zeros([16, 128], FLOAT)
        acc3 = tl.zeros([16, 128], FLOAT)
        tile = share_from

        for _ in tl.range(share_to - share_from, num_stages=1):
            first_key = tile * BLOCK_N
            k_tile = k_ptr + first_key * stride_ks
            valid = columns[:, None] < kv_len - first_key
            k0 = tl.load(k_tile + (k_rows + dims_128), mask=valid, other=0.0)
            k1 = tl.load(k_tile + (k_rows + (128 + dims_128)), mask=valid, other=0.0)
            k2 = tl.load(k_tile + (k_rows + (256 + dims_128)), mask=valid, other=0.0)
            k3 = tl.load(k_tile + (k_rows + (384 + dims_128)), mask=valid, other=0.0)
            k4 = tl.load(k_tile + (k_rows + (512 + dims_64)), mask=valid, other=0.0)
            s = tl.dot(q0, tl.trans(k0), input_precision=PRECISION, out_dtype=FLOAT)
            s = tl.dot(q1, tl.trans(k1), s, input_precision=PRECISION, out_dtype=FLOAT)
            s = tl.dot(q2, tl.trans(k2), s, input_precision=PRECISION, out_dtype=FLOAT)
            s = tl.dot(q3, tl.trans(k3), s, input_precision=PRECISION, out_dtype=FLOAT)
            s = tl.dot(q4, tl.trans(k4), s, input_precision=PRECISION, out_dtype=FLOAT)
            kv_idx = first_key + columns[None, :]
            keep = (kv_idx < kv_len) & (kv_idx >= 0)
            s = tl.where(keep, s, float("-inf"))

            p = tl.where(kind == 0, tl.exp2(s * scale_log2 - lse), 1.0)
            p = tl.where(s == float("-inf"), 0.0, p)
            v0 = k0
            chosen = v0 == tl.where(kind == 2, float("inf"), float("-inf"))
            chosen = tl.where(kind == 1, v0 != v0, chosen).to(v0.dtype)
            is_finite = tl.abs(v0) < float("inf")
            v0 = tl.where(kind == 0, tl.where(is_finite, v0, 0.0), chosen)
            acc0 = tl.dot(p.to(v0.dtype), v0, acc0, input_precision=PRECISION, out_dtype=FLOAT)
            v1 = k1
            chosen = v1 == tl.where(kind == 2, float("inf"), float("-inf"))
            chosen = tl.where(kind == 1, v1 != v1, chosen).to(v1.dtype)
            is_finite = tl.abs(v1) < float("inf")
            v1 = tl.where(kind == 0, tl.where(is_finite, v1, 0.0), chosen)
            acc1 = tl.dot(p.to(v1.dtype), v1, acc1, input_precision=PRECISION, out_dtype=FLOAT)
            v2 = k2
            chosen = v2 == tl.where(kind == 2, float("inf"), float("-inf"))
            chosen = tl.where(kind == 1, v2 != v2, chosen).to(v2.dtype)
            is_finite = tl.abs(v2) < float("inf")
            v2 = tl.where(kind == 0, tl.where(is_finite, v2, 0.0), chosen)
            acc2 = tl.dot(p.to(v2.dtype), v2, acc2, input_precision=PRECISION, out_dtype=FLOAT)
            v3 = k3
            chosen = v3 == tl.where(kind == 2, float("inf"), float("-inf"))
            chosen = tl.where(kind == 1, v3 != v3, chosen).to(v3.dtype)
            is_finite = tl.abs(v3) < float("inf")
            v3 = tl.where(kind == 0, tl.where(is_finite, v3, 0.0), chosen)
            acc3 = tl.dot(p.to(v3.dtype), v3, acc3, input_precision=PRECISION, out_dtype=FLOAT)
            tile += 1

        seen = tl.where(kind == 2, float("inf"), float("-inf"))
        seen = tl.where(kind == 1, float("nan"), seen)
        tl.debug_barrier()
        address = out_ptr + results * 512 + dims_128
        is_stored = inside[:, None]
        if kind > 0:
            before = tl.load(address, mask=is_stored, other=0.0).to(FLOAT)
            acc0 = before + tl.where(acc0 > 0, seen, 0.0)
        tl.store(address, acc0.to(out_ptr.dtype.element_ty), mask=is_stored)
        address = out_ptr + results * 512 + (128 + dims_128)
        is_stored = inside[:, None]
        if kind > 0:
            before = tl.load(address, mask=is_stored, other=0.0).to(FLOAT)
            acc1 = before + tl.where(acc1 > 0, seen, 0.0)
        tl.store(address, acc1.to(out_ptr.dtype.element_ty), mask=is_stored)
        address = out_ptr + results * 512 + (256 + dims_128)
        is_stored = inside[:, None]
        if kind > 0:
            before = tl.load(address, mask=is_stored, other=0.0).to(FLOAT)
            acc2 = before + tl.where(acc2 > 0, seen, 0.0)
        tl.store(address, acc2.to(out_ptr.dtype.element_ty), mask=is_stored)
        address = out_ptr + results * 512 + (384 + dims_128)
        is_stored = inside[:, None]
        if kind > 0:
            before = tl.load(address, mask=is_stored, other=0.0).to(FLOAT)
            acc3 = before + tl.where(acc3 > 0, seen, 0.0)
        tl.store(address, acc3.to(out_ptr.dtype.element_ty), mask=is_stored)


@triton.jit
def attend_share(
    q_ptr, k_ptr, out_ptr, lse_ptr, spoilt_ptr, stride_qb, stride_qh, stride_qs, stride_kb,
    stride_kh, stride_ks, heads, group, splits, split_tiles, q_len, kv_len, q_offset, scale_log2,
    chunk, q_block, split, h_kv, b, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr, PARTIAL: tl.constexpr, ALIGN: tl.constexpr, OFFSET: tl.constexpr,
    FLOAT: tl.constexpr, PRECISION: tl.constexpr,
):
    """A share of a row's tiles."""

    # Strides that keep 16-byte alignment say so.
    stride_qb = stride_qb // ALIGN * ALIGN
    stride_qh = stride_qh // ALIGN * ALIGN
    stride_qs = stride_qs // ALIGN * ALIGN
    stride_kb = stride_kb // ALIGN * ALIGN
    stride_kh = stride_kh // ALIGN * ALIGN
    stride_ks = stride_ks // ALIGN * ALIGN
    q_ptr += b * stride_qb
    k_ptr += b * stride_kb + h_kv * stride_kh

    index = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    dims_128 = tl.arange(0, 128)[None, :]
    dims_64 = tl.arange(0, 64)[None, :]

    k_rows = columns[:, None] * stride_ks.to(OFFSET)
    q_row = q_block * (BLOCK_M // GROUP) + index // GROUP
    member = chunk * GROUP + index % GROUP
    inside = (q_row < q_len) & (member < group)
    head = h_kv * group + tl.minimum(member, group - 1)
    results = (((b * heads + head).to(tl.int64) * q_len + q_row) * splits + split)[:, None]
    q_rows = (head * stride_qh + q_row * stride_qs)[:, None]

    # Tiles of the row, and the share of them.
    visited = tl.cdiv(kv_len, BLOCK_N)
    share = tl.where(split_tiles > 0, split_tiles, tl.cdiv(visited, splits))
    share_from = tl.minimum(split * share, visited)
    share_to = tl.minimum(share_from + share, visited)
    flags = spoilt_ptr + 2 * results
    spoilt = tl.load(flags, mask=inside[:, None], other=0)
    spoilt |= tl.load(flags + 1, mask=inside[:, None], other=0)
    if tl.max(tl.max(spoilt.to(tl.int32), 1), 0) > 0:
        select_rows(
            q_ptr, k_ptr, out_ptr, lse_ptr, stride_qh, stride_qs, stride_ks, heads, group, splits,
            q_len, scale_log2, kv_len, q_offset, b, h_kv, chunk, q_block, split, share_from,
            share_to, BLOCK_M, BLOCK_N, GROUP, PARTIAL, OFFSET, FLOAT, PRECISION,
        )


# Values never specialise: new lengths, strides, scalars and data run the same binary.
@triton.jit(
    do_not_specialize=[
        "stride_qb", "stride_qh", "stride_qs", "stride_kb", "stride_kh", "stride_ks", "heads",
        "group", "splits", "split_tiles", "q_len", "kv_len", "q_offset", "scale_log2"
    ],
    do_not_specialize_on_alignment=[],
)
def repair_decoded(
    q_ptr,
    k_ptr,
    out_ptr,
    lse_ptr,
    spoilt_ptr,
    stride_qb: tl.int64,
    stride_qh: tl.int64,
    stride_qs: tl.int64,
    stride_kb: tl.int64,
    stride_kh: tl.int64,
    stride_ks: tl.int64,
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
        q_ptr, k_ptr, out_ptr, lse_ptr, spoilt_ptr, stride_qb, stride_qh, stride_qs, stride_kb,
        stride_kh, stride_ks, heads, group, splits, split_tiles, q_len, kv_len, q_offset,
        scale_log2, chunk, q_block, split, h_kv, b, BLOCK_M, BLOCK_N, GROUP, PARTIAL, ALIGN,
        OFFSET, FLOAT, PRECISION,
    )
