"""Which way a checked call goes: its backend, its kernel, the tile of its schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .. import backends, ops, tune
from ..call import Call
from ..config import config
from ..decoding import choose_kernel, wants_gradient
from ..schedule.make import make_schedule
from ..tiling import hopper
from ..tiling.decode import LATENT_TILE, MOST_QUERIES
from .known import Known

# Tiles that tuning tries beside a portable kernel's own.
_TILES = ((128, 128), (128, 64), (64, 128), (64, 64))


@dataclass(frozen=True)
class Route:
    """A backend, and whether its kernel for few queries runs the call; the tile of a schedule, and
    what that depends on, where it is known on the host."""

    backend: str
    decodes: bool
    tile: tuple[int, int]
    kept_by: Any


def route_of(
    known: Known,
    call: Call,
    backend: str,
    schedule: Any = None,
    invariant: bool = False,
    planned: bool = False,
) -> Route:
    """The way of a call, found once for all that are known to be alike; `planned`: it is only
    planned. Raises FlashgenError where nothing can run it."""

    def choose() -> Route:
        choice = backends.choose_for(backend, call, schedule)
        decodes = False
        if not planned:
            how = choose_kernel(call, choice.name, asked=backend, invariant=invariant)
            decodes = how.decodes
        tile = tile_of(call, choice.name, invariant)
        if not planned and not decodes and schedule is None and choice.name != "cpu":
            others = hopper.tiles_to_try(*_dims(call)) if choice.name == "hopper" else _TILES
            tile = tune.tiles(
                *_tuned_as(call, choice.name), tile, others, _timed(call, choice.name)
            )
        return Route(choice.name, decodes, tile, kept_key(call, tile, "auto"))

    size = getattr(schedule, "block_size", None)
    asked = (planned, backend, bool(invariant), wants_gradient(call), size)
    route: Route = known.once(asked, choose)
    return route


def is_planned(call: Call, decodes: bool) -> bool:
    """Whether a call reads a schedule: without a mask, the kernel that decodes sees from the
    lengths what there is to visit."""
    return not decodes or call.bound.spec.mask is not None


def tile_of(call: Call, backend: str, invariant: bool = False) -> tuple[int, int]:
    """The tile that the kernel works on."""
    if call.bound.spec.heads is not None:
        return LATENT_TILE
    few = call.geometry.q_len <= MOST_QUERIES
    # One row of tiles is cut too seldom to matter; what the host knows of lengths is the batch's.
    name, dims = "portable" if few else backend, _dims(call)
    whole = not few and not invariant
    long_rows = whole and backends.takes_long_rows(backend, call.bound, call.geometry, dims)
    found = None if few or backend == "cpu" else tune.tile_known(*_tuned_as(call, backend))
    if found is not None and (backend != "hopper" or hopper.works_on(found, *dims)):
        return found
    length = call.geometry.q_len
    return backends.block_size(name, call.q.device, call.q.dtype, *dims, long_rows, length)


def _dims(call: Call) -> tuple[int, int]:
    return call.q.shape[-1], call.v.shape[-1]


def _tuned_as(call: Call, backend: str) -> tuple[str, torch.device]:
    """What tuning calls the schedules of calls like this one, and where they run."""
    spec, q = call.bound.spec, call.q
    dims, dtype = f"d{q.shape[-1]}_{call.v.shape[-1]}", str(q.dtype).removeprefix("torch.")
    trained = ", with gradients" if wants_gradient(call) else ""
    return f"{spec.slug}_{spec.mask_digest[:8]}_{dims}, {dtype}, {backend}{trained}", q.device


def _timed(call: Call, backend: str) -> Callable[[tuple[int, int]], Callable[[], Any]]:
    """What runs the call on a schedule of a given tile, with gradients if they are wanted."""

    def prepare(tile: tuple[int, int]) -> Callable[[], Any]:
        schedule = make_schedule(call.bound, call.geometry, tile, "auto", call.text)
        choice = backends.choose_for(backend, call, schedule)
        grad = call.q.new_ones((*call.q.shape[:3], call.v.shape[-1]))
        inputs = [x for x in (call.q, call.k, call.v) if x.requires_grad]

        def run() -> None:
            with config.override(tune="off"):
                arguments = ops.arguments_of(call, schedule, False)
                made = ops.engine(choice.name, call.bound, **arguments)
                out, _ = ops.attention(made, call.q, call.k, call.v, call.sinks, call.data)
                if inputs and torch.is_grad_enabled():
                    torch.autograd.grad(out, inputs, grad)

        return run

    return prepare


def kept_key(call: Call, block: tuple[int, int], planner: str) -> Any:
    """What a schedule depends on, if that is known on the host; else None."""
    geometry, spec = call.geometry, call.bound.spec
    on_device = isinstance(geometry.q_offset, torch.Tensor) or geometry.has_lens
    if on_device or spec.mask_tensors:
        return None
    lengths = (geometry.batch, geometry.heads, geometry.kv_heads, geometry.q_len, geometry.kv_len)
    scalars = tuple(sorted(call.bound.scalars.items()))
    return spec.mask_digest, scalars, lengths, geometry.q_offset, geometry.device, block, planner
