"""One call's inputs, checked: shapes, dtypes, devices, lengths. Nothing waits for the device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from . import transforms
from .check_kinds import check_kinds
from .check_storage import (
    Storage,
    check_mix,
    check_pages,
    check_size,
    packing_of,
    pages_of,
    views,
)
from .config import config
from .dropout import Dropout, check_dropout
from .errors import CallText, FlashgenError
from .geometry import MAX_POSITION, Geometry, check_offset
from .spec import MLA, Bound
from .spec.data import fit_data
from .storage import Pages

MAX_HEAD_DIM = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class Call:
    """Checked inputs: tensors, lengths and positions, the spec with its data, the scale.

    q, k, v are views as kernels take them: [B, H, S, D], also of packed and paged tensors."""

    text: CallText
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    geometry: Geometry
    bound: Bound
    scale: float
    softcap: float | None
    sinks: torch.Tensor | None
    dropout: Dropout | None

    @property
    def data(self) -> list[torch.Tensor]:
        """What the expressions read, in the spec's order."""
        return [self.bound.tensors[tensor.name] for tensor in self.bound.spec.tensors]


class Declaration(Protocol):
    """What a call is checked against: a `Program`, or what an operator knows of one."""

    @property
    def flex_function(self) -> str | None: ...
    @property
    def softcap(self) -> float | None: ...
    @property
    def sinks(self) -> bool: ...
    @property
    def heads(self) -> MLA | None: ...
    def bind(
        self,
        data: Mapping[str, Any],
        call: object,
        spread: frozenset[str] = ...,
        lengths: Mapping[str, int] = ...,
    ) -> Bound: ...


def autocast(*tensors: Any) -> Any:
    """Queries, keys and values as `torch.autocast` has SDPA take them: float64 stays, as there."""
    if not isinstance(tensors[0], torch.Tensor):
        return tensors
    kind = tensors[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if _is_cast(x) else x for x in tensors)


def _is_cast(x: Any) -> bool:
    is_float = isinstance(x, torch.Tensor) and x.dtype.is_floating_point
    return is_float and x.dtype != torch.float64


def check(
    program: Declaration,
    text: CallText,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    *,
    scale: float | None,
    q_offset: Any,
    storage: Storage,
    sinks: torch.Tensor | None,
    data: Mapping[str, Any],
    dropout_p: float = 0.0,
    seed: int | None = None,
) -> Call:
    """Check one call. Raises FlashgenError for whatever doesn't fit."""
    latent = program.heads is not None
    check_kinds(text, {"q": q, "kv" if latent else "k": k, "v": v})
    if program.heads is not None:
        v = _latent_values(text, program.heads, k, v, scale, storage)
    elif v is None:
        raise FlashgenError("there is no value tensor", call=text, write="attend(q, k, v)")
    check_mix(text, storage)
    if transforms.are_active():
        given_tensors = (q, k, v, *storage.given().values(), *data.values())
        transforms.refuse_mapped(*given_tensors, call=text)
    # Views that stand for negated numbers (`x.conj().imag`) are written out.
    q, k, v = given = tuple(x.resolve_neg() for x in autocast(q, k, v))
    write = storage.shapes
    if program.heads is not None:
        write = storage.latent_shapes(program.heads.rank + program.heads.rope)
    _check_inputs(text, q, k, v, storage, write)
    q, k, v = views(storage, *given)
    _check_shapes(text, given, (q, k, v), storage, program.heads, write)
    geometry = geometry_of(text, q, k, v, q_offset, storage)
    if program.flex_function and geometry.q_offset is None and _lengths_differ(geometry):
        raise FlashgenError(
            f"{program.flex_function} is a FlexAttention function, where the first query is "
            f"position 0; here, with Sq={geometry.q_len} and Skv={geometry.kv_len}, the queries "
            "are the last positions",
            call=text,
            write="q_offset=0 for FlexAttention's meaning, or the first query's position",
        )
    bound = program.bind(data, text, spread=geometry.spread, lengths=geometry.lengths)
    bound = fit_data(bound, geometry.extents, q.device, text)
    checked_scale = _scale(text, scale, q.shape[-1])
    sinks = _sinks(text, program.sinks, sinks, geometry)
    dropout = check_dropout(dropout_p, seed, text)
    return Call(text, q, k, v, geometry, bound, checked_scale, program.softcap, sinks, dropout)


def _lengths_differ(geometry: Geometry) -> bool:
    if (packing := geometry.packing) is not None and packing.cu_q is packing.cu_kv:
        return False
    return geometry.q_len != geometry.kv_len or geometry.has_lens


