# flashgen: visited tiles

import triton
import triton.language as tl


@triton.jit
def is_visited(states_ptr, tile, tiles, head_step, group):
    """Whether any head of a group visits a tile."""
    inside = (tile >= 0) & (tile < tiles)
    visited = tl.load(states_ptr + tile, mask=inside, other=0) != 0
    for head in range(1, group):
        visited |= tl.load(states_ptr + head * head_step + tile, mask=inside, other=0) != 0
    return visited


@triton.jit(do_not_specialize=["head_step", "rows", "tiles", "heads", "group", "width"])
def visit(
    states_ptr,
    counts_ptr,
    runs_ptr,
    head_step: tl.int64,
    rows: tl.int32,
    tiles: tl.int32,
    heads: tl.int32,
    group: tl.int32,
    width: tl.int32,
    CHUNK: tl.constexpr,
):
    """Runs of tiles that any of `group` heads visits, cut or full. `heads`: groups of them."""
    row = tl.program_id(0) % rows
    states_ptr += tl.program_id(0) // rows * group * head_step + row * tiles
    runs_ptr += tl.program_id(0).to(tl.int64) * (2 * width)
    runs = 0
    ended = 0
    members = 0
    low = tiles
    high = 0
    for start in range(0, tiles + 1, CHUNK):
        tile = start + tl.arange(0, CHUNK)
        here = is_visited(states_ptr, tile, tiles, head_step, group)
        before = is_visited(states_ptr, tile - 1, tiles, head_step, group)
        opens = (here & ~before).to(tl.int32)
        closes = (before & ~here).to(tl.int32)
        rank = runs + tl.cumsum(opens, 0) - 1
        tl.store(runs_ptr + 2 * rank, tile, mask=(opens > 0) & (rank < width - 2))
        rank = ended + tl.cumsum(closes, 0) - 1
        tl.store(runs_ptr + 2 * rank + 1, tile, mask=(closes > 0) & (rank < width - 2))
        runs += tl.sum(opens, 0)
        ended += tl.sum(closes, 0)
        members += tl.sum(here.to(tl.int32), 0)
        low = tl.minimum(low, tl.min(tl.where(here, tile, tiles), 0))
        high = tl.maximum(high, tl.max(tl.where(here, tile + 1, 0), 0))
    past = 2 * tl.minimum(runs, width - 2) + tl.arange(0, 4)
    # More runs than there is room for: one run over everything.
    if runs > width - 2:
        tl.debug_barrier()
        tl.store(runs_ptr, low)
        tl.store(runs_ptr + 1, high)
        members = high - low
        past = 2 + tl.arange(0, 4)
    tl.store(runs_ptr + past, tl.zeros([4], tl.int32))
    tl.store(counts_ptr + tl.program_id(0), members)
