"""Calls as operators: what `torch.compile` traces, and what dispatch modes and subclasses see.

The Python here runs under Dynamo. It sorts arguments by their types and never looks at a length or
a value, so nothing of it breaks a graph or becomes a guard; operators check a call when they run.
What depends on the declaration alone runs while a graph is made (`declare.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index
from typing import Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from .. import transforms
from ..schedule import Schedule
from ..spec import Program
from . import library  # noqa: F401  (registers the operators)
from .declare import constants_of, declare, names_of, refuse_transforms

Lists = tuple[list[torch.Tensor], list[int]]


class Sorted(NamedTuple):
    """A call's arguments and data by what they are: tensors, numbers that vary, and the rest."""

    tensors: dict[str, torch.Tensor]
    ints: dict[str, int]
    static: tuple[tuple[str, Any], ...]
    data: dict[str, torch.Tensor]
    numbers: dict[str, Any]
    counts: dict[str, int]
    # For each of the data: name and kind, what tracing must know of a tensor, a baked-in value.
    kinds: tuple[tuple[Any, ...], ...]


def _names(call: Sorted) -> tuple[Any, ...]:
    """As `declare` takes them. A function, as PyTorch 2.10 asks for a constant where a named tuple
    has properties and methods."""
    return tuple(call.tensors), tuple(call.ints), call.static, call.kinds


def _lists(call: Sorted, given: tuple[str, ...], kept: tuple[torch.Tensor, ...]) -> Lists:
    """In the order that `Form` describes."""
    data = [call.data[name] for name in given]
    # Operators specialise on a float, and not on a tensor: it becomes one, by a product.
    unit = torch.ones((), dtype=torch.float64, device="cpu")
    one = [unit * x for x in call.numbers.values()]
    tensors = [*call.tensors.values(), *data, *kept, *one]
    return tensors, [*call.ints.values(), *call.counts.values()]


