"""The text of the kernels for few queries: splits of the keys, and their merging."""

from __future__ import annotations

import functools
import re
from typing import Any

from ..expr import leaves
from ..spec import Spec
from . import (
    Generated,
    Part,
    Variant,
    bare,
    called,
    environment,
    full_score,
    header,
    is_added,
    is_pointer,
    kernel_name,
    key_arguments,
    lower_for,
    parts_of,
    position_arguments,
    score_arguments,
    scores_of,
    tidy,
    unaligned_pointers,
)
from .mask_text import keep_by_key, mask_text

SCHEDULE = ("counts", "runs")
SCHEDULE_SIZES = (
    "schedule_stride_b: tl.int64",
    "schedule_stride_h: tl.int64",
    "runs_width: tl.int32",
)


def decode(
    spec: Spec,
    variant: Variant,
    command: str = "",
    *,
    repairs: bool = False,
    dealt: bool = False,
) -> Generated:
    """The kernel that attends with a split of the keys.

    `repairs`: only its careful second pass, on rows that Hopper's kernel found to be spoilt.
    `dealt`: the tiles of all sequences in even shares; packed queries have no other kernel."""
    arguments = _arguments(spec, variant, repairs, dealt)
    text = (
        environment()
        .get_template("decode.py.j2")
        .render(
            **_loop(spec, variant),
            header=header(spec, command, by_range=False),
            arguments=arguments,
            unspecialized=[bare(a) for a in arguments if not is_pointer(a)],
            unaligned=unaligned_pointers(arguments, spec),
            aligned_strides=[bare(a) for a in arguments if re.match(r"stride_\w+:", a)],
            kv_lens=variant.kv_lens,
            offset=variant.offset,
            packed=variant.packed,
            key_storage=variant.keys,
            repairs=repairs,
            dealt=dealt,
            **_select_arguments(arguments, spec, variant),
            **_share_arguments(arguments, spec, variant, dealt),
        )
    )
    kind = "repair_decoded" if repairs else "decode_dealt" if dealt else "decode"
    name = f"{kernel_name(spec, variant)}{variant.suffix}_{kind}"
    return Generated(name, tidy(text), tuple(map(bare, arguments)))


def _loop(spec: Spec, variant: Variant) -> dict[str, Any]:
    """What the attention loop is made of."""
    mask = mask_text(
        spec,
        "q_idx",
        lambda exprs: lower_for(exprs, spec, variant, frozenset()),
        by_range=False,
    )
    score = lower_for(scores_of(spec), spec, variant, mask.assigned)
    q_parts, v_parts = parts_of(variant.head_dim), parts_of(variant.v_head_dim)
    if spec.heads is not None:
        v_parts = latent_parts(0, spec.heads.rank)
        q_parts = (*v_parts, *latent_parts(spec.heads.rank, spec.heads.rope, len(v_parts)))
    helpers = called(spec, variant.approximates, mask.helpers, score.helpers)
    helpers |= {"pages"} if variant.keys == "paged" else set()
    indices = leaves(spec.mask, "index") | leaves(spec.score, "index")
    return {
        "helpers": sorted(helpers),
        "head_dim": variant.head_dim,
        "v_head_dim": variant.v_head_dim,
        "q_parts": q_parts,
        "v_parts": v_parts,
        "latent": spec.heads is not None,
        "row_lines": (*mask.general.row_lines, *score.statements[0]),
        "tile_lines": mask.general.tile_lines,
        "score_lines": score.statements[1],
        "keep": keep_by_key(spec, mask.general.keep),
        "has_mask": spec.mask is not None,
        "score": full_score(spec, score),
        "is_scaled": not is_added(spec),
        "softcap": spec.softcap,
        "sinks": spec.sinks,
        "dropout": False,
        "uses_q_idx": "q_idx" in indices,
    }


@functools.cache
def merging(dealt: bool = False) -> Generated:
    """The kernel that merges the splits' results; the same for every spec. `dealt`: those of
    shares that were dealt, where each row has as many as its span says."""
    arguments = ["parts_ptr", "lses_ptr", "out_ptr", "lse_ptr"]
    if dealt:
        arguments += ["spans_ptr", "cu_seqlens_q_ptr"]
        arguments += ["batch: tl.int32", "heads: tl.int32", "total_q: tl.int64"]
    else:
        arguments.append("splits: tl.int32")
    text = (
        environment()
        .get_template("merge.py.j2")
        .render(
            header="# flashgen: merging of partial results",
            arguments=arguments,
            unspecialized=[bare(a) for a in arguments if not is_pointer(a)],
            unaligned=[a for a in arguments if a == "cu_seqlens_q_ptr"],
            dealt=dealt,
        )
    )
    return Generated(f"merge{'_dealt' * dealt}", tidy(text), tuple(map(bare, arguments)))


@functools.cache
def visiting() -> Generated:
    """The kernel that lists the tiles which a group of heads visits; the same for every spec."""
    text = environment().get_template("visit.py.j2").render(header="# flashgen: visited tiles")
    arguments = (
        "states_ptr", "counts_ptr", "runs_ptr", "head_step", "rows", "tiles", "heads", "group",
        "width",
    )  # fmt: skip
    return Generated("visit", tidy(text), arguments)


