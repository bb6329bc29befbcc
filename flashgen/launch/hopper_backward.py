"""Running Hopper's backward kernels: when they can, descriptors, sums, repairs."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import astuple
from typing import Any

import torch

from .. import binaries, emit, tune
from ..config import config
from ..emit.gradients import Wanted, ignores_score
from ..emit.hopper_backward import Module, hopper_backward, keys_of, stages_of, sum_width, width_of
from ..emit.sums import NO_DATA
from ..geometry import Geometry
from ..spec import Bound, Spec
from ..tiling import Tiling
from ..tiling.hopper import Steps, steps_for, steps_to_try
from . import key_parts, launch, multiprocessors, tuned_as, variant_of

BLOCK_M = 64
# Four warps are one warpgroup; the kernel adds the others itself.
_ATTENTION = Tiling(0, 0, 4, 1)
_FINISH = Tiling(64, 64, 8, 1)
_ORDER = Tiling(0, 0, 4, 1)
# Blocks that are taken by how long they are, for each program.
_LATE_ROUNDS = 3
# What two tiles of 256 dimensions leave of shared memory, of a query.
_MOST_QUERY_BYTES = 8


def obstacle(
    bound: Bound,
    geometry: Geometry,
    head_dims: tuple[int, int],
    dtype: torch.dtype,
    block_size: tuple[int, int],
    scale: float,
    dropout: bool = False,
) -> str:
    """Why the portable backward runs instead; empty where Hopper's does."""
    if geometry.pages is not None:
        return "it reads no pages"
    if dropout:
        return "it drops no weights"
    if bound.spec.reads_doubles:
        return "it compares no float64 data in a mask"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"its products are of 16-bit numbers, not {dtype}"
    if max(head_dims) > 256:
        return f"a head dimension of {max(head_dims)} is more than 256"
    if any(dim % 8 for dim in head_dims):
        return f"rows of {head_dims} numbers aren't multiples of 16 bytes"
    block_n = keys_of(*head_dims)
    if block_size[0] % BLOCK_M or block_size[1] % block_n:
        return f"tiles of {block_size[0]} x {block_size[1]} hold no {BLOCK_M} x {block_n}"
    if scale == 0:
        return "it divides by the scale, which is 0"
    if ignores_score(bound.spec):
        return "the score function ignores the score"
    if min(map(width_of, head_dims)) == 256:
        made = generate(bound.spec, variant_of(bound, geometry, *head_dims))
        if made.query_bytes > _MOST_QUERY_BYTES:
            return f"shared memory has no room for {made.query_bytes} bytes of data of each query"
    return ""


@functools.lru_cache(maxsize=1024)
def generate(
    spec: Spec, variant: emit.Variant, ordered: bool = False, wanted: Wanted = NO_DATA
) -> Module:
    """The text of Hopper's backward kernels; `ordered`: with sums in a fixed order.

    `wanted`: gradients of data, those that it computes."""
    return hopper_backward(spec, variant, wanted, ordered=ordered)


@functools.lru_cache(maxsize=1024)
def _module(
    spec: Spec, variant: emit.Variant, ordered: bool, wanted: Wanted, parts: tuple[str, ...]
) -> tuple[Any, Module]:
    made = generate(spec, variant, ordered, wanted)
    return binaries.Kernels(made.name, made.text, parts), made


def can_describe(tensors: Mapping[str, torch.Tensor]) -> str:
    """Why TMA can't address one of a call's tensors; empty if it can."""
    from . import tma

    found = ((name, tma.can_describe(tensor)) for name, tensor in tensors.items())
    return next((f"{name} has {problem}" for name, problem in found if problem), "")


def backward(
    spec: Spec,
    variant: emit.Variant,
    values: Mapping[str, Any],
    geometry: Geometry,
    block_size: tuple[int, int],
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ordered: bool = False,
    wanted: Wanted = NO_DATA,
) -> dict[str, torch.Tensor]:
    """Write the gradients of q, k and v, and add to those of data that are `wanted`.

    `values`: what the portable kernels take, LSE and minus delta of each row prepared, a sum of dQ
    that is 0, and the runs along the queries; `ordered`: equal bit by bit from run to run. Returns
    which tiles hold numbers that aren't finite: `q` [B, Hq, query tiles] and `kv` [B, Hkv, key
    tiles], int32, not 0 for these; packed: tiles of all sequences, B = 1."""
    made = generate(spec, variant, ordered, wanted)
    what = tuned_as(made.name, made.text, values["q_ptr"].dtype)
    default = default_steps(variant, ordered)

    def run(steps: Steps) -> dict[str, torch.Tensor]:
        if config.tune != "off":
            # Another run has added to them.
            for name in ("dq_sum_ptr", *(f"grad_{name}_ptr" for name in wanted.data)):
                values[name].zero_()
        return _backward(spec, variant, values, geometry, block_size, grads, steps, wanted)

    return run(tuned(what, geometry.device, default, block_size, variant.packed, run))


