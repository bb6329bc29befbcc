"""One backward's kernels: the values that they share, tilings, grids."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .. import binaries, emit, tune
from ..config import config
from ..dropout import Dropout
from ..emit.backward import Module
from ..emit.backward import backward as emit_backward
from ..emit.gradients import Wanted
from ..emit.hopper_backward import sum_width
from ..geometry import Geometry
from ..schedule import Schedule
from ..schedule.make import has_long_rows
from ..spec import Bound, Spec
from ..tiling import Tiling
from ..tiling.backward import square, tilings
from . import current_target, key_parts, launch, multiprocessors, row_blocks, tuned_as, variant_of
from . import diagonal as launch_diagonal
from . import hopper_backward as launch_hopper_backward
from .arguments import (
    constants_of,
    data_values,
    dropout_values,
    position_values,
    range_values,
    schedule_values,
    score_values,
)
from .hopper_backward import strides

_PREPARE = Tiling(64, 0, 4, 1)
# Blocks whose marks a program of a repair looks at.
_CHUNK = 32


@dataclass(frozen=True, eq=False)
class Gradients:
    """Gradients in their tensors' shapes and dtypes; None where none is wanted."""

    q: torch.Tensor | None = None
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    data: dict[str, torch.Tensor] = field(default_factory=dict)


class Saved(NamedTuple):
    """What the forward leaves to the backward, and the gradients of its results.

    q, k, v, out as in the call, out contiguous; lse [B, Hq, Sq], natural; `grad_out` in out's
    shape, any strides, and `grad_lse` in lse's: None where the loss doesn't use them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    grad_out: torch.Tensor | None
    grad_lse: torch.Tensor | None


@functools.lru_cache(maxsize=1024)
def generate(spec: Spec, variant: emit.Variant, wanted: Wanted, repairs: bool = False) -> Module:
    """The text of the backward kernels; `repairs`: for what Hopper's kernels leave to them."""
    return emit_backward(spec, variant, wanted, repairs=repairs)


@functools.lru_cache(maxsize=1024)
def _module(
    spec: Spec, variant: emit.Variant, wanted: Wanted, repairs: bool, parts: tuple[str, ...]
) -> tuple[Any, Module]:
    made = generate(spec, variant, wanted, repairs)
    return binaries.Kernels(made.name, made.text, parts), made


def _values(
    saved: Saved,
    bound: Bound,
    geometry: Geometry,
    schedule: Schedule,
    scale: float,
    softcap: float | None,
    dropout: Dropout | None,
) -> dict[str, Any]:
    """The kernels' arguments that a call decides, by name."""
    values: dict[str, Any] = {
        "q_ptr": saved.q, "k_ptr": saved.k, "v_ptr": saved.v, "grad_out_ptr": saved.grad_out,
        "lse_ptr": saved.lse, "grad_lse_ptr": saved.grad_lse, "out_ptr": saved.out,
        "heads": geometry.heads, "kv_heads": geometry.kv_heads, "group": geometry.group,
        "capacity": geometry.kv_len,
        "sequences_ptr": schedule.q_sequences,
        **score_values(scale, softcap, bound.spec.score is not None),
        **position_values(geometry), **data_values(bound), **dropout_values(dropout),
        **range_values(bound.spec, schedule),
    }  # fmt: skip
    assert saved.grad_out is not None
    given = (("q", saved.q), ("k", saved.k), ("v", saved.v), ("g", saved.grad_out))
    for letter, tensor in (*given, ("o", saved.out)):
        values |= strides(letter, tensor)
    return values


