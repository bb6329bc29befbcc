# flashgen: merging of partial results

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["splits", "v_head_dim"])
def merge(
    parts_ptr,
    lses_ptr,
    out_ptr,
    lse_ptr,
    splits: tl.int32,
    v_head_dim: tl.int32,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
    FLOAT: tl.constexpr,
):
    """out = sum of weight x part, where a part's weight is its share of the sum of exponentials."""
    row = tl.program_id(0).to(tl.int64)
    parts_ptr += row * splits * v_head_dim
    lses_ptr += row * splits
    chunk = tl.arange(0, CHUNK)
    dims = tl.arange(0, BLOCK_D)
    lses = tl.load(lses_ptr + chunk, mask=chunk < splits, other=float("-inf"))
    for first in range(CHUNK, splits, CHUNK):
        part = first + chunk
        more = tl.load(lses_ptr + part, mask=part < splits, other=float("-inf"))
        lses = tl.maximum(lses, more, propagate_nan=tl.PropagateNan.ALL)
    m = tl.max(lses, 0)
    m_safe = tl.where(m == float("-inf"), 0.0, m)
    total = tl.zeros([CHUNK], FLOAT)
    acc = tl.zeros([CHUNK, BLOCK_D], FLOAT)
    for first in range(0, splits, CHUNK):
        part = first + chunk
        lses = tl.load(lses_ptr + part, mask=part < splits, other=float("-inf"))
        weights = tl.exp2(lses - m_safe)
        # A split that saw no key counts for nothing.
        seen = (lses != float("-inf"))[:, None] & (dims < v_head_dim)[None, :]
        parts = tl.load(
            parts_ptr + part[:, None] * v_head_dim + dims[None, :], mask=seen, other=0.0
        )
        acc += weights[:, None] * parts
        total += weights
    divisor = tl.sum(total, 0)
    divisor = tl.where(divisor == 0.0, 1.0, divisor)
    out = tl.sum(acc, 0) / divisor
    tl.store(lse_ptr + row, (m + tl.log2(divisor)) * LN2)
    tl.store(
        out_ptr + row * v_head_dim + dims,
        out.to(out_ptr.dtype.element_ty),
        mask=dims < v_head_dim,
    )
