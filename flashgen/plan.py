"""Planning on the device: generated kernels fill buffers of a size known before."""

from __future__ import annotations

import functools
from typing import Any

import torch

from . import cache, emit
from .emit_plan import PlanModule, Side, plan_module
from .geometry import Geometry
from .kernel_names import spell
from .launch import data_values, key_parts, launch, position_values, variant_of
from .schedule import Planner, Runs
from .schedule.classify import grid_of
from .schedule.runs import run_capacity
from .spec import Bound, Spec
from .tiling import Tiling

_TILING = Tiling(0, 0, 4, 1)
# Tiles that a program looks at together; the same for every length.
_CHUNK = 64


@functools.lru_cache(maxsize=1024)
def generate(spec: Spec, variant: emit.Variant) -> PlanModule:
    """The planning kernels' text."""
    return plan_module(spec, variant)


@functools.lru_cache(maxsize=1024)
def _module(spec: Spec, variant: emit.Variant, parts: tuple[str, ...]) -> tuple[Any, PlanModule]:
    made = generate(spec, variant)
    return cache.module(made.generated.name, made.generated.text, parts), made


@functools.cache
def compaction() -> emit.Generated:
    """The text of the compaction kernel."""
    template = emit.environment().get_template("compact.py.j2")
    text = template.render(header="# flashgen: runs of tiles")
    arguments = (
        "states_ptr", "counts_ptr", "masked_ptr", "full_ptr", "step", "row_step", "grid_step",
        "rows", "tiles", "heads", "kv_len", "kv_lens_ptr", "masked_width", "full_width",
    )  # fmt: skip
    return emit.Generated("compact", emit.tidy(text), arguments)


@functools.lru_cache(maxsize=8)
def _compaction(parts: tuple[str, ...]) -> Any:
    generated = compaction()
    return cache.module(generated.name, generated.text, parts).compact


def plan(
    bound: Bound, geometry: Geometry, block: tuple[int, int], planner: Planner
) -> tuple[torch.Tensor, Runs]:
    """The states of all tiles and the runs along the rows, without waiting for the device."""
    bound = spell(bound)
    grid = grid_of(bound, geometry, block)
    states = torch.empty(grid, dtype=torch.int8, device=geometry.device)
    if states.numel():
        if bound.spec.mask is None:
            _fill(states, geometry, block)
        else:
            _classify(states, bound, geometry, block, planner)
    capacity = run_capacity(bound.spec.mask, grid[3])
    return states, compact(states, geometry.kv_len, geometry.kv_lens, block[1], capacity)


def _fill(states: torch.Tensor, geometry: Geometry, block: tuple[int, int]) -> None:
    """Without a mask every tile inside the lengths is full."""
    if geometry.kv_lens is None:
        states.fill_(2)
        return
    starts = torch.arange(states.shape[3], device=states.device) * block[1]
    states.copy_((starts < geometry.kv_lens.reshape(-1, 1, 1, 1)).to(torch.int8) * 2)


def _classify(
    states: torch.Tensor,
    bound: Bound,
    geometry: Geometry,
    block: tuple[int, int],
    planner: Planner,
) -> None:
    module, made = _module(bound.spec, variant_of(bound, geometry, 0, 0), key_parts())
    batch, heads, q_tiles, kv_tiles = states.shape
    values = {
        **position_values(geometry),
        **data_values(bound),
        "states_ptr": states,
        "q_tiles": q_tiles,
        "kv_tiles": kv_tiles,
        "heads": heads,
        "group": geometry.group,
    }
    for side in made.sides:
        tiles, size = (q_tiles, block[0]) if side.name == "q" else (kv_tiles, block[1])
        values |= _summarize(module, side, values, batch * heads, tiles, size)
    constants = {
        "TILE_M": block[0],
        "TILE_N": block[1],
        "BLOCK_N": 1 << (block[1] - 1).bit_length(),
        "CHUNK": _CHUNK,
        "ELEMENTS": planner != "bounds",
    }
    programs = batch * heads * q_tiles * -(-kv_tiles // _CHUNK)
    launch(module.classify, made.generated.arguments, values, constants, _TILING, programs)


def _summarize(
    module: Any, side: Side, values: dict[str, Any], grids: int, tiles: int, size: int
) -> dict[str, torch.Tensor]:
    device = values["states_ptr"].device
    summaries = {
        f"{s.name}_{end}_ptr": torch.empty(grids * tiles, dtype=s.dtype, device=device)
        for s in side.summaries
        for end in ("min", "max")
    }
    kernel = getattr(module, f"summarize_{side.name}")
    constants = {"TILE": size, "BLOCK": 1 << (size - 1).bit_length()}
    arguments = tuple(emit.bare(a) for a in side.arguments)
    every = {**values, **summaries, "tiles": tiles}
    launch(kernel, arguments, every, constants, _TILING, grids * tiles)
    return summaries


def compact(
    states: torch.Tensor,
    kv_len: int,
    kv_lens: torch.Tensor | None,
    tile_n: int,
    capacity: int,
    by_key: bool = False,
) -> Runs:
    """Runs along the rows of the states; `by_key`: along their columns."""
    batch, heads, q_tiles, kv_tiles = states.shape
    rows, tiles = (kv_tiles, q_tiles) if by_key else (q_tiles, kv_tiles)
    shape = (batch, heads, rows)
    counts = torch.empty((*shape, 3), dtype=torch.int32, device=states.device)
    masked, full = (
        torch.empty((*shape, capacity + 3, 2), dtype=torch.int32, device=states.device)
        for _ in range(2)
    )
    steps = (kv_tiles, 1) if by_key else (1, kv_tiles)
    values = {
        "states_ptr": states, "counts_ptr": counts, "masked_ptr": masked, "full_ptr": full,
        "step": steps[0], "row_step": steps[1], "grid_step": q_tiles * kv_tiles,
        "rows": rows, "tiles": tiles, "heads": heads, "kv_len": kv_len,
        "kv_lens_ptr": states if kv_lens is None else kv_lens,
        "masked_width": capacity + 3, "full_width": capacity + 3,
    }  # fmt: skip
    constants = {
        "HAS_LENS": kv_lens is not None,
        "TILE_N": tile_n,
        "BY_KEY": by_key,
        "CHUNK": _CHUNK,
    }
    programs = batch * heads * rows
    if programs:
        kernel = _compaction(key_parts())
        launch(kernel, compaction().arguments, values, constants, _TILING, programs)
    return Runs(counts, masked, full)
