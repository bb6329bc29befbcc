"""xFormers' attention biases, read from the objects themselves."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import flashgen as fg

from .causality import bottom_right, top_left
from .local_windows import local
from .sequence_lengths import from_seqlens
from .sliding_windows import sliding_window

SIMPLE: dict[str, Any] = {
    "LowerTriangularMask": lambda bias: top_left,
    "LowerTriangularFromBottomRightMask": lambda bias: bottom_right,
    "LowerTriangularFromBottomRightLocalAttentionMask": lambda bias: sliding_window(
        window=bias._window_size
    ),
    "LocalAttentionFromBottomRightMask": lambda bias: local(
        left=bias.window_left, right=bias.window_right
    ),
}
TOP_LEFT = ("BlockDiagonalCausalMask", "BlockDiagonalCausalLocalAttentionMask")
REFUSED = {
    "LowerTriangularMaskWithTensorBias": "Write masks.top_left, and the bias as a score function: "
    "`return score + bias[b, h, q_idx, kv_idx]`.",
    "Paged": "Write the call with page_table= and kv_lens=, and masks.causal, "
    "masks.sliding_window or masks.left_padding for the rest: pages are storage here, not a mask.",
}


def from_xformers(bias: Any) -> Any:
    """The mask of an xFormers bias: an object of a class in `xformers.ops.fmha.attn_bias`.

    Told by the names of its classes, so that xFormers need not be installed. The block-diagonal
    family keeps its layout: one row of packed queries, keys packed, padded or gappy. Lengths are
    read on the host. Raises FlashgenError for paged classes (storage, see the message), for a
    tensor bias (a score, not a mask) and for classes it doesn't know."""
    names = [c.__name__ for c in type(bias).__mro__]
    call = f"from_xformers({names[0]})"
    for name, advice in REFUSED.items():
        if any(n == name or (name == "Paged" and n.startswith(name)) for n in names):
            raise fg.FlashgenError(f"{names[0]} is more than a mask", call=call, write=advice)
    known = next((n for n in names if n in SIMPLE or n.startswith("BlockDiagonal")), None)
    if known is None:
        raise fg.FlashgenError(
            f"{names[0]} is not one of xFormers' biases",
            call=call,
            write="Write masks.from_dense(matrix) for a boolean matrix, or the formula.",
        )
    try:
        return SIMPLE[known](bias) if known in SIMPLE else _block_diagonal(bias, known)
    except AttributeError as error:
        raise fg.FlashgenError(
            f"this {known} isn't like xFormers': {error}",
            call=call,
            write="Write masks.from_seqlens(q_seqlen, kv_seqlen, ...) with its lengths.",
        ) from error


def _block_diagonal(bias: Any, name: str) -> Any:
    q_starts = _list(bias.q_seqinfo.seqstart)
    kv_starts = _list(bias.k_seqinfo.seqstart)
    sizes = getattr(bias.k_seqinfo, "seqlen", None)
    kv_sizes = _lengths(kv_starts) if sizes is None else _list(sizes)
    window: Any = getattr(bias, "_window_size", None)
    if hasattr(bias, "window_left"):
        window = (bias.window_left, bias.window_right)
    return from_seqlens(
        _lengths(q_starts),
        kv_sizes,
        kv_start=kv_starts[: len(kv_sizes)],
        causal="Causal" in name,
        window=window,
        top_left=name in TOP_LEFT,
        device=bias.q_seqinfo.seqstart.device,
    )


def _list(tensor: Any) -> list[int]:
    return [int(value) for value in tensor]


def _lengths(starts: list[int]) -> list[int]:
    return [end - start for start, end in pairwise(starts)]