# Pieces of a latent row share the offsets inside them: small ones need few registers for those.
_WIDEST = 128


def latent_parts(first: int, size: int, number: int = 0) -> tuple[Part, ...]:
    """The parts of a latent row's elements `first` to `first + size`, numbered from `number`.

    Multiples of 16 are cut exactly; a last part that isn't reads zeros behind the row's end."""
    parts: list[Part] = []
    while size > 0:
        width = min(_WIDEST, max(16, 1 << (size.bit_length() - 1)))
        parts.append(Part(number + len(parts), first, width, width > size))
        first, size = first + width, size - width
    return tuple(parts)


def _arguments(spec: Spec, variant: Variant, repairs: bool, dealt: bool) -> list[str]:
    tensors = "qk" if spec.heads is not None else "qkv"
    has_mask = spec.mask is not None
    arguments = [*(f"{x}_ptr" for x in tensors), "out_ptr", "lse_ptr"]
    whole = ["spans_ptr", "whole_ptr", "whole_lse_ptr"]
    arguments += ["spoilt_ptr"] if repairs else whole if dealt else []
    arguments += ["sinks_ptr"] if spec.sinks else []
    arguments += SCHEDULE if has_mask else ()
    arguments += [f"stride_{x}{dim}: tl.int64" for x in tensors for dim in "bhs"]
    arguments += SCHEDULE_SIZES if has_mask else ()
    arguments += ["heads: tl.int32", "group: tl.int32"]
    arguments += ["splits: tl.int32", "batch: tl.int32" if dealt else "split_tiles: tl.int32"]
    arguments += ["q_room: tl.int32", "total_q: tl.int64"] if variant.packed else []
    given = position_arguments(variant, compares=True)
    positions = (a for a in given if a != "sequences_ptr")
    arguments += [*positions, *key_arguments(variant)]
    arguments += ["table_width: tl.int32"] if variant.keys == "paged" and not dealt else []
    return arguments + score_arguments(spec, variant)


# What the careful second pass takes, beside the kernel's own arguments: computed by then.
_DERIVED = ("b", "h_kv", "chunk", "q_block", "split", "share_from", "share_to")
_UNUSED = (
    r"counts|sinks_ptr|spoilt_ptr|spans_ptr|whole\w*|total_q|kv_lens_ptr|kv_room|kv_len|"
    r"split_tiles|schedule_\w+|q_offset\w*|stride_.b|stride_kh|stride_vh|page_table_stride|table_width|cu_seqlens_\w+"
)


def _select_arguments(arguments: list[str], spec: Spec, variant: Variant) -> dict[str, list[str]]:
    is_paged = variant.keys == "paged"
    names = [n for n in map(bare, arguments) if not re.fullmatch(_UNUSED, n)]
    if is_paged:
        names += ["stride_kb", *(["stride_vb"] if "v_ptr" in names else ())]
    names += [*(["q_len"] if variant.packed else ()), "kv_len", "q_offset", *_DERIVED]
    constants = ["BLOCK_M", "BLOCK_N", "GROUP", *(["TILE_N"] if spec.mask is not None else ())]
    constants += [*(["PAGE_SIZE"] if is_paged else ()), "PARTIAL", "OFFSET", "FLOAT", "PRECISION"]
    return {
        "select_call": [*names, *constants],
        "select_arguments": [*names, *(f"{c}: tl.constexpr" for c in constants)],
    }


# What says how many tiles are dealt of each sequence.
_DEALING = (
    "counts", "schedule_stride_b", "schedule_stride_h", "splits", "batch", "kv_lens_ptr", "kv_room",
    "cu_seqlens_q_ptr",
)  # fmt: skip


def _share_arguments(
    arguments: list[str], spec: Spec, variant: Variant, dealt: bool
) -> dict[str, list[str]]:
    """What the function takes that attends with a share, and the one that deals."""
    names = [*map(bare, arguments), "chunk", "q_block", "split", "h_kv", "b"]
    names += ["share_from", "share_to"] if dealt else []
    constants = ["BLOCK_M", "BLOCK_N", "GROUP"]
    constants += ["TILE_M", "TILE_N"] if spec.mask is not None else []
    dealing = [n for n in map(bare, arguments) if n in _DEALING]
    dealing += ["split", "h_kv", "q_block"]
    others = ["PARTIAL", "ALIGN", "OFFSET", "FLOAT", "PRECISION"]
    others = [*(["PAGE_SIZE"] if variant.keys == "paged" else ()), *others]
    return {
        "share_arguments": [*names, *(f"{c}: tl.constexpr" for c in (*constants, *others))],
        "share_call": [*names, *constants, *others],
        "deal_arguments": [*dealing, *(f"{c}: tl.constexpr" for c in (*constants, "COUNT"))],
        "deal_call": [*dealing, *constants, "COUNT"],
    }
