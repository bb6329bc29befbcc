"""`torch.ops.flashgen`: schedules, attention, and its gradients, as operators.

What a schema can't say, which tensor of a list is which, is in the `Form` that the string names."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from .. import ahead
from ..call import Call, check
from ..calls.known import Known, key_of
from ..config import config
from ..decoding import choose_kernel, decode
from ..errors import CallText
from ..geometry import Geometry, refuse_paged
from ..launch.backward import Saved
from ..records.tape import Tapes
from ..schedule import Schedule
from ..schedule.make import check_fits, make_schedule
from ..schedule.runs import column_capacity
from . import flat, guard, refused
from .eager import refuse_forward_mode, saveable, twice
from .engine import arguments_of, engine, no_autocast
from .form import Form, form_of

Tensors = Sequence[torch.Tensor]
Ints = Sequence[int]

# torch.library has no annotations.
_library: Any = torch.library.Library("flashgen", "DEF")  # type: ignore[no-untyped-call]
_library.define(
    "schedule(Tensor[] others, SymInt[] ints, SymInt[] q_shape, SymInt[] k_shape, Device device, "
    "str form) -> Tensor[]"
)
_library.define("transpose(Tensor states, Tensor? kv_lens, SymInt kv_len, int[] tile) -> Tensor")
_library.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor[] others, SymInt[] ints, str form) "
    "-> (Tensor out, Tensor lse)"
)
_library.define(
    "attention_backward(Tensor? grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, "
    "Tensor out, Tensor lse, Tensor[] others, SymInt[] ints, str form, bool[] needed) -> Tensor[]"
)


def _schedule(
    others: Tensors, ints: Ints, q_shape: Ints, k_shape: Ints, device: torch.device, form: str
) -> list[torch.Tensor]:
    """The states; on a GPU the runs along rows, and if gradients are wanted along columns; each in
    one dimension. Only the shapes of q and k are read."""
    known = form_of(form)
    q, k = (torch.empty((), device=device).expand(tuple(shape)) for shape in (q_shape, k_shape))
    call, alike, _, _ = _call(known, q, k, k, others, ints)
    tile, tapes = known.block_size, alike.tapes
    made = make_schedule(call.bound, call.geometry, tile, "auto", call.text, tapes)
    runs = [made.kv_runs, made.q_runs][: known.lists] if device.type != "cpu" else []
    return [flat.flat_states(made.states), *map(flat.flat_runs, runs)]


def _schedule_fake(
    others: Tensors, ints: Ints, q_shape: Ints, k_shape: Ints, device: torch.device, form: str
) -> list[torch.Tensor]:
    known = form_of(form)
    arguments, *_ = known.read(others, ints)
    lengths = (q_shape[0], q_shape[1], k_shape[1], q_shape[2], k_shape[2])
    offset, kv_lens = arguments.get("q_offset"), arguments.get("kv_lens")
    grid = known.grid(Geometry(*lengths, device, offset, kv_lens))
    states = torch.empty(flat.states_length(grid), dtype=torch.int8, device=device)
    if device.type == "cpu":
        return [states]
    sizes = [flat.runs_length(*axis) for axis in known.axes(grid)[: known.lists]]
    return [states, *(torch.empty(n, dtype=torch.int32, device=device) for n in sizes)]


def _transpose(
    states: torch.Tensor, kv_lens: torch.Tensor | None, kv_len: int, tile: Sequence[int]
) -> torch.Tensor:
    """Runs along the columns, which the gradients of keys and values consume."""
    from ..plan import compact

    capacity = column_capacity(states.shape[2])
    block = (tile[0], tile[1])
    return flat.flat_runs(compact(states, kv_len, kv_lens, block, capacity, by_key=True))


def _transpose_fake(
    states: torch.Tensor, kv_lens: torch.Tensor | None, kv_len: int, tile: Sequence[int]
) -> torch.Tensor:
    batch, heads, rows, columns = states.shape
    length = flat.runs_length((batch, heads, columns), column_capacity(rows))
    return states.new_empty(length, dtype=torch.int32)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, others: Tensors, ints: Ints, form: str
) -> tuple[torch.Tensor, torch.Tensor]:
    guard.renew()
    given = (q, k, v, others, ints)
    if (wrong := refused.find(form)) is not None:
        raise wrong.error(*given)
    known = form_of(form)
    refuse_forward_mode(known.name, q, k, v, *others)
    ahead.once(_kind_of(form, q, k, v), q.device, lambda: _forward(known, *given, Tapes()))
    return _forward(known, *given)


def _kind_of(form: str, *tensors: torch.Tensor) -> tuple[Any, ...]:
    """What kernels depend on beside the form, all but alignment and such."""
    return form, *((x.shape[-1], x.dtype, x.device) for x in tensors)


def _forward(
    known: Form,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    others: Tensors,
    ints: Ints,
    own_tapes: Tapes | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and LSE; `own_tapes`: records instead of those of calls like this one."""
    call, schedule, choice, tapes = _scheduled(known, q, k, v, others, ints, own_tapes)
    invariant = _is_invariant(known)
    if config.debug:
        from ..debug import report_clamped

        report_clamped(call.bound, call.geometry)
    kernel = choose_kernel(call, choice, asked=known.backend, invariant=invariant)
    with no_autocast(q.device):
        if kernel.decodes:
            out, lse = decode(call, schedule, invariant, choice, tapes)
        else:
            arguments = arguments_of(call, schedule, known.deterministic, invariant)
            made = engine(choice, call.bound, tapes=tapes, **arguments)
            out, lse = made.forward(call.q, call.k, call.v, call.sinks, call.data)
    if call.geometry.packing is None:
        return out, lse
    return out[0].transpose(0, 1).contiguous(), lse[0].contiguous()


