"""From a spec to the text of a module: Python decides expressions, Jinja the structure."""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import jinja2

from .. import __version__
from ..bounds import tile_rule
from ..expr import Expr, leaves
from ..layout import tidy as tidy
from ..lower import Lowered, lower, with_distances
from ..lower.widths import size_name
from ..order import ordered, with_tables
from ..spec import Spec
from .bytecode import Bytecode
from .mask_text import keep_by_key, mask_text
from .scores import called as called
from .scores import full_score as full_score
from .scores import is_added as is_added
from .scores import reads_score as reads_score
from .scores import scores_of as scores_of
from .scores import slant_of as slant_of

# Indices of the attention loop, as the kernels name them.
INDEX_NAMES = {n: n for n in ("b", "h", "h_kv", "q_idx", "kv_idx", "q_len", "kv_len", "away")}
INDEX_NAMES |= {n: n for n in ("least_away", "most_away")}


@dataclass(frozen=True)
class Variant:
    """What shapes a kernel beside its spec. Sizes in elements; lengths are never part of it.

    `offset`: where positions come from: `scalar` (an int), `tensor`, or `lens` (bottom-right of
    per-batch lengths). `wide`: scalars and data lengths passed as 64 bits. `dropout`: whether
    weights are dropped. `packed`: sequences of queries one after another. `keys`: `dense`,
    `packed`, `paged`, or `parted` (documents in dense tensors, as sequences, on Hopper).
    `approximates`: scores of 16-bit inputs for NVIDIA, whose tanh is an instruction."""

    head_dim: int
    v_head_dim: int
    offset: str = "scalar"
    kv_lens: bool = False
    wide: frozenset[str] = frozenset()
    dropout: bool = False
    packed: bool = False
    keys: str = "dense"
    approximates: bool = False

    @property
    def suffix(self) -> str:
        """Part of a file's name."""
        if self.keys == "parted":
            return "_parted"
        return "_packed" * self.packed + "_paged" * (self.keys == "paged")


@dataclass(frozen=True)
class Generated:
    """A module's name and text, and the arguments of its kernel in order."""

    name: str
    text: str
    arguments: tuple[str, ...]


class Part(NamedTuple):
    """A power-of-two piece of a head dimension: elements `first` to `first + size`."""

    number: int
    first: int
    size: int
    is_cut: bool


@functools.cache
def parts_of(head_dim: int) -> tuple[Part, ...]:
    """At most two powers of two that hold a head dimension: 192 is 128 + 64, 40 is 32 + 16.

    A matrix product needs 16 elements at least; padding is read as zeros."""
    whole = max(16, 1 << (head_dim - 1).bit_length())
    first = whole // 2
    if first >= 16 and head_dim > first:
        second = max(16, 1 << (head_dim - first - 1).bit_length())
        if first + second < whole:
            return (Part(0, 0, first, False), Part(1, first, second, first + second > head_dim))
    return (Part(0, 0, whole, whole > head_dim),)


@functools.cache
def environment() -> jinja2.Environment:
    """The templates; a variable that isn't given is an error."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("flashgen.templates", ""),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
        bytecode_cache=Bytecode(),
    )
    made.filters["pack"] = _pack
    made.filters["wrapped"] = _wrapped
    made.filters["gluon"] = in_gluon
    made.filters["body"] = _body
    return made


def _pack(names: list[str]) -> str:
    """A list of strings as Python, wrapped to the house's line length."""
    line = ", ".join(f'"{name}"' for name in names)
    if len(line) < 60:
        return f"[{line}]"
    lines = textwrap.wrap(line, 88)
    return "[" + "".join(f"\n        {line}" for line in lines) + "\n    ]" if lines else "[]"


def _body(text: str, indent: int = 0) -> str:
    """Statements from wherever they stood, for a place whose first line is indented already."""
    lines = textwrap.dedent(text).strip("\n").splitlines()
    return f"\n{' ' * indent}".join(line for line in lines if line.strip())


def in_gluon(text: str) -> str:
    """Triton's text as Gluon spells it: lowered expressions, and the functions they call."""
    text = text.replace("@triton.jit", "@gluon.jit")
    text = re.sub(r"\btl\.sigmoid\b", "sigmoid", text)
    return re.sub(r"\btl\.", "gl.", text.replace("tl.PropagateNan", "hopper.PropagateNan"))


