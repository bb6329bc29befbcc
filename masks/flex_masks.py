"""FlexAttention's BlockMask: its mask function, or its table of blocks."""

from __future__ import annotations

from typing import Any

import torch

import flashgen as fg

from .block_tables import block_sparse, blocks_from_indices


def from_block_mask(block_mask: Any, *, blocks: bool | None = None) -> Any:
    """The mask of a FlexAttention BlockMask.

    Of one that `create_block_mask` made, only the mask function matters: `mask_mod`, as
    FlexAttention calls it, `q_idx` counted from the first query. Where there are as many queries
    as keys that is the position; where not, pass `q_offset=0` to the call, as FlexAttention
    means it (without, the call is refused). What is attended to follows the tensors of the call:
    the lengths in the BlockMask (`seq_lengths`) aren't needed, and a longer mask is cropped.

    A BlockMask that was put together from lists of blocks (`from_kv_blocks`) also hides what its
    lists leave out. `blocks=True` takes the lists into account: full blocks are seen whole,
    partial ones by `mask_mod`, all others are hidden. That is the default where `mask_mod` is
    FlexAttention's `noop_mask`; with `create_block_mask` it would be the same mask, slower.

    Raises FlashgenError for what isn't a BlockMask, and for a slice of one, which has lost its
    mask function."""
    mask_mod = getattr(block_mask, "mask_mod", None)
    if not callable(mask_mod) or not hasattr(block_mask, "kv_indices"):
        raise fg.FlashgenError(
            f"{type(block_mask).__name__} is not a BlockMask",
            call="from_block_mask(...)",
            write="Write create_block_mask(...)'s result, or fg.mask(mask_mod) for a function.",
        )
    name = getattr(mask_mod, "__name__", "")
    if "sliced_mask_mod" in name:
        raise fg.FlashgenError(
            "a slice of a BlockMask has no mask function any more",
            call="from_block_mask(...)",
            write="Write the whole BlockMask, and q_offset= at the call for later queries.",
        )
    if blocks is None:
        blocks = name == "noop_mask"
    return _by_blocks(block_mask, mask_mod, name) if blocks else _by_rows(mask_mod, name)


def _by_rows(mask_mod: Any, name: str) -> Any:
    """By position whatever its parameters are called: so flashgen knows that it counts rows."""

    def flex(b, h, row, column):  # type: ignore[no-untyped-def]
        return mask_mod(b, h, row, column)

    flex.__name__ = name or "mask_mod"
    return fg.mask(flex)


def _by_blocks(block_mask: Any, mask_mod: Any, name: str) -> Any:
    q_block, kv_block = block_mask.BLOCK_SIZE
    columns = -(-block_mask.seq_lengths[1] // kv_block)
    partial = _table(block_mask.kv_num_blocks, block_mask.kv_indices, columns)
    sizes = {"q_block": q_block, "kv_block": kv_block}
    # Composed even with noop_mask: it says that rows count from the first query.
    rows = _by_rows(mask_mod, name)
    seen = block_sparse(blocks=partial, **sizes) & rows
    if block_mask.full_kv_num_blocks is None:
        return seen
    full = _table(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, columns)
    if name == "noop_mask":
        return block_sparse(blocks=partial | full, **sizes) & rows
    return seen | block_sparse(blocks=full, **sizes)


def _table(counts: torch.Tensor, indices: torch.Tensor, columns: int) -> torch.Tensor:
    place = torch.arange(indices.shape[-1], device=indices.device)
    chosen = torch.where(place < counts[..., None], indices, -1)
    table = blocks_from_indices(chosen, columns)[(None,) * (4 - chosen.ndim)]
    # Positions behind the BlockMask are held at its end: an empty row and column.
    return torch.nn.functional.pad(table, (0, 1, 0, 1))
