"""Making schedules, and refusing those that don't fit."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .. import transforms
from ..config import config
from ..errors import FlashgenError, show
from ..expr import Env, evaluate
from ..geometry import Geometry
from ..order import tables_of
from ..records.tape import Tapes
from ..spec import Bound, Spec
from .classify import EMPTY, FULL, Planner, classify
from .runs import Runs
from .value import Schedule, shown


def make_schedule(
    bound: Bound,
    geometry: Geometry,
    block: tuple[int, int],
    planner: Planner,
    call: object,
    tapes: Tapes | None = None,
) -> Schedule:
    """Plan with PyTorch on the CPU; on a GPU with generated kernels, without waiting for it.

    `tapes`: the records of calls that plan alike."""
    if planner not in ("auto", "bounds", "exact"):
        raise FlashgenError(
            f"there is no planner {show(planner)}", call=call, write="auto, bounds or exact"
        )
    if transforms.are_active():
        bound = Bound(bound.spec, bound.scalars, transforms.bare_tensors(bound.tensors))
    with transforms.outside():
        return _made(bound, geometry, block, planner, tapes or Tapes())


def _made(
    bound: Bound, geometry: Geometry, block: tuple[int, int], planner: Planner, tapes: Tapes
) -> Schedule:
    if geometry.device.type == "cpu":
        return of_states(
            classify(bound, geometry, block, planner), None, bound, geometry, block, planner, tapes
        )
    made = _plan(bound, geometry, block, planner, tapes)
    return of_states(*made, bound, geometry, block, planner, tapes)


def of_states(
    states: torch.Tensor,
    runs: Runs | None,
    bound: Bound,
    geometry: Geometry,
    block: tuple[int, int],
    planner: Planner,
    tapes: Tapes,
) -> Schedule:
    """The schedule of a call, of what planning makes; on the CPU the runs are made later."""
    spec, offset, packing = bound.spec, geometry.q_offset, geometry.packing
    if geometry.device.type == "cpu":
        # Compared with those of calls, which may be the same tensors, edited since.
        offset = offset.clone() if isinstance(offset, torch.Tensor) else offset
        packing = None if packing is None else packing.copy()
    return Schedule(
        states,
        block,
        geometry.q_len,
        geometry.kv_len,
        offset,
        geometry.kv_lens,
        spec.name,
        spec.mask_digest,
        planner,
        mask_scalars(bound),
        runs,
        geometry.group if spec.uses("h_kv") else None,
        packing,
        sources_of(bound),
        _tapes=tapes,
    )


def _plan(
    bound: Bound, geometry: Geometry, block: tuple[int, int], planner: Planner, tapes: Tapes
) -> tuple[torch.Tensor, Runs]:
    from ..plan import plan

    def run() -> tuple[torch.Tensor, ...]:
        states, runs = plan(bound, geometry, block, planner)
        return states, *runs.tensors

    tensors = [*bound.tensors.values(), *geometry.tensors]
    if geometry.packing is not None:
        tensors.append(geometry.packing.sequences(block[0]))
    states, *runs = tapes.run(("plan", block, planner), tensors, run)
    return states, Runs(*runs)


def sources_of(bound: Bound) -> tuple[tuple[torch.Tensor, int], ...]:
    """The mask's data whose ranges kernels may ask for."""
    return tuple((bound.tensors[t.tensor], t.dim) for t in tables_of(bound.spec.mask))


def has_long_rows(bound: Bound, geometry: Geometry) -> bool:
    """Whether the last query sees the first key, and others all along its row.

    As far as the host knows: no data, no waiting."""
    spec = bound.spec
    if spec.mask is None:
        return True
    if spec.mask_tensors or isinstance(geometry.q_offset, torch.Tensor):
        return False
    if not geometry.is_dense and geometry.q_offset is None:
        # The last query of the longest sequence stands at its last key.
        last = geometry.kv_len - 1
    elif geometry.kv_lens is not None and geometry.q_offset is None:
        return False
    else:
        last = geometry.q_len - 1 + int(geometry.offset)
    scalars = tuple(sorted(bound.scalars.items()))
    return _sees_all_along(spec, scalars, last, geometry.q_len, geometry.kv_len)