def _attention_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, others: Tensors, ints: Ints, form: str
) -> tuple[torch.Tensor, torch.Tensor]:
    kind = torch.float64 if q.dtype == torch.float64 else torch.float32
    rows = q.shape[:-1] if q.ndim == 4 else (q.shape[1], q.shape[0])
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(rows, dtype=kind)


def _backward(
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    others: Tensors,
    ints: Ints,
    form: str,
    needed: Sequence[bool],
) -> list[torch.Tensor]:
    """Gradients of those of q, k, v and `others` that are needed, in this order."""
    known = form_of(form)
    grads = (x for x in (grad_out, grad_lse) if x is not None)
    refuse_forward_mode(known.name, q, k, v, *grads, *others)
    saved = Saved(q, k, v, out, lse, grad_out, grad_lse)
    given = (saved, others, ints, needed)
    kind = (*_kind_of(form, q, k, v), *needed, grad_lse is None)
    ahead.once(kind, q.device, lambda: _gradients(known, *given, Tapes()))
    return _gradients(known, *given)


def _gradients(
    known: Form,
    given: Saved,
    others: Tensors,
    ints: Ints,
    needed: Sequence[bool],
    own_tapes: Tapes | None = None,
) -> list[torch.Tensor]:
    q, k, v, out, lse, grad_out, grad_lse = given
    call, schedule, choice, tapes = _scheduled(known, q, k, v, others, ints, own_tapes)
    arguments = arguments_of(call, schedule, known.deterministic)
    made = engine(choice, call.bound, tapes=tapes, **arguments)
    places = known.places
    names = ("sinks", *(f"data {tensor.name}" for tensor in known.spec.tensors))
    flags = [name in places and needed[3 + places[name]] for name in names]
    refuse_paged(call.geometry, call.text)
    is_packed = call.geometry.packing is not None
    saved = Saved(call.q, call.k, call.v, out, lse, grad_out, grad_lse)
    if is_packed:
        saved = _as_kernels_see(saved)
    with no_autocast(q.device):
        grads = made.backward(saved, call.sinks, call.data, (*needed[:3], *flags))
    if is_packed:
        rows = (None if x is None else x[0].transpose(0, 1) for x in grads[:3])
        grads = (*rows, *grads[3:])
    found: dict[int, torch.Tensor | None] = dict(enumerate(grads[:3]))
    found |= {3 + places[n]: g for n, g in zip(names, grads[3:], strict=True) if n in places}
    inputs = (q, k, v, *others)
    return [_laid_out(found[i], inputs[i]) for i, need in enumerate(needed) if need]


