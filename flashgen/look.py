"""What `source` and `explain` say of a call."""

from __future__ import annotations

from . import cache, emit, launch
from .backends import Choice
from .bounds import tile_rule
from .call import Call
from .kernel_names import spell
from .model import Cost
from .schedule import Schedule
from .show import explain_text
from .tiling import choose_for

LINES_SHOWN = 24


def _generated(call: Call) -> list[emit.Generated]:
    bound = spell(call.bound)
    variant = launch.variant_of(bound, call.geometry, call.q.shape[-1], call.v.shape[-1])
    return [launch.generate(bound.spec, variant)]


def _path(generated: emit.Generated) -> str:
    return str(cache.write(generated.name, generated.text, launch.key_parts()))


def source(call: Call) -> str:
    """The text of every kernel of a call, each below the path of its file."""
    return "\n\n".join(f"# {_path(g)}\n{g.text}" for g in _generated(call))


def _loop_of(generated: emit.Generated) -> str:
    """The heart of a kernel: its loop over tiles, and how much more there is."""
    lines = generated.text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("    # Tiles")), 0)
    shown = lines[start : start + LINES_SHOWN]
    return "\n".join([*shown, f"... {len(lines) - len(shown)} more lines"])


def explain(call: Call, schedule: Schedule, choice: Choice) -> str:
    """Every stage of a call, from the spec to the kernel."""
    spec = call.bound.spec
    target = launch.current_target(call.q.device)
    dims = (call.q.shape[-1], call.v.shape[-1])
    tiling = choose_for(target, call.q.dtype, *dims, schedule.block_size)
    sections = [
        ("spec", str(spec)),
        ("tile rule", str(tile_rule(spec.mask))),
        ("schedule", str(schedule)),
        ("cost", str(Cost.of(call, schedule))),
        ("backend", f"{choice}\n{tiling}"),
    ]
    for generated in _generated(call):
        sections.append((f"kernel {_path(generated)}", _loop_of(generated)))
    return explain_text(sections)
