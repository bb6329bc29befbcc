"""Planning on the device: generated kernels fill buffers of a size known before."""

from __future__ import annotations

import functools
from typing import Any

import torch

from . import binaries, emit
from .emit.decode import visiting
from .emit.plan import PlanModule, plan_module
from .geometry import Geometry
from .kernel_names import spell
from .launch import data_values, key_parts, launch, position_values, variant_of
from .order import FAR, Ranges, lead, ranges_like
from .schedule import Planner, Runs, Visits
from .schedule.classify import grid_of
from .schedule.queue import COLUMNS
from .schedule.runs import MOST_RUNS, run_capacity
from .spec import Bound, Spec
from .storage import Packing
from .tiling import Tiling

_TILING = Tiling(0, 0, 4, 1)
# Tiles that a program looks at together; the same for every length.
CHUNK = 128
# Rows of packed sequences that a program compares with as many others.
_COMPARED = 64


@functools.lru_cache(maxsize=1024)
def generate(spec: Spec, variant: emit.Variant) -> PlanModule:
    """The planning kernels' text."""
    return plan_module(spec, variant)


@functools.lru_cache(maxsize=1024)
def _module(spec: Spec, variant: emit.Variant, parts: tuple[str, ...]) -> tuple[Any, PlanModule]:
    made = generate(spec, variant)
    return binaries.Kernels(made.generated.name, made.generated.text, parts), made


@functools.cache
def compaction(packed: bool = False) -> emit.Generated:
    """The text of the compaction kernel."""
    template = emit.environment().get_template("compact.py.j2")
    text = template.render(header="# flashgen: runs of tiles", packed=packed)
    places = ("sequences_ptr", "cu_seqlens_q_ptr", "cu_seqlens_kv_ptr") if packed else ()
    arguments = (
        "states_ptr", "counts_ptr", "masked_ptr", "full_ptr", "step", "row_step", "grid_step",
        "rows", "tiles", "heads", "kv_len", "kv_lens_ptr", *places, "width",
    )  # fmt: skip
    return emit.Generated("compact" + "_packed" * packed, emit.tidy(text), arguments)


@functools.lru_cache(maxsize=8)
def _compaction(packed: bool, parts: tuple[str, ...]) -> Any:
    generated = compaction(packed)
    return binaries.Kernels(generated.name, generated.text, parts).compact


@functools.cache
def ranging() -> emit.Generated:
    """The text of the kernel that finds ranges of equal elements."""
    text = (
        emit.environment().get_template("ranges.py.j2").render(header="# flashgen: data in order")
    )
    arguments = (
        "x_ptr", "range_ptr", "order_ptr", "rows", "n", "row_stride", "stride", "steps"
    )  # fmt: skip
    return emit.Generated("ranges", emit.tidy(text), arguments)


@functools.lru_cache(maxsize=8)
def _ranging(parts: tuple[str, ...]) -> Any:
    generated = ranging()
    return binaries.Kernels(generated.name, generated.text, parts).find_ranges


