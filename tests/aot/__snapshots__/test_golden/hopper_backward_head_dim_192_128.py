


# flashgen 0.1.0
# spec causal_document
#   mask    (kv_idx <= q_idx) & (doc[b, q_idx] == doc[b, kv_idx])
#   data    doc: int32[2-d]
# tile rule
#   may attend   ~(max[q](q_idx) < min[kv](kv_idx)) & ~((max[q](doc[b, q_idx]) < min[kv](doc[b,
#       kv_idx])) | (max[kv](doc[b, kv_idx]) < min[q](doc[b, q_idx])))
#   must attend  (max[kv](kv_idx) <= min[q](q_idx)) & ((min[q](doc[b, q_idx]) == max[q](doc[b,
#       q_idx])) & (min[kv](doc[b, kv_idx]) == max[kv](doc[b, kv_idx])) & (min[q](doc[b, q_idx]) ==
#       min[kv](doc[b, kv_idx])))
# data in order
#   where equal doc lie together: (kv_idx <= q_idx) & ((doc_range_0[0, b, q_idx] <= kv_idx) &
#       (kv_idx < doc_range_0[1, b, q_idx]))

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashgen import hopper
from flashgen.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

# Named barriers: a step's weights are written, and taken; ds, of even and of odd steps, is written,
# and read by the other warpgroup; what is beyond the valid keys is 0.
WEIGHED = gl.constexpr(8)
TAKEN = gl.constexpr(9)
DS_FULL = gl.constexpr(10)
DS_FREE = gl.constexpr(12)
HIDDEN = gl.constexpr(14)
FLOAT = gl.constexpr(gl.float32)


@gluon.jit
def place_of(item, blocks, heads, group, side):
    """Batch element, query head, head of the keys and key block of a piece of work.

    First key blocks first: under causal masks they are the longest. Those of `side` heads are side
    by side."""
    line = item // (blocks * side) * side + item % side
    block = item // side % blocks
    h = line % heads
    return line // heads, h, h // group, block


@gluon.jit
def begin_at(block, length):
    """Which step of a run a block begins with where no tile is cut: programs that add to the same
    rows
    at the same time wait for each other. Blocks with cut tiles begin apart as it is."""
    return (3 * block & 63) * gl.minimum(length, 192) // 64


