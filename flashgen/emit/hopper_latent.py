"""The text of Hopper's kernel for latent heads."""

from __future__ import annotations

from ..expr import leaves
from ..layout import tidy
from ..lower import isolate
from ..spec import Spec
from . import (
    Generated,
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
    position_arguments,
    score_arguments,
    scores_of,
    unaligned_pointers,
)
from .by_key import lower_by_key
from .decode import SCHEDULE, SCHEDULE_SIZES

DESCRIPTORS = ("q_half_desc", "q_rope_desc", "k_half_desc", "k_rope_desc")
# What a row of the block has of its own: heads lie beside queries.
_OF_ROWS = frozenset(("q_idx", "h"))


def latent(spec: Spec, variant: Variant, command: str = "") -> Generated:
    """Hopper's kernel that attends with a split of latent rows."""
    assert spec.heads is not None
    isolated = [] if spec.mask is None else [isolate(spec.mask)]
    mask = lower_by_key(isolated, spec, variant, frozenset(), _OF_ROWS)
    score = lower_by_key(scores_of(spec), spec, variant, mask.assigned, _OF_ROWS)
    helpers = called(spec, True, mask.lowered.helpers, score.lowered.helpers)
    lines = [line for made in (mask, score) for part in made.lines for line in part]
    lines += [*mask.lowered.results, *score.lowered.results]
    helpers |= {"sigmoid"} if any("tl.sigmoid" in line for line in lines) else set()
    indices = leaves(spec.mask, "index") | leaves(spec.score, "index")
    arguments = _arguments(spec, variant)
    text = (
        environment()
        .get_template("hopper_latent.py.j2")
        .render(
            header=header(spec, command, by_range=False),
            helpers=sorted(helpers),
            arguments=arguments,
            unspecialized=[bare(a) for a in arguments if not is_pointer(a) and ":" in a],
            unaligned=unaligned_pointers(arguments, spec),
            half=spec.heads.rank // 2,
            rope=spec.heads.rope,
            kv_lens=variant.kv_lens,
            offset=variant.offset,
            packed=False,
            key_storage=variant.keys,
            row_lines=(*mask.lines[0], *score.lines[0]),
            key_lines=(*mask.lines[1], *score.lines[1]),
            crossing=dict.fromkeys((*mask.crossing, *score.crossing)),
            tile_lines=mask.lines[2],
            score_lines=score.lines[2],
            keep=mask.lowered.results[0] if mask.lowered.results else "",
            has_mask=spec.mask is not None,
            score=full_score(spec, score.lowered),
            is_scaled=not is_added(spec),
            softcap=spec.softcap,
            sinks=spec.sinks,
            uses_q_idx="q_idx" in indices,
            uses_h_kv="h_kv" in indices,
            **_partitions(spec, variant),
        )
    )
    name = f"{kernel_name(spec, variant)}{variant.suffix}_hopper_latent"
    return Generated(name, tidy(text), tuple(map(bare, arguments)))


def _arguments(spec: Spec, variant: Variant) -> list[str]:
    """The kernel's arguments: descriptors in the place of the portable one's pointers."""
    has_mask = spec.mask is not None
    arguments = ["out_ptr", "lse_ptr", "spoilt_ptr", *DESCRIPTORS]
    arguments += ["sinks_ptr"] if spec.sinks else []
    arguments += [*SCHEDULE, *SCHEDULE_SIZES] if has_mask else ()
    arguments += ["heads: tl.int32", "splits: tl.int32", "split_tiles: tl.int32"]
    arguments += [*position_arguments(variant, compares=True), *key_arguments(variant)]
    return arguments + score_arguments(spec, variant)


_TILES = (
    "left",
    "right",
    "rope",
    "q_ready",
    "left_ready",
    "right_ready",
    "left_free",
    "right_free",
)
_PLACE = ("b", "q_block", "chunk", "split", "splits", "heads", "q_len", "kv_len")


def _partitions(spec: Spec, variant: Variant) -> dict[str, list[str]]:
    """What each partition takes."""
    has_mask = spec.mask is not None
    queries = ["q_left", "q_right", "q_rope"]
    walk = ["first_tile", *(["walk"] if has_mask else ())]
    pages = ["page_table_ptr", "num_pages"] if variant.keys == "paged" else []
    produced = ["b", "q_block", "chunk", "loads", *walk, *pages]
    shared = [*_TILES, "weights", "factors", "tiles", *walk]
    values = [*(["sinks_ptr"] if spec.sinks else []), "q_offset"]
    values += [bare(a) for a in score_arguments(spec, variant)]
    constants = ["BLOCK_N", "STAGES", "GROUP", "QUERIES"]
    constants += ["TILE_N"] if has_mask else []
    constants += ["PAGE_SIZE"] if variant.keys == "paged" else []
    constants.append("PARTIAL")
    outputs = ["out_ptr", "lse_ptr", "spoilt_ptr"]
    partitions = {
        "producer": [*DESCRIPTORS, *queries, *_TILES, *produced],
        "weigher": [*outputs, "k_half_desc", *queries, *shared, *_PLACE, *values],
        "adder": [*outputs, *shared, *_PLACE],
    }
    made = {"constants": [f"{c}: gl.constexpr" for c in constants], "constants_call": constants}
    for name, arguments in partitions.items():
        made |= {f"{name}_arguments": arguments, f"{name}_call": arguments}
    return made
