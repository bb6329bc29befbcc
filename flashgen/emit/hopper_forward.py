"""The text of Hopper's forward kernel."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ..expr import Expr, leaves, make
from ..layout import tidy
from ..order import with_tables
from ..spec import Spec
from . import (
    STRIDES,
    Generated,
    Part,
    Variant,
    attention_arguments,
    bare,
    called,
    environment,
    full_score,
    header,
    is_added,
    is_pointer,
    kernel_name,
    parts_of,
    scores_of,
    slant_of,
    unaligned_pointers,
    used_in,
)
from .by_key import across, lower_by_key, of_lane
from .hopper_mask import MaskMath, mask_math
from .level import Level, level_of, level_text
from .mask_text import needed
from .scores import BY_SCALE, unscaled

# How far keys are ahead of a row block's queries.
_AHEAD = "ahead(first_key, columns, q_idx, FLOAT)"


@functools.cache
def covers(head_dim: int, v_head_dim: int) -> bool:
    """Whether rows are multiples of 16 bytes, and the output's parts fit where the queries' lay."""
    q_sizes, v_sizes = ([p.size for p in parts_of(d)] for d in (head_dim, v_head_dim))
    return not (head_dim % 8 or v_head_dim % 8) and q_sizes[: len(v_sizes)] == v_sizes


def forward(
    spec: Spec, variant: Variant, command: str = "", *, groups: int = 2, skips: bool = False
) -> Generated:
    """Hopper's forward kernel of a spec; `groups`: warpgroups that multiply, of 64 rows each;
    `skips`: where documents lie together, another kernel has them apart, and this one does
    nothing."""
    given, spec = spec, with_tables(spec)
    mask = mask_math(spec, variant)
    slant, level = _apart(spec, variant, groups)
    changed = scores_of(spec) if slant is None else [make("mul", slant, BY_SCALE)]
    exprs = [*changed, *([unscaled(level.added), level.test] if level else [])]
    score = lower_by_key(exprs, spec, variant, mask.assigned, ahead=_AHEAD)
    rise = () if slant is None else (f"rise = {score.lowered.results[0]}",)
    pairs = [across(line, score.crossing) for line in score.lines[2]]
    texts = [across(text, score.crossing) for text in score.lowered.results]
    level_lines = level_text(pairs, *texts[1:]) if level else None
    q_parts, v_parts = parts_of(variant.head_dim), parts_of(variant.v_head_dim)
    lasting = groups > 1 and spec.score is None
    overlaps = lasting and groups == 2 and _overlaps(spec, mask, variant)
    crosses = bool(mask.general.crossing or score.crossing)
    pieces = _pieces(q_parts, groups, crosses or overlaps)
    descriptors = _descriptors(q_parts, v_parts)
    arguments = _arguments(spec, variant, descriptors, skips)
    buffers = [f"{d.removesuffix('_desc')}_tiles" for d in descriptors]
    views = [(f"{x}{p.number}", p) for x, parts in (("k", q_parts), ("v", v_parts)) for p in parts]
    buffers += [f"{name}_pages" for name, _ in views] if variant.keys == "paged" else []
    buffers += ["places", "notes", "q_ready", "q_free", "ready", "free"]
    helpers = called(spec, True, mask.helpers, score.lowered.helpers)
    indices = leaves(spec.mask, "index") | leaves(spec.score, "index")
    lines = [*mask.lines, *(line for part in score.lines for line in part), *score.lowered.results]
    helpers |= {"sigmoid"} if any("tl.sigmoid" in line for line in lines) else set()
    text = (
        environment()
        .get_template("hopper_forward.py.j2")
        .render(
            header=header(given, command),
            helpers=sorted(helpers),
            arguments=arguments,
            unspecialized=[bare(a) for a in arguments if not is_pointer(a) and ":" in a],
            unaligned=unaligned_pointers(arguments, spec),
            q_parts=q_parts,
            v_parts=v_parts,
            q_bytes=_bytes("q", q_parts),
            k_bytes=_bytes("k", q_parts, variant),
            v_bytes=_bytes("v", v_parts, variant),
            page_views=views,
            kv_lens=variant.kv_lens,
            clears=variant.kv_lens and variant.keys != "parted",
            skips=skips,
            offset=variant.offset,
            packed=variant.packed,
            key_storage=variant.keys,
            row_lines=(*mask.row_lines, *score.lines[0], *rise),
            mask=mask,
            score_key_lines=score.lines[1],
            score_crossing=score.crossing,
            score_lines=needed(pairs, texts[:1]),
            level=level_lines,
            of_lane=of_lane,
            has_mask=spec.mask is not None,
            score="" if slant else across(full_score(spec, score.lowered) or "", score.crossing),
            slanted=slant is not None,
            is_scaled=not is_added(spec),
            softcap=spec.softcap,
            sinks=spec.sinks,
            uses_q_idx="q_idx" in indices,
            uses_h_kv="h_kv" in indices,
            v_head_dim=variant.v_head_dim,
            outputs=[f"acc{part.number}" for part in v_parts],
            groups=groups,
            q_pieces=pieces,
            held=all(piece.held for piece in pieces),
            trusting=lasting or bool(slant or level),
            lasting=lasting,
            plain=spec.score is None,
            overlaps=overlaps,
            names=[*map(bare, arguments), *buffers],
            used_in=used_in,
        )
    )
    name = f"{kernel_name(spec, variant)}{variant.suffix}_hopper_fwd{'_of_others' * skips}"
    return Generated(name, tidy(text), tuple(bare(a) for a in arguments))


def has_level_tiles(spec: Spec, variant: Variant) -> bool:
    """Whether two warpgroups weigh apart from scores what is added to whole tiles."""
    return _apart(spec, variant, groups=2)[1] is not None


def _apart(spec: Spec, variant: Variant, groups: int) -> tuple[Expr | None, Level | None]:
    """What is added to scores, where that is by the distance alone, or the same in a whole tile;
    three warpgroups have no registers for the latter, and wide heads for neither."""
    is_dense = not variant.packed and variant.keys == "dense"
    if groups == 1 or not is_dense or max(variant.head_dim, variant.v_head_dim) > 128:
        return None, None
    return slant_of(spec), level_of(spec) if groups == 2 else None


def _overlaps(spec: Spec, mask: MaskMath, variant: Variant) -> bool:
    """Whether weights are found beside the product of those before.

    Where registers have room for both, and rows are long: where many tiles are cut, larger loops
    cost more than that brings."""
    dims = (variant.head_dim, variant.v_head_dim)
    is_wide = all([part.size for part in parts_of(dim)] == [128] for dim in dims)
    has_long_rows = spec.mask is None or mask.general.bits.count("keys_before") == 1
    return is_wide and has_long_rows and not spec.softcap


@dataclass(frozen=True)
class Piece:
    """Columns of a part of the head dimension, which a product takes at once; `held`: queries are
    in registers."""

    part: Part
    first: int
    size: int
    held: bool

    def tile(self, place: str, rows: str) -> str:
        """Such a tile: its part's number, where it is, [rows, size]."""
        whole = f"{self.part.number}{place}.reshape([{rows}, {self.part.size}])"
        return (
            whole
            if self.size == self.part.size
            else f"{whole}.slice({self.first}, {self.size}, dim=1)"
        )