@gluon.jit
def load(
    q_tiles, k_tiles, v_tiles, grad_out_tiles, lse_tiles, minus_delta_tiles,
    q, k, v, grad_out, lse, minus_delta, first_rows,
    work, q_here, grads_here, is_free, keys_here, keys_free,
    counts, masked_runs, full_runs, masked_width, full_width,
    schedule_stride_b, schedule_stride_h, next_item_ptr,
    items, blocks, heads, group, side, capacity, padded_len,
    doc_q_tiles,
    q_len,
    kv_len,
    q_offset,
    doc_ptr,
    doc_size_0,
    doc_stride_0,
    doc_size_1,
    doc_stride_1,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr,
    STAGES: gl.constexpr, STEPS: gl.constexpr,
):
    """The warp that loads: for each piece of work its keys and values, and its queries and their
    gradients a few steps ahead. It gets the pieces from a counter, and tells the others."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    number = 0
    past = 0
    item = gl.program_id(0)

    while item < items:
        b, h, h_kv, block = place_of(item, blocks, heads, group, side)
        schedule_row = (b * schedule_stride_b + h * schedule_stride_h) * gl.cdiv(capacity, TILE_N)
        schedule_row += block * BLOCK_N // TILE_N

        masked_steps = gl.load(counts + 3 * schedule_row) * STEPS
        full_steps = gl.load(counts + 3 * schedule_row + 1) * STEPS

        mbarrier.wait(keys_free, number & 1 ^ 1)
        hopper.note(work.index(0), item)
        hopper.note(work.index(1), masked_steps)
        hopper.note(work.index(2), full_steps)
        steps = masked_steps + full_steps
        if steps > 0:
            mbarrier.expect(keys_here, k_tiles.block_type.nbytes + v_tiles.block_type.nbytes)
            hopper.load_tile(k_tiles, [b, h_kv, block * BLOCK_N, 0], keys_here, k.index(0))
            hopper.load_tile(v_tiles, [b, h_kv, block * BLOCK_N, 0], keys_here, v.index(0))
        else:
            mbarrier.arrive(keys_here, count=1)
        mbarrier.arrive(keys_here, count=1)
        line = (b * heads + h) * padded_len
        rows = gl.arange(0, BLOCK_M, LANES)
        doc_row = doc_ptr + b * doc_stride_0
        masked = masked_runs + schedule_row * (2 * masked_width)
        full = full_runs + schedule_row * (2 * full_width)
        runs = gl.where(masked_steps > 0, masked, full)
        step = gl.load(runs) * STEPS
        end = gl.load(runs + 1) * STEPS
        length = end - step
        ahead = gl.where(masked_steps > 0, 0, begin_at(block, length))
        next_step = gl.load(runs + 2) * STEPS
        next_end = gl.load(runs + 3) * STEPS

        for turn in range(steps):
            stage = past % STAGES
            mbarrier.wait(is_free.index(stage), past // STAGES & 1 ^ 1)
            past += 1
            at = step + ahead
            row = gl.where(at >= end, at - length, at) * BLOCK_M
            mbarrier.expect(q_here.index(stage), q_tiles.block_type.nbytes + 4 * BLOCK_M)
            hopper.load_tile(q_tiles, [b, h, row, 0], q_here.index(stage), q.index(stage))
            hopper.load_tile(lse_tiles, [line + row], q_here.index(stage), lse.index(stage))
            mbarrier.expect(grads_here.index(stage), grad_out_tiles.block_type.nbytes + 4 * BLOCK_M)
            hopper.load_tile(
                grad_out_tiles, [b, h, row, 0], grads_here.index(stage), grad_out.index(stage)
            )
            hopper.load_tile(
                minus_delta_tiles, [line + row], grads_here.index(stage), minus_delta.index(stage)
            )
            first_rows.index(stage).store(gl.full([1], row, gl.int32, LANES))
            if turn < masked_steps:
                q_idx = row + q_offset + rows
                doc_q_at = gl.minimum(gl.maximum(q_idx, 0), doc_size_1 - 1)
                doc_q_loaded = gl.load(doc_row + doc_q_at * doc_stride_1)
                doc_q_tiles.index(stage).store(doc_q_loaded)
            mbarrier.arrive(q_here.index(stage), count=1)
            step += 1
            is_last = step == end
            step = gl.where(is_last, next_step, step)
            end = gl.where(is_last, next_end, end)
            runs += gl.where(is_last, 2, 0)
            if turn + 1 == masked_steps:
                runs = full
                step = gl.load(runs) * STEPS
                end = gl.load(runs + 1) * STEPS
            length = gl.where(is_last, end - step, length)
            ahead = gl.where(masked_steps > 0, 0, begin_at(block, length))
            next_step = gl.load(runs + 2) * STEPS
            next_end = gl.load(runs + 3) * STEPS

        number += 1
        item = gl.atomic_add(next_item_ptr, 1) + gl.num_programs(0)
    # There is no more.
    mbarrier.wait(keys_free, number & 1 ^ 1)
    hopper.note(work.index(0), items)
    mbarrier.arrive(keys_here, count=2)


@gluon.jit
def quad_offsets(COLUMNS: gl.constexpr):
    """Where an accumulator of 64 rows is added: four of a thread's numbers are neighbours."""
    LAYOUT: gl.constexpr = hopper.accumulator(COLUMNS)
    rows = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))[None, :]
    return columns // 8 * 512 + rows // 16 * 128 + rows % 8 * 16 + columns % 8 // 2 * 4


@gluon.jit
def store_part(
    sums, tile, sum_ptr, spoilt_ptr, last, LAYOUT: gl.constexpr, SHARED_HEADS: gl.constexpr
):
    """Columns of dK or dV, into shared memory; heads that share keys add theirs up in memory."""
    if SHARED_HEADS:
        hopper.add_quads(sum_ptr + quad_offsets(sums.shape[1]), sums)
    else:
        rows = gl.arange(0, sums.shape[0], gl.SliceLayout(1, LAYOUT))[:, None]
        # 0, or NaN; one operation for each number.
        is_spoilt = gl.sum(sums * 0.0, 1)[:, None] != 0.0
        gl.store(spoilt_ptr + rows * 0, 1, mask=is_spoilt & (rows < last))
        tile.store(sums.to(tile.dtype))


