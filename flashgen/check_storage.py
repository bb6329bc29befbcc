"""How a call stores its queries, keys and values: checked, and seen as [B, H, S, D]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, Literal

import torch

from .config import config
from .errors import FlashgenError, show
from .geometry import MAX_POSITION
from .storage import Packing, Pages

PageLayout = Literal["NHD", "HND"]
_DENSE = "q [B, Hq, Sq, D], k [B, Hkv, Skv, D], v [B, Hkv, Skv, Dv]"
_PACKED = "q [Tq, Hq, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv] with cu_seqlens_q, cu_seqlens_kv [B + 1]"
_PAGES = {
    "NHD": "k [pages, page size, Hkv, D], v [pages, page size, Hkv, Dv]",
    "HND": "k [pages, Hkv, page size, D], v [pages, Hkv, page size, Dv]",
}


@dataclass(frozen=True, eq=False)
class Storage:
    """A call's arguments that say how its tensors are stored; all None: dense."""

    kv_lens: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_kv: Any = None
    max_seqlen_q: Any = None
    max_seqlen_kv: Any = None
    page_table: Any = None
    page_layout: Any = None

    @staticmethod
    def take(arguments: dict[str, Any]) -> Storage:
        """Take what belongs here out of a call's keyword arguments."""
        names = [f.name for f in fields(Storage)]
        return Storage(**{name: arguments.pop(name, None) for name in names})

    def given(self) -> Mapping[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def is_packed(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def is_paged(self) -> bool:
        return self.page_table is not None

    @property
    def shapes(self) -> str:
        """What q, k and v look like."""
        if not self.is_paged:
            return _PACKED if self.is_packed else _DENSE
        queries = "q [Tq, Hq, D] with cu_seqlens_q" if self.is_packed else "q [B, Hq, Sq, D]"
        return f"{queries}, {_PAGES[self.page_layout or 'NHD']}"

    def latent_shapes(self, width: int) -> str:
        """What queries and latent rows of so many columns look like."""
        if not self.is_paged:
            queries = f"q [T, Hq, {width}], kv [T, 1, {width}]"
            return queries if self.is_packed else f"q [B, Hq, Sq, {width}], kv [B, 1, Skv, {width}]"
        pages = {"HND": "pages, 1, page size"}.get(self.page_layout, "pages, page size, 1")
        layout = f'page_layout="{self.page_layout or "NHD"}"'
        queries = f"q [Tq, Hq, {width}]" if self.is_packed else f"q [B, Hq, Sq, {width}]"
        return f"{queries}, kv [{pages}, {width}] with {layout}"

    @property
    def dims(self) -> tuple[int, int, int]:
        """How many dimensions q, k and v have."""
        keys = 4 if self.is_paged or not self.is_packed else 3
        return 3 if self.is_packed else 4, keys, keys


def check_mix(text: object, storage: Storage) -> None:
    """Refuse arguments that don't go together. Raises FlashgenError."""
    s = storage
    layouts = ("NHD", "HND")
    rules = [
        (s.cu_seqlens_kv is not None and s.is_paged,
         "cu_seqlens_kv and page_table both say where keys are", "one of them"),
        (s.cu_seqlens_kv is not None and not s.is_packed,
         "cu_seqlens_kv is given, and cu_seqlens_q isn't", f"both: {_PACKED}"),
        (s.is_packed and s.cu_seqlens_kv is None and not s.is_paged,
         "cu_seqlens_q is given, and neither cu_seqlens_kv nor page_table is",
         f"{_PACKED} (one tensor may be both), or keys in pages with page_table and kv_lens"),
        (s.cu_seqlens_kv is not None and s.kv_lens is not None,
         "kv_lens and cu_seqlens_kv both say how many keys there are", "one of them"),
        (s.max_seqlen_q is not None and not s.is_packed,
         "max_seqlen_q is given, and cu_seqlens_q isn't", f"max_seqlen_q with {_PACKED}"),
        (s.max_seqlen_kv is not None and s.cu_seqlens_kv is None and not s.is_paged,
         "max_seqlen_kv is given, and neither cu_seqlens_kv nor page_table is",
         f"max_seqlen_kv with {_PACKED}"),
        (s.is_paged and s.kv_lens is None,
         "page_table is given, and kv_lens isn't", "kv_lens [B], the keys of each sequence"),
        (s.page_layout is not None and not s.is_paged,
         "page_layout is given, and page_table isn't", "page_table [B, P] with kv_lens [B]"),
        (s.page_layout is not None and s.page_layout not in layouts,
         f"there is no page_layout {show(s.page_layout)}",
         '"NHD" (pages [n, page size, Hkv, D]) or "HND" (pages [n, Hkv, page size, D])'),
    ]  # fmt: skip
    for is_wrong, problem, write in rules:
        if is_wrong:
            raise FlashgenError(problem, call=text, write=write)


def views(
    storage: Storage, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v as kernels take them: packed [1, H, T, D], pages [pages, Hkv, page size, D]."""
    if storage.is_packed:
        q = q.transpose(0, 1)[None]
    if storage.is_paged:
        if storage.page_layout != "HND":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
    elif storage.is_packed:
        k, v = (x.transpose(0, 1)[None] for x in (k, v))
    return q, k, v


def packing_of(
    text: object, storage: Storage, q: torch.Tensor, k: torch.Tensor
) -> tuple[Packing | None, tuple[int | None, int | None]]:
    """The packing of views of q and k, and the longest of queries and of keys, if known."""
    if not storage.is_packed:
        return None, (None, None)
    cu_q = _cu_seqlens(text, "cu_seqlens_q", storage.cu_seqlens_q, q)
    most_q = _longest(text, "q", storage.max_seqlen_q, cu_q, q.shape[2])
    if storage.is_paged:
        return Packing(cu_q, None, q.shape[2], 0), (most_q, None)
    same = storage.cu_seqlens_kv is storage.cu_seqlens_q
    cu_kv = cu_q if same else _cu_seqlens(text, "cu_seqlens_kv", storage.cu_seqlens_kv, k)
    if cu_kv.shape != cu_q.shape:
        raise FlashgenError(
            f"cu_seqlens_q has {cu_q.shape[0]} elements, and cu_seqlens_kv {cu_kv.shape[0]}",
            call=text,
            write="both [B + 1]",
        )
    most_kv = _longest(text, "kv", storage.max_seqlen_kv, cu_kv, k.shape[2])
    return Packing(cu_q, cu_kv, q.shape[2], k.shape[2]), (most_q, most_kv)


def _cu_seqlens(text: object, name: str, cu: Any, x: torch.Tensor) -> torch.Tensor:
    write = f"{name} [B + 1], int32 on {x.device}: 0, then where each sequence ends"
    if not isinstance(cu, torch.Tensor):
        raise FlashgenError(f"{name} is a {type(cu).__name__}", call=text, write=write)
    if cu.dtype != torch.int32 or cu.ndim != 1 or not cu.numel() or cu.device != x.device:
        kind = f"{name} has shape {list(cu.shape)} and dtype {cu.dtype}, on {cu.device}"
        raise FlashgenError(kind, call=text, write=write)
    return cu.contiguous()


def check_size(text: object, name: str, given: Any) -> int | None:
    """A `max_seqlen_*`: an int, also as a 0-d tensor on the CPU, or None."""
    if isinstance(given, torch.Tensor) and given.ndim == 0 and given.device.type == "cpu":
        given = given.item()
    if given is None or (isinstance(given, int) and not isinstance(given, bool) and given >= 0):
        return given
    what = f"a tensor on {given.device}" if isinstance(given, torch.Tensor) else show(given)
    raise FlashgenError(f"{name} is {what}", call=text, write=f"a Python int, or no {name} at all")


def _longest(text: object, side: str, given: Any, cu: torch.Tensor, total: int) -> int | None:
    """The longest sequence as given, or as counted where that doesn't wait for the device."""
    name = f"max_seqlen_{side}"
    given = check_size(text, name, given)
    # Reading lengths on a GPU would wait for it.
    if cu.device.type != "cpu" and not config.debug:
        return None if given is None else min(given, total)
    ends = cu.tolist()
    lens = [end - start for start, end in pairwise(ends)]
    if ends[0] != 0 or min(lens, default=0) < 0 or ends[-1] > total:
        raise FlashgenError(
            f"cu_seqlens_{side} holds {_short(ends)}",
            call=text,
            write=f"0, then where each sequence ends, ascending, up to {total} at most",
        )
    most = max(lens, default=0)
    if given is not None and most > given:
        raise FlashgenError(
            f"{name} is {given}, and a sequence has {most}", call=text, write=f"{name}={most}"
        )
    return most if given is None else min(given, total)


def pages_of(
    text: object, storage: Storage, batch: int, k: torch.Tensor, v: torch.Tensor
) -> Pages | None:
    """The pages of views of k and v."""
    if not storage.is_paged:
        return None
    table, size = storage.page_table, k.shape[2]
    if size < 1:
        raise FlashgenError(
            f"pages have room for {size} keys: a page size is a positive integer",
            call=text,
            write=_PAGES[storage.page_layout or "NHD"],
        )
    write = f"page_table [{batch}, P], int32 on {k.device}: the pages of each sequence in order"
    if not isinstance(table, torch.Tensor):
        raise FlashgenError(f"page_table is a {type(table).__name__}", call=text, write=write)
    good = table.dtype == torch.int32 and table.ndim == 2 and table.shape[0] == batch
    if not good or table.device != k.device:
        kind = f"page_table has shape {list(table.shape)} and dtype {table.dtype}"
        raise FlashgenError(f"{kind}, on {table.device}", call=text, write=write)
    if table.shape[1] * size > MAX_POSITION:
        raise FlashgenError("a line of page_table holds 2^30 keys", call=text, write="fewer pages")
    return Pages(table if table.stride(1) == 1 else table.contiguous(), size, k.shape[0])


def check_pages(text: object, pages: Pages, kv_lens: torch.Tensor) -> None:
    """Refuse entries that are no pages, as far as the lengths reach. Reads the table."""
    used = torch.arange(pages.table.shape[1], device=kv_lens.device) * pages.size
    is_wrong = (pages.table < 0) | (pages.table >= pages.count)
    wrong = (is_wrong & (used < kv_lens[:, None])).nonzero().tolist()
    if wrong:
        b, column = wrong[0]
        raise FlashgenError(
            f"page_table[{b}, {column}] is {int(pages.table[b, column])}, and the sequence has "
            f"{int(kv_lens[b])} keys",
            call=text,
            write=f"pages from 0 to {pages.count - 1} in the first ceil(kv_lens[b] / "
            f"{pages.size}) columns",
        )


def _short(numbers: list[int]) -> str:
    return str(numbers if len(numbers) <= 8 else [*numbers[:7], "..."])
