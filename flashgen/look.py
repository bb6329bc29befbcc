"""What `source` and `explain` say of a call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from . import cache, data_gradients, emit, launch, plan
from .backends import Choice
from .bounds import tile_rule
from .call import Call
from .decoding import Kernel, describe, on_hopper
from .emit import decode as emit_decode
from .emit.gradients import Wanted
from .kernel_names import name_in_kernels, spell
from .launch import backward as launch_backward
from .launch import decode as launch_decode
from .launch import hopper_backward as launch_hopper_backward
from .launch import hopper_forward as launch_hopper
from .launch import hopper_latent as launch_hopper_latent
from .model import Cost
from .order import Ordered, ordered
from .schedule import Schedule
from .schedule.documents import apart_of
from .show import explain_text
from .spec import Spec
from .tiling.hopper import shape_for

LINES_SHOWN = 24


def _forward(call: Call, choice: Choice, kernel: Kernel) -> list[emit.Generated]:
    spec, variant = _kernel_of(call)
    if kernel.decodes and on_hopper(call, choice.name):
        made = [launch_hopper_latent.generate(spec, variant)]
        return [*made, launch_decode.repairing(spec, variant), emit_decode.merging()]
    if kernel.decodes:
        made = [launch_decode.generate(spec, variant, dealt=kernel.dealt)]
        return [*made, emit_decode.merging(kernel.dealt)]
    if choice.name == "hopper":
        made = list(launch_hopper.generate(spec, variant))
        if (apart := apart_of(spell(call.bound), call.geometry, (128, 128))) is not None:
            # On a schedule that is given, in the place of the first one.
            others = launch_hopper.generate(spec, variant, skips=True)[0]
            made += [others, launch_hopper.apart_text(apart.bound.spec, variant)]
        return made
    return [launch.generate(spec, variant)]


def _kernel_of(call: Call) -> tuple[Spec, emit.Variant]:
    bound = spell(call.bound)
    dims = (call.q.shape[-1], call.v.shape[-1])
    drops = call.dropout is not None
    return bound.spec, launch.variant_of(bound, call.geometry, *dims, drops, call.q)


def _all(call: Call, choice: Choice, kernel: Kernel) -> list[emit.Generated]:
    """Forward, backward (there is none of paged keys, or of what decodes), and planning."""
    spec, variant = _kernel_of(call)
    made = _forward(call, choice, kernel)
    if call.geometry.pages is None and not kernel.decodes:
        made += [emit.Generated(m.name, m.text, ()) for m in _backward(call, choice)]
    if spec.mask is not None:
        planning = replace(variant, head_dim=0, v_head_dim=0, dropout=False, approximates=False)
        made.append(plan.generate(spec, planning).generated)
    if choice.name == "hopper" and variant.packed:
        made.append(plan.queueing())
    listing = emit_decode.visiting() if kernel.decodes else plan.compaction(variant.packed)
    return [*made, listing]


def _backward(call: Call, choice: Choice) -> list[Any]:
    """The modules of the gradients of q, k, v, and of the data that wants any."""
    spec, variant = _kernel_of(call)
    told = _division(call, hopper=choice.name == "hopper")
    division = told.renamed(name_in_kernels(call.bound.spec))
    if choice.name != "hopper" or _no_hopper_backward(call, told):
        return [launch_backward.generate(spec, variant, division.kernels)]
    modules: list[Any] = [
        launch_hopper_backward.generate(spec, variant, wanted=division.added),
        launch_backward.generate(spec, variant, division.repairs, repairs=True),
    ]
    if division.rest:
        modules.append(launch_backward.generate(spec, variant, division.alone))
    return modules


def _division(call: Call, *, hopper: bool) -> launch_backward.Division:
    """Which kernels compute the gradients of q, k, v, and of the data that wants any, by the
    user's names."""
    dims = (call.q.shape[-1], call.v.shape[-1])
    data = data_gradients.wanted(call.bound, [x.requires_grad for x in call.data])
    return launch_backward.divide(
        Wanted(data=data), call.bound, call.geometry, dims, call.q.dtype, deterministic=False,
        hopper=hopper, side=launch_backward.side_of(call.q.device, call.q.dtype, dims, (128, 128)),
    )  # fmt: skip


