"""The text of the planning kernels: the tile rule and the mask, lowered."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import torch

from ..bounds import TileRule, tile_rule
from ..expr import FLOATS, Expr, cast, leaves
from ..lower import Lowered, Widths, lower
from ..spec import Spec
from . import (
    INDEX_NAMES,
    Generated,
    Variant,
    bare,
    data_arguments,
    environment,
    header,
    position_arguments,
    taken_names,
    tidy,
    unaligned_pointers,
    used_in,
)

TEMPLATE = "plan.py.j2"


@dataclass(frozen=True)
class Summary:
    """One one-sided expression, and where its least and greatest values over a tile are kept.

    Those of a dtype share a buffer [slots, tiles of queries and of keys, 2]; a query's and a
    key's may have the same slot."""

    name: str
    side: str
    expr: Expr
    dtype: torch.dtype
    slot: int
    value: str = ""

    @property
    def truth(self) -> str:
        return " != 0" if self.expr.kind == "bool" else ""

    @property
    def buffer(self) -> str:
        return _buffer(self.dtype)

    @property
    def at(self) -> str:
        return f"at + {2 * self.slot} * programs" if self.slot else "at"


def _buffer(dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}_summaries_ptr"


@dataclass(frozen=True)
class Side:
    """The function that summarises a tile of queries or of keys.

    `known`: names it may read; `place` and `sizes`: where its tile is, and how large."""

    name: str
    title: str
    known: tuple[str, ...]
    place: tuple[str, ...]
    sizes: tuple[str, ...]
    lines: tuple[str, ...]
    summaries: tuple[Summary, ...]
    reads: frozenset[str]


@dataclass(frozen=True)
class Kernel:
    """A kernel's arguments, and what Triton is told of them."""

    arguments: tuple[str, ...]
    unspecialized: tuple[str, ...]
    unaligned: tuple[str, ...]

    @staticmethod
    def of(arguments: list[str], spec: Spec) -> Kernel:
        typed = tuple(bare(a) for a in arguments if ":" in a)
        return Kernel(tuple(arguments), typed, tuple(unaligned_pointers(arguments, spec)))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(map(bare, self.arguments))


@dataclass(frozen=True)
class PlanModule:
    """The generated planning module, what its kernels take, and the buffers between them.

    `summarize` are the arguments of the first kernel, empty if nothing is summarised; `buffers`
    the name, dtype and number of slots of each buffer."""

    generated: Generated
    summarize: tuple[str, ...]
    buffers: tuple[tuple[str, torch.dtype, int], ...]


def plan_module(spec: Spec, variant: Variant) -> PlanModule:
    """Generate the planning kernels of a mask (which must not be None)."""
    assert spec.mask is not None
    rule = tile_rule(spec.mask)
    summaries = _summaries(rule, spec, variant)
    slots: dict[torch.dtype, int] = {}
    for summary in summaries:
        slots[summary.dtype] = max(slots.get(summary.dtype, 0), summary.slot + 1)
    buffers = tuple((_buffer(dtype), dtype, count) for dtype, count in slots.items())
    position = ["heads: tl.int32", "group: tl.int32", *position_arguments(variant)]
    data = data_arguments(spec, variant)
    pointers = [name for name, _, _ in buffers]
    tiles = ["q_tiles: tl.int32", "kv_tiles: tl.int32", "grids: tl.int32"]
    tiles += ["lines: tl.int32"] * variant.packed
    summarize = Kernel.of([*pointers, *tiles, *position, *data], spec)
    sides = tuple(_side(s, summaries, spec, variant, summarize.names) for s in ("q", "kv"))
    sides = tuple(side for side in sides if side.summaries)
    rules = _lower([rule.may, rule.must], spec, variant, _tiles(rule, summaries))
    mask = _lower([spec.mask], spec, variant, {})
    results = ["states_ptr", "counts_ptr", "masked_ptr", "full_ptr", "width: tl.int32"]
    classify = Kernel.of([*results, *pointers, *tiles, *position, *data], spec)
    names = [bare(a) for a in data]
    helpers = rules.helpers | mask.helpers
    text = (
        environment()
        .get_template(TEMPLATE)
        .render(
            header=header(spec, "", by_range=False),
            helpers=sorted(helpers.union(*(_side_helpers(s) for s in sides))),
            sides=sides,
            calls=[],
            used_in=used_in,
            summarize=summarize,
            summaries=summaries,
            unaligned=classify.unaligned,
            unspecialized=classify.unspecialized,
            arguments=classify.arguments,
            data_names=names,
            mask=str(spec.mask),
            allowed_lines=mask.statements[0],
            allowed=mask.results[0],
            rule_lines=rules.statements[0],
            may=rules.results[0],
            must=rules.results[1],
            call_rest=["q_len", "kv_len", *names],
            kv_lens=variant.kv_lens,
            offset=variant.offset,
            packed=variant.packed,
            key_storage="dense",
            head_dim=0,
            v_head_dim=0,
        )
    )
    name = f"{spec.slug}{'_packed' * variant.packed}_plan"
    generated = Generated(name, tidy(text), classify.names)
    return PlanModule(generated, summarize.names if sides else (), buffers)


