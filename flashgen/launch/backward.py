"""Gradients of either forward: what is wanted, on whose kernels, into which buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from .. import ahead, data_gradients
from ..dropout import Dropout
from ..emit.gradients import Wanted, ignores_score
from ..emit.sums import NO_DATA, summed
from ..geometry import Geometry
from ..schedule import Schedule
from ..spec import Bound
from ..tiling.backward import square
from . import current_target, variant_of
from . import hopper_backward as launch_hopper_backward
from .arguments import LOG2E
from .backward_run import Gradients as Gradients
from .backward_run import Run
from .backward_run import Saved as Saved
from .backward_run import generate as generate


@dataclass(frozen=True)
class Division:
    """How a call's gradients are divided between Hopper's kernels and the portable ones.

    `kernels`: all that is computed. Of gradients of data, `added` has those that Hopper's kernels
    add up beside the gradients of q, k and v, and `rest` names those that only portable ones do."""

    kernels: Wanted
    added: Wanted
    rest: tuple[str, ...]

    @property
    def repairs(self) -> Wanted:
        """What portable kernels compute again, of tiles that aren't finite."""
        return replace(self.kernels, q=True, k=True, v=True, data=(), stored=(), exact=False)

    @property
    def alone(self) -> Wanted:
        """What portable kernels compute of the rest, beside Hopper's."""
        return replace(self.kernels, q=False, k=False, v=False, data=self.rest, far=self.added.far)

    def renamed(self, name: Callable[[str], str]) -> Division:
        """The same with other names of data."""
        kernels, added = self.kernels.renamed(name), self.added.renamed(name)
        return Division(kernels, added, tuple(map(name, self.rest)))


def divide(
    wanted: Wanted,
    bound: Bound,
    geometry: Geometry,
    head_dims: tuple[int, int],
    dtype: torch.dtype,
    *,
    deterministic: bool,
    hopper: bool,
    side: int = 0,
) -> Division:
    """What is wanted, divided; `hopper`: whether Hopper's kernels may have a part; `side`: rows of
    the blocks of the kernel along diagonals."""
    kernels = _kernels(wanted, bound, geometry, dtype, deterministic)
    added = NO_DATA
    if hopper:
        added = summed(bound.spec, kernels, variant_of(bound, geometry, *head_dims), side)
    rest = tuple(n for n in kernels.data if n not in added.data or n in added.far)
    return Division(kernels, added, rest)


def side_of(
    device: torch.device, dtype: torch.dtype, dims: tuple[int, int], block_size: tuple[int, int]
) -> int:
    """Rows of the blocks of the kernel along diagonals."""
    return square(current_target(device), dtype, *dims, block_size).block_m


def obstacle(
    division: Division,
    bound: Bound,
    geometry: Geometry,
    head_dims: tuple[int, int],
    dtype: torch.dtype,
    block_size: tuple[int, int],
    scale: float,
    dropout: bool = False,
) -> str:
    """Why portable kernels compute all of a call's gradients; empty where Hopper's do."""
    if geometry.packing is not None and division.rest:
        return (
            f"portable kernels compute gradients of packed sequences' data"
            f" ({', '.join(division.rest)}) along with the others"
        )
    return launch_hopper_backward.obstacle(
        bound, geometry, head_dims, dtype, block_size, scale, dropout
    )


def backward(
    saved: Saved,
    wanted: Wanted,
    *,
    bound: Bound,
    geometry: Geometry,
    schedule: Schedule,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    sinks_wanted: bool = False,
    deterministic: bool = False,
    dropout: Dropout | None = None,
    hopper: bool = False,
) -> Gradients:
    """Gradients of either forward; `deterministic`: equal bit by bit from run to run.

    `hopper`: by Hopper's kernels where they can."""
    saved = _unit_strides(saved)
    dims, dtype = (saved.q.shape[-1], saved.v.shape[-1]), saved.q.dtype
    wanted = replace(wanted, lse=saved.grad_lse is not None)
    division = divide(
        wanted,
        bound,
        geometry,
        dims,
        dtype,
        deterministic=deterministic,
        hopper=hopper,
        side=side_of(saved.q.device, dtype, dims, schedule.block_size),
    )
    kernels = division.kernels
    common = (bound, geometry, dims, dtype, schedule.block_size, scale, dropout is not None)
    on_hopper = hopper and not (obstacle(division, *common) or _cannot_describe(saved))
    if on_hopper:
        kernels = replace(kernels, q=True, k=True, v=True)
    grads = _allocate(saved, kernels if on_hopper else wanted, kernels, bound, geometry, on_hopper)
    if not saved.lse.numel() or not saved.k.shape[2] or not geometry.batch:
        return _without_pairs(saved, grads, bound, sinks if sinks_wanted else None)
    call = (bound, geometry, schedule, scale, softcap, dropout)
    run = Run(saved, division.repairs if on_hopper else kernels, *call, repairs=on_hopper)
    run.prepare()
    if on_hopper:
        run.on_hopper(grads, deterministic, division.added)
    # What repairs is compiled behind what it repairs.
    with ahead.behind(0.5 if on_hopper else 1.0):
        run.portable(grads)
    if on_hopper and division.rest:
        Run(saved, division.alone, *call, prepared=run).portable(grads)
    of_sinks = _sink_gradient(sinks, run.lse_log2, run.minus_delta) if sinks_wanted else None
    return replace(grads, sinks=of_sinks, data=data_gradients.finish(grads.data, bound))


