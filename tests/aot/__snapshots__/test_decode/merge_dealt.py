# flashgen: merging of partial results

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(
    do_not_specialize=["batch", "heads", "total_q"],
    do_not_specialize_on_alignment=["cu_seqlens_q_ptr"],
)
def merge(
    parts_ptr,
    lses_ptr,
    out_ptr,
    lse_ptr,
    spans_ptr,
    cu_seqlens_q_ptr,
    batch: tl.int32,
    heads: tl.int32,
    total_q: tl.int64,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
    FLOAT: tl.constexpr,
    PACKED: tl.constexpr,
):
    """out = sum of weight x part, where a part's weight is its share of the sum of exponentials."""
    pieces: tl.constexpr = (V_HEAD_DIM + BLOCK_D - 1) // BLOCK_D
    row = (tl.program_id(0) // pieces).to(tl.int64)
    place = tl.load(spans_ptr + 2 * row)
    splits = (tl.load(spans_ptr + 2 * row + 1) - place + 1).to(tl.int32)
    result = row
    if PACKED:
        is_row = row // heads < tl.load(cu_seqlens_q_ptr + batch)
        place = tl.where(is_row, place, 0)
        splits = tl.where(is_row, splits, 0)
        result = row % heads * total_q + row // heads
    if place < 0:
        return
    parts_ptr += place * V_HEAD_DIM
    lses_ptr += place
    dims = tl.program_id(0) % pieces * BLOCK_D + tl.arange(0, BLOCK_D)
    is_there = dims < V_HEAD_DIM
    m = tl.full([], float("-inf"), FLOAT)
    total = tl.zeros([CHUNK], FLOAT)
    acc = tl.zeros([CHUNK, BLOCK_D], FLOAT)
    for first in range(0, splits, CHUNK):
        part = first + tl.arange(0, CHUNK)
        lses = tl.load(lses_ptr + part, mask=part < splits, other=float("-inf"))
        parts = tl.load(
            parts_ptr + part[:, None] * V_HEAD_DIM + dims[None, :],
            mask=(part < splits)[:, None] & is_there[None, :],
            other=0.0,
        )
        m_new = tl.maximum(m, tl.max(lses, 0))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m - m_safe)
        weights = tl.exp2(lses - m_safe)
        # A split that saw no key counts for nothing.
        parts = tl.where((lses != float("-inf"))[:, None], parts, 0.0)
        acc = acc * alpha + weights[:, None] * parts
        total = total * alpha + weights
        m = m_new
    divisor = tl.sum(total, 0)
    divisor = tl.where(divisor == 0.0, 1.0, divisor)
    out = tl.sum(acc, 0) / divisor
    tl.store(lse_ptr + result, (m + tl.log2(divisor)) * LN2)
    tl.store(out_ptr + row * V_HEAD_DIM + dims, out.to(out_ptr.dtype.element_ty), mask=is_there)