def _summaries(rule: TileRule, spec: Spec, variant: Variant) -> tuple[Summary, ...]:
    """Each distinct summarised expression once; bare positions need none."""
    widths = Widths({t.name: t.dtype for t in spec.tensors}, variant.wide)
    found: dict[tuple[str, Expr], Summary] = {}
    slots: Counter[tuple[str, torch.dtype]] = Counter()
    for node in rule.summaries:
        side, expr = node.attr[0], node.args[0]
        if (side, expr) in found:
            continue
        if expr.kind in FLOATS:
            dtype = torch.float64 if expr.kind == "double" else torch.float32
        else:
            dtype = torch.int64 if widths.is_wide(expr) else torch.int32
        name = f"{side}_summary_{sum(s == side for s, _ in found)}"
        found[side, expr] = Summary(name, side, expr, dtype, slots[side, dtype])
        slots[side, dtype] += 1
    return tuple(found.values())


def _tiles(rule: TileRule, summaries: tuple[Summary, ...]) -> dict[Expr, str]:
    """How the rule's summaries are spelled in `classify`."""
    spelled = {}
    for summary in summaries:
        for end in ("min", "max"):
            node = Expr("tile", summary.expr.kind, (summary.expr,), (summary.side, end))
            spelled[node] = f"{summary.name}_{end}"
    for side, symbol in (("q", "q_idx"), ("kv", "kv_idx")):
        position = Expr("index", "int", (), symbol)
        for end, word in (("min", "low"), ("max", "high")):
            spelled[Expr("tile", "int", (position,), (side, end))] = f"{side}_{word}"
    return spelled


def _lower(exprs: list[Expr], spec: Spec, variant: Variant, tiles: dict[Expr, str]) -> Lowered:
    return lower(
        exprs,
        stages=1,
        stage_of=lambda _: 0,
        names=INDEX_NAMES,
        dtypes={t.name: t.dtype for t in spec.tensors},
        wide_scalars=variant.wide,
        tiles=tiles,
        taken=taken_names(spec, variant),
    )


def _side(
    name: str,
    summaries: tuple[Summary, ...],
    spec: Spec,
    variant: Variant,
    known: tuple[str, ...],
) -> Side:
    mine = [s for s in summaries if s.side == name]
    values = [s.expr if s.expr.kind != "bool" else cast(s.expr, "int") for s in mine]
    lowered = _lower(values, spec, variant, {})
    spelled = tuple(
        replace(s, value=_spread_nan(s, text))
        for s, text in zip(mine, lowered.results, strict=True)
    )
    is_q = name == "q"
    return Side(
        name,
        "queries" if is_q else "keys",
        ("at", "programs", *known),
        ("index", "q_tiles") if is_q else ("index - q_programs", "kv_tiles"),
        ("TILE_M", "BLOCK_M") if is_q else ("TILE_N", "BLOCK_N"),
        lowered.statements[0],
        spelled,
        _batch_indices(mine, variant),
    )


def _batch_indices(summaries: list[Summary], variant: Variant) -> frozenset[str]:
    """Which of b, h and h_kv a summary kernel has to know."""
    used = set().union(*(leaves(s.expr, "index") for s in summaries))
    used |= {"b"} if variant.packed or variant.kv_lens or variant.offset == "tensor" else set()
    return frozenset(used | ({"h"} if "h_kv" in used else set()))


def _spread_nan(summary: Summary, text: str) -> str:
    """A NaN anywhere in a tile makes both of its summaries NaN: they leave the tile open."""
    if summary.expr.kind not in FLOATS:
        return f"{text} + tl.zeros([BLOCK], tl.int32)"
    has_nan = f"tl.max(({text} != {text}).to(tl.int32), 0) > 0"
    dtype = "tl.float64" if summary.expr.kind == "double" else "FLOAT"
    return f'tl.where({has_nan}, float("nan"), {text}) + tl.zeros([BLOCK], {dtype})'


def _side_helpers(side: Side) -> frozenset[str]:
    from ..lower.spell import HELPERS

    lines = "\n".join([*side.lines, *(s.value for s in side.summaries)])
    return frozenset(h for h in HELPERS if f"{h}(" in lines)