def _latent_values(
    text: CallText, heads: MLA, kv: Any, v: Any, scale: Any, storage: Storage
) -> torch.Tensor:
    """The values of latent heads: the first columns of the keys."""
    width = heads.rank + heads.rope
    write = f"attend(q, kv, scale=...), with one head of {width} columns: "
    write += storage.latent_shapes(width)
    if v is not None:
        problem = f"{heads} has no value tensor: the value is kv's first {heads.rank} columns"
        raise FlashgenError(problem, call=text, write=write)
    if scale is None:
        raise FlashgenError(
            f"{heads} needs its scale: it belongs to the expanded heads, and can't be seen from "
            f"kv's {width} columns",
            call=text,
            write=f"scale=(nope + rope)**-0.5, which is 192**-0.5 for DeepSeek-V3 (times mscale**2 "
            f"with YaRN), never {width}**-0.5",
        )
    heads_at = {3: 1, 4: 2 if storage.is_paged and storage.page_layout != "HND" else 1}
    shape = list(kv.shape)
    if len(shape) not in heads_at or shape[heads_at[len(shape)]] != 1 or shape[-1] != width:
        problem = f"kv is {shape}"
        raise FlashgenError(problem, call=text, write=write)
    values: torch.Tensor = kv[..., : heads.rank]
    return values


def _check_inputs(
    text: CallText,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    storage: Storage,
    write: str,
) -> None:
    for name, x, dims in zip("qkv", (q, k, v), storage.dims, strict=True):
        if x.ndim != dims:
            problem = f"{name} has {x.ndim} dimensions"
        elif x.dtype not in DTYPES:
            problem = f"{name} has dtype {x.dtype}"
        elif x.dtype != q.dtype:
            problem = f"{name} has dtype {x.dtype}, and q {q.dtype}"
        elif x.device != q.device:
            problem = f"{name} is on {x.device}, and q on {q.device}"
        else:
            continue
        raise FlashgenError(
            problem,
            call=text,
            write=f"{write}, of one dtype (float16, bfloat16, float32; float64 on the "
            "CPU) on one device",
        )


def _check_shapes(
    text: CallText,
    given: Sequence[torch.Tensor],
    views: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    storage: Storage,
    latent: MLA | None,
    write: str,
) -> None:
    """`views`: q, k, v as [B, H, S, D]; `write`: the shapes that a call gives."""
    q, k, v = views
    is_batch = storage.is_packed or storage.is_paged or q.shape[0] == k.shape[0]
    if k.shape[:3] != v.shape[:3] or not is_batch or q.shape[3] != k.shape[3]:
        shapes = ", ".join(str(list(x.shape)) for x in (given if latent is None else given[:2]))
        problem = f"the shapes {shapes} don't fit together"
        raise FlashgenError(problem, call=text, write=write)
    heads, kv_heads = q.shape[1], k.shape[1]
    if (kv_heads == 0) != (heads == 0) or (kv_heads and heads % kv_heads):
        raise FlashgenError(
            f"{heads} query heads can't share {kv_heads} heads of keys evenly",
            call=text,
            write="a number of query heads that is a multiple of the key heads",
        )
    for name, x in (("head dimension", q), ("head dimension of the values", v)):
        if latent is None and not 1 <= x.shape[3] <= MAX_HEAD_DIM:
            raise FlashgenError(
                f"the {name} is {x.shape[3]}", call=text, write=f"1 to {MAX_HEAD_DIM}"
            )
    if max(q.shape[2], k.shape[2]) > MAX_POSITION:
        raise FlashgenError("lengths beyond 2^30 - 1", call=text, write="shorter sequences")


