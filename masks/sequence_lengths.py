"""Block-diagonal masks from the lengths of packed sequences, or from cu_seqlens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import flashgen as fg

from .packed_sequences import (
    block_diagonal,
    block_diagonal_causal,
    block_diagonal_local,
    block_diagonal_window,
)

Window = int | tuple[int, int] | None


def from_seqlens(
    q_seqlen: Sequence[int],
    kv_seqlen: Sequence[int] | None = None,
    *,
    kv_start: Sequence[int] | int | None = None,
    causal: bool = False,
    window: Window = None,
    top_left: bool = False,
    device: torch.device | str | None = None,
) -> Any:
    """The mask of packed sequences with these lengths (xFormers' block-diagonal family).

    `kv_seqlen` is `q_seqlen` if left out. `kv_start`: where each sequence's keys begin; one number
    is the distance of padded keys; left out, keys are packed like queries. Ranges may overlap.
    `window`: an int is a causal window that counts the query itself, `(left, right)` one to both
    sides. Causal and windows are aligned bottom-right unless `top_left`: with more queries than
    keys a sequence's first queries see no key.
    Raises FlashgenError for lengths that are negative or don't belong together."""
    call = f"from_seqlens({_short(q_seqlen)}, {_short(kv_seqlen)}, kv_start={_short(kv_start)})"
    q_size = list(q_seqlen)
    kv_size = q_size if kv_seqlen is None else list(kv_seqlen)
    if kv_start is None:
        starts = [sum(kv_size[:n]) for n in range(len(kv_size))]
    elif isinstance(kv_start, int):
        starts = [kv_start * n for n in range(len(kv_size))]
    else:
        starts = list(kv_start)[: len(kv_size)]
    if not len(q_size) == len(kv_size) == len(starts):
        raise fg.FlashgenError(
            f"there are {len(q_size)} lengths of queries, {len(kv_size)} of keys and "
            f"{len(starts)} starts",
            call=call,
            write="Write one of each for every sequence.",
        )
    for number in (*q_size, *kv_size, *starts):
        if not isinstance(number, int) or number < 0:
            problem = (
                "negative" if isinstance(number, (int, float)) and number < 0 else "no integer"
            )
            raise fg.FlashgenError(
                f"a length or a start is {problem}: {number!r}",
                call=call,
                write="Write integers, 0 or more.",
            )
    if isinstance(kv_start, int) and max(kv_size, default=0) > kv_start:
        raise fg.FlashgenError(
            f"a sequence has {max(kv_size)} keys, and padded ones lie {kv_start} apart",
            call=call,
            write=f"Write kv_start={max(kv_size)} or more, or a list of starts.",
        )
    cu_q = torch.tensor([sum(q_size[:n]) for n in range(len(q_size) + 1)], device=device)
    starts, kv_size = torch.tensor([starts, kv_size], dtype=torch.int64, device=device)
    data = _data(cu_q, starts, kv_size, sum(q_size), top_left)
    return _choose(data, causal, window)


def from_cu_seqlens(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor | None = None,
    *,
    causal: bool = False,
    window: Window = None,
    total_q: int | None = None,
) -> Any:
    """The mask of packed sequences given by cumulative lengths, as variable-length attention has.

    `cu_seqlens_q`, `cu_seqlens_kv` (the same if left out): integer [n + 1], 0 first. Causal and
    windows are aligned bottom-right in each sequence, as in FlashAttention. `window`: an int is a
    causal window that counts the query itself, `(left, right)` one to both sides
    (FlashAttention's `window_size` without -1). Rows past the last sequence see no key.

    `total_q` is the number of rows; left out, it is read from `cu_seqlens_q`, which waits for the
    device where that lies on one. With it nothing does.
    Raises FlashgenError for shapes or dtypes that aren't cumulative lengths."""
    cu_kv = cu_seqlens_q if cu_seqlens_kv is None else cu_seqlens_kv
    for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_kv", cu_kv)):
        problem = _problem(cu)
        if not problem and cu.device != cu_seqlens_q.device:
            problem = f"is on {cu.device}, and cu_seqlens_q on {cu_seqlens_q.device}"
        if problem:
            raise fg.FlashgenError(
                f"{name} must be integers [sequences + 1], and {problem}",
                call="from_cu_seqlens(...)",
                write="Write torch.tensor([0, *lengths]).cumsum(0).",
            )
    if cu_seqlens_q.shape != cu_kv.shape:
        raise fg.FlashgenError(
            f"there are {cu_seqlens_q.numel() - 1} sequences of queries and {cu_kv.numel() - 1} "
            "of keys",
            call="from_cu_seqlens(...)",
            write="Write an empty sequence (a repeated number) where one is missing.",
        )
    rows = int(cu_seqlens_q[-1]) if total_q is None else total_q
    if not isinstance(rows, int) or rows < 0:
        raise fg.FlashgenError(
            f"total_q is {rows!r}", call="from_cu_seqlens(...)", write="Write the number of rows."
        )
    data = _data(cu_seqlens_q.long(), cu_kv[:-1].long(), cu_kv.long().diff(), rows, False)
    return _choose(data, causal, window)


def _problem(cu: Any) -> str:
    """What is wrong with cumulative lengths, as far as it costs no waiting; empty if nothing is."""
    if not isinstance(cu, torch.Tensor):
        return f"is a {type(cu).__name__}"
    if cu.ndim != 1 or cu.numel() < 1 or cu.is_floating_point() or cu.dtype == torch.bool:
        return f"is {list(cu.shape)} {cu.dtype}"
    if cu.device.type == "cpu" and (int(cu[0]) != 0 or bool((cu.diff() < 0).any())):
        return f"holds {_short(cu.tolist())}, which doesn't start at 0, or falls"
    return ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _data(
    cu_q: torch.Tensor, kv_start: torch.Tensor, kv_size: torch.Tensor, rows: int, top_left: bool
) -> dict[str, torch.Tensor]:
    """What the four masks read; an empty sequence behind the last takes the rows past the end."""
    row = torch.arange(rows + 1, device=cu_q.device)
    sequence = torch.searchsorted(cu_q[1:].contiguous(), row, right=True)
    sequence[-1:] = len(cu_q) - 1
    shift = torch.zeros_like(kv_size) if top_left else kv_size - cu_q.diff()
    data = {
        "sequence": sequence,
        "q_start": cu_q,
        "kv_start": torch.nn.functional.pad(kv_start, (0, 1)),
        "kv_size": torch.nn.functional.pad(kv_size, (0, 1)),
        "diagonal": torch.nn.functional.pad(shift, (0, 1)),
    }
    return {name: tensor.to(torch.int32) for name, tensor in data.items()}


def _choose(data: dict[str, torch.Tensor], causal: bool, window: Window) -> Any:
    sides = window if isinstance(window, tuple) else (window,) * 2
    if window is not None and not (len(sides) == 2 and all(type(x) is int for x in sides)):
        raise fg.FlashgenError(
            f"window is {window!r}",
            call="from_seqlens(..., window=...)",
            write="Write the number of keys, or (left, right).",
        )
    if isinstance(window, int):
        return block_diagonal_window(**data, window=window)
    if window is not None:
        left, right = window
        return block_diagonal_local(**data, left=left, right=0 if causal else right)
    if causal:
        return block_diagonal_causal(**data)
    keys = ("sequence", "kv_start", "kv_size")
    return block_diagonal(**{name: data[name] for name in keys})