class Run:
    """One backward: the values that its kernels share."""

    def __init__(
        self,
        saved: Saved,
        wanted: Wanted,
        bound: Bound,
        geometry: Geometry,
        schedule: Schedule,
        scale: float,
        softcap: float | None,
        dropout: Dropout | None,
        repairs: bool = False,
        prepared: Run | None = None,
    ) -> None:
        self.saved, self.geometry, self.schedule = saved, geometry, schedule
        self.wanted = wanted
        head_dim, v_head_dim = saved.q.shape[-1], saved.v.shape[-1]
        self.spec, self.bound = bound.spec, bound
        self.variant = variant_of(
            bound, geometry, head_dim, v_head_dim, dropout is not None, saved.q
        )
        made = _module(bound.spec, self.variant, wanted, repairs, key_parts())
        self.module, self.made = made
        changed = bound.spec.score is not None or softcap is not None or dropout is not None
        kind = (current_target(saved.q.device), saved.q.dtype, head_dim, v_head_dim)
        self.tilings = tilings(*kind, schedule.block_size, changed, self.made.per_pair)
        self.square = square(*kind, schedule.block_size)
        tile, is_packed = schedule.block_size[0], geometry.packing is not None
        self.spoilt: dict[str, torch.Tensor] = {}
        self.repairs = repairs
        # The prepared rows are laid out in the schedule's tiles, for all kernels alike.
        self.padded_len = schedule.states.shape[2] * tile
        self.batch = 1 if is_packed else geometry.batch
        self.prepare_rows = min(64, tile & -tile) if is_packed else 16 if repairs else 64
        shape = (self.batch, geometry.heads, self.padded_len)
        if prepared is None:
            self.lse_log2 = saved.lse.new_empty(shape)
            self.minus_delta = saved.lse.new_empty(shape)
        else:
            self.lse_log2, self.minus_delta = prepared.lse_log2, prepared.minus_delta
        self.values = {
            **_values(saved, bound, geometry, schedule, scale, softcap, dropout),
            "lse_log2_ptr": self.lse_log2, "minus_delta_ptr": self.minus_delta,
            "padded_len": self.padded_len,
        }  # fmt: skip
        if repairs:
            width = sum_width(head_dim)
            self.values["dq_sum_ptr"] = torch.empty(*shape, width, device=saved.q.device)

    def prepare(self) -> None:
        """Write the LSE in base 2 and minus delta, and what Hopper's kernels add dQ to: 0."""
        constants = constants_of(self.saved.q, self._aligned("out_ptr"), _PREPARE, (64, 1))
        constants = {name: constants[name] for name in ("ALIGN", "FLOAT")}
        constants["BLOCK_M"] = rows = self.prepare_rows
        if self.geometry.packing is not None:
            constants["TILE_M"] = self.schedule.block_size[0]
        if self.repairs:
            constants["SUM_WIDTH"] = self.values["dq_sum_ptr"].shape[-1]
        if self.repairs and self.geometry.packing is None:
            self.values |= self._sorting()
        programs = math.ceil(self.padded_len / rows) * self.batch * self.geometry.heads
        names, kernel = self.made.prepare, self.module.prepare_rows
        launch(kernel, names, self.values, constants, _PREPARE, programs)

    def _sorting(self) -> dict[str, Any]:
        """Where rows of key tiles are put in order of their length, where they differ in it."""
        counts = self.schedule.q_runs.counts
        batch, heads, rows, _ = counts.shape
        longest = counts.new_empty(batch * heads * rows)
        is_even = has_long_rows(self.bound, self.geometry)
        return {
            "counts": counts, "kv_rows": rows, "longest_ptr": longest,
            "sorted_rows": 0 if is_even else longest.numel(),
        }  # fmt: skip

    def on_hopper(self, grads: Gradients, ordered: bool, of_data: Wanted) -> None:
        """All gradients, but for what isn't finite: `by_query` and `by_key` look at that again; and
        those of data that Hopper's kernels add up."""
        assert grads.q is not None
        assert grads.k is not None
        assert grads.v is not None
        values = {**self.values, **key_schedule(self.schedule)}
        values |= {f"grad_{name}_ptr": grads.data[name] for name in of_data.data}
        if (packing := self.geometry.packing) is not None:
            values["queue_ptr"] = self.schedule.queue(by_key=True, late_first=ordered)
            values["q_sequences_ptr"] = self.schedule.q_sequences
            values["kv_sequences_ptr"] = self.schedule.kv_sequences
            values["total_kv"] = packing.total_kv
        self.spoilt = launch_hopper_backward.backward(
            self.spec,
            self.variant,
            values,
            self.geometry,
            self.schedule.block_size,
            (grads.q, grads.k, grads.v),
            ordered,
            of_data,
        )

    def portable(self, grads: Gradients) -> None:
        """What is wanted; after `on_hopper`, repairs of it."""
        if self.made.has_queries:
            self.by_query(grads)
        if self.made.diagonals:
            self.by_distance(grads)
        if self.wanted.by_key:
            self.by_key(grads)

    def by_distance(self, grads: Gradients) -> None:
        """Gradients of data that is read by distance."""
        values = {**self.values, **key_schedule(self.schedule)}
        values |= {f"grad_{name}_ptr": grad for name, grad in grads.data.items()}
        kernel = self.module.attention_backward_diagonal
        launch_diagonal.by_distance(
            kernel, self.made, values, self.geometry, self.schedule, self.square
        )

    def by_query(self, grads: Gradients) -> None:
        """Gradients of the queries, and of other data."""
        geometry = self.geometry
        values = {**self.values, **schedule_values(self.schedule), "grad_q_ptr": grads.q}
        values["spoilt_ptr"] = self.spoilt.get("q")
        values |= {f"grad_{name}_ptr": grad for name, grad in grads.data.items()}
        results = [] if grads.q is None else [grads.q]
        if grads.q is not None:
            values |= strides("dq", grads.q)

        def run(tiling: Tiling) -> None:
            programs = row_blocks(geometry, self.schedule, tiling) * geometry.heads
            constants = self._constants(tiling, results)
            kernel = self.module.attention_backward_q
            self._launch(kernel, self.made.queries, values, constants, tiling, programs)

        self._run_tuned("queries", run, grads.data.values())

    def by_key(self, grads: Gradients) -> None:
        """Gradients of the keys and values."""
        geometry = self.geometry
        values = {**self.values, **key_schedule(self.schedule)}
        parts = 1 if self.spoilt else self._parts(self._key_blocks(self.tilings[1]))
        values |= {"batch": geometry.batch, "members": geometry.group // parts}
        values["spoilt_ptr"] = self.spoilt.get("kv")
        results = []
        for name, grad in (("k", grads.k), ("v", grads.v)):
            # Zeros that are wanted where the score is ignored: no kernel writes them.
            if grad is not None and f"grad_{name}_ptr" in self.made.keys:
                # A repair writes few blocks, into what the others have.
                is_whole = geometry.group == 1 or self.spoilt
                result = grad if is_whole else self._partial(grad, parts)
                values |= {f"grad_{name}_ptr": result, **strides(f"d{name}", result)}
                results.append((grad, result))

        def run(tiling: Tiling) -> None:
            constants = self._constants(tiling, [result for _, result in results])
            programs = self._key_blocks(tiling) * parts
            kernel = self.module.attention_backward_kv
            self._launch(kernel, self.made.keys, values, constants, tiling, programs)

        self._run_tuned("keys", run)
        for grad, result in results:
            if result is not grad:
                grad.copy_(result.view(parts, *grad.shape).sum(0))

    def _launch(
        self,
        kernel: Any,
        names: tuple[str, ...],
        values: dict[str, Any],
        constants: dict[str, Any],
        tiling: Tiling,
        blocks: int,
    ) -> None:
        """A program for each block; of a repair, for many that it looks at."""
        if self.repairs:
            values, constants = {**values, "items": blocks}, {**constants, "CHUNK": _CHUNK}
        programs = math.ceil(blocks / _CHUNK) if self.repairs else blocks
        launch(kernel, names, values, constants, tiling, programs)

    def _key_blocks(self, tiling: Tiling) -> int:
        """Blocks of keys of all sequences and heads."""
        geometry, columns = self.geometry, tiling.block_n
        blocks = math.ceil(geometry.kv_len / columns) * geometry.batch
        if geometry.packing is not None:
            rows = self.schedule.q_runs.counts.shape[2]
            blocks = rows * (self.schedule.block_size[1] // columns)
        return blocks * geometry.kv_heads

    def _run_tuned(
        self, kernel: str, run: Callable[[Tiling], None], added_to: Iterable[torch.Tensor] = ()
    ) -> None:
        """Run the `queries` or the `keys` kernel, with the blocks that tuning finds or found.

        `added_to`: buffers that must be zeros again before it counts. A repair isn't tuned."""
        tiling, size = self.tilings[kernel == "keys"], self.schedule.block_size
        if not self.spoilt:
            what = tuned_as(f"{self.made.name} {kernel}", self.made.text, self.saved.q.dtype)
            tiling = tune.blocks(what, self.saved.q.device, tiling, size, run)
            for buffer in added_to if config.tune != "off" else ():
                buffer.zero_()
        run(tiling)

    def _parts(self, programs: int) -> int:
        """Among how many programs the heads that share keys are divided, to fill the device."""
        wanted = 8 * multiprocessors(self.saved.q.device)
        group = self.geometry.group
        divisors = (n for n in range(1, group + 1) if group % n == 0)
        return next((n for n in divisors if programs * n >= wanted), group)

    def _partial(self, grad: torch.Tensor, parts: int) -> torch.Tensor:
        """A buffer for the sums of each part, not rounded yet."""
        batch, *shape = grad.shape
        # Packed: rows behind the last sequence belong to no program.
        make = grad.new_empty if self.geometry.packing is None else grad.new_zeros
        return make((parts * batch, *shape), dtype=self.saved.lse.dtype)

    def _aligned(self, *names: str) -> list[torch.Tensor]:
        names = (*names, "grad_out_ptr")
        return [self.values[name] for name in names]

    def _constants(self, tiling: Tiling, results: list[torch.Tensor]) -> dict[str, Any]:
        aligned = [*self._aligned("q_ptr", "k_ptr", "v_ptr"), *results]
        return constants_of(self.saved.q, aligned, tiling, self.schedule.block_size)


def key_schedule(schedule: Schedule) -> dict[str, Any]:
    """A schedule's runs along the queries; strides count grids of tiles."""
    runs = schedule.q_runs
    batch, heads, q_tiles, kv_tiles = schedule.states.shape
    return {
        "counts": runs.counts,
        "masked_runs": runs.masked,
        "full_runs": runs.full,
        "states": schedule.states,
        "schedule_stride_b": heads if batch > 1 else 0,
        "schedule_stride_h": 1 if heads > 1 else 0,
        "masked_width": runs.masked.shape[-2],
        "full_width": runs.full.shape[-2],
        "q_tiles": q_tiles,
        "kv_tiles": kv_tiles,
        "kv_rows": runs.counts.shape[2],
        "sequences_ptr": schedule.kv_sequences,
    }