def geometry_of(
    text: CallText,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_offset: Any,
    storage: Storage,
) -> Geometry:
    """Lengths, heads and positions of views as kernels take them. Raises FlashgenError."""
    batch, heads, q_len, _ = q.shape
    kv_len, kv_lens = k.shape[2], storage.kv_lens
    packing, longest = packing_of(text, storage, q, k)
    if packing is not None:
        batch, q_len = packing.batch, q_len if longest[0] is None else longest[0]
    pages = pages_of(text, storage, batch, k, v)
    if pages is not None:
        kv_len = pages.table.shape[1] * pages.size
    room = None
    if kv_lens is not None:
        kv_lens = _kv_lens(text, kv_lens, batch, kv_len, q.device)
        room = None if q.device.type == "cpu" else kv_len
    if pages is not None:
        most = _longest_paged(text, storage, pages, kv_lens)
        longest = (longest[0], most)
        kv_len = kv_len if storage.max_seqlen_kv is None or most is None else min(kv_len, most)
    elif packing is not None and packing.cu_kv is not None:
        kv_lens, kv_len = packing.cu_kv.diff(), kv_len if longest[1] is None else longest[1]
    offset = check_offset(q_offset, batch, q.device, text)
    found = Geometry(
        *(batch, heads, k.shape[1], q_len, kv_len, q.device, offset, kv_lens),
        packing=packing,
        pages=pages,
        longest=longest,
        room=room,
    )
    if found.last_position is not None and found.last_position > MAX_POSITION:
        raise FlashgenError(
            f"the last query is position {found.last_position - 1}",
            call=text,
            write="positions below 2^30 - 1: a smaller q_offset",
        )
    return transforms.bare_geometry(found) if transforms.are_active() else found


def _longest_paged(
    text: CallText, storage: Storage, pages: Pages, kv_lens: torch.Tensor
) -> int | None:
    """The most keys of a sequence, where the host knows it; checks the table if it can be read."""
    given = check_size(text, "max_seqlen_kv", storage.max_seqlen_kv)
    if kv_lens.device.type != "cpu" and not config.debug:
        return given
    check_pages(text, pages, kv_lens)
    most = int(kv_lens.max()) if kv_lens.numel() else 0
    if given is not None and most > given:
        problem = f"max_seqlen_kv is {given}, and a sequence has {most} keys"
        raise FlashgenError(problem, call=text, write=f"max_seqlen_kv={most}")
    return most if given is None else given


def _kv_lens(
    text: CallText, lens: Any, batch: int, capacity: int, device: torch.device
) -> torch.Tensor:
    write = f"kv_lens [{batch}], int32 or int64 on {device}, each from 0 to {capacity}"
    if not isinstance(lens, torch.Tensor):
        raise FlashgenError(f"kv_lens is a {type(lens).__name__}", call=text, write=write)
    if lens.dtype not in (torch.int32, torch.int64):
        raise FlashgenError(f"kv_lens has dtype {lens.dtype}", call=text, write=write)
    if lens.shape != (batch,) or lens.device != device:
        problem = f"kv_lens has shape {list(lens.shape)} on {lens.device}"
        raise FlashgenError(problem, call=text, write=write)
    # Reading lengths on a GPU would wait for it.
    is_read = (device.type == "cpu" or config.debug) and batch > 0
    if is_read and not 0 <= int(lens.min()) <= int(lens.max()) <= capacity:
        raise FlashgenError(f"kv_lens holds {lens.tolist()}", call=text, write=write)
    return lens.to(torch.int32).contiguous()


def _scale(text: CallText, scale: Any, head_dim: int) -> float:
    if scale is None:
        return float(head_dim**-0.5)
    if isinstance(scale, (torch.Tensor, bool, str)) or not hasattr(scale, "__float__"):
        raise FlashgenError(
            f"scale is a {type(scale).__name__}",
            call=text,
            write="a Python float; a learnable temperature is a score function: `score * t`",
        )
    try:
        found = float(scale)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise FlashgenError(f"scale is {found}", call=text, write="a finite number")
    return found


def _sinks(
    text: CallText, declared: bool, sinks: torch.Tensor | None, geometry: Geometry
) -> torch.Tensor | None:
    if declared != (sinks is not None):
        problem = (
            "sinks=True was declared, and no sinks are given"
            if declared
            else ("sinks are given, and were not declared")
        )
        write = f"sinks=<[{geometry.heads}]>" if declared else "fg.Attention(..., sinks=True)"
        raise FlashgenError(problem, call=text, write=write)
    if sinks is None:
        return None
    if not hasattr(sinks, "shape"):
        problem = f"sinks is a {type(sinks).__name__}"
        raise FlashgenError(problem, call=text, write=f"a float tensor [{geometry.heads}]")
    if sinks.shape != (geometry.heads,) or not sinks.dtype.is_floating_point:
        problem = f"sinks has shape {list(sinks.shape)} and dtype {sinks.dtype}"
        raise FlashgenError(problem, call=text, write=f"a float tensor [{geometry.heads}]")
    if sinks.device != geometry.device:
        problem = f"sinks is on {sinks.device}, and q on {geometry.device}"
        raise FlashgenError(problem, call=text, write="sinks.to(q.device)")
    return sinks.contiguous().resolve_neg()