@functools.lru_cache(maxsize=1024)
def _sees_all_along(
    spec: Spec, scalars: tuple[tuple[str, Any], ...], last: int, q_len: int, kv_len: int
) -> bool:
    """Whether the query at the position `last` sees the keys before it, as far as samples tell."""
    assert spec.mask is not None
    values = {"q_idx": last, "q_len": q_len, "kv_len": kv_len}
    names = ("b", "h", "h_kv", "q_idx", "kv_idx", "q_len", "kv_len")
    index = {name: torch.tensor(values.get(name, 0), device="cpu") for name in names}
    samples = torch.arange(_SAMPLES, device="cpu")
    index["kv_idx"] = samples * max(min(last + 1, kv_len), 1) // _SAMPLES
    return bool(evaluate(spec.mask, Env(index, dict(scalars))).all())


# Keys that are looked at to tell a long row.
_SAMPLES = 8


def mask_scalars(bound: Bound) -> tuple[tuple[str, Any], ...]:
    """The runtime scalars that a schedule was made with."""
    return tuple((n, bound.scalars[n]) for n in sorted(bound.spec.mask_scalars))


def check_block_size(block_size: Any, call: object) -> tuple[int, int]:
    """(queries, keys), multiples of 16 up to 256. Raises FlashgenError."""
    pair = block_size if isinstance(block_size, (tuple, list)) else (block_size, block_size)
    good = len(pair) == 2 and all(
        isinstance(n, int) and 16 <= n <= 256 and n % 16 == 0 for n in pair
    )
    if not good:
        raise FlashgenError(
            f"block_size is {show(block_size)}",
            call=call,
            write="multiples of 16 up to 256: (128, 64)",
        )
    return pair[0], pair[1]


_OF_THIS_CALL = "a schedule of this call: attend.schedule(q, k, v, ...)"


def check_fits(schedule: Any, bound: Bound, geometry: Geometry, call: object) -> None:
    """Refuse a schedule made for other lengths, positions, masks or devices; debugging, one made
    of other data. Raises FlashgenError."""
    if not isinstance(schedule, Schedule):
        raise FlashgenError(
            f"schedule is a {type(schedule).__name__}",
            call=call,
            write="what attend.schedule(q, k, v, ...) returned",
        )
    needed = _needed(schedule, bound, geometry)
    for what, made in schedule.fit.items():
        if made != needed[what]:
            found, wanted = made, needed[what]
            if what == "the mask":
                found, wanted = schedule.mask_name, f"another one, {bound.spec.name}"
                if found == bound.spec.name:
                    # Dimensions of 1 and dtypes of data are a part of what a mask is.
                    wanted += ": with data of other dtypes or dimensions, or of another function"
            raise FlashgenError(
                f"the schedule was made for {what} {found}, and this call has {wanted}",
                call=call,
                write=_OF_THIS_CALL,
            )
    if config.debug and (count := _wrong_tiles(schedule, bound, geometry, call)):
        problem = f"the schedule was made of other data: {count} of its tiles are wrong here"
        raise FlashgenError(problem, call=call, write=_OF_THIS_CALL)


def _wrong_tiles(schedule: Schedule, bound: Bound, geometry: Geometry, call: object) -> int:
    """How many tiles are left out though a pair of the call attends in them, or are taken for full
    and aren't."""
    right = make_schedule(bound, geometry, schedule.block_size, "exact", call).states
    made = schedule.states
    return int(((made == EMPTY) & (right != EMPTY) | (made == FULL) & (right != FULL)).sum())


def _needed(schedule: Schedule, bound: Bound, geometry: Geometry) -> dict[str, Any]:
    """What a schedule of the call fits, as `Schedule.fit` says it."""
    packing, spec = geometry.packing, bound.spec
    wide = geometry.varies_by_batch or spec.uses("b")
    wide |= packing is not None or schedule.packing is not None
    return {
        "device": geometry.device,
        "the mask": spec.mask_digest,
        "scalars": dict(mask_scalars(bound)),
        "Sq =": geometry.q_len,
        "Skv =": geometry.kv_len,
        "q_offset": shown(geometry.q_offset),
        "kv_lens": shown(geometry.kv_lens),
        "cu_seqlens_q": None if packing is None else shown(packing.cu_q),
        "queries in all": None if packing is None else packing.total_q,
        "groups of": geometry.group if spec.uses("h_kv") else None,
        "batch size": geometry.batch if wide else 1,
        "heads": geometry.heads if spec.uses("h", "h_kv") else 1,
    }
