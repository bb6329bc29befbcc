"""The text of the backward kernels: the score function's derivative, lowered beside the mask."""

from __future__ import annotations

from dataclasses import dataclass

from ..differentiate import ZERO
from ..expr import Expr, const, leaves
from ..layout import tidy
from ..lower import Lowered
from ..order import with_tables
from ..spec import Spec
from . import (
    AHEAD,
    DROPOUT,
    Variant,
    bare,
    called,
    data_arguments,
    environment,
    header,
    key_arguments,
    lower_for,
    parts_of,
    position_arguments,
    reads_score,
    unaligned_pointers,
    used_in,
)
from .diagonal import distance_math
from .gradients import Math, Term, Wanted, derivatives_of, how_added, place_of, reads_of, term_of
from .mask_text import mask_text, needed

TEMPLATE = "backward.py.j2"


@dataclass(frozen=True)
class Module:
    """A generated module, and the arguments of its kernels in order.

    `diagonals`: of the one for data that is read by distance, none if there is no such data;
    `per_pair`: the queries' kernel writes gradients of data for each pair; `has_queries`: whether
    there is one."""

    name: str
    text: str
    prepare: tuple[str, ...]
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    diagonals: tuple[str, ...] = ()
    per_pair: bool = False
    has_queries: bool = True


@dataclass(frozen=True)
class Kernel:
    """A kernel's arguments, and what Triton is told of them.

    `inner` and `outer` are what its second pass may take: declared, and as given."""

    arguments: tuple[str, ...]
    strides: tuple[str, ...]
    unspecialized: tuple[str, ...]
    unaligned: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    outer: tuple[str, ...] = ()

    @property
    def bare(self) -> tuple[str, ...]:
        return tuple(map(bare, self.arguments))


def backward(spec: Spec, variant: Variant, wanted: Wanted, *, repairs: bool = False) -> Module:
    """The backward kernels of a spec, as far as they are wanted.

    `repairs`: they compute only the blocks that Hopper's kernels found to be spoilt."""
    given, spec = spec, with_tables(spec)
    by_query = _math(spec, variant, wanted, "q")
    by_key = _math(given, variant, wanted, "kv")
    prepare, queries, keys = _kernels(given, variant, wanted, repairs)
    by_distance = distance_math(given, variant, wanted)
    diagonals = _diagonal_kernel(given, variant, by_distance.terms)
    of_mask = by_query.mask.helpers | by_key.mask.helpers
    of_score = by_query.helpers | by_key.helpers | by_distance.helpers
    helpers = called(spec, variant.approximates, of_mask, of_score)
    helpers |= {"dropped"} if variant.dropout else set()
    helpers |= {term.how for term in (*by_query.terms, *by_distance.terms)} & {"add_exactly"}
    indices = leaves(spec.mask, "index") | leaves(spec.score, "index")
    text = (
        environment()
        .get_template(TEMPLATE)
        .render(
            header=header(given, ""),
            helpers=sorted(helpers),
            grads=wanted,
            repairs=repairs,
            prepare=prepare,
            queries=queries,
            keys=keys,
            by_query=by_query,
            by_key=by_key,
            terms=by_query.terms,
            diagonals=diagonals,
            by_distance=by_distance,
            row_lines=by_query.row_lines,
            has_mask=spec.mask is not None,
            score=spec.score is not None,
            softcap=spec.softcap,
            head_dim=variant.head_dim,
            v_head_dim=variant.v_head_dim,
            q_parts=parts_of(variant.head_dim),
            v_parts=parts_of(variant.v_head_dim),
            kv_lens=variant.kv_lens,
            offset=variant.offset,
            packed=variant.packed,
            key_storage=variant.keys,
            dropout=variant.dropout,
            uses_q_idx="q_idx" in indices or variant.dropout,
            used_in=used_in,
        )
    )
    name = f"{spec.slug}_d{variant.head_dim}" + (
        f"_{variant.v_head_dim}" if variant.v_head_dim != variant.head_dim else ""
    )
    per_pair = any(term.axes == "both" for term in by_query.terms)
    has_queries = wanted.q or bool(by_query.terms)
    kind = "repair_bwd" if repairs else "bwd"
    return Module(
        f"{name}{variant.suffix}_{kind}",
        tidy(text),
        prepare.bare,
        queries.bare,
        keys.bare,
        diagonals.bare,
        per_pair,
        has_queries,
    )


def _math(spec: Spec, variant: Variant, wanted: Wanted, block: str) -> Math:
    """Statements for a kernel whose programs own a block of queries (`q`) or of keys (`kv`)."""
    # Along the queries, a second form of the mask makes registers spill.
    mask = mask_text(
        spec,
        f"{block}_idx",
        lambda exprs: _lower(exprs, spec, variant, block, frozenset()),
        by_range=block == "q",
    )
    if spec.score is None:
        return Math(mask.general.row_lines, mask, (), (), "", "1.0", frozenset())
    found = derivatives_of(spec)
    slope = const(1.0) if found.score == ZERO else found.score
    reads = [] if block == "kv" else reads_of(found, wanted, variant, by_distance=False)
    exprs = [spec.score, slope, *(x for load, by in reads for x in (by, place_of(load, wanted)))]
    score = _lower(exprs, spec, variant, block, mask.assigned)
    # What the score doesn't need waits until there is a gradient.
    first = needed(score.statements[1], score.results[:1])
    later = tuple(line for line in score.statements[1] if line not in first)
    text, slope_text, *rest = score.results
    if not reads_score(spec.score):
        text = f"tl.zeros_like(s) + ({text})"
    terms = tuple(
        term_of(load, by, offset, number, how_added(load.attr, wanted))
        for number, ((load, _), by, offset) in enumerate(
            zip(reads, rest[::2], rest[1::2], strict=True)
        )
    )
    rows = (*mask.general.row_lines, *score.statements[0])
    return Math(rows, mask, first, later, text, slope_text, score.helpers, terms)


