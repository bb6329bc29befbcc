"""Running the kernel for gradients of data that is read by distance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..emit.backward import Module
from ..geometry import Geometry
from ..schedule import Schedule
from ..tiling import Tiling
from . import launch
from .arguments import constants_of


def by_distance(
    kernel: Any,
    made: Module,
    values: Mapping[str, Any],
    geometry: Geometry,
    schedule: Schedule,
    tiling: Tiling,
) -> None:
    """Add up what `values` has buffers for, a program for each diagonal of square blocks.

    `values`: what the backward kernels take, the states of the schedule's tiles included."""
    side, states = tiling.block_m, schedule.states
    aligned: list[torch.Tensor] = [values[f"{x}_ptr"] for x in ("q", "k", "v", "grad_out")]
    constants = constants_of(aligned[0], aligned, tiling, schedule.block_size)
    rows, columns = (
        tiles * (size // side)
        for tiles, size in zip(states.shape[2:], schedule.block_size, strict=True)
    )
    programs = (rows + columns - 1) * geometry.batch * geometry.heads
    launch(kernel, made.diagonals, values, constants, tiling, programs)