def _kernels(
    wanted: Wanted, bound: Bound, geometry: Geometry, dtype: torch.dtype, deterministic: bool
) -> Wanted:
    """What the kernels compute of what is wanted, and how."""
    stored = data_gradients.stored(bound.spec, wanted.data, geometry)
    # float64 is for the interpreter, whose programs run one after the other.
    exact = deterministic and len(stored) < len(wanted.data) and dtype != torch.float64
    kernels = replace(wanted, stored=stored, exact=exact)
    return replace(kernels, q=False, k=False) if ignores_score(bound.spec) else kernels


def _cannot_describe(saved: Saved) -> str:
    """Why TMA can't address one of the tensors; empty if it can."""
    tensors = {"q": saved.q, "k": saved.k, "v": saved.v, "grad_out": saved.grad_out}
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return launch_hopper_backward.can_describe(given)


def _allocate(
    saved: Saved,
    wanted: Wanted,
    kernels: Wanted,
    bound: Bound,
    geometry: Geometry,
    on_hopper: bool,
) -> Gradients:
    """Buffers for the kernels to write; zeros for what they leave out or add to.

    Packed: portable kernels leave out rows behind the last sequence."""
    is_whole = geometry.packing is None or on_hopper

    def like(x: torch.Tensor, is_wanted: bool, is_written: bool) -> torch.Tensor | None:
        if not is_wanted:
            return None
        is_filled = is_written and is_whole
        made = torch.empty_like(x) if is_filled else torch.zeros_like(x)
        return made if made.stride(-1) == 1 else made.contiguous()

    return Gradients(
        like(saved.q, wanted.q, kernels.q),
        like(saved.k, wanted.k, kernels.k),
        like(saved.v, wanted.v, kernels.v),
        data=data_gradients.allocate(kernels, bound, saved.lse.dtype),
    )


def _without_pairs(
    saved: Saved, grads: Gradients, bound: Bound, sinks: torch.Tensor | None
) -> Gradients:
    """Without queries or keys nothing depends on q, k, v or data; the LSE of a row is its sink."""
    for grad in (grads.q, grads.k, grads.v):
        if grad is not None:
            grad.zero_()
    of_sinks = None
    if sinks is not None:
        of_sinks = torch.zeros_like(sinks)
        if saved.grad_lse is not None:
            of_sinks = saved.grad_lse.sum((0, 2)).to(sinks.dtype)
            of_sinks = torch.where(sinks == -torch.inf, 0.0, of_sinks)
    return replace(grads, sinks=of_sinks, data=data_gradients.finish(grads.data, bound))


def _unit_strides(saved: Saved) -> Saved:
    """Tensors as the kernels read them: unit last strides, a gradient of the output."""
    grad_out = torch.zeros_like(saved.out) if saved.grad_out is None else saved.grad_out
    if 0 in grad_out.stride():
        # The gradient of a sum is one number, expanded; TMA reads no rows that are all one row.
        grad_out = grad_out.contiguous()
    q, k, v, grad_out = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (saved.q, saved.k, saved.v, grad_out)
    )
    grad_lse = None if saved.grad_lse is None else saved.grad_lse.contiguous()
    return Saved(q, k, v, saved.out, saved.lse, grad_out, grad_lse)


def _sink_gradient(
    sinks: torch.Tensor | None, lse_log2: torch.Tensor, minus_delta: torch.Tensor
) -> torch.Tensor | None:
    """[Hq]: the sink's weight times -delta, summed over all rows; those without keys too.

    Both are laid out as the kernels have them; where no row is, the LSE is inf."""
    if sinks is None:
        return None
    wide = sinks.to(minus_delta.dtype).reshape(1, -1, 1) * LOG2E
    weights = torch.exp2(wide - lse_log2)
    share = torch.where(weights == 0, 0.0, weights * minus_delta)
    return share.sum((0, 2)).to(sinks.dtype)