def _as_kernels_see(saved: Saved) -> Saved:
    """Packed results, and their gradients, as [1, H, T, D] and [1, H, T]."""
    grad_out, grad_lse = saved.grad_out, saved.grad_lse
    return saved._replace(
        out=saved.out.transpose(0, 1)[None],
        lse=saved.lse[None],
        grad_out=None if grad_out is None else grad_out.transpose(0, 1)[None],
        grad_lse=None if grad_lse is None else grad_lse[None],
    )


def _laid_out(grad: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """In the shape of what it is a gradient of, and the strides that the fake says."""
    assert grad is not None
    if grad.shape != x.shape:
        grad = grad.sum_to_size(x.shape)
    fake = _like(x)
    return grad if grad.stride() == fake.stride() else fake.copy_(grad)


def _like(x: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(x)
    return made if made.ndim == 0 or made.stride(-1) == 1 else made.contiguous()


def _backward_fake(
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    others: Tensors,
    ints: Ints,
    form: str,
    needed: Sequence[bool],
) -> list[torch.Tensor]:
    return [_like(x) for x, need in zip((q, k, v, *others), needed, strict=True) if need]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, others, ctx.ints, ctx.form = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*map(saveable, (q, k, v, *output, *others)))


def _autograd(
    ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None
) -> tuple[Any, ...]:
    """Gradients of q, k, v and the list, by the second operator."""
    is_refused = refused.find(ctx.form) is not None
    differentiable = frozenset() if is_refused else form_of(ctx.form).differentiable
    flags = ctx.needs_input_grad
    needed = [*flags[:3], *(f and i in differentiable for i, f in enumerate(flags[3]))]
    grads: list[torch.Tensor | None] = [None] * len(needed)
    if any(needed) and not (grad_out is None and grad_lse is None):
        q, k, v, out, lse, *others = ctx.saved_tensors
        given = (grad_out, grad_lse, q, k, v, out, lse, others, ctx.ints, ctx.form, needed)
        made = iter(torch.ops.flashgen.attention_backward(*given))
        grads = [next(made) if need else None for need in needed]
    # An empty list passes for one of tensors, whose gradient is a list.
    return *grads[:3], grads[3:], None if ctx.ints else [], None


def _no_second(ctx: Any, *_: Any) -> Any:
    raise twice()


def _call(
    form: Form, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, others: Tensors, ints: Ints
) -> tuple[Call, Known, Tensors, Ints]:
    """The checked call, what is known of those alike, and what of the lists is the schedule's.
    Raises FlashgenError."""
    arguments, data, tensors, rest = form.read(others, ints)
    del arguments["batch_invariant"]
    text = CallText(form.name, {"q": q, "k": k, "v": v, **arguments, **data})
    key = key_of(q, k, v, arguments, data)
    checked = functools.partial(check, form, text, q, k, v, data=data)
    known, call = form.calls.checked(key, text, q, k, v, arguments, data, checked)
    return call, known, tensors, rest


def _scheduled(
    form: Form,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    others: Tensors,
    ints: Ints,
    tapes: Tapes | None,
) -> tuple[Call, Schedule, str, Tapes]:
    """The checked call, its schedule, its backend, and records: those of calls like it, unless
    others are given."""
    from .. import backends

    call, known, tensors, rest = _call(form, q, k, v, others, ints)
    tapes = tapes or known.tapes
    if not tensors:
        tile = form.block_size
        schedule = make_schedule(call.bound, call.geometry, tile, "auto", call.text, tapes)
    else:
        schedule = form.schedule_of(call.bound, call.geometry, tensors, rest)
        # One that the graph made is this call's.
        if form.made_for is not None:
            check_fits(schedule, call.bound, call.geometry, call.text)

    def choose() -> str:
        return backends.choose_for(form.backend, call, schedule).name

    return call, schedule, known.once(schedule.block_size, choose), tapes


def _is_invariant(form: Form) -> bool:
    return bool(dict(form.static)["batch_invariant"])


for _name, _run, _fake in (
    ("schedule", _schedule, _schedule_fake),
    ("transpose", _transpose, _transpose_fake),
    ("attention", _attention, _attention_fake),
    ("attention_backward", _backward, _backward_fake),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flashgen::{_name}", _fake, lib=_library)
torch.library.register_autograd(
    "flashgen::attention", _autograd, setup_context=_setup_context, lib=_library
)
torch.library.register_autograd("flashgen::attention_backward", _no_second, lib=_library)