def _no_hopper_backward(
    call: Call, division: launch_backward.Division, block_size: tuple[int, int] = (128, 128)
) -> str:
    """Why the gradients of a call with Hopper's forward come from portable kernels."""
    dims = (call.q.shape[-1], call.v.shape[-1])
    given = (call.bound, call.geometry, dims, call.q.dtype, block_size, call.scale)
    return launch_backward.obstacle(division, *given, dropout=call.dropout is not None)


def _path(generated: emit.Generated) -> str:
    return str(cache.write(generated.name, generated.text, launch.key_parts()))


def source(call: Call, choice: Choice, kernel: Kernel) -> str:
    """The text of every kernel of a call, each below the path of its file."""
    return "\n\n".join(f"# {_path(g)}\n{g.text}" for g in _all(call, choice, kernel))


def _loop_of(generated: emit.Generated) -> str:
    """The heart of a kernel: its loop over tiles, and how much more there is."""
    lines = generated.text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("    # Tiles")), 0)
    shown = lines[start : start + LINES_SHOWN]
    return "\n".join([*shown, f"... {len(lines) - len(shown)} more lines"])


def _order(cheaper: Ordered, schedule: Schedule) -> str:
    """The form of the mask for data in order, and whether this data is. Waits for the device."""
    lines = [str(cheaper)]
    for table, ranges in zip(cheaper.tables, schedule.ranges, strict=True):
        held = f"{int(ranges.order.sum())} of {ranges.order.numel()}"
        lines.append(
            f"{table.tensor}: {held} in order; kernels along the keys compare with ranges there"
        )
    return "\n".join(lines)


def _blocks(call: Call, schedule: Schedule, choice: Choice, kernel: Kernel) -> str:
    """The blocks in use: those that tuning has found, or the default."""
    if kernel.decodes:
        return describe(call, schedule, choice.name)
    spec, _ = _kernel_of(call)
    generated = _forward(call, choice, kernel)[0]
    dims = (call.q.shape[-1], call.v.shape[-1])
    if choice.name != "hopper":
        default: Any = launch.default_tiling(call.q, dims[1], schedule, spec)
        return _named(default, launch.tuned_tiling(generated, call.q, dims[1], schedule, spec))
    rows, keys = schedule.block_size
    default, device = shape_for(*dims, keys, rows), call.q.device
    what = launch.tuned_as(generated.name, generated.text, call.q.dtype)
    forward = _named(default, launch_hopper.tuned(what, device, default, dims))
    return f"{forward}\n{_blocks_back(call, schedule.block_size)}"


def _blocks_back(call: Call, block_size: tuple[int, int]) -> str:
    """Which kernels compute the gradients of a call with Hopper's forward, and their steps."""
    spec, variant = _kernel_of(call)
    division = _division(call, hopper=True)
    if problem := _no_hopper_backward(call, division, block_size):
        return f"backward: portable; {problem}"
    added = division.renamed(name_in_kernels(call.bound.spec)).added
    made = launch_hopper_backward.generate(spec, variant, wanted=added)
    default = launch_hopper_backward.default_steps(variant)
    what = launch.tuned_as(made.name, made.text, call.q.dtype)
    steps = launch_hopper_backward.tuned(what, call.q.device, default, block_size, variant.packed)
    text = f"backward: hopper, {_named(default, steps)}"
    for names, where in ((division.added.data, "with them"), (division.rest, "portable")):
        if names:
            text += f"\ngradients of {', '.join(names)}: {where}"
    return text


def _named(default: Any, found: Any) -> str:
    return f"{found}{' (tuned)' if found != default else ''}"


def explain(call: Call, schedule: Schedule, choice: Choice, kernel: Kernel) -> str:
    """Every stage of a call, from the spec to the kernel."""
    spec = call.bound.spec
    sections = [
        ("spec", str(spec)),
        ("tile rule", str(tile_rule(spec.mask))),
        ("schedule", str(schedule)),
        ("cost", str(Cost.of(call, schedule))),
        ("backend", f"{choice}\n{kernel}\n{_blocks(call, schedule, choice, kernel)}"),
    ]
    if cheaper := ordered(spec.mask):
        sections.insert(2, ("data in order", _order(cheaper, schedule)))
    generated = _forward(call, choice, kernel)[0]
    sections.append((f"kernel {_path(generated)}", _loop_of(generated)))
    return explain_text(sections)
