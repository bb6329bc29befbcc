"""The text of Hopper's backward kernels; the mask and the score function, lowered for steps."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..expr import Expr, leaves
from ..layout import tidy
from ..lower import Lowered, fewest
from ..order import with_tables
from ..spec import Spec
from . import (
    Variant,
    bare,
    called,
    data_arguments,
    environment,
    header,
    lower_for,
    position_arguments,
    slant_of,
    unaligned_pointers,
)
from .gradients import Wanted
from .hopper_score import ScoreMath, score_math
from .level import OF_TILES
from .mask_text import needed
from .shipped import Read, Shipped, ship
from .sums import NO_DATA

# How far keys are ahead of a step's queries.
_AHEAD = "(-ahead(first_row + q_offset, rows, kv_idx, FLOAT))"
TEMPLATE = "hopper_backward.py.j2"


@dataclass(frozen=True)
class Module:
    """A generated module, and the arguments of its kernels in order.

    `query_bytes`: how much data of a query comes through shared memory."""

    name: str
    text: str
    attention: tuple[str, ...]
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    order: tuple[str, ...]
    query_bytes: int


@dataclass(frozen=True)
class Math:
    """Mask and score function as statements, by where they change.

    `key_lines`: with the key block alone; `mask_query_lines`, `score_query_lines`: with a step's
    queries alone, but for what is loaded for them (`shipped`); `tile_lines` and the score's own
    with both, or with the score."""

    key_lines: tuple[str, ...]
    mask_query_lines: tuple[str, ...]
    score_query_lines: tuple[str, ...]
    tile_lines: tuple[str, ...]
    keep: str
    helpers: set[str]
    shipped: Shipped
    score: ScoreMath


def hopper_backward(
    spec: Spec, variant: Variant, wanted: Wanted = NO_DATA, *, ordered: bool = False
) -> Module:
    """Hopper's backward kernels of a spec; of gradients of data those `wanted`, which are `summed`.

    `ordered`: what blocks of keys add up in memory they add in an order that is fixed."""
    math = _math(spec, variant, wanted)
    attention, queries, keys = _arguments(spec, variant, ordered, wanted)
    order = (_PACKED_ORDER if variant.packed else _ORDER) if ordered else []
    arguments = (attention, queries, keys, order)
    is_wide = keys_of(variant.head_dim, variant.v_head_dim) == 64
    is_crowded = math.score.is_crowded
    # Three warpgroups of small heads have no registers for data of pairs.
    is_small = max(variant.head_dim, variant.v_head_dim) <= 64
    has_adder = is_small and not (variant.packed or is_crowded)
    text = (
        environment()
        .get_template(TEMPLATE)
        .render(
            header=header(spec, ""),
            helpers=sorted(math.helpers),
            attention=attention,
            finish_queries=queries,
            finish_keys=keys,
            order_visits=order,
            unspecialized=[_typed(each) for each in arguments],
            unaligned=unaligned_pointers(attention, spec),
            data=[*map(bare, data_arguments(spec, variant)), *_gradients(wanted)],
            math=math,
            ordered=ordered,
            item_names=_item_names(math, variant),
            sorts=_sorts(variant, ordered),
            score=math.score.text,
            sums=math.score.sums,
            level=math.score.level,
            slant=math.score.slant,
            sums_read_q_idx=math.score.sums.reads("q_idx"),
            bends=bool(spec.softcap) or math.score.slope != "1.0",
            softcap=spec.softcap,
            width=width_of(variant.head_dim),
            adder=has_adder,
            # Beside the warp that loads: who reads a block's steps from shared memory.
            readers=2 + has_adder + ordered,
            wide=is_wide,
            two_groups=not (has_adder or is_wide),
            crowded=is_crowded and not (is_small or is_wide),
            q_wide=parts_of(variant.head_dim),
            v_wide=parts_of(variant.v_head_dim),
            dq_wide=_halves(variant.head_dim),
            sum_width=sum_width(variant.head_dim),
            v_sum_width=sum_width(variant.v_head_dim),
            shipped=math.shipped,
            load_arguments=_load_arguments(spec, variant, math.shipped),
            packed=variant.packed,
            positions=[bare(a) for a in _positions(variant)],
            v_width=width_of(variant.v_head_dim),
            head_dim=variant.head_dim,
            v_head_dim=variant.v_head_dim,
            kv_lens=variant.kv_lens,
            offset=variant.offset,
            mask_indices=leaves(spec.mask, "index"),
            score_indices=leaves(spec.score, "index") if math.score.text else (),
        )
    )
    name = f"{spec.slug}_d{variant.head_dim}" + (
        f"_{variant.v_head_dim}" if variant.v_head_dim != variant.head_dim else ""
    )
    sizes = {t.name: t.dtype.itemsize for t in with_tables(spec).tensors}
    pointers = (value.pointer.removesuffix("_ptr") for value in math.shipped.values)
    query_bytes = sum(sizes[pointer] for pointer in pointers)
    ending = "hopper_bwd_ordered" if ordered else "hopper_bwd"
    name = f"{name}{variant.suffix}_{ending}"
    return Module(
        name, tidy(text), _names(attention), _names(queries), _names(keys),
        _names(order), query_bytes,
    )  # fmt: skip


def width_of(head_dim: int) -> int:
    """A head dimension as shared memory holds it: TMA reads zeros beyond the tensor's."""
    return next(width for width in (64, 128, 256) if head_dim <= width)