def _pieces(q_parts: tuple[Part, ...], groups: int, crosses: bool) -> tuple[Piece, ...]:
    """What registers hold of the queries beside the scores, the output and data of keys.

    Products then read less shared memory, whose rate bounds those of 256 columns; and the next
    queries can be copied at once if all are held."""
    size = sum(part.size for part in q_parts)
    if size == 256 and not crosses:
        cuts = ((0, 64), (64, 64), (128, 128))
        return tuple(Piece(q_parts[0], first, n, first == 0) for first, n in cuts)
    held = groups == 2 and size <= (64 if crosses else 128)
    return tuple(Piece(part, 0, part.size, held) for part in q_parts)


def _descriptors(q_parts: tuple[Part, ...], v_parts: tuple[Part, ...]) -> list[str]:
    parts = (("q", q_parts), ("k", q_parts), ("v", v_parts))
    return [f"{name}{part.number}_desc" for name, own in parts for part in own]


def _bytes(name: str, parts: tuple[Part, ...], variant: Variant | None = None) -> str:
    """What a barrier waits for: a tile of each part, in how many pages ever."""
    if variant is not None and variant.keys == "paged":
        return f"{2 * sum(part.size for part in parts)} * BLOCK_N"
    return " + ".join(f"{name}{part.number}_desc.block_type.nbytes" for part in parts)


def _arguments(spec: Spec, variant: Variant, descriptors: list[str], skips: bool) -> list[str]:
    """The kernel's arguments: descriptors in the place of pointers and strides; packed: the queue
    in the place of what says where sequences are."""
    known = {"q_ptr", "k_ptr", "v_ptr", "out_ptr", "lse_ptr", *STRIDES}
    work = ["items: tl.int32", "whole: tl.int32", "splits: tl.int32", "shared_row: tl.int64"]
    work += ["parts_ptr", "lses_ptr"]
    if variant.packed:
        work = ["queue_ptr"]
        known |= {"schedule_stride_b", "q_tiles", "sequences_ptr", "kv_lens_ptr"}
        known |= {"cu_seqlens_q_ptr", "cu_seqlens_kv_ptr"}
    rest = [a for a in attention_arguments(spec, variant) if bare(a) not in known]
    return [
        "out_ptr", "lse_ptr", "spoilt_ptr", *descriptors, "next_item_ptr", *work,
        *["parted_ptr"] * skips, "last_heads: tl.int32", *rest
    ]  # fmt: skip