def _lower(
    exprs: list[Expr], spec: Spec, variant: Variant, block: str, taken: frozenset[str]
) -> Lowered:
    moving = "kv_idx" if block == "q" else "q_idx"
    behind = "-ahead(first_query + q_offset, rows[None, :], kv_idx, FLOAT)"
    return lower_for(
        exprs,
        spec,
        variant,
        taken,
        stage_of=lambda e: int(moving in leaves(e, "index") or reads_score(e)),
        ahead=AHEAD if block == "q" else f"({behind})",
    )


def _strides(*letters: str) -> tuple[str, ...]:
    return tuple(f"stride_{letter}{dim}" for letter in letters for dim in "bhs")


def _kernels(
    spec: Spec, variant: Variant, wanted: Wanted, repairs: bool
) -> tuple[Kernel, Kernel, Kernel]:
    flags, items = ["spoilt_ptr"] * repairs, ["items: tl.int32"] * repairs
    pointers = ["out_ptr", "grad_out_ptr", *(["grad_lse_ptr"] if wanted.lse else []), "lse_ptr"]
    strides = _strides("o", "g")
    prepare = [*pointers, "lse_log2_ptr", "minus_delta_ptr", *(["dq_sum_ptr"] * repairs)]
    if repairs and not variant.packed:
        prepare += ["counts", "longest_ptr", "kv_rows: tl.int32", "sorted_rows: tl.int32"]
    prepare += [f"{s}: tl.int64" for s in strides]
    if variant.packed:
        prepare += ["sequences_ptr", "cu_seqlens_q_ptr", "total_q: tl.int64"]
    else:
        prepare += ["heads: tl.int32", "q_len: tl.int32"]
    prepare.append("padded_len: tl.int64")
    unspecialized = tuple(bare(a) for a in prepare if ":" in a)
    queries = _attention_kernel(
        with_tables(spec),
        variant,
        flags + ["grad_q_ptr"] * wanted.q + [f"grad_{name}_ptr" for name in wanted.data],
        ["dq"] * wanted.q,
        items + (["q_tiles: tl.int32"] if variant.packed else ["heads: tl.int32"]),
        ("b", "h", "h_kv", "block", "masked_tiles", "full_tiles", "ragged_tiles", "ragged_tile"),
    )
    keys = _attention_kernel(
        spec,
        variant,
        flags + ["grad_k_ptr"] * wanted.k + ["grad_v_ptr"] * wanted.v + ["states"],
        ["dk"] * wanted.k + ["dv"] * wanted.v,
        [*items, *_KEY_SIZES[variant.packed], "q_tiles: tl.int32", "kv_tiles: tl.int32"],
        (*("b", "h_kv", "block", "heads", "first_member"), *_PLACE[: 2 * variant.packed]),
    )
    return Kernel(tuple(prepare), strides, unspecialized), queries, keys


def _diagonal_kernel(spec: Spec, variant: Variant, terms: tuple[Term, ...]) -> Kernel:
    results = [*dict.fromkeys(f"grad_{term.name}_ptr" for term in terms), "states"]
    lengths = ["heads: tl.int32", "q_tiles: tl.int32", "kv_tiles: tl.int32"]
    return (
        _attention_kernel(spec, variant, results, [], lengths, ()) if terms else Kernel((), (), ())
    )


_POINTERS = ("q_ptr", "k_ptr", "v_ptr", "grad_out_ptr", "lse_log2_ptr", "minus_delta_ptr")
_SCHEDULE = ("counts", "masked_runs", "full_runs")
_KEY_SIZES = (
    ["batch: tl.int32", "kv_heads: tl.int32", "members: tl.int32", "capacity: tl.int32"],
    ["kv_rows: tl.int32", "kv_heads: tl.int32", "members: tl.int32"],
)
# Packed: where a program's keys lie among those of all sequences.
_PLACE = ("tile_row", "first_row")
_CONSTANTS = ("BLOCK_M", "BLOCK_N", "TILE_M", "TILE_N", "OFFSET", "FLOAT", "PRECISION")


def _attention_kernel(
    spec: Spec,
    variant: Variant,
    results: list[str],
    letters: list[str],
    lengths: list[str],
    derived: tuple[str, ...],
) -> Kernel:
    strides = _strides("q", "k", "v", "g", *letters)
    arguments = [*_POINTERS, *results, *_SCHEDULE]
    arguments += [f"{s}: tl.int64" for s in strides]
    arguments += [f"schedule_stride_{d}: tl.int64" for d in "bh"]
    arguments += ["masked_width: tl.int32", "full_width: tl.int32", *lengths, "group: tl.int32"]
    positions = position_arguments(variant)
    # The length of the queries stands before that of the padded ones.
    arguments += [*positions[:1], "padded_len: tl.int64", *positions[1:], *key_arguments(variant)]
    arguments += ["scale: tl.float32", "scale_log2: tl.float32"]
    arguments += ["to_cap: tl.float32"] if spec.softcap else []
    arguments += DROPOUT if variant.dropout else ()
    arguments += data_arguments(spec, variant)
    names = [bare(a) for a in arguments]
    known = tuple(dict.fromkeys([*names, "q_len", "kv_len", "q_offset", *derived]))
    return Kernel(
        tuple(arguments),
        strides,
        tuple(bare(a) for a in arguments if ":" in a),
        tuple(unaligned_pointers(arguments, spec)),
        (*known, *(f"{c}: tl.constexpr" for c in _CONSTANTS)),
        (*known, *_CONSTANTS),
    )