def attend(
    program: Program,
    mask_program: Program,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    schedule: Schedule | None,
    backend: str,
    deterministic: bool,
    arguments: Mapping[str, Any],
    data: Mapping[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Attention.__call__` through operators: out and LSE.

    `arguments` are those of `call.check`, `data` what the expressions read; `mask_program`
    decides schedules."""
    if transforms.are_active():
        refuse_transforms(program.label)
    call = _sort(arguments, data, constants_of(program.label))
    lists = 2 if _wants_gradient(q, k, v, *call.tensors.values(), *call.data.values()) else 1
    made_for, lengths = None, []
    if schedule is None and q.ndim == 4 and arguments["page_table"] is None:
        tail, block = plan(mask_program, q, k, v, arguments, data, backend, lists)
    elif schedule is None:
        # How many tiles packed and paged sequences have isn't in the shapes: planned where it runs.
        tail, block = [], None
    else:
        tail, block, made_for, lengths = _given(schedule, lists)
    how = (backend, deterministic, block, made_for, lists)
    shape = _shape_of(q, k, v)
    digest, tile, (tensors, ints) = _declared(program, call, how, shape)
    if tile is None:
        tail, lengths = [], []
    out, lse = torch.ops.flashgen.attention(q, k, v, [*tensors, *tail], [*ints, *lengths], digest)
    return out, lse


def shapes(
    program: Program,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    arguments: Mapping[str, Any],
    data: Mapping[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and LSE of a checked call of meta tensors: the operator's, which knows the shapes."""
    call = _sort({**arguments, "batch_invariant": False}, data, constants_of(program.label))
    how = ("auto", False, (128, 128), None, 1)
    shape = _shape_of(*tensors)
    digest, _, lists = _declared(program, call, how, shape)
    out, lse = torch.ops.flashgen.attention(*tensors, *lists, digest)
    return out, lse


def plan(
    program: Program,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    arguments: Mapping[str, Any],
    data: Mapping[str, Any],
    backend: str,
    lists: int,
) -> tuple[list[torch.Tensor], tuple[int, int] | None]:
    """The schedule's tensors, and its tile. Layers that ask for the same share an operator's call:
    it depends on shapes of q and k, and on what the mask reads."""
    read = names_of(program.label)
    data = {name: value for name, value in data.items() if name in read}
    # What the tile depends on, and else what places a call's positions.
    kernel = "portable" if arguments["dropout_p"] and backend == "auto" else backend
    arguments = {**arguments, "sinks": None, "scale": None, "dropout_p": 0.0, "seed": None}
    call = _sort(arguments, data, constants_of(program.label))
    how = (kernel, False, None, None, lists)
    shape = _shape_of(q, k, v)
    digest, block, (tensors, ints) = _declared(program, call, how, shape)
    if block is None:
        # Refused, and so is the call itself.
        return [], None
    made = torch.ops.flashgen.schedule(tensors, ints, q.shape, k.shape, q.device, digest)
    return made, block


def _declared(
    program: Program, call: Sorted, how: tuple[Any, ...], shape: tuple[Any, ...]
) -> tuple[str, tuple[int, int] | None, Lists]:
    """The form's digest, its tile, None where the call is refused, and the operators' lists."""
    digest, given, kept, tile, is_guarded = declare(
        program.label, _names(call), how, is_dynamo_compiling(), *shape
    )
    if is_guarded:
        # By where they are found before each run, so that they may be others then; what is read
        # here becomes a guard (`guard.py`).
        kept = tuple(getattr(program.in_graphs.guarded.held, digest))
    return digest, tile, _lists(call, given, kept)


def _given(schedule: Schedule, lists: int) -> tuple[Any, ...]:
    """Tensors of a schedule that comes from outside, its tile, and what it was made for."""
    block = (index(schedule.block_size[0]), index(schedule.block_size[1]))
    numbers = [(name, x) for name, x in schedule.scalars if _is_int(x)]
    made_for = (schedule.mask_name, schedule.mask_digest, tuple(name for name, _ in numbers))
    lengths = [schedule.q_len, schedule.kv_len, *(x for _, x in numbers)]
    tensors, runs = [schedule.states], schedule._kv_runs
    if runs is not None and schedule.states.device.type != "cpu":
        tensors += [runs.counts, runs.masked, runs.full]
        if lists == 2 and schedule.packing is None:
            given = (schedule.states, schedule.kv_lens, schedule.kv_len, block)
            tensors.append(torch.ops.flashgen.transpose(*given))
    return tensors, block, made_for, lengths


def _sort(
    arguments: Mapping[str, Any], data: Mapping[str, Any], constants: tuple[str, ...]
) -> Sorted:
    tensors = {n: x for n, x in arguments.items() if isinstance(x, torch.Tensor)}
    ints = {n: x for n, x in arguments.items() if _is_int(x)}
    static = tuple(
        (n, _constant(x)) for n, x in arguments.items() if n not in tensors and n not in ints
    )
    varying = {n: x for n, x in data.items() if n not in constants}
    return Sorted(
        tensors,
        ints,
        static,
        {n: x for n, x in varying.items() if isinstance(x, torch.Tensor)},
        {n: x for n, x in varying.items() if isinstance(x, (float, torch.SymFloat))},
        {n: x for n, x in varying.items() if _is_int(x)},
        tuple(_kind(n, x, n in constants) for n, x in data.items()),
    )


def _kind(name: str, value: Any, constant: bool) -> tuple[Any, ...]:
    if constant:
        return (name, "static", index(value) if _is_int(value) else _constant(value))
    if isinstance(value, torch.Tensor):
        single = tuple(d for d in range(value.ndim) if value.shape[d] == 1)
        return (name, "tensor", value.dtype, value.ndim, single, value.device)
    if _is_int(value):
        return (name, "int")
    if isinstance(value, (float, torch.SymFloat)):
        return (name, "float")
    return (name, "static", value)


def _constant(value: Any) -> Any:
    """As a constant of the graph: a float that Dynamo holds for a variable, by its digits; one that
    follows from a length is a guard on it."""
    if isinstance(value, torch.SymFloat):
        return float(value)
    return float.fromhex(value.hex()) if isinstance(value, float) else value


def _is_int(value: Any) -> bool:
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def _shape_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Any, ...]:
    """What decides the spec and the tile: which indices take several values, dtype, dimensions."""
    sizes = {"b": q.shape[0], "h": q.shape[-3], "h_kv": k.shape[-3]}
    if q.ndim == 3 or k.ndim == 3:
        sizes = {"b": 2, "h": q.shape[-2], "h_kv": k.shape[-2]}
    spread = tuple(name for name, size in sizes.items() if size > 1)
    # Head dimensions and what is baked in are constants of a graph: `index` makes them so.
    return spread, q.dtype, q.device, index(q.shape[-1]), index(v.shape[-1])


def _wants_gradient(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
