


# flashgen 0.1.0
# spec causal + alibi
#   mask    kv_idx <= q_idx
#   score   score + slope[h] * float(kv_idx - q_idx)
#   data    slope: float32[1-d]
# tile rule
#   may attend   ~(max[q](q_idx) < min[kv](kv_idx))
#   must attend  max[kv](kv_idx) <= min[q](q_idx)

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashgen import hopper
from flashgen.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

# Named barriers, two of each: a warpgroup's ds is written, and read by the other one.
FREE = gl.constexpr(8)
FULL = gl.constexpr(12)
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
def announce(
    k_tiles, k, work, keys_here, keys_free, may_take, spoilt_ptr,
    counts, masked_runs, full_runs, masked_width, full_width,
    schedule_stride_b, schedule_stride_h, next_item_ptr,
    items, blocks, heads, group, side, capacity, padded_len,
    longest_ptr, late_side,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr,
    STEPS: gl.constexpr, SHARED_HEADS: gl.constexpr,
):
    """A warp that gets pieces of work from a counter. Of each it tells the others and loads its
    keys,
    while the last steps of the one before are computed."""
    number = 0
    item = gl.program_id(0)

    while item < items:
        is_late = item >= items - late_side * blocks
        own_side = gl.where(is_late, late_side, side)
        b, h, h_kv, block = place_of(item, blocks, heads, group, own_side)
        if is_late:
            block = gl.load(
                longest_ptr + (b * schedule_stride_b + h * schedule_stride_h) * blocks + block
            )
        schedule_row = (b * schedule_stride_b + h * schedule_stride_h) * gl.cdiv(capacity, TILE_N)
        schedule_row += block * BLOCK_N // TILE_N

        masked_steps = gl.load(counts + 3 * schedule_row) * STEPS
        full_steps = gl.load(counts + 3 * schedule_row + 1) * STEPS

        # Without branches, behind which the assembler takes nothing for alike in all threads.
        steps = masked_steps + full_steps
        is_seen, slot = steps > 0, number & 1
        mbarrier.wait(keys_free, slot ^ 1)
        hopper.note(work.index(slot * 7), h)
        hopper.note(work.index(slot * 7 + 1), masked_steps)
        hopper.note(work.index(slot * 7 + 2), full_steps)
        key_line = b * (heads // group) + h_kv
        hopper.note(work.index(slot * 7 + 3), b)
        hopper.note(work.index(slot * 7 + 4), h_kv)
        hopper.note(work.index(slot * 7 + 5), block)
        hopper.note(work.index(slot * 7 + 6), key_line)
        mbarrier.expect(keys_here, k_tiles.block_type.nbytes, is_seen)
        hopper.load_tile(k_tiles, [b, h_kv, block * BLOCK_N, 0], keys_here, k.index(slot), is_seen)
        mbarrier.arrive(keys_here, count=1, pred=is_seen)
        mbarrier.wait(may_take, slot, pred=is_seen)
        number += is_seen.to(gl.int32)
        if not SHARED_HEADS:
            # Keys that no query sees: the kernels of repairs write their zeros.
            own_tile = key_line * gl.cdiv(capacity, TILE_N) + block * BLOCK_N // TILE_N
            gl.store(spoilt_ptr + own_tile, 1, mask=steps == 0)
        item = gl.atomic_add(next_item_ptr, 1) + gl.num_programs(0)
    # There is no more.
    mbarrier.wait(keys_free, number & 1 ^ 1)
    hopper.note(work.index((number & 1) * 7), -1)
    mbarrier.arrive(keys_here, count=2)


@gluon.jit
def load(
    q_tiles, v_tiles, grad_out_tiles, lse_tiles, minus_delta_tiles,
    q, v, grad_out, lse, minus_delta, first_rows, sum_places, dq_sum_ptr,
    work, q_here, grads_here, is_free, keys_here, keys_free,
    values_here, values_free, may_take,
    masked_runs, full_runs, masked_width, full_width,
    schedule_stride_b, schedule_stride_h, heads, group, capacity, padded_len,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr,
    STAGES: gl.constexpr, STEPS: gl.constexpr,
):
    """The warp that loads: for each piece of work its values, and its queries and their gradients a
    few steps ahead."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    number = 0
    past = 0
    mbarrier.wait(keys_here, 0)
    h = hopper.read(work.index(0))
    while h >= 0:
        slot = number & 1
        masked_steps = hopper.read(work.index(slot * 7 + 1))
        steps = masked_steps + hopper.read(work.index(slot * 7 + 2))
        b = hopper.read(work.index(slot * 7 + 3))
        h_kv = hopper.read(work.index(slot * 7 + 4))
        block = hopper.read(work.index(slot * 7 + 5))
        mbarrier.arrive(keys_free, count=1)
        schedule_row = (b * schedule_stride_b + h * schedule_stride_h) * gl.cdiv(capacity, TILE_N)
        schedule_row += block * BLOCK_N // TILE_N

        line = (b * heads + h) * padded_len
        masked = masked_runs + schedule_row * (2 * masked_width)
        full = full_runs + schedule_row * (2 * full_width)
        runs = gl.where(masked_steps > 0, masked, full)
        step = gl.load(runs) * STEPS
        end = gl.load(runs + 1) * STEPS
        length = end - step
        ahead = gl.where(masked_steps > 0, 0, begin_at(block, length))
        next_step = gl.load(runs + 2) * STEPS
        next_end = gl.load(runs + 3) * STEPS

        almost = gl.maximum(steps - 4, 0)
        for turn in range(steps):
            stage = past % STAGES
            mbarrier.wait(is_free.index(stage), past // STAGES & 1 ^ 1)
            past += 1
            at = step + ahead
            row = gl.where(at >= end, at - length, at) * BLOCK_M
            mbarrier.expect(q_here.index(stage), q_tiles.block_type.nbytes + 4 * BLOCK_M)
            hopper.load_tile(q_tiles, [b, h, row, 0], q_here.index(stage), q.index(stage))
            hopper.load_tile(lse_tiles, [line + row], q_here.index(stage), lse.index(stage))
            # Behind the first queries, which needn't wait for room.
            begins = turn == 0
            mbarrier.wait(values_free, slot ^ 1, pred=begins)
            mbarrier.expect(values_here, v_tiles.block_type.nbytes, begins)
            hopper.load_tile(
                v_tiles, [b, h_kv, block * BLOCK_N, 0], values_here, v.index(0), begins
            )
            # A block that is taken earlier than it needs to be keeps a head in use for longer.
            mbarrier.arrive(may_take, count=1, pred=turn == almost)
            mbarrier.expect(grads_here.index(stage), grad_out_tiles.block_type.nbytes + 4 * BLOCK_M)
            hopper.load_tile(
                grad_out_tiles, [b, h, row, 0], grads_here.index(stage), grad_out.index(stage)
            )
            hopper.load_tile(
                minus_delta_tiles, [line + row], grads_here.index(stage), minus_delta.index(stage)
            )
            first_rows.index(stage).store(gl.full([1], row, gl.int32, LANES))
            sum_place = dq_sum_ptr + (line + row).to(gl.int64) * 128
            hopper.note_pointer(sum_places.index((past - 1) % (2 * STAGES)), sum_place)
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
        mbarrier.wait(keys_here, number & 1)
        h = hopper.read(work.index((number & 1) * 7))
    # The last step is followed by one that is computed, of whatever is there, but not used.
    stage = past % STAGES
    mbarrier.wait(is_free.index(stage), past // STAGES & 1 ^ 1)
    mbarrier.arrive(q_here.index(stage), count=2)
    mbarrier.arrive(grads_here.index(stage), count=1)
    mbarrier.arrive(values_here, count=1)


@gluon.jit
def quad_offsets(COLUMNS: gl.constexpr):
    """Where an accumulator of 64 rows is added: four of a thread's numbers are neighbours."""
    LAYOUT: gl.constexpr = hopper.accumulator(COLUMNS)
    rows = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))[None, :]
    return columns // 8 * 512 + rows // 16 * 128 + rows % 8 * 16 + columns % 8 // 2 * 4


