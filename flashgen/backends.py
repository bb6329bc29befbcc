"""Which backend runs a call, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from . import launch
from .call import Call
from .errors import FlashgenError, show
from .geometry import Geometry
from .launch import hopper_forward as launch_hopper
from .launch import hopper_latent as launch_hopper_latent
from .schedule import Schedule
from .schedule.make import has_long_rows
from .spec import MLA, Bound
from .tiling import choose as tiling_of

Backend = Literal["auto", "cpu", "interpret", "portable", "hopper"]
NAMES = ("auto", "cpu", "interpret", "portable", "hopper")


@dataclass(frozen=True)
class Choice:
    """A backend, and the reason for it."""

    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


def choose(
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    call: object,
    tensors: Sequence[torch.Tensor] = (),
    schedule: Schedule | None = None,
    dropout: bool = False,
    geometry: Geometry | None = None,
    heads: MLA | None = None,
    doubles: bool = False,
) -> Choice:
    """Resolve `auto`, and refuse what can't run. Raises FlashgenError.

    `tensors`: q, k and v; `schedule`: the one that is given; `dropout`: whether weights are
    dropped; where the tensors lie, whether heads are latent, and whether the mask reads `doubles`:
    Hopper's kernels want to know."""
    if backend not in NAMES:
        raise FlashgenError(
            f"there is no backend {show(backend)}", call=call, write=f"one of {', '.join(NAMES)}"
        )
    if backend == "auto" and device.type == "cpu":
        return Choice("cpu", "the tensors are on the CPU")
    why = "asked for"
    no_hopper = ""
    if backend in ("auto", "hopper"):
        if heads is not None and geometry is not None:
            q, kv = tensors[:2]
            no_hopper = launch_hopper_latent.obstacle(
                device, dtype, heads, q, kv, geometry, schedule
            )
        else:
            no_hopper = launch_hopper.obstacle(device, dtype, tensors, schedule, geometry)
        if dropout and not no_hopper:
            no_hopper = "Hopper's kernels have no dropout"
        if doubles and not no_hopper:
            no_hopper = "Hopper's kernels compare no float64 data in a mask"
    if backend == "auto":
        backend, why = "hopper", "generated Gluon kernels for sm_90"
        if no_hopper:
            backend, why = "portable", f"generated Triton kernels for {device.type}; {no_hopper}"
    problem, write = no_hopper, 'backend="auto", which takes what can run'
    if backend != "hopper":
        problem, write = _obstacle(backend, device, dtype)
    if problem:
        raise FlashgenError(f"backend {backend}: {problem}", call=call, write=write)
    return Choice(backend, why)


def _obstacle(backend: str, device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    on_cpu = device.type == "cpu"
    if backend == "portable":
        if on_cpu:
            return "the tensors are on the CPU", 'backend="cpu", or tensors on a GPU'
        if dtype == torch.float64:
            return "float64 is for checking on a CPU", "float32, bfloat16 or float16"
        return "", ""
    if not on_cpu:
        return f"the tensors are on {device}", 'backend="auto", or tensors on the CPU'
    if backend == "interpret":
        from .launch import interpreting

        if not interpreting():
            return (
                "this process doesn't interpret Triton kernels",
                "TRITON_INTERPRET=1 in the environment when the process starts",
            )
        if dtype == torch.bfloat16:
            return (
                "Triton's interpreter computes bfloat16 products wrongly",
                "float32 or float16 to check numerics; bfloat16 on a GPU",
            )
    return "", ""


def choose_for(backend: str, call: Call, schedule: Schedule | None = None) -> Choice:
    """`choose` for a checked call."""
    return choose(
        *(backend, call.q.device, call.q.dtype, call.text),
        tensors=(call.q, call.k, call.v),
        schedule=schedule,
        dropout=call.dropout is not None,
        geometry=call.geometry,
        heads=call.bound.spec.heads,
        doubles=call.bound.spec.reads_doubles,
    )


def takes_long_rows(
    backend: str, bound: Bound, geometry: Geometry, head_dims: tuple[int, int]
) -> bool:
    """Whether a backend's kernel works on the tiles of long rows; `head_dims`: of keys, values."""
    if not has_long_rows(bound, geometry):
        return False
    return backend != "hopper" or launch_hopper.takes_tall_tiles(bound, geometry, head_dims)


def block_size(
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    v_head_dim: int,
    long_rows: bool,
    q_len: int = 8192,
) -> tuple[int, int]:
    """The tile that a backend's kernel works on; `q_len`: where it is known."""
    if backend == "hopper":
        return launch_hopper.tile_for(head_dim, v_head_dim, long_rows, q_len)
    target = launch.current_target(device)
    tiling = tiling_of(target, dtype, head_dim, v_head_dim, long_rows)
    return tiling.block_m, tiling.block_n
