"""`flashgen show`: a mask and its schedule, in the terminal and as a picture."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ..errors import FlashgenError, format_call
from ..expr import format_expr, leaves
from ..geometry import Geometry
from ..schedule import Schedule
from ..schedule.make import make_schedule
from ..show import mask_svg, mask_text, schedule_svg, schedule_text
from ..show.text import WIDTH, wrap_formula
from ..spec import Bound, Mask, Program
from ..spec.data import fit_data
from . import target
from .loading import write
from .shapes import heads_of

Planner = Literal["auto", "bounds", "exact"]

# Beyond these lengths: no matrix of elements; and no look at the elements of undecided tiles.
_DENSE, _EXACT = 2048, 16384
# A schedule of at most so many tiles along a side, unless asked otherwise.
_TILES = 1024


@dataclass(frozen=True, eq=False)
class Drawing:
    """What is drawn of a mask: its formula, its schedule, and its first matrix if it is small."""

    mask: Mask
    formula: str
    bound: Bound
    schedule: Schedule
    dense: torch.Tensor | None

    def svg(self, title: str) -> str:
        if self.dense is None:
            return schedule_svg(self.schedule, title=title, formula=self.formula)
        return mask_svg(self.dense, self.schedule, title=title, formula=self.formula)


def show(given: argparse.Namespace) -> None:
    """Print the mask, its data and its schedule; write the picture where `--svg` asks for it."""
    found = target.find(given)
    mask = found.program.mask
    if mask is None:
        raise FlashgenError(f"{given.name} has no mask: every key is allowed")
    heads = (given.batch, given.heads, given.kv_heads)
    wanted = {argument.name for argument in mask.params}
    data = {name: value for name, value in found.data.items() if name in wanted}
    target.check_complete(mask.name, mask.leaves, data)
    drawn = draw(mask, data, given.n, given.block_size, heads, given.planner)
    print(_heading(drawn))
    if drawn.dense is not None:
        print(mask_text(drawn.dense), end="\n\n")
    print(schedule_text(drawn.schedule, groups=2))
    if given.svg:
        write(Path(given.svg), drawn.svg(mask.name))
        print(f"wrote {given.svg}")


def draw(
    mask: Mask,
    data: Mapping[str, Any],
    lengths: tuple[int, int],
    block_size: tuple[int, int] | None = None,
    heads: tuple[int | None, int | None, int | None] = (None, None, None),
    planner: Planner | None = None,
) -> Drawing:
    """Plan a mask on the CPU. `heads` is (B, Hq, Hkv); what is None follows from the data."""
    q_len, kv_len = lengths
    call = format_call(mask.name, **data)
    bound = Program(mask=mask).bind(data, call)
    geometry = Geometry(*heads_of(bound, heads), q_len, kv_len, torch.device("cpu"))
    bound = fit_data(bound, geometry.extents, geometry.device, call)
    block = block_size or _block_size(q_len, kv_len)
    if 0 in block:
        raise FlashgenError(f"a tile of {block[0]}x{block[1]}", write="--block-size 16x16")
    how: Planner = planner or ("bounds" if max(lengths) > _EXACT else "auto")
    schedule = make_schedule(bound, geometry, block, how, call)
    dense = None
    if 0 < max(lengths) <= _DENSE and min(lengths) > 0:
        dense = mask.dense(*lengths, batch=geometry.batch, heads=geometry.heads, **data)[0, 0]
    formula = "every key" if bound.spec.mask is None else format_expr(bound.spec.mask)
    return Drawing(mask, formula, bound, schedule, dense)


def _block_size(q_len: int, kv_len: int) -> tuple[int, int]:
    """Small tiles for small pictures, then a kernel's, then as large as it takes."""
    longest = max(q_len, kv_len)
    size = 8 if longest <= 64 else 16 if longest <= 256 else 128
    while longest > size * _TILES:
        size *= 2
    return size, size


def _heading(drawn: Drawing) -> str:
    """The name, the first words of the docstring, the formula, the data."""
    doc = " ".join((drawn.mask.__doc__ or "").strip().partition("\n\n")[0].split())
    # A composed mask's docstring is that of its class.
    is_leaf = len(drawn.mask.leaves) == 1 and hasattr(drawn.mask, "__wrapped__")
    lines = [f"{drawn.mask.name}: {doc}" if is_leaf and doc else drawn.mask.name]
    lines += wrap_formula(drawn.formula, WIDTH, indent=4)
    for name, value in drawn.bound.scalars.items():
        lines.append(f"    {name} = {value}")
    for name in sorted(leaves(drawn.bound.spec.mask, "load")):
        tensor = drawn.bound.tensors[name]
        dtype = str(tensor.dtype).removeprefix("torch.")
        lines.append(f"    {name}: {dtype} {list(tensor.shape)}{_values(tensor)}")
    return "\n".join([*lines, ""])


def _values(tensor: torch.Tensor) -> str:
    return f" = {tensor.tolist()}" if tensor.numel() <= 16 else ""