@gluon.jit
def store_keys(
    sums, pointer, stride, sum_ptr, spoilt_ptr, last,
    DIM: gl.constexpr, LAYOUT: gl.constexpr, SHARED_HEADS: gl.constexpr,
):
    """Rows of dK or dV that are inside; heads that share keys add theirs up in memory."""
    if SHARED_HEADS:
        hopper.add_quads(sum_ptr + quad_offsets(sums.shape[1]), sums)
    else:
        # Counted again for each block: a register that is kept from block to block is one that
        # spills.
        row = gl.arange(0, sums.shape[0], gl.SliceLayout(1, LAYOUT)) + hopper.zero_again()
        # 0, or NaN; one operation for each number.
        is_spoilt = gl.sum(sums * 0.0, 1) != 0.0
        gl.store(spoilt_ptr + row * 0, 1, mask=is_spoilt & (row < last))
        starts = row.to(gl.int64) * stride
        dtype: gl.constexpr = pointer.dtype.element_ty
        hopper.store_parted_rows(pointer, sums, starts, row < last, dtype, DIM)


@gluon.jit
def attend(
    q, k, v, grad_out, lse, minus_delta, first_rows, sum_places, work, ds_tiles,
    q_here, grads_here, is_free, keys_here, keys_free, values_here, values_free,
    dk_sum_ptr, dv_sum_ptr, all_spoilt_ptr, dk_ptr, dv_ptr,
    stride_dkb, stride_dvb, stride_dkh, stride_dks, stride_dvh, stride_dvs,
    blocks, capacity, heads, group, scale, scale_log2,
    q_len,
    kv_len,
    q_offset,
    slope_ptr,
    slope_size_0,
    slope_stride_0,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, TILE_N: gl.constexpr, STAGES: gl.constexpr,
    SHARED_HEADS: gl.constexpr, HALF: gl.constexpr,
):
    """A warpgroup: half of the keys, all steps of all blocks that this program gets."""
    WIDTH: gl.constexpr = 128
    V_WIDTH: gl.constexpr = 128
    V_SLOTS: gl.constexpr = 1
    OTHER: gl.constexpr = 1 - HALF
    HALF_N: gl.constexpr = BLOCK_N // 2
    DQ_WIDTH: gl.constexpr = WIDTH // 2
    SCORES: gl.constexpr = hopper.accumulator(BLOCK_M)
    QUERIES: gl.constexpr = gl.SliceLayout(0, SCORES)
    OPERAND: gl.constexpr = hopper.operand(WIDTH)
    V_OPERAND: gl.constexpr = hopper.operand(V_WIDTH)
    KEYS: gl.constexpr = hopper.accumulator(WIDTH)
    VALUES: gl.constexpr = hopper.accumulator(V_WIDTH)
    DQ: gl.constexpr = hopper.accumulator(DQ_WIDTH)
    no_dq = gl.zeros([64, DQ_WIDTH], gl.float32, DQ)
    dq_offsets = HALF * 64 * DQ_WIDTH + quad_offsets(DQ_WIDTH)
    zeros = gl.zeros([HALF_N, BLOCK_M], gl.float32, SCORES)
    rows = gl.arange(0, BLOCK_M, QUERIES)[None, :]
    # Scores aren't scaled before they change.
    log2e, scale_log2 = scale_log2, scale_log2 * scale
    dk = gl.zeros([HALF_N, WIDTH], gl.float32, KEYS)
    dv = gl.zeros([HALF_N, V_WIDTH], gl.float32, VALUES)
    number = 0
    past = 0
    mbarrier.wait(keys_here, 0)
    h = hopper.read(work.index(0))
    if h >= 0:
        slot = number & 1
        masked_end = hopper.read(work.index(slot * 7 + 1))
        end = masked_end + hopper.read(work.index(slot * 7 + 2))
        block = hopper.read(work.index(slot * 7 + 5))
        first_key = block * BLOCK_N + HALF * HALF_N
        kv_idx = first_key + gl.arange(0, HALF_N, gl.SliceLayout(1, SCORES))[:, None]
        slope_value = gl.load(slope_ptr + h * slope_stride_0).to(FLOAT)
        rise = slope_value * log2e

        mbarrier.wait(values_here, number & 1)

        mbarrier.wait(q_here.index(0), 0)
        here = hopper.zero_again() + (number & 1)
        k_half = k.index(here).reshape([BLOCK_N, WIDTH]).slice(HALF * HALF_N, HALF_N)
        queries = q.index(0).reshape([BLOCK_M, WIDTH])
        s = warpgroup_mma(k_half, queries.permute((1, 0)), zeros, use_acc=False, is_async=True)
        row_lse = lse.index(0).load(QUERIES)[None, :]

        mbarrier.wait(grads_here.index(0), 0)
        s = warpgroup_mma_wait(0, deps=(s,))
        # Of a step before the first: nothing is read, and its dQ isn't added.
        hopper.arrive_at(FULL + 2 * HALF + 1)
        hopper.arrive_at(FREE + 2 * OTHER)
        while h >= 0:
            for turn in range(past, end - 1):
                stage, coming = turn % STAGES, (turn + 1) % STAGES
                phase, parity = (turn + 1) // STAGES & 1, turn & 1
                # Of the step before: where a block begins, its keys are those of the one before.
                here = hopper.zero_again() + (number + gl.where(turn == past, 1, 0) & 1)
                dq_keys = k.index(here).reshape([BLOCK_N, WIDTH]).slice(
                    HALF * DQ_WIDTH, DQ_WIDTH, dim=1
                )
                q_tile = q.index(stage).reshape([BLOCK_M, WIDTH])
                grad_out_tile = grad_out.index(stage).reshape([BLOCK_M, V_WIDTH])
                here = hopper.zero_again() + number % V_SLOTS
                v_half = v.index(here).reshape([BLOCK_N, V_WIDTH]).slice(HALF * HALF_N, HALF_N)
                their_grads = grad_out.index(stage).reshape([BLOCK_M, V_WIDTH])
                dp = warpgroup_mma(
                    v_half, their_grads.permute((1, 0)), zeros, use_acc=False, is_async=True
                )

                first_row = first_rows.index(stage).load(QUERIES)[None, :]
                kv_idx = first_key + gl.arange(0, HALF_N, gl.SliceLayout(1, SCORES))[:, None]
                is_key = kv_idx < kv_len
                # Of the last block of a row alone, which leaves others a branch.
                has_tail = first_key + HALF_N > kv_len

                row_lse = gl.fma(hopper.pinned(rise), (rows & -7).to(FLOAT), row_lse)
                lift = rise * (kv_idx - (first_row + q_offset) - (rows & 6)).to(FLOAT)
                p = gl.exp2(s * scale_log2 - (row_lse - lift))
                if turn < masked_end:
                    q_idx = hopper.place_rows(first_row + q_offset, rows)
                    p = gl.where(kv_idx <= q_idx, p, 0.0)
                    if has_tail:
                        hopper.stay()
                        p = gl.where(is_key, p, 0.0)

                p_tile = p.to(k.dtype)
                # Ahead of the product: shared memory answers late.
                row_delta = minus_delta.index(stage).load(QUERIES)[None, :]
                weights_there = gl.convert_layout(p_tile, V_OPERAND)
                dv = warpgroup_mma(
                    weights_there, grad_out_tile, dv, use_acc=turn > past, is_async=True
                )
                # The branch above keeps this wait from moving above the exponentials.
                dp = warpgroup_mma_wait(1, deps=(dp,))
                dp += row_delta

                sum_place = hopper.read_pointer(
                    sum_places.index((turn + 2 * STAGES - 1) % (2 * STAGES)), DQ
                )
                ds_tile = (p * dp).to(k.dtype)
                hopper.sync_at(FREE + 2 * HALF + parity)
                own_ds = ds_tiles.index(parity).slice(HALF * HALF_N, HALF_N, dim=1)
                own_ds.permute((1, 0)).store(ds_tile)
                fence_async_shared()
                hopper.arrive_at(FULL + 2 * HALF + parity)
                hopper.sync_at(FULL + 2 * OTHER + (parity ^ 1))
                both_ds = ds_tiles.index(parity ^ 1)
                dq = warpgroup_mma(both_ds, dq_keys, no_dq, use_acc=False, is_async=True)
                ds_there = gl.convert_layout(ds_tile, OPERAND)
                dk = warpgroup_mma(ds_there, q_tile, dk, use_acc=turn > past, is_async=True)
                mbarrier.wait(q_here.index(coming), phase)
                dq = warpgroup_mma_wait(1, deps=(dq,))
                hopper.arrive_at(FREE + 2 * OTHER + (parity ^ 1))
                # Half of it here, half where nothing waits: registers that are added are free much
                # later.
                left, right = hopper.halves(dq)
                left_places, right_places = hopper.halves(sum_place + dq_offsets)
                if turn > 0:
                    hopper.add_quads(left_places, left)
                if turn == past:
                    # The keys of the block before have been read.
                    mbarrier.arrive(keys_free, count=1)

                # Scores of the next step.
                here = hopper.zero_again() + (number & 1)
                k_half = k.index(here).reshape([BLOCK_N, WIDTH]).slice(HALF * HALF_N, HALF_N)
                queries = q.index(coming).reshape([BLOCK_M, WIDTH])
                s = warpgroup_mma(
                    k_half, queries.permute((1, 0)), zeros, use_acc=False, is_async=True
                )

                dv, dk = warpgroup_mma_wait(1, deps=(dv, dk))
                # Thread by thread; mbarrier.arrive would first wait for all of them.
                hopper.async_copy.mbarrier_arrive(is_free.index(stage), increment_count=False)
                mbarrier.wait(grads_here.index(coming), phase)
                row_lse = lse.index(coming).load(QUERIES)[None, :]
                if turn > 0:
                    hopper.add_quads(right_places, right)
                s = warpgroup_mma_wait(0, deps=(s,))
            turn = end - 1
            stage, coming = turn % STAGES, (turn + 1) % STAGES
            phase, parity = (turn + 1) // STAGES & 1, turn & 1
            # Of the step before: where a block begins, its keys are those of the one before.
            here = hopper.zero_again() + (number + gl.where(turn == past, 1, 0) & 1)
            dq_keys = k.index(here).reshape([BLOCK_N, WIDTH]).slice(
                HALF * DQ_WIDTH, DQ_WIDTH, dim=1
            )
            q_tile = q.index(stage).reshape([BLOCK_M, WIDTH])
            grad_out_tile = grad_out.index(stage).reshape([BLOCK_M, V_WIDTH])
            here = hopper.zero_again() + number % V_SLOTS
            v_half = v.index(here).reshape([BLOCK_N, V_WIDTH]).slice(HALF * HALF_N, HALF_N)
            their_grads = grad_out.index(stage).reshape([BLOCK_M, V_WIDTH])
            dp = warpgroup_mma(
                v_half, their_grads.permute((1, 0)), zeros, use_acc=False, is_async=True
            )

            first_row = first_rows.index(stage).load(QUERIES)[None, :]
            kv_idx = first_key + gl.arange(0, HALF_N, gl.SliceLayout(1, SCORES))[:, None]
            is_key = kv_idx < kv_len
            # Of the last block of a row alone, which leaves others a branch.
            has_tail = first_key + HALF_N > kv_len

            row_lse = gl.fma(hopper.pinned(rise), (rows & -7).to(FLOAT), row_lse)
            lift = rise * (kv_idx - (first_row + q_offset) - (rows & 6)).to(FLOAT)
            p = gl.exp2(s * scale_log2 - (row_lse - lift))
            if turn < masked_end:
                q_idx = hopper.place_rows(first_row + q_offset, rows)
                p = gl.where(kv_idx <= q_idx, p, 0.0)
                if has_tail:
                    hopper.stay()
                    p = gl.where(is_key, p, 0.0)

            p_tile = p.to(k.dtype)
            # Ahead of the product: shared memory answers late.
            row_delta = minus_delta.index(stage).load(QUERIES)[None, :]
            weights_there = gl.convert_layout(p_tile, V_OPERAND)
            dv = warpgroup_mma(weights_there, grad_out_tile, dv, use_acc=turn > past, is_async=True)
            # The branch above keeps this wait from moving above the exponentials.
            dp = warpgroup_mma_wait(1, deps=(dp,))
            dp += row_delta
            # Their room is the next block's.
            mbarrier.arrive(values_free, count=1)

            sum_place = hopper.read_pointer(
                sum_places.index((turn + 2 * STAGES - 1) % (2 * STAGES)), DQ
            )
            ds_tile = (p * dp).to(k.dtype)
            hopper.sync_at(FREE + 2 * HALF + parity)
            own_ds = ds_tiles.index(parity).slice(HALF * HALF_N, HALF_N, dim=1)
            own_ds.permute((1, 0)).store(ds_tile)
            fence_async_shared()
            hopper.arrive_at(FULL + 2 * HALF + parity)
            hopper.sync_at(FULL + 2 * OTHER + (parity ^ 1))
            both_ds = ds_tiles.index(parity ^ 1)
            dq = warpgroup_mma(both_ds, dq_keys, no_dq, use_acc=False, is_async=True)
            ds_there = gl.convert_layout(ds_tile, OPERAND)
            dk = warpgroup_mma(ds_there, q_tile, dk, use_acc=turn > past, is_async=True)
            dq = warpgroup_mma_wait(1, deps=(dq,))
            hopper.arrive_at(FREE + 2 * OTHER + (parity ^ 1))
            if turn > 0:
                hopper.add_quads(sum_place + dq_offsets, dq)

            if turn == past:
                # The keys of the block before have been read.
                mbarrier.arrive(keys_free, count=1)
            number += 1
            mbarrier.wait(keys_here, number & 1)
            h = hopper.read(work.index((number & 1) * 7))
            if h >= 0:
                slot = number & 1
                masked_end = end + hopper.read(work.index(slot * 7 + 1))
                end = masked_end + hopper.read(work.index(slot * 7 + 2))
                block = hopper.read(work.index(slot * 7 + 5))
                first_key = block * BLOCK_N + HALF * HALF_N
                kv_idx = first_key + gl.arange(0, HALF_N, gl.SliceLayout(1, SCORES))[:, None]
                slope_value = gl.load(slope_ptr + h * slope_stride_0).to(FLOAT)
                rise = slope_value * log2e

            mbarrier.wait(q_here.index(coming), phase)

            # Scores of the next step.
            here = hopper.zero_again() + (number & 1)
            k_half = k.index(here).reshape([BLOCK_N, WIDTH]).slice(HALF * HALF_N, HALF_N)
            queries = q.index(coming).reshape([BLOCK_M, WIDTH])
            s = warpgroup_mma(k_half, queries.permute((1, 0)), zeros, use_acc=False, is_async=True)

            dv, dk = warpgroup_mma_wait(1, deps=(dv, dk))
            # Thread by thread; mbarrier.arrive would first wait for all of them.
            hopper.async_copy.mbarrier_arrive(is_free.index(stage), increment_count=False)
            own_slot = number & 1 ^ 1
            own_block = hopper.read(work.index(own_slot * 7 + 5))
            own_key = own_block * BLOCK_N + HALF * HALF_N
            own_b = hopper.read(work.index(own_slot * 7 + 3))
            own_h_kv = hopper.read(work.index(own_slot * 7 + 4))
            key_line = hopper.read(work.index(own_slot * 7 + 6))
            sum_row = (key_line.to(gl.int64) * blocks + own_block) * BLOCK_N + HALF * HALF_N
            own_tile = key_line * gl.cdiv(capacity, TILE_N) + own_block * BLOCK_N // TILE_N
            last = capacity - own_key
            dk_place = own_b * stride_dkb + own_h_kv * stride_dkh + own_key * stride_dks
            dv_place = own_b * stride_dvb + own_h_kv * stride_dvh + own_key * stride_dvs
            # Multiples of 8: what TMA can address.
            store_keys(
                dv, dv_ptr + dv_place // 8 * 8, stride_dvs, dv_sum_ptr + sum_row * V_WIDTH,
                all_spoilt_ptr + own_tile, last, 128, VALUES, SHARED_HEADS,
            )
            store_keys(
                dk * scale, dk_ptr + dk_place // 8 * 8, stride_dks, dk_sum_ptr + sum_row * WIDTH,
                all_spoilt_ptr + own_tile, last, 128, KEYS, SHARED_HEADS,
            )

            mbarrier.wait(values_here, number & 1)

            mbarrier.wait(grads_here.index(coming), phase)
            row_lse = lse.index(coming).load(QUERIES)[None, :]
            s = warpgroup_mma_wait(0, deps=(s,))
            past = turn + 1

        here = hopper.zero_again() + (number & 1 ^ 1)
        dq_keys = k.index(here).reshape([BLOCK_N, WIDTH]).slice(HALF * DQ_WIDTH, DQ_WIDTH, dim=1)
        hopper.sync_at(FULL + 2 * OTHER + (past & 1 ^ 1))
        both_ds = ds_tiles.index(past & 1 ^ 1)
        dq = warpgroup_mma(both_ds, dq_keys, no_dq, use_acc=False, is_async=True)
        sum_place = hopper.read_pointer(
            sum_places.index((past + 2 * STAGES - 1) % (2 * STAGES)), DQ
        )
        dq = warpgroup_mma_wait(0, deps=(dq,))
        hopper.add_quads(sum_place + dq_offsets, dq)

        # The other warpgroup's last arrival, so that every barrier ends where it began.
        hopper.sync_at(FREE + 2 * HALF + (past & 1))