@gluon.jit
def weigh(
    q, k, v, grad_out, lse, minus_delta, first_rows, work, ds_tiles, hand,
    doc_q_tiles,
    q_here, grads_here, is_free, keys_here, keys_free,
    dq_sum_ptr, own_sum_ptr, all_spoilt_ptr, own_tiles,
    items, blocks, heads, group, side, padded_len, capacity, scale, scale_log2,
    q_len,
    kv_len,
    q_offset,
    doc_ptr,
    doc_size_0,
    doc_stride_0,
    doc_size_1,
    doc_stride_1,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, TILE_N: gl.constexpr, STAGES: gl.constexpr,
    SHARED_HEADS: gl.constexpr,
):
    """A warpgroup: the weights of all steps, dV, and dQ of the first dimensions."""
    V_OPERAND0: gl.constexpr = hopper.operand(128)
    WIDTH: gl.constexpr = 192
    SCORES: gl.constexpr = hopper.accumulator(BLOCK_M)
    QUERIES: gl.constexpr = gl.SliceLayout(0, SCORES)
    DQ: gl.constexpr = hopper.accumulator(128)
    zeros = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, SCORES)
    no_dq = gl.zeros([64, 128], gl.float32, DQ)
    number = 0
    past = 0
    mbarrier.wait(keys_here, 0)
    item = hopper.read(work.index(0))
    while item < items:
        b, h, h_kv, block = place_of(item, blocks, heads, group, side)
        dq_places = dq_sum_ptr + ((b * heads + h).to(gl.int64) * padded_len) * WIDTH
        masked_end = past + hopper.read(work.index(1))
        end = masked_end + hopper.read(work.index(2))
        first_key = block * BLOCK_N
        dq_places += 0 + quad_offsets(128)
        keys = k.index(0).reshape([BLOCK_N, 256])
        values = v.index(0).reshape([BLOCK_N, 128])
        rows = gl.arange(0, BLOCK_M, QUERIES)[None, :]
        by_scale = 1.0 / scale_log2
        kv_idx = first_key + gl.arange(0, BLOCK_N, gl.SliceLayout(1, SCORES))[:, None]
        is_key = kv_idx < kv_len
        doc_kv_at = gl.minimum(kv_idx, doc_size_1 - 1)
        doc_kv = gl.load(doc_ptr + b * doc_stride_0 + doc_kv_at * doc_stride_1)
        dv0 = gl.zeros([BLOCK_N, 128], gl.float32, hopper.accumulator(128))
        if end > past:
            # Of a step before the first: nothing is read, and its dQ isn't added.
            hopper.arrive_at(DS_FREE + (past & 1))
            first = past % STAGES
            mbarrier.wait(q_here.index(first), past // STAGES & 1)
            queries = q.index(first).reshape([BLOCK_M, 256])
            row_lse = lse.index(first).load(QUERIES) * by_scale
            s = zeros - row_lse[None, :]
            s = warpgroup_mma(
                keys.slice(
                    0, 128, dim=1
                ), queries.slice(0, 128, dim=1).permute((1, 0)), s, is_async=True
            )
            s = warpgroup_mma(
                keys.slice(
                    128, 64, dim=1
                ), queries.slice(128, 64, dim=1).permute((1, 0)), s, is_async=True
            )

            s = warpgroup_mma_wait(0, deps=(s,))
            # Not `row`: Triton takes for constant what a turn sets to the value that it has before
            # the loop.
            last_row = gl.zeros_like(first_rows.index(first).load(gl.SliceLayout(0, DQ))[None, :])
            for turn in range(past, end - 1):
                stage, parity = turn % STAGES, turn & 1
                here = hopper.zero_again()
                keys = k.index(here).reshape([BLOCK_N, 256])
                their_grads = grad_out.index(stage).reshape([BLOCK_M, 128])
                hopper.sync_at(DS_FULL + (parity ^ 1))
                dq = warpgroup_mma(
                    ds_tiles.index(parity ^ 1).permute((1, 0)), keys.slice(0, 128, dim=1), no_dq,
                    use_acc=False, is_async=True,
                )
                first_row = first_rows.index(stage).load(QUERIES)[None, :]
                row = first_rows.index(stage).load(gl.SliceLayout(0, DQ))[None, :]

                p = gl.exp2(s * scale_log2)
                if turn < masked_end:
                    q_idx = first_row + q_offset + rows
                    doc_q = doc_q_tiles.index(stage).load(QUERIES)[None, :]

                    p = gl.where(is_key & ((kv_idx <= q_idx) & (doc_q == doc_kv)), p, 0.0)

                p_tile = p.to(k.dtype)
                hopper.sync_at(TAKEN)
                hand.store(p)
                hopper.arrive_at(WEIGHED)
                mbarrier.wait(grads_here.index(stage), turn // STAGES & 1)
                dv0 = warpgroup_mma(
                    gl.convert_layout(p_tile, V_OPERAND0), their_grads,
                    dv0, is_async=True,
                )
                dq = warpgroup_mma_wait(1, deps=(dq,))
                hopper.arrive_at(DS_FREE + (parity ^ 1))
                if turn > past:
                    hopper.add_quads(dq_places + last_row.to(gl.int64) * WIDTH, dq)

                last_row = row
                coming = (turn + 1) % STAGES
                mbarrier.wait(q_here.index(coming), (turn + 1) // STAGES & 1)
                queries = q.index(coming).reshape([BLOCK_M, 256])
                row_lse = lse.index(coming).load(QUERIES) * by_scale
                s = zeros - row_lse[None, :]
                s = warpgroup_mma(
                    keys.slice(
                        0, 128, dim=1
                    ), queries.slice(0, 128, dim=1).permute((1, 0)), s, is_async=True
                )
                s = warpgroup_mma(
                    keys.slice(
                        128, 64, dim=1
                    ), queries.slice(128, 64, dim=1).permute((1, 0)), s, is_async=True
                )

                dv0 = warpgroup_mma_wait(2, deps=(dv0,))
                hopper.async_copy.mbarrier_arrive(is_free.index(stage), increment_count=False)
                s = warpgroup_mma_wait(0, deps=(s,))

            turn = end - 1
            stage, parity = turn % STAGES, turn & 1
            here = hopper.zero_again()
            keys = k.index(here).reshape([BLOCK_N, 256])
            their_grads = grad_out.index(stage).reshape([BLOCK_M, 128])
            hopper.sync_at(DS_FULL + (parity ^ 1))
            dq = warpgroup_mma(
                ds_tiles.index(parity ^ 1).permute((1, 0)), keys.slice(0, 128, dim=1), no_dq,
                use_acc=False, is_async=True,
            )
            first_row = first_rows.index(stage).load(QUERIES)[None, :]
            row = first_rows.index(stage).load(gl.SliceLayout(0, DQ))[None, :]

            p = gl.exp2(s * scale_log2)
            if turn < masked_end:
                q_idx = first_row + q_offset + rows
                doc_q = doc_q_tiles.index(stage).load(QUERIES)[None, :]

                p = gl.where(is_key & ((kv_idx <= q_idx) & (doc_q == doc_kv)), p, 0.0)

            p_tile = p.to(k.dtype)
            hopper.sync_at(TAKEN)
            hand.store(p)
            hopper.arrive_at(WEIGHED)
            mbarrier.wait(grads_here.index(stage), turn // STAGES & 1)
            dv0 = warpgroup_mma(
                gl.convert_layout(p_tile, V_OPERAND0), their_grads,
                dv0, is_async=True,
            )
            dq = warpgroup_mma_wait(1, deps=(dq,))
            hopper.arrive_at(DS_FREE + (parity ^ 1))
            if turn > past:
                hopper.add_quads(dq_places + last_row.to(gl.int64) * WIDTH, dq)

            dv0 = warpgroup_mma_wait(0, deps=(dv0,))
            hopper.async_copy.mbarrier_arrive(is_free.index(stage), increment_count=False)

            hopper.sync_at(DS_FULL + parity)
            dq = warpgroup_mma(
                ds_tiles.index(parity).permute((1, 0)), keys.slice(0, 128, dim=1), no_dq,
                use_acc=False, is_async=True,
            )
            dq = warpgroup_mma_wait(0, deps=(dq,))
            hopper.arrive_at(DS_FREE + parity)
            hopper.add_quads(dq_places + row.to(gl.int64) * WIDTH, dq)

            # The last weights are taken, and so values are read no more.
            hopper.sync_at(TAKEN)
        place = [b, h_kv, first_key, 0]
        key_line = b * (heads // group) + h_kv
        key_row = (key_line.to(gl.int64) * blocks + block) * BLOCK_N
        spoilt_ptr = (
            all_spoilt_ptr
            + key_line * gl.cdiv(capacity, TILE_N)
            + block * BLOCK_N // TILE_N
        )
        # Keys that no query sees get 0, those beyond the valid ones too.
        last = capacity - first_key
        store_part(
            dv0, values,
            own_sum_ptr + key_row * 128 + 0, spoilt_ptr, last,
            hopper.accumulator(128), SHARED_HEADS,
        )
        if not SHARED_HEADS:
            fence_async_shared()
            hopper.barrier()
            hopper.store_tile(own_tiles, place, v.index(0))
            hopper.wait_stores(0)
            hopper.barrier()
        mbarrier.arrive(keys_free, count=1)
        past = end
        number += 1
        mbarrier.wait(keys_here, number & 1)
        item = hopper.read(work.index(0))


@gluon.jit
def pull(
    q, k, v, grad_out, lse, minus_delta, first_rows, work, ds_tiles, hand,
    doc_q_tiles,
    q_here, grads_here, is_free, keys_here, keys_free,
    dq_sum_ptr, own_sum_ptr, all_spoilt_ptr, own_tiles,
    items, blocks, heads, group, side, padded_len, capacity, scale, scale_log2,
    q_len,
    kv_len,
    q_offset,
    doc_ptr,
    doc_size_0,
    doc_stride_0,
    doc_size_1,
    doc_stride_1,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, TILE_N: gl.constexpr, STAGES: gl.constexpr,
    SHARED_HEADS: gl.constexpr,
):
    """A warpgroup: gradients of scores, dK, and dQ of the other dimensions."""
    OPERAND0: gl.constexpr = hopper.operand(128)
    OPERAND1: gl.constexpr = hopper.operand(64)
    WIDTH: gl.constexpr = 192
    SCORES: gl.constexpr = hopper.accumulator(BLOCK_M)
    QUERIES: gl.constexpr = gl.SliceLayout(0, SCORES)
    DQ: gl.constexpr = hopper.accumulator(64)
    zeros = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, SCORES)
    no_dq = gl.zeros([64, 64], gl.float32, DQ)
    number = 0
    past = 0
    mbarrier.wait(keys_here, 0)
    item = hopper.read(work.index(0))
    while item < items:
        b, h, h_kv, block = place_of(item, blocks, heads, group, side)
        dq_places = dq_sum_ptr + ((b * heads + h).to(gl.int64) * padded_len) * WIDTH
        masked_end = past + hopper.read(work.index(1))
        end = masked_end + hopper.read(work.index(2))
        first_key = block * BLOCK_N
        dq_places += 8192 + quad_offsets(64)
        keys = k.index(0).reshape([BLOCK_N, 256])
        values = v.index(0).reshape([BLOCK_N, 128])
        dk0 = gl.zeros([BLOCK_N, 128], gl.float32, hopper.accumulator(128))
        dk1 = gl.zeros([BLOCK_N, 64], gl.float32, hopper.accumulator(64))
        if end > past:
            hopper.arrive_at(TAKEN)
            hopper.arrive_at(DS_FULL + (past & 1 ^ 1))
            first = past % STAGES
            mbarrier.wait(grads_here.index(first), past // STAGES & 1)
            their_grads = grad_out.index(first).reshape([BLOCK_M, 128])
            row_delta = minus_delta.index(first).load(QUERIES)
            dp = zeros + row_delta[None, :]
            dp = warpgroup_mma(values, their_grads.permute((1, 0)), dp, is_async=True)

            dp = warpgroup_mma_wait(0, deps=(dp,))
            mbarrier.wait(q_here.index(first), past // STAGES & 1)
            last_row = gl.zeros_like(first_rows.index(first).load(gl.SliceLayout(0, DQ))[None, :])
            for turn in range(past, end - 1):
                stage, parity = turn % STAGES, turn & 1
                here = hopper.zero_again()
                keys = k.index(here).reshape([BLOCK_N, 256])
                values = v.index(here).reshape([BLOCK_N, 128])
                queries = q.index(stage).reshape([BLOCK_M, 256])
                mbarrier.wait(q_here.index(stage), turn // STAGES & 1)
                hopper.sync_at(WEIGHED)
                dq = warpgroup_mma(
                    ds_tiles.index(parity ^ 1).permute((1, 0)), keys.slice(128, 64, dim=1), no_dq,
                    use_acc=False, is_async=True,
                )
                slopes = hand.load(SCORES)
                hopper.arrive_at(TAKEN)
                ds_tile = (slopes * dp).to(k.dtype)
                hopper.sync_at(DS_FREE + parity)
                ds_tiles.index(parity).store(ds_tile)
                fence_async_shared()
                hopper.arrive_at(DS_FULL + parity)
                row = first_rows.index(stage).load(gl.SliceLayout(0, DQ))[None, :]
                dk0 = warpgroup_mma(
                    gl.convert_layout(ds_tile, OPERAND0), queries.slice(0, 128, dim=1),
                    dk0, is_async=True,
                )
                dk1 = warpgroup_mma(
                    gl.convert_layout(ds_tile, OPERAND1), queries.slice(128, 64, dim=1),
                    dk1, is_async=True,
                )
                dq = warpgroup_mma_wait(2, deps=(dq,))
                if turn > past:
                    hopper.add_quads(dq_places + last_row.to(gl.int64) * WIDTH, dq)

                last_row = row
                coming = (turn + 1) % STAGES
                mbarrier.wait(grads_here.index(coming), (turn + 1) // STAGES & 1)
                their_grads = grad_out.index(coming).reshape([BLOCK_M, 128])
                row_delta = minus_delta.index(coming).load(QUERIES)
                dp = zeros + row_delta[None, :]
                dp = warpgroup_mma(values, their_grads.permute((1, 0)), dp, is_async=True)

                dk0, dk1 = warpgroup_mma_wait(1, deps=(dk0, dk1,))
                hopper.async_copy.mbarrier_arrive(is_free.index(stage), increment_count=False)
                dp = warpgroup_mma_wait(0, deps=(dp,))

            turn = end - 1
            stage, parity = turn % STAGES, turn & 1
            here = hopper.zero_again()
            keys = k.index(here).reshape([BLOCK_N, 256])
            values = v.index(here).reshape([BLOCK_N, 128])
            queries = q.index(stage).reshape([BLOCK_M, 256])
            mbarrier.wait(q_here.index(stage), turn // STAGES & 1)
            hopper.sync_at(WEIGHED)
            dq = warpgroup_mma(
                ds_tiles.index(parity ^ 1).permute((1, 0)), keys.slice(128, 64, dim=1), no_dq,
                use_acc=False, is_async=True,
            )
            slopes = hand.load(SCORES)
            hopper.arrive_at(TAKEN)
            ds_tile = (slopes * dp).to(k.dtype)
            hopper.sync_at(DS_FREE + parity)
            ds_tiles.index(parity).store(ds_tile)
            fence_async_shared()
            hopper.arrive_at(DS_FULL + parity)
            row = first_rows.index(stage).load(gl.SliceLayout(0, DQ))[None, :]
            dk0 = warpgroup_mma(
                gl.convert_layout(ds_tile, OPERAND0), queries.slice(0, 128, dim=1),
                dk0, is_async=True,
            )
            dk1 = warpgroup_mma(
                gl.convert_layout(ds_tile, OPERAND1), queries.slice(128, 64, dim=1),
                dk1, is_async=True,
            )
            dq = warpgroup_mma_wait(2, deps=(dq,))
            if turn > past:
                hopper.add_quads(dq_places + last_row.to(gl.int64) * WIDTH, dq)

            dk0, dk1 = warpgroup_mma_wait(0, deps=(dk0, dk1,))
            hopper.async_copy.mbarrier_arrive(is_free.index(stage), increment_count=False)

            hopper.barrier()
            dq = warpgroup_mma(
                ds_tiles.index(parity).permute((1, 0)), keys.slice(128, 64, dim=1), no_dq,
                use_acc=False, is_async=True,
            )
            dq = warpgroup_mma_wait(0, deps=(dq,))
            hopper.add_quads(dq_places + row.to(gl.int64) * WIDTH, dq)

            # The other warpgroup has read ds of the last two steps: keys are read no more.
            hopper.sync_at(DS_FREE)
            hopper.sync_at(DS_FREE + 1)
        place = [b, h_kv, first_key, 0]
        key_line = b * (heads // group) + h_kv
        key_row = (key_line.to(gl.int64) * blocks + block) * BLOCK_N
        spoilt_ptr = (
            all_spoilt_ptr
            + key_line * gl.cdiv(capacity, TILE_N)
            + block * BLOCK_N // TILE_N
        )
        # Keys that no query sees get 0, those beyond the valid ones too.
        last = capacity - first_key
        store_part(
            dk0 * scale, keys.slice(0, 128, dim=1),
            own_sum_ptr + key_row * 192 + 0, spoilt_ptr, last,
            hopper.accumulator(128), SHARED_HEADS,
        )
        store_part(
            dk1 * scale, keys.slice(128, 64, dim=1),
            own_sum_ptr + key_row * 192 + 8192, spoilt_ptr, last,
            hopper.accumulator(64), SHARED_HEADS,
        )
        if not SHARED_HEADS:
            fence_async_shared()
            hopper.barrier()
            hopper.store_tile(own_tiles, place, k.index(0))
            hopper.wait_stores(0)
            hopper.barrier()
        mbarrier.arrive(keys_free, count=1)
        past = end
        number += 1
        mbarrier.wait(keys_here, number & 1)
        item = hopper.read(work.index(0))


# Values never specialise: new lengths, strides, scalars and data run the same binary.
@gluon.jit(
    do_not_specialize=[
        "schedule_stride_b", "schedule_stride_h", "masked_width", "full_width", "heads",
        "items", "side", "group", "capacity", "padded_len", "q_len", "kv_len", "q_offset",
        "scale", "scale_log2", "doc_size_0", "doc_stride_0", "doc_size_1", "doc_stride_1"
    ],
    do_not_specialize_on_alignment=["doc_ptr"],
)
def attention_backward(
    dq_sum_ptr,
    dk_sum_ptr,
    dv_sum_ptr,
    spoilt_kv_ptr,
    next_item_ptr,
    counts,
    masked_runs,
    full_runs,
    q_tiles,
    k_tiles,
    v_tiles,
    grad_out_tiles,
    lse_tiles,
    minus_delta_tiles,
    dk_tiles,
    dv_tiles,
    schedule_stride_b: gl.int64,
    schedule_stride_h: gl.int64,
    masked_width: gl.int32,
    full_width: gl.int32,
    heads: gl.int32,
    items: gl.int32,
    side: gl.int32,
    group: gl.int32,
    capacity: gl.int32,
    padded_len: gl.int32,
    q_len: gl.int32,
    kv_len: gl.int32,
    q_offset: gl.int32,
    scale: gl.float32,
    scale_log2: gl.float32,
    doc_ptr,
    doc_size_0: gl.int32,
    doc_stride_0: gl.int64,
    doc_size_1: gl.int32,
    doc_stride_1: gl.int64,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    TILE_M: gl.constexpr,
    TILE_N: gl.constexpr,
    STAGES: gl.constexpr,
    SHARED_HEADS: gl.constexpr,
):
    blocks = gl.cdiv(capacity, BLOCK_N)
    STEPS: gl.constexpr = TILE_M // BLOCK_M
    k = gl.allocate_shared_memory(k_tiles.dtype, [1, 1, 1, BLOCK_N, 256], k_tiles.layout)
    v = gl.allocate_shared_memory(v_tiles.dtype, [1, 1, 1, BLOCK_N, 128], v_tiles.layout)
    q = gl.allocate_shared_memory(q_tiles.dtype, [STAGES, 1, 1, BLOCK_M, 256], q_tiles.layout)
    grad_out = gl.allocate_shared_memory(
        q_tiles.dtype, [STAGES, 1, 1, BLOCK_M, 128], grad_out_tiles.layout
    )
    lse = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], lse_tiles.layout)
    minus_delta = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], minus_delta_tiles.layout)
    DS_TILES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], q_tiles.dtype)
    ds_tiles = gl.allocate_shared_memory(q_tiles.dtype, [2, BLOCK_N, BLOCK_M], DS_TILES)
    HAND: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], gl.float32)
    hand = gl.allocate_shared_memory(gl.float32, [BLOCK_N, BLOCK_M], HAND)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    first_rows = gl.allocate_shared_memory(gl.int32, [STAGES, 1], PLAIN)
    doc_q_tiles = gl.allocate_shared_memory(doc_ptr.dtype.element_ty, [STAGES, BLOCK_M], PLAIN)
    work = gl.allocate_shared_memory(gl.int32, [6, 1], PLAIN)
    keys_here = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    keys_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_here = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    grads_here = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    is_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # The copies, and what is to do; both warpgroups.
    mbarrier.init(keys_here, count=2)
    mbarrier.init(keys_free, count=2)
    for stage in gl.static_range(STAGES):
        # The copies, and what else is read of the queries.
        mbarrier.init(q_here.index(stage), count=2)
        mbarrier.init(grads_here.index(stage), count=1)
        # Every thread of the two warpgroups that compute.
        mbarrier.init(is_free.index(stage), count=256)
    gl.warp_specialize(
        [
            (weigh, (
                q, k, v, grad_out, lse, minus_delta, first_rows, work, ds_tiles, hand,
                doc_q_tiles,
                q_here, grads_here, is_free, keys_here, keys_free,
                dq_sum_ptr, dv_sum_ptr, spoilt_kv_ptr, dv_tiles,
                items, blocks, heads, group, side, padded_len, capacity, scale, scale_log2,
                q_len,
                kv_len,
                q_offset,
                doc_ptr,
                doc_size_0,
                doc_stride_0,
                doc_size_1,
                doc_stride_1,
                BLOCK_M, BLOCK_N, TILE_N, STAGES, SHARED_HEADS,
            )),
            (pull, (
                q, k, v, grad_out, lse, minus_delta, first_rows, work, ds_tiles, hand,
                doc_q_tiles,
                q_here, grads_here, is_free, keys_here, keys_free,
                dq_sum_ptr, dk_sum_ptr, spoilt_kv_ptr, dk_tiles,
                items, blocks, heads, group, side, padded_len, capacity, scale, scale_log2,
                q_len,
                kv_len,
                q_offset,
                doc_ptr,
                doc_size_0,
                doc_stride_0,
                doc_size_1,
                doc_stride_1,
                BLOCK_M, BLOCK_N, TILE_N, STAGES, SHARED_HEADS,
            )),
            (load, (
                q_tiles, k_tiles, v_tiles, grad_out_tiles, lse_tiles, minus_delta_tiles,
                q, k, v, grad_out, lse, minus_delta, first_rows,
                work, q_here, grads_here, is_free, keys_here, keys_free,
                counts, masked_runs, full_runs, masked_width, full_width,
                schedule_stride_b, schedule_stride_h, next_item_ptr,
                items, blocks, heads, group, side, capacity, padded_len,
                doc_q_tiles,
                q_len,
                kv_len,
                q_offset,
                doc_ptr,
                doc_size_0,
                doc_stride_0,
                doc_size_1,
                doc_stride_1,
                BLOCK_M, BLOCK_N, TILE_M, TILE_N, STAGES, STEPS,
            )),
        ],
        [4, 1],
        [240, 24],
    )


@triton.jit(
    do_not_specialize=[
        "stride_dqb", "stride_dqh", "stride_dqs", "heads", "q_len", "padded_len", "scale"
    ],
    do_not_specialize_on_alignment=[
        "stride_dqb", "stride_dqh", "stride_dqs", "heads", "q_len", "padded_len", "scale"
    ],
)
def finish_queries(
    dq_sum_ptr,
    grad_q_ptr,
    spoilt_q_ptr,
    stride_dqb: tl.int64,
    stride_dqh: tl.int64,
    stride_dqs: tl.int64,
    heads: tl.int32,
    q_len: tl.int32,
    padded_len: tl.int64,
    scale: tl.float32,
    TILE_M: tl.constexpr,
):
    """dQ of 64 rows, from its sum."""
    blocks = padded_len // 64
    block = tl.program_id(0) % blocks
    h = (tl.program_id(0) // blocks) % heads
    b = tl.program_id(0) // blocks // heads
    line = (b * heads + h).to(tl.int64)
    rows = block * 64 + tl.arange(0, 64)[:, None]
    dq_sum_ptr += (line * padded_len + block * 64) * 192
    spoilt = 0
    dims = tl.arange(0, 128)[None, :]
    dq = tl.load(dq_sum_ptr + tl.arange(0, 8192)) * scale
    dq = tl.reshape(dq, [16, 4, 8, 4, 2, 2])
    dq = tl.reshape(tl.permute(dq, [1, 4, 2, 0, 3, 5]), [64, 128])
    inside = (rows < q_len) & (dims < 192)
    place = grad_q_ptr + b * stride_dqb + h * stride_dqh + rows * stride_dqs + dims
    tl.store(place, dq.to(grad_q_ptr.dtype.element_ty), mask=inside)
    # Not x - x != 0: fused with the product above it, that is a rounding error.
    spoilt += tl.sum((~(tl.abs(dq) < float("inf"))).to(tl.int32))
    dims = 128 + tl.arange(0, 64)[None, :]
    dq = tl.load(dq_sum_ptr + 8192 + tl.arange(0, 4096)) * scale
    dq = tl.reshape(dq, [8, 4, 8, 4, 2, 2])
    dq = tl.reshape(tl.permute(dq, [1, 4, 2, 0, 3, 5]), [64, 64])
    inside = (rows < q_len) & (dims < 192)
    place = grad_q_ptr + b * stride_dqb + h * stride_dqh + rows * stride_dqs + dims
    tl.store(place, dq.to(grad_q_ptr.dtype.element_ty), mask=inside)
    # Not x - x != 0: fused with the product above it, that is a rounding error.
    spoilt += tl.sum((~(tl.abs(dq) < float("inf"))).to(tl.int32))
    tile = line * tl.cdiv(padded_len, TILE_M) + block * 64 // TILE_M
    tl.store(spoilt_q_ptr + tile, 1, mask=spoilt > 0)


@triton.jit(
    do_not_specialize=[
        "stride_dkb", "stride_dkh", "stride_dks", "stride_dvb", "stride_dvh", "stride_dvs",
        "kv_heads", "capacity"
    ],
    do_not_specialize_on_alignment=[
        "stride_dkb", "stride_dkh", "stride_dks", "stride_dvb", "stride_dvh", "stride_dvs",
        "kv_heads", "capacity"
    ],
)
def finish_keys(
    dk_sum_ptr,
    dv_sum_ptr,
    grad_k_ptr,
    grad_v_ptr,
    spoilt_kv_ptr,
    stride_dkb: tl.int64,
    stride_dkh: tl.int64,
    stride_dks: tl.int64,
    stride_dvb: tl.int64,
    stride_dvh: tl.int64,
    stride_dvs: tl.int64,
    kv_heads: tl.int32,
    capacity: tl.int32,
    BLOCK_N: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """dK and dV of 64 keys, from the sums of the heads that share them."""
    blocks = tl.cdiv(capacity, 64)
    block = tl.program_id(0) % blocks
    h = (tl.program_id(0) // blocks) % kv_heads
    b = tl.program_id(0) // blocks // kv_heads
    line = (b * kv_heads + h).to(tl.int64)
    rows = block * 64 + tl.arange(0, 64)[:, None]
    sum_row = line * (tl.cdiv(capacity, BLOCK_N) * BLOCK_N) + block * 64
    spoilt = 0
    dk_sum_ptr += sum_row * 192
    dims = tl.arange(0, 128)[None, :]
    inside = (rows < capacity) & (dims < 192)
    dk = tl.load(dk_sum_ptr + tl.arange(0, 8192))
    dk = tl.reshape(dk, [16, 4, 8, 4, 2, 2])
    dk = tl.reshape(tl.permute(dk, [1, 4, 2, 0, 3, 5]), [64, 128])
    place = grad_k_ptr + b * stride_dkb + h * stride_dkh
    place += rows * stride_dks + dims
    tl.store(place, dk.to(grad_k_ptr.dtype.element_ty), mask=inside)
    spoilt += tl.sum((~(tl.abs(dk) < float("inf"))).to(tl.int32))
    dims = 128 + tl.arange(0, 64)[None, :]
    inside = (rows < capacity) & (dims < 192)
    dk = tl.load(dk_sum_ptr + 8192 + tl.arange(0, 4096))
    dk = tl.reshape(dk, [8, 4, 8, 4, 2, 2])
    dk = tl.reshape(tl.permute(dk, [1, 4, 2, 0, 3, 5]), [64, 64])
    place = grad_k_ptr + b * stride_dkb + h * stride_dkh
    place += rows * stride_dks + dims
    tl.store(place, dk.to(grad_k_ptr.dtype.element_ty), mask=inside)
    spoilt += tl.sum((~(tl.abs(dk) < float("inf"))).to(tl.int32))
    dv_sum_ptr += sum_row * 128
    dims = tl.arange(0, 128)[None, :]
    inside = (rows < capacity) & (dims < 128)
    dv = tl.load(dv_sum_ptr + tl.arange(0, 8192))
    dv = tl.reshape(dv, [16, 4, 8, 4, 2, 2])
    dv = tl.reshape(tl.permute(dv, [1, 4, 2, 0, 3, 5]), [64, 128])
    place = grad_v_ptr + b * stride_dvb + h * stride_dvh
    place += rows * stride_dvs + dims
    tl.store(place, dv.to(grad_v_ptr.dtype.element_ty), mask=inside)
    spoilt += tl.sum((~(tl.abs(dv) < float("inf"))).to(tl.int32))
    tile = line * tl.cdiv(capacity, TILE_N) + block * 64 // TILE_N
    tl.store(spoilt_kv_ptr + tile, 1, mask=spoilt > 0)