def _wrapped(names: list[str], indent: int) -> str:
    """Arguments as lines of the house's length; the first one's indentation stands there."""
    # Blanks inside an argument are no place to break.
    solid = ", ".join(name.replace(" ", "\0") for name in names)
    lines = textwrap.wrap(solid, 99 - indent)
    return f"\n{' ' * indent}".join(lines).replace("\0", " ") + ","


@functools.cache
def identifiers() -> frozenset[str]:
    """Every word of the templates: names that a user's data must not take in a kernel."""
    made = environment()
    assert made.loader is not None
    names = made.list_templates(extensions=["j2"])
    sources = [made.loader.get_source(made, name)[0] for name in names]
    # What stands in Jinja's own tags and comments never reaches a kernel.
    text = re.sub(r"\{[{%#].*?[#%}]\}", " ", " ".join(sources), flags=re.DOTALL)
    return frozenset(re.findall(r"[A-Za-z_]\w*", text))


def data_arguments(spec: Spec, variant: Variant) -> list[str]:
    """The kernel's arguments for scalars and tensors, annotated so that values never specialise."""
    types = {"float": "tl.float32", "double": "tl.int64", "bool": "tl.int32"}
    arguments = [
        f"{s.name}: "
        + (types.get(s.kind) or ("tl.int64" if s.name in variant.wide else "tl.int32"))
        for s in spec.scalars
    ]
    for tensor in spec.tensors:
        arguments.append(f"{tensor.name}_ptr")
        for dim in range(tensor.ndim):
            size = size_name(tensor.name, dim)
            wide = "tl.int64" if size in variant.wide else "tl.int32"
            arguments += [f"{size}: {wide}", f"{tensor.name}_stride_{dim}: tl.int64"]
    return arguments


def taken_names(spec: Spec, variant: Variant) -> frozenset[str]:
    """Names that no statement may assign: the template's, and the data's own."""
    data = (bare(argument) for argument in data_arguments(spec, variant))
    return identifiers() | frozenset(INDEX_NAMES) | frozenset(data)


def bare(argument: str) -> str:
    return argument.partition(":")[0]


STRIDES = tuple(f"stride_{x}{dim}" for x in "qkvo" for dim in "bhs")
DROPOUT = ("dropout_seed: tl.int64", "dropout_threshold: tl.int32", "dropout_scale: tl.float32")
# How far keys are ahead of a row block's queries.
AHEAD = "ahead(first_key, columns[None, :], q_idx, FLOAT)"
_FIXED_POINTERS = ("q_ptr", "k_ptr", "v_ptr", "out_ptr", "lse_ptr")
_SCHEDULE = ("counts", "masked_runs", "full_runs")


def attention_arguments(spec: Spec, variant: Variant) -> list[str]:
    arguments = [*_FIXED_POINTERS, *(["sinks_ptr"] if spec.sinks else []), *_SCHEDULE]
    arguments += [f"{s}: tl.int64" for s in STRIDES]
    arguments += [f"schedule_stride_{d}: tl.int64" for d in "bh"]
    arguments += ["masked_width: tl.int32", "full_width: tl.int32"]
    arguments += ["heads: tl.int32", "group: tl.int32"]
    arguments += ["q_tiles: tl.int32", "total_q: tl.int64"] * variant.packed
    arguments += [*position_arguments(variant), *key_arguments(variant)]
    return arguments + score_arguments(spec, variant)


def score_arguments(spec: Spec, variant: Variant) -> list[str]:
    """Factors of the scores, then the data."""
    arguments = ["by_scale: tl.float32" if is_added(spec) else "scale: tl.float32"]
    arguments = [*(arguments if spec.score else []), "scale_log2: tl.float32"]
    arguments += ["to_cap: tl.float32"] if spec.softcap else []
    arguments += DROPOUT if variant.dropout else ()
    return arguments + data_arguments(spec, variant)


