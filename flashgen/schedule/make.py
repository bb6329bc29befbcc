"""Making schedules, and refusing those that don't fit."""

from __future__ import annotations

from typing import Any

import torch

from .. import transforms
from ..errors import FlashgenError
from ..expr import Env, evaluate
from ..geometry import Geometry
from ..order import tables_of
from ..spec import Bound
from ..storage import Packing
from ..tape import Tapes
from .classify import Planner, classify
from .runs import Runs
from .value import Schedule


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
            f"there is no planner {planner!r}", call=call, write="auto, bounds or exact"
        )
    if transforms.are_active():
        bound = Bound(bound.spec, bound.scalars, transforms.bare_tensors(bound.tensors))
    with transforms.outside():
        return _made(bound, geometry, block, planner, tapes or Tapes())


def _made(
    bound: Bound, geometry: Geometry, block: tuple[int, int], planner: Planner, tapes: Tapes
) -> Schedule:
    spec, runs = bound.spec, None
    offset, packing = geometry.q_offset, geometry.packing
    if geometry.device.type == "cpu":
        states = classify(bound, geometry, block, planner)
        # Compared with those of calls, which may be the same tensors, edited since.
        offset = offset.clone() if isinstance(offset, torch.Tensor) else offset
        packing = None if packing is None else packing.copy()
    else:
        states, runs = _plan(bound, geometry, block, planner, tapes)
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
    values = {"q_idx": last, "q_len": geometry.q_len, "kv_len": geometry.kv_len}
    names = ("b", "h", "h_kv", "q_idx", "kv_idx", "q_len", "kv_len")
    index = {name: torch.tensor(values.get(name, 0)) for name in names}
    index["kv_idx"] = torch.arange(_SAMPLES) * max(min(last + 1, geometry.kv_len), 1) // _SAMPLES
    return bool(evaluate(spec.mask, Env(index, dict(bound.scalars))).all())


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
            f"block_size is {block_size!r}",
            call=call,
            write="multiples of 16 up to 256: (128, 64)",
        )
    return pair[0], pair[1]


def check_fits(schedule: Any, bound: Bound, geometry: Geometry, call: object) -> None:
    """Refuse a schedule made for other lengths, positions, masks or devices."""
    if not isinstance(schedule, Schedule):
        raise FlashgenError(
            f"schedule is a {type(schedule).__name__}",
            call=call,
            write="what attend.schedule(q, k, v, ...) returned",
        )
    for what, made, needed in _differences(schedule, bound, geometry):
        if made != needed:
            raise FlashgenError(
                f"the schedule was made for {what} {made}, and this call has {needed}",
                call=call,
                write="a schedule of this call: attend.schedule(q, k, v, ...)",
            )


def _differences(schedule: Schedule, bound: Bound, geometry: Geometry) -> list[Any]:
    batch, heads = schedule.states.shape[:2]
    wide = geometry.varies_by_batch or bound.spec.uses("b")
    packing = geometry.packing
    if packing is not None or schedule.packing is not None:
        batch, wide = schedule.shape[0], True
    by_head = bound.spec.uses("h", "h_kv")
    mask = (schedule.mask_name, schedule.mask_digest)
    same = schedule.mask_digest == bound.spec.mask_digest
    return [
        ("device", schedule.device, geometry.device),
        ("the mask", mask[0], mask[0] if same else f"another one, {bound.spec.name}"),
        ("scalars", dict(schedule.scalars), dict(mask_scalars(bound))),
        ("Sq =", schedule.q_len, geometry.q_len),
        ("Skv =", schedule.kv_len, geometry.kv_len),
        ("q_offset", _shown(schedule.q_offset), _shown(geometry.q_offset)),
        ("kv_lens", _shown(schedule.kv_lens), _shown(geometry.kv_lens)),
        ("cu_seqlens_q", _starts(schedule.packing), _starts(packing)),
        ("queries in all", _total(schedule.packing), _total(packing)),
        ("groups of", schedule.group, geometry.group if bound.spec.uses("h_kv") else None),
        ("batch size", batch, geometry.batch if wide else 1),
        ("heads", heads, geometry.heads if by_head else 1),
    ]


def _starts(packing: Packing | None) -> Any:
    return _shown(None if packing is None else packing.cu_q)


def _total(packing: Packing | None) -> int | None:
    return None if packing is None else packing.total_q


def _shown(value: int | torch.Tensor | None) -> Any:
    """What can be compared without waiting for the device."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.tolist() if value.device.type == "cpu" else f"a tensor {list(value.shape)}"