def parts_of(head_dim: int) -> tuple[tuple[int, int], ...]:
    """(first, size) of what products take of a head dimension, in powers of two."""
    return ((0, 128), (128, 64)) if 128 < head_dim <= 192 else ((0, width_of(head_dim)),)


def sum_width(head_dim: int) -> int:
    """Numbers of a row where it is added up in memory."""
    return sum(size for _, size in parts_of(head_dim))


def keys_of(head_dim: int, v_head_dim: int) -> int:
    """Keys of a block: their gradients fill the registers."""
    return 128 if max(head_dim, v_head_dim) <= 128 else 64


def _halves(head_dim: int) -> tuple[tuple[int, int], ...]:
    """What each of two warpgroups computes of dQ."""
    parts, half = parts_of(head_dim), width_of(head_dim) // 2
    return parts if len(parts) == 2 else ((0, half), (half, half))


def _item_names(math: Math, variant: Variant) -> set[str]:
    """What a warpgroup wants to know of a block, beside where it is: by its place, lengths too."""
    texts = [*math.key_lines, *math.mask_query_lines, *math.score_query_lines, *math.tile_lines]
    names = set(re.findall(r"\w+", " ".join((*texts, math.keep, *math.score.texts)))) | {"block"}
    if variant.packed:
        names |= {"kv_len"}
    if math.score.sums.terms or variant.offset == "lens":
        names |= {"q_len"}
    return names | ({"b"} if variant.kv_lens or variant.offset == "tensor" else set())


def _sorts(variant: Variant, ordered: bool) -> bool:
    """Whether blocks may be taken by how long they are."""
    return not (ordered or variant.packed or keys_of(variant.head_dim, variant.v_head_dim) == 64)


def stages_of(head_dim: int, v_head_dim: int) -> int:
    """Steps whose queries are in shared memory: those of small heads are short."""
    return 4 if max(head_dim, v_head_dim) <= 64 else 2


def _math(spec: Spec, variant: Variant, wanted: Wanted) -> Math:
    masks = [] if spec.mask is None else [fewest(spec.mask, "q_idx")]
    mask = _lower(masks, spec, variant, frozenset())
    keep = mask.results[0] if mask.results else ""
    keys, queries, tile = mask.statements
    slant = _slant(spec, variant, wanted)
    score = score_math(
        spec, wanted, slant, lambda exprs: _lower(exprs, spec, variant, _assigned(mask))
    )
    keys = (*keys, *score.key_lines)
    of_mask, of_score = Read(queries, (keep, *tile)), Read(score.query_lines, score.texts)
    mask_lines, score_lines, shipped = ship(spec, keys, of_mask, of_score)
    read = (keep, *mask_lines, *tile, *score_lines, *score.texts)
    helpers = called(spec, True, mask.helpers, score.helpers)
    return Math(
        needed(keys, read), mask_lines, score_lines, tile, keep,
        helpers | {term.how for term in score.sums.terms} & {"add_exactly"}, shipped, score,
    )  # fmt: skip


def _slant(spec: Spec, variant: Variant, wanted: Wanted) -> Expr | None:
    """What scores rise by for each position that a key is ahead, if it is fixed for a key block.

    Sums of gradients of data read distances of pairs."""
    slant = slant_of(spec)
    if slant is None or wanted.data or keys_of(variant.head_dim, variant.v_head_dim) == 64:
        return None
    return None if "q_idx" in leaves(slant, "index") else slant


def _assigned(found: Lowered) -> frozenset[str]:
    return frozenset(line.partition(" = ")[0] for part in found.statements for line in part)


def _load_arguments(spec: Spec, variant: Variant, shipped: Shipped) -> list[str]:
    """What the warp that loads reads to load values of queries."""
    lines = (*shipped.key_lines, *shipped.query_lines)
    names = map(bare, [*_positions(variant), *data_arguments(spec, variant)])
    return list(names) if lines else []


def _lower(exprs: list[Expr], spec: Spec, variant: Variant, taken: frozenset[str]) -> Lowered:
    # Three warpgroups have no registers left: 128 spills in the loop, 4 with integers.
    ahead = _AHEAD if max(variant.head_dim, variant.v_head_dim) > 64 else ""
    return lower_for(exprs, spec, variant, taken, stages=3, stage_of=_stage, ahead=ahead)