def position_arguments(variant: Variant, *, compares: bool = False) -> list[str]:
    """The kernel's arguments for lengths and positions; packed: and for where queries begin.

    `compares`: it compares lengths with the cache itself."""
    arguments = ["q_len: tl.int32"]
    if variant.packed:
        arguments = ["sequences_ptr", "cu_seqlens_q_ptr"]
    arguments.append("kv_lens_ptr" if variant.kv_lens else "kv_len: tl.int32")
    arguments += ["kv_room: tl.int32"] if compares and variant.kv_lens else []
    if variant.offset == "scalar":
        arguments.append("q_offset: tl.int32")
    elif variant.offset == "tensor":
        arguments += ["q_offset_ptr", "q_offset_stride: tl.int32"]
    return arguments


def key_arguments(variant: Variant) -> list[str]:
    """The kernel's arguments for where keys and values lie, beside their strides."""
    if variant.keys == "paged":
        return ["page_table_ptr", "page_table_stride: tl.int64", "num_pages: tl.int32"]
    return ["cu_seqlens_kv_ptr"] if variant.keys == "packed" else []


def unaligned_pointers(arguments: Iterable[str], spec: Spec) -> list[str]:
    """Pointers read one element at a time: their alignment must not make another binary."""
    read = {"sinks_ptr", "kv_lens_ptr", "q_offset_ptr", *(f"{t.name}_ptr" for t in spec.tensors)}
    read |= {"sequences_ptr", "cu_seqlens_q_ptr", "cu_seqlens_kv_ptr", "page_table_ptr"}
    return [name for name in map(bare, arguments) if name in read]


def used_in(names: Iterable[str], body: str) -> list[str]:
    """Those of the names that a function's body reads: what it has to be given."""
    words = set(re.findall(r"\w+", body))
    return [name for name in names if bare(name) in words]


def is_pointer(argument: str) -> bool:
    return bare(argument).endswith("_ptr") or argument in (*_SCHEDULE, "runs")


def _stage(expr: Expr) -> int:
    """0: fixed for a row block, 1: changes with the tile."""
    return int("kv_idx" in leaves(expr, "index") or reads_score(expr))


def lower_for(
    exprs: list[Expr],
    spec: Spec,
    variant: Variant,
    taken: frozenset[str],
    stages: int = 2,
    stage_of: Callable[[Expr], int] = _stage,
    ahead: str = "",
) -> Lowered:
    """Statements of expressions in the attention loop, by default for (row block, tile).

    `ahead`: how far keys are ahead of queries, where a kernel computes that."""
    return lower(
        [with_distances(expr) for expr in exprs] if ahead else exprs,
        stages=stages,
        stage_of=stage_of,
        names={**INDEX_NAMES, "score": "s", "ahead": ahead},
        dtypes={t.name: t.dtype for t in spec.tensors},
        wide_scalars=variant.wide,
        taken=taken | taken_names(spec, variant),
    )


def forward(spec: Spec, variant: Variant, command: str = "", *, repairs: bool = False) -> Generated:
    """The portable forward kernel of a spec.

    `repairs`: only its careful second pass, on rows that Hopper's kernel found to be spoilt."""
    template = "repair.py.j2" if repairs else "forward.py.j2"
    given, spec = spec, spec if repairs else with_tables(spec)
    mask = mask_text(
        spec,
        "q_idx",
        lambda exprs: lower_for(exprs, spec, variant, frozenset()),
        by_range=not repairs,
    )
    score = lower_for(scores_of(spec), spec, variant, mask.assigned, ahead=AHEAD)
    more = ["spoilt_ptr", "items: tl.int32"] if repairs else []
    more += ["batch: tl.int32"] if repairs and variant.packed else []
    arguments = [*more, *attention_arguments(spec, variant)]
    helpers = called(spec, variant.approximates, mask.helpers, score.helpers)
    helpers |= {"dropped"} if variant.dropout else set()
    helpers |= {"pages"} if variant.keys == "paged" else set()
    indices = leaves(spec.mask, "index") | leaves(spec.score, "index")
    text = (
        environment()
        .get_template(template)
        .render(
            header=header(given, command, by_range=not repairs),
            helpers=sorted(helpers),
            arguments=arguments,
            bare_arguments=[bare(a) for a in arguments],
            unspecialized=[bare(a) for a in arguments if not is_pointer(a)],
            unaligned=unaligned_pointers(arguments, spec),
            aligned_strides=STRIDES,
            head_dim=variant.head_dim,
            v_head_dim=variant.v_head_dim,
            v_room=1 << (variant.v_head_dim - 1).bit_length(),
            q_parts=parts_of(variant.head_dim),
            v_parts=parts_of(variant.v_head_dim),
            kv_lens=variant.kv_lens,
            offset=variant.offset,
            packed=variant.packed,
            key_storage=variant.keys,
            row_lines=(*mask.general.row_lines, *score.statements[0]),
            tile_lines=mask.general.tile_lines,
            score_lines=score.statements[1],
            keep=keep_by_key(spec, mask.general.keep),
            ordered=mask.ordered,
            holds=mask.holds,
            has_mask=spec.mask is not None,
            score=full_score(spec, score),
            is_scaled=not is_added(spec),
            softcap=spec.softcap,
            sinks=spec.sinks,
            dropout=variant.dropout,
            uses_q_idx="q_idx" in indices or variant.dropout,
            **_select_arguments(arguments, given, variant),
        )
    )
    name = kernel_name(spec, variant)
    name = f"{name}{variant.suffix}" + ("_repair" if repairs else "_fwd")
    return Generated(name, tidy(text), tuple(bare(a) for a in arguments))