def find_ranges(tensor: torch.Tensor, dim: int) -> Ranges:
    """`order.find_ranges` by a kernel."""
    x = lead(tensor, dim)
    shape, n = x.shape, x.shape[-1]
    x = x.reshape(-1, n)
    found = torch.empty((2, *shape), dtype=torch.int32, device=x.device)
    order = torch.empty(shape[:-1], dtype=torch.int32, device=x.device)
    values = {
        "x_ptr": x, "range_ptr": found, "order_ptr": order, "rows": len(x), "n": n,
        "row_stride": x.stride(0), "stride": x.stride(1), "steps": n.bit_length(),
    }  # fmt: skip
    constants = {"FAR": FAR, "BLOCK": 1024}
    if x.numel():
        programs = len(x) * (-(-n // 1024) + 1)
        launch(_ranging(key_parts()), ranging().arguments, values, constants, _TILING, programs)
    return ranges_like(tensor, dim, found, order)


def plan(
    bound: Bound, geometry: Geometry, block: tuple[int, int], planner: Planner
) -> tuple[torch.Tensor, Runs]:
    """The states of all tiles and the runs along the rows, without waiting for the device."""
    grid = grid_of(bound, geometry, block)
    states = torch.empty(grid, dtype=torch.int8, device=geometry.device)
    runs = _runs(grid[:3], run_capacity(bound.spec.mask, grid[3]), geometry.device)
    lengths = (geometry.kv_len, geometry.kv_lens, block)
    if not states.numel():
        _compact(states, *lengths, runs, packing=geometry.packing)
    elif bound.spec.mask is None:
        _fill(states, geometry, block)
        _compact(states, *lengths, runs, packing=geometry.packing)
    else:
        _classify(states, runs, spell(bound), geometry, block, planner)
        if grid[3] > CHUNK:
            _compact(states, *lengths, runs, packing=geometry.packing)
    return states, runs


def _runs(shape: tuple[int, ...], capacity: int, device: torch.device) -> Runs:
    """Buffers for rows of so many runs; a kernel reads three more."""
    counts = torch.empty((*shape, 3), dtype=torch.int32, device=device)
    size = (*shape, capacity + 3, 2)
    masked, full = (torch.empty(size, dtype=torch.int32, device=device) for _ in range(2))
    return Runs(counts, masked, full)


def _fill(states: torch.Tensor, geometry: Geometry, block: tuple[int, int]) -> None:
    """Without a mask every tile inside the lengths is full."""
    if geometry.kv_lens is None:
        states.fill_(2)
        return
    starts = torch.arange(states.shape[3], device=states.device) * block[1]
    lens = geometry.kv_lens.reshape(-1, 1, 1, 1)
    if geometry.packing is not None:
        b, tile = geometry.packing.tiles(block[0])
        is_row = tile * block[0] < geometry.packing.q_lens[b]
        lens = torch.where(is_row, lens.flatten()[b], 0).reshape(1, 1, -1, 1)
    states.copy_((starts < lens).to(torch.int8) * 2)


def _classify(
    states: torch.Tensor,
    runs: Runs,
    bound: Bound,
    geometry: Geometry,
    block: tuple[int, int],
    planner: Planner,
) -> None:
    """Write the states, and the runs of rows of at most CHUNK tiles."""
    module, made = _module(bound.spec, variant_of(bound, geometry, 0, 0), key_parts())
    batch, heads, q_tiles, kv_tiles = states.shape
    grids, width = batch * heads, 1 << (block[1] - 1).bit_length()
    values = {
        **position_values(geometry), **data_values(bound),
        "states_ptr": states, "counts_ptr": runs.counts,
        "masked_ptr": runs.masked, "full_ptr": runs.full, "width": runs.masked.shape[-2],
        "q_tiles": q_tiles, "kv_tiles": kv_tiles, "grids": grids, "heads": heads,
        "group": geometry.group,
    }  # fmt: skip
    lines = grids
    if geometry.packing is not None:
        # All sequences' queries stand in one line of tiles, their keys do not.
        lines = geometry.batch * heads
        values |= {"sequences_ptr": geometry.packing.sequences(block[0]), "lines": lines}
    if made.summarize:
        programs = grids * q_tiles + lines * kv_tiles
        for name, dtype, slots in made.buffers:
            values[name] = torch.empty(2 * slots * programs, dtype=dtype, device=states.device)
        tiles = {"TILE_M": block[0], "TILE_N": block[1], "BLOCK_N": width}
        tiles["BLOCK_M"] = 1 << (block[0] - 1).bit_length()
        launch(module.summarize, made.summarize, values, tiles, _TILING, programs)
    constants = {
        "TILE_M": block[0],
        "TILE_N": block[1],
        "BLOCK_N": width,
        "CHUNK": CHUNK,
        "ELEMENTS": planner != "bounds",
    }
    programs = grids * q_tiles * -(-kv_tiles // CHUNK)
    launch(module.classify, made.generated.arguments, values, constants, _TILING, programs)


def compact(
    states: torch.Tensor,
    kv_len: int,
    kv_lens: torch.Tensor | None,
    block: tuple[int, int],
    capacity: int,
    by_key: bool = False,
    packing: Packing | None = None,
) -> Runs:
    """Runs along the rows of the states; `by_key`: along their columns.

    Packed: a column is a tile of keys in its own sequence's rows; all of them stand in one line."""
    batch, heads, q_tiles, kv_tiles = states.shape
    rows = kv_tiles if by_key else q_tiles
    if packing is not None and by_key:
        rows = packing.rows(block[1], by_key)
    runs = _runs((batch, heads, rows), capacity, states.device)
    _compact(states, kv_len, kv_lens, block, runs, by_key, packing)
    return runs


def _compact(
    states: torch.Tensor,
    kv_len: int,
    kv_lens: torch.Tensor | None,
    block: tuple[int, int],
    runs: Runs,
    by_key: bool = False,
    packing: Packing | None = None,
) -> None:
    batch, heads, q_tiles, kv_tiles = states.shape
    rows, tiles = runs.counts.shape[2], q_tiles if by_key else kv_tiles
    values = {
        "states_ptr": states, "counts_ptr": runs.counts,
        "masked_ptr": runs.masked, "full_ptr": runs.full, "width": runs.masked.shape[-2],
        "step": kv_tiles if by_key else 1, "row_step": 1 if by_key else kv_tiles,
        "grid_step": q_tiles * kv_tiles,
        "rows": rows, "tiles": tiles, "heads": heads, "kv_len": kv_len,
        "kv_lens_ptr": states if kv_lens is None else kv_lens,
    }  # fmt: skip
    constants: dict[str, Any] = {"TILE_N": block[1], "BY_KEY": by_key, "CHUNK": CHUNK}
    if packing is None:
        constants["HAS_LENS"] = kv_lens is not None
    else:
        constants["TILE_M"] = block[0]
        values |= {
            "sequences_ptr": packing.sequences(block[by_key], by_key),
            "cu_seqlens_q_ptr": packing.cu_q,
            "cu_seqlens_kv_ptr": packing.cu_q if packing.cu_kv is None else packing.cu_kv,
        }
    programs = batch * heads * rows
    if programs:
        is_packed = packing is not None
        kernel, arguments = _compaction(is_packed, key_parts()), compaction(is_packed).arguments
        launch(kernel, arguments, values, constants, _TILING, programs)


@functools.cache
def queueing() -> emit.Generated:
    """The text of the kernel that puts packed sequences' rows of tiles in order."""
    template = emit.environment().get_template("queue.py.j2")
    arguments = (
        "counts", "sequences_ptr", "cu_ptr", "other_cu_ptr", "queue_ptr", "rows", "TILE",
        "OTHER_TILE",
    )  # fmt: skip
    text = template.render(header="# flashgen: packed rows in order")
    return emit.Generated("queue", emit.tidy(text), arguments)


@functools.lru_cache(maxsize=8)
def _queueing(parts: tuple[str, ...]) -> Any:
    generated = queueing()
    return binaries.Kernels(generated.name, generated.text, parts).queue


def queue(
    counts: torch.Tensor,
    packing: Packing,
    block: tuple[int, int],
    by_key: bool = False,
    late_first: bool = False,
) -> torch.Tensor:
    """`schedule.queue` by a kernel; what follows the rows that hold a tile is anything."""
    rows, sides = counts.shape[2], (packing.cu_q, packing.cu_kv)
    found = torch.empty(rows + 1, COLUMNS, dtype=torch.int32, device=counts.device)
    values = {
        "counts": counts, "sequences_ptr": packing.sequences(block[by_key], by_key),
        "cu_ptr": sides[by_key], "other_cu_ptr": sides[not by_key], "queue_ptr": found,
        "rows": rows, "TILE": block[by_key], "OTHER_TILE": block[not by_key],
    }  # fmt: skip
    programs = -(-rows // _COMPARED)
    kernel, names = _queueing(key_parts()), queueing().arguments
    constants = {"LATE_FIRST": late_first, "BLOCK": _COMPARED}
    launch(kernel, names, values, constants, _TILING, programs)
    return found


@functools.lru_cache(maxsize=8)
def _visiting(parts: tuple[str, ...]) -> Any:
    generated = visiting()
    return binaries.Kernels(generated.name, generated.text, parts).visit


def visits(states: torch.Tensor, group: int) -> Visits:
    """Runs of tiles that any of `group` heads visits, along the rows of the states."""
    batch, heads, rows, tiles = states.shape
    group = group if heads > 1 else 1
    shape, device = (batch, heads // group, rows), states.device
    width = min(tiles // 2 + 1, MOST_RUNS) + 3
    counts = torch.empty(shape, dtype=torch.int32, device=device)
    runs = torch.empty((*shape, width, 2), dtype=torch.int32, device=device)
    values = {
        "states_ptr": states, "counts_ptr": counts, "runs_ptr": runs, "head_step": rows * tiles,
        "rows": rows, "tiles": tiles, "heads": heads // group, "group": group, "width": width,
    }  # fmt: skip
    if counts.numel():
        kernel, names = _visiting(key_parts()), visiting().arguments
        launch(kernel, names, values, {"CHUNK": CHUNK}, _TILING, counts.numel())
    return Visits(counts, runs)