def default_steps(variant: emit.Variant, ordered: bool = False) -> Steps:
    """The steps where tuning has found no others."""
    return steps_for(stages_of(variant.head_dim, variant.v_head_dim), ordered)


def tuned(
    what: str,
    device: torch.device,
    default: Steps,
    block_size: tuple[int, int],
    packed: bool,
    run: Callable[[Steps], Any] | None = None,
) -> Steps:
    """The steps that tuning found, or finds by `run(steps)`; else the default. `packed`: the
    order stays, as blocks are taken from a queue that follows it."""
    found = tune.numbers(
        f"{what}, tiles of {block_size[0]} x {block_size[1]}",
        device,
        (astuple(steps) for steps in steps_to_try(default, not packed, config.tune)),
        astuple(default),
        lambda numbers: default.order <= numbers[2] <= (default.order if packed else 2),
        None if run is None else lambda numbers: run(Steps(*numbers)),
    )
    return Steps(*found)


def _backward(
    spec: Spec,
    variant: emit.Variant,
    values: Mapping[str, Any],
    geometry: Geometry,
    block_size: tuple[int, int],
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    steps: Steps,
    wanted: Wanted,
) -> dict[str, torch.Tensor]:
    ordered = steps.order == 2
    module, made = _module(spec, variant, ordered, wanted, key_parts())
    block_n = keys_of(variant.head_dim, variant.v_head_dim)
    sums = _Sums(values, variant, geometry, block_size, grads)
    constants = {
        "BLOCK_M": BLOCK_M, "BLOCK_N": block_n, "TILE_M": block_size[0], "TILE_N": block_size[1],
        "STAGES": steps.stages,
        "SHARED_HEADS": geometry.group > 1,
    }  # fmt: skip
    blocks, batch = math.ceil(geometry.kv_len / block_n), geometry.batch
    if geometry.packing is not None:
        # At most; only the device knows how many of them hold keys.
        blocks, batch = values["kv_rows"] * (block_size[1] // block_n), 1
    items = blocks * batch * geometry.heads
    values = {**values, **_descriptors(values, variant, grads), **sums.values}
    side = steps.side(_bytes_of_head(values, variant), batch * geometry.heads)
    programs = min(items, multiprocessors(geometry.device))
    values |= {"items": items, "side": side, "late_side": 0}
    if values.get("sorted_rows") and block_size[1] == block_n:
        values["late_side"] = _late_side(side, batch * geometry.heads, blocks, programs)
    values["batch"] = geometry.batch
    if ordered:
        values |= _order_visits(module, made, values, geometry, block_size, block_n)
    launch(module.attention_backward, made.attention, values, constants, _ATTENTION, programs)
    programs = values["padded_len"] // 64 * batch * geometry.heads
    constants = {"TILE_M": block_size[0]}
    launch(module.finish_queries, made.queries, values, constants, _FINISH, programs)
    if geometry.group > 1:
        programs = math.ceil(geometry.kv_len / 64) * geometry.batch * geometry.kv_heads
        if geometry.packing is not None:
            programs = values["kv_rows"] * (block_size[1] // 64) * geometry.kv_heads
        constants = {"BLOCK_N": block_n, "TILE_N": block_size[1]}
        launch(module.finish_keys, made.keys, values, constants, _FINISH, programs)
    return {"q": sums.spoilt_q, "kv": sums.spoilt_kv}


def _bytes_of_head(values: Mapping[str, Any], variant: emit.Variant) -> int:
    """What is read and added to of a head's queries."""
    width, v_width = width_of(variant.head_dim), width_of(variant.v_head_dim)
    size: int = values["padded_len"] * (2 * width + 2 * v_width + 4 * width)
    return size


def _late_side(side: int, lines: int, blocks: int, programs: int) -> int:
    """How many heads come last, whose blocks are taken by how long they are: a divisor of all,
    and a multiple of `side`. A program should get some of these blocks."""
    fitting = (n for n in range(side, lines, side) if lines % n == 0)
    return next((n for n in fitting if n * blocks >= _LATE_ROUNDS * programs), lines)


def _order_visits(
    module: Any,
    made: Module,
    values: Mapping[str, Any],
    geometry: Geometry,
    block_size: tuple[int, int],
    block_n: int,
) -> dict[str, torch.Tensor]:
    """Which block of keys adds when to each row of queries, and the counters of these turns."""
    batch, heads, q_tiles, kv_tiles = values["states"].shape
    kv_rows, most, device = values["kv_rows"], q_tiles, geometry.device
    if geometry.packing is not None:
        most = math.ceil(geometry.q_len / block_size[0])
    ranks = torch.empty(batch, heads, q_tiles, kv_tiles, dtype=torch.int32, device=device)
    visits = torch.empty(batch, heads, kv_rows, most + 1, dtype=torch.int32, device=device)
    values = {**values, "ranks": ranks, "visits": visits, "q_rows": q_tiles, "most_visits": most}
    constants = {
        "BLOCK_N": block_n, "TILE_M": block_size[0], "TILE_N": block_size[1], "CHUNK": 128
    }  # fmt: skip
    programs = batch * heads * (q_tiles + kv_rows)
    launch(module.order_visits, made.order, values, constants, _ORDER, programs)
    lines, blocks = geometry.batch, math.ceil(geometry.kv_len / block_n)
    if geometry.packing is not None:
        lines, blocks = 1, kv_rows * (block_size[1] // block_n)
    rows = geometry.heads * (values["padded_len"] // BLOCK_M)
    row_turns, key_turns = _counters(device, (lines * rows,), (lines * geometry.kv_heads * blocks,))
    return {
        "ranks": ranks, "visits": visits, "most_visits": most,
        "row_turns_ptr": row_turns, "key_turns_ptr": key_turns,
    }  # fmt: skip


def _counters(device: torch.device, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """int32 tensors of zeros, in one allocation; each starts at a multiple of 16 bytes."""
    ends = list(itertools.accumulate(math.ceil(math.prod(s) / 4) * 4 for s in shapes))
    whole = torch.zeros(ends[-1], dtype=torch.int32, device=device)
    starts = (0, *ends)
    return [
        whole[start : start + math.prod(shape)].view(shape)
        for start, shape in zip(starts, shapes, strict=False)
    ]


class _Sums:
    """What many programs add to, 0 at first: dK and dV of heads that share keys, flags."""

    def __init__(
        self,
        values: Mapping[str, Any],
        variant: emit.Variant,
        geometry: Geometry,
        block_size: tuple[int, int],
        grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:
        device = geometry.device
        batch, q_tiles, kv_tiles = _tiles(values, geometry, block_size)
        shapes = (geometry.heads, q_tiles), (geometry.kv_heads, kv_tiles)
        self.spoilt_q, self.spoilt_kv, next_item = _counters(
            device, *((batch, *shape) for shape in shapes), (1,)
        )
        dq, dk, dv = grads
        self.values = {
            "grad_q_ptr": dq, "grad_k_ptr": dk, "grad_v_ptr": dv,
            "spoilt_q_ptr": self.spoilt_q, **strides("dq", dq), **strides("dk", dk),
            **strides("dv", dv),
        }  # fmt: skip
        self.k = self.v = values["dq_sum_ptr"]
        if geometry.group > 1:
            # Whole blocks of keys, those beyond the last one too.
            dims = (variant.head_dim, variant.v_head_dim)
            block_n = keys_of(*dims)
            blocks = -(-geometry.kv_len // block_n)
            if geometry.packing is not None:
                blocks = kv_tiles * (block_size[1] // block_n)
            rows, widths = batch * geometry.kv_heads * blocks * block_n, map(sum_width, dims)
            self.k, self.v = (torch.zeros(rows, width, device=device) for width in widths)
        self.values |= {
            "dk_sum_ptr": self.k, "dv_sum_ptr": self.v, "spoilt_kv_ptr": self.spoilt_kv,
            "next_item_ptr": next_item,
        }  # fmt: skip


def _tiles(
    values: Mapping[str, Any], geometry: Geometry, block_size: tuple[int, int]
) -> tuple[int, int, int]:
    """How many grids of tiles there are, and rows of tiles of queries and of keys in each."""
    if geometry.packing is not None:
        return 1, values["padded_len"] // block_size[0], values["kv_rows"]
    q_tiles, kv_tiles = (
        math.ceil(n / size)
        for n, size in zip((geometry.q_len, geometry.kv_len), block_size, strict=True)
    )
    return geometry.batch, q_tiles, kv_tiles


def strides(letter: str, tensor: torch.Tensor) -> dict[str, int]:
    """Arguments for the strides of batch, heads and sequence."""
    return {f"stride_{letter}{d}": tensor.stride(i) for i, d in enumerate("bhs")}


def _descriptors(
    values: Mapping[str, Any],
    variant: emit.Variant,
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> dict[str, Any]:
    from . import tma

    width, v_width = width_of(variant.head_dim), width_of(variant.v_head_dim)
    block_n = keys_of(variant.head_dim, variant.v_head_dim)
    lse, minus_delta = (values[f"{n}_ptr"].reshape(-1) for n in ("lse_log2", "minus_delta"))
    tiles = {
        "q_tiles": tma.descriptor(values["q_ptr"], (BLOCK_M, width)),
        "k_tiles": tma.descriptor(values["k_ptr"], (block_n, width)),
        "v_tiles": tma.descriptor(values["v_ptr"], (block_n, v_width)),
        "grad_out_tiles": tma.descriptor(values["grad_out_ptr"], (BLOCK_M, v_width)),
        "lse_tiles": tma.descriptor(lse, (BLOCK_M,)),
        "minus_delta_tiles": tma.descriptor(minus_delta, (BLOCK_M,)),
    }
    if block_n == 64:
        # Smaller heads' gradients leave from registers.
        tiles["dk_tiles"] = tma.descriptor(grads[1], (64, width))
        tiles["dv_tiles"] = tma.descriptor(grads[2], (64, v_width))
    return tiles