def kernel_name(spec: Spec, variant: Variant) -> str:
    """What names of a call's kernels begin with."""
    dims = dict.fromkeys((variant.head_dim, variant.v_head_dim))
    return f"{spec.slug}_d" + "_".join(map(str, dims))


# What the careful second pass takes, beside the kernel's own arguments: computed by then.
_DERIVED = (
    "b", "h", "h_kv", "block", "masked_tiles", "full_tiles", "ragged_tiles", "ragged_tile"
)  # fmt: skip
_CONSTANTS = ("BLOCK_M", "BLOCK_N", "TILE_N", "OFFSET", "FLOAT", "PRECISION")
_UNUSED = (
    "counts", "spoilt_ptr", "items", "batch", "sinks_ptr", "masked_width", "full_width", "heads",
    "group", "kv_lens_ptr", "q_tiles", "total_q", "sequences_ptr", "cu_seqlens_q_ptr",
    "cu_seqlens_kv_ptr", "page_table_stride",
)  # fmt: skip


def _select_arguments(arguments: list[str], spec: Spec, variant: Variant) -> dict[str, list[str]]:
    is_paged = variant.keys == "paged"
    tables = {*data_arguments(with_tables(spec), variant)} - {*data_arguments(spec, variant)}
    names = [bare(a) for a in arguments if a not in tables]
    names = [n for n in names if n not in _UNUSED and not n.startswith("schedule_")]
    of_place = "stride_([qo]b|.h)" if is_paged else "stride_.[bh]"
    names = [n for n in names if not re.fullmatch(rf"{of_place}|q_offset\w*|kv_len", n)]
    names += [*(["q_len"] * variant.packed), "kv_len", "q_offset", *_DERIVED]
    constants = (*_CONSTANTS, *(["PAGE_SIZE"] * is_paged))
    return {
        "select_call": [*names, *constants],
        "select_arguments": [*names, *(f"{c}: tl.constexpr" for c in constants)],
    }


def header(spec: Spec, command: str, by_range: bool = True) -> str:
    """Comments above a generated module: what it computes, and how to make it again.

    `by_range`: its kernels have a form for data in order."""
    lines = [f"flashgen {__version__}", *str(spec).splitlines()]
    lines += ["tile rule", *(f"  {line}" for line in str(tile_rule(spec.mask)).splitlines())]
    if by_range and (cheaper := ordered(spec.mask)):
        lines += ["data in order", f"  {cheaper}"]
    if command:
        lines.append(f"made by: {command}")
    return "\n".join(part for line in lines for part in _comment(line))


def _comment(line: str) -> list[str]:
    blanks = " " * (len(line) - len(line.lstrip()))
    return textwrap.wrap(
        line.strip(), 99, initial_indent=f"# {blanks}", subsequent_indent=f"# {blanks}    "
    )