# Values never specialise: new lengths, strides, scalars and data run the same binary.
@gluon.jit(
    do_not_specialize=[
        "late_side", "schedule_stride_b", "schedule_stride_h", "masked_width", "full_width",
        "heads", "stride_dkb", "stride_dkh", "stride_dks", "stride_dvb", "stride_dvh",
        "stride_dvs", "items", "side", "group", "capacity", "padded_len", "q_len", "kv_len",
        "q_offset", "scale", "scale_log2", "slope_size_0", "slope_stride_0"
    ],
    do_not_specialize_on_alignment=["slope_ptr"],
)
def attention_backward(
    dq_sum_ptr,
    dk_sum_ptr,
    dv_sum_ptr,
    spoilt_kv_ptr,
    next_item_ptr,
    longest_ptr,
    late_side: gl.int32,
    counts,
    masked_runs,
    full_runs,
    q_tiles,
    k_tiles,
    v_tiles,
    grad_out_tiles,
    lse_tiles,
    minus_delta_tiles,
    schedule_stride_b: gl.int64,
    schedule_stride_h: gl.int64,
    masked_width: gl.int32,
    full_width: gl.int32,
    heads: gl.int32,
    grad_k_ptr,
    grad_v_ptr,
    stride_dkb: gl.int64,
    stride_dkh: gl.int64,
    stride_dks: gl.int64,
    stride_dvb: gl.int64,
    stride_dvh: gl.int64,
    stride_dvs: gl.int64,
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
    slope_ptr,
    slope_size_0: gl.int32,
    slope_stride_0: gl.int64,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    TILE_M: gl.constexpr,
    TILE_N: gl.constexpr,
    STAGES: gl.constexpr,
    SHARED_HEADS: gl.constexpr,
):
    blocks = gl.cdiv(capacity, BLOCK_N)
    STEPS: gl.constexpr = TILE_M // BLOCK_M
    k = gl.allocate_shared_memory(k_tiles.dtype, [2, 1, 1, BLOCK_N, 128], k_tiles.layout)
    v = gl.allocate_shared_memory(v_tiles.dtype, [1, 1, 1, BLOCK_N, 128], v_tiles.layout)
    q = gl.allocate_shared_memory(q_tiles.dtype, [STAGES, 1, 1, BLOCK_M, 128], q_tiles.layout)
    grad_out = gl.allocate_shared_memory(
        q_tiles.dtype, [STAGES, 1, 1, BLOCK_M, 128], grad_out_tiles.layout
    )
    lse = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], lse_tiles.layout)
    minus_delta = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], minus_delta_tiles.layout)
    DS_TILES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_N], q_tiles.dtype)
    ds_tiles = gl.allocate_shared_memory(q_tiles.dtype, [2, BLOCK_M, BLOCK_N], DS_TILES)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    first_rows = gl.allocate_shared_memory(gl.int32, [STAGES, 1], PLAIN)
    sum_places = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], PLAIN)
    work = gl.allocate_shared_memory(gl.int32, [14, 1], PLAIN)
    keys_here = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    keys_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    values_here = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    values_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    may_take = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(may_take, count=1)
    mbarrier.init(values_here, count=1)
    mbarrier.init(values_free, count=2)
    q_here = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    grads_here = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    is_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # The copies, and what is to do; both warpgroups.
    mbarrier.init(keys_here, count=2)
    mbarrier.init(keys_free, count=3)
    for stage in gl.static_range(STAGES):
        # The copies, and what else is read of the queries.
        mbarrier.init(q_here.index(stage), count=2)
        mbarrier.init(grads_here.index(stage), count=1)
        # Every thread of the two warpgroups that compute.
        mbarrier.init(is_free.index(stage), count=256)
    gl.warp_specialize(
        [
            (attend, (
                q, k, v, grad_out, lse, minus_delta, first_rows, sum_places, work, ds_tiles,
                q_here, grads_here, is_free, keys_here, keys_free, values_here, values_free,
                dk_sum_ptr, dv_sum_ptr, spoilt_kv_ptr, grad_k_ptr, grad_v_ptr,
                stride_dkb, stride_dvb, stride_dkh, stride_dks, stride_dvh, stride_dvs,
                blocks, capacity, heads, group, scale, scale_log2,
                q_len,
                kv_len,
                q_offset,
                slope_ptr,
                slope_size_0,
                slope_stride_0,
                BLOCK_M, BLOCK_N, TILE_N, STAGES, SHARED_HEADS, 0,
            )),
            (attend, (
                q, k, v, grad_out, lse, minus_delta, first_rows, sum_places, work, ds_tiles,
                q_here, grads_here, is_free, keys_here, keys_free, values_here, values_free,
                dk_sum_ptr, dv_sum_ptr, spoilt_kv_ptr, grad_k_ptr, grad_v_ptr,
                stride_dkb, stride_dvb, stride_dkh, stride_dks, stride_dvh, stride_dvs,
                blocks, capacity, heads, group, scale, scale_log2,
                q_len,
                kv_len,
                q_offset,
                slope_ptr,
                slope_size_0,
                slope_stride_0,
                BLOCK_M, BLOCK_N, TILE_N, STAGES, SHARED_HEADS, 1,
            )),
            (announce, (
                k_tiles, k, work, keys_here, keys_free, may_take, spoilt_kv_ptr,
                counts, masked_runs, full_runs, masked_width, full_width,
                schedule_stride_b, schedule_stride_h, next_item_ptr,
                items, blocks, heads, group, side, capacity, padded_len,
                longest_ptr, late_side,
                BLOCK_M, BLOCK_N, TILE_M, TILE_N, STEPS, SHARED_HEADS,
            )),
            (load, (
                q_tiles, v_tiles, grad_out_tiles, lse_tiles, minus_delta_tiles,
                q, v, grad_out, lse, minus_delta, first_rows, sum_places, dq_sum_ptr,
                work, q_here, grads_here, is_free, keys_here, keys_free,
                values_here, values_free, may_take,
                masked_runs, full_runs, masked_width, full_width,
                schedule_stride_b, schedule_stride_h, heads, group, capacity, padded_len,
                BLOCK_M, BLOCK_N, TILE_M, TILE_N, STAGES, STEPS,
            )),
        ],
        [4, 1, 1],
        [240, 24, 24],
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
    dq_sum_ptr += (line * padded_len + block * 64) * 128
    spoilt = 0
    dims = tl.arange(0, 128)[None, :]
    dq = tl.load(dq_sum_ptr + tl.arange(0, 8192)) * scale
    dq = tl.reshape(dq, [16, 4, 8, 4, 2, 2])
    dq = tl.reshape(tl.permute(dq, [1, 4, 2, 0, 3, 5]), [64, 128])
    inside = (rows < q_len) & (dims < 128)
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
    dk_sum_ptr += sum_row * 128
    dims = tl.arange(0, 128)[None, :]
    inside = (rows < capacity) & (dims < 128)
    dk = tl.load(dk_sum_ptr + tl.arange(0, 8192))
    dk = tl.reshape(dk, [16, 4, 8, 4, 2, 2])
    dk = tl.reshape(tl.permute(dk, [1, 4, 2, 0, 3, 5]), [64, 128])
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