def _stage(expr: Expr) -> int:
    """0: fixed for a key block, 1: changes with the queries alone, 2: with pairs."""
    indices = leaves(expr, "index")
    if leaves(expr, "score") or {"q_idx", "kv_idx"} <= indices or indices & OF_TILES:
        return 2
    return int("q_idx" in indices)


_DESCRIPTORS = ("q", "k", "v", "grad_out", "lse", "minus_delta")


_ORDER = ["states", "counts", "masked_runs", "ranks", "visits"]
_ORDER += ["q_rows: tl.int32", "kv_rows: tl.int32", "kv_tiles: tl.int32", "most_visits: tl.int32"]
_ORDER += ["masked_width: tl.int32", "capacity: tl.int32"]
_PLACES = ["cu_seqlens_q_ptr", "cu_seqlens_kv_ptr"]
_PACKED_ORDER = [*_ORDER, "q_sequences_ptr", "kv_sequences_ptr", *_PLACES]


def _positions(variant: Variant) -> list[str]:
    """Arguments for lengths and positions; packed: lengths come with the queue."""
    arguments = position_arguments(variant)
    return [a for a in arguments if a.startswith("q_offset")] if variant.packed else arguments


def _gradients(wanted: Wanted) -> list[str]:
    return [f"grad_{name}_ptr" for name in wanted.data]


def _strides(*letters: str) -> list[str]:
    return [f"stride_{letter}{dim}: tl.int64" for letter in letters for dim in "bhs"]


def _arguments(
    spec: Spec, variant: Variant, ordered: bool, wanted: Wanted
) -> tuple[list[str], list[str], list[str]]:
    attention = ["dq_sum_ptr", "dk_sum_ptr", "dv_sum_ptr", "spoilt_kv_ptr", "next_item_ptr"]
    attention += _gradients(wanted)
    if _sorts(variant, ordered):
        attention += ["longest_ptr", "late_side: tl.int32"]
    if ordered:
        attention += ["row_turns_ptr", "key_turns_ptr", "visits", "ranks", "most_visits: tl.int32"]
    is_wide = keys_of(variant.head_dim, variant.v_head_dim) == 64
    descriptors = (*_DESCRIPTORS, "dk", "dv") if is_wide else _DESCRIPTORS
    attention += ["counts", "masked_runs", "full_runs", *(f"{n}_tiles" for n in descriptors)]
    attention += [f"schedule_stride_{d}: tl.int64" for d in "bh"]
    attention += ["masked_width: tl.int32", "full_width: tl.int32", "heads: tl.int32"]
    if variant.packed or not is_wide:
        attention += ["grad_k_ptr", "grad_v_ptr", *_strides("dk", "dv")]
    if variant.packed:
        attention += ["queue_ptr"]
        attention += ["states", "kv_tiles: tl.int32"]
    else:
        attention += ["items: tl.int32"]
    extent = "kv_rows: tl.int32" if variant.packed else "capacity: tl.int32"
    attention += ["side: tl.int32", "group: tl.int32", extent, "padded_len: tl.int32"]
    attention += _positions(variant)
    attention += ["scale: tl.float32", "scale_log2: tl.float32"]
    attention += ["to_cap: tl.float32"] if spec.softcap else []
    attention += data_arguments(spec, variant)
    queries = ["dq_sum_ptr", "grad_q_ptr", "spoilt_q_ptr", *_strides("dq"), "heads: tl.int32"]
    queries += ["q_len: tl.int32", "padded_len: tl.int64", "scale: tl.float32"]
    keys = ["dk_sum_ptr", "dv_sum_ptr", "grad_k_ptr", "grad_v_ptr", "spoilt_kv_ptr"]
    keys += [*_strides("dk", "dv"), "kv_heads: tl.int32", extent]
    if variant.packed:
        places = ["cu_seqlens_q_ptr", "cu_seqlens_kv_ptr"]
        queries += ["q_sequences_ptr", *places, "grad_k_ptr", "grad_v_ptr", *_strides("dk", "dv")]
        queries += ["kv_heads: tl.int32", "batch: tl.int32"]
        queries += ["total_q: tl.int32", "total_kv: tl.int32"]
        queries.remove("q_len: tl.int32")
        keys += ["sequences_ptr", "cu_seqlens_kv_ptr"]
    return attention, queries, keys


def _names(arguments: list[str]) -> tuple[str, ...]:
    return tuple(map(bare, arguments))


def _typed(arguments: list[str]) -> list[str]:
    """Arguments that are numbers: their values must not make another binary."""
    return [bare(a) for a in arguments if ":" in a]
