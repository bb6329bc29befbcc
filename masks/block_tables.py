"""Block-sparse attention from a table: BigBird, MInference, top-k blocks, video tiles."""

from __future__ import annotations

import torch

import flashgen as fg

from .checks import at_least


@fg.mask(check=at_least(q_block=1, kv_block=1))
def block_sparse(
    b,
    h,
    q_idx,
    kv_idx,
    blocks: fg.Tensor,
    q_block: fg.Const[int],
    kv_block: fg.Const[int],
):
    """A table says which blocks of keys a block of queries sees.

    Allowed iff `blocks[b, h, i // q_block, j // kv_block]`. Nothing is causal by itself: compose
    `causal & block_sparse`. 1 keeps a block, as in FlashMask's `block_mask`. Positions past the
    table are clamped to its last row or column, so give it ceil(length / block) of each.

    Data: `blocks`, bool or integer (non-zero keeps) [B or 1, H or 1, rows, columns], per query
    head. `q_block`, `kv_block`: baked in, at least 1; they need not be the kernel's tiles.

    Source: BigBird (arXiv 2007.14062), section 2; MInference (arXiv 2407.02490); FlashMask's
    `block_mask`.

    At N = 10, `block_sparse(blocks=torch.tensor([[[[1, 0, 0], [1, 1, 0], [0, 1, 1]]]]),
    q_block=4, kv_block=4)`:

        ████······
        ████······
        ████······
        ████······
        ████████··
        ████████··
        ████████··
        ████████··
        ····██████
        ····██████
    """
    return blocks[b, h, q_idx // q_block, kv_idx // kv_block] != 0


@fg.mask(check=at_least(kv_block=1))
def block_padding(kv_idx, block_valid: fg.Tensor, kv_block: fg.Const[int]):
    """Of each block of keys only the first few are real; for use with `block_sparse &`.

    Allowed iff `j % kv_block < block_valid[j // kv_block]`.

    Data: `block_valid`, integer [columns]: real keys in each block. `kv_block`: baked in, at
    least 1.

    Source: Video Sparse Attention (arXiv 2505.13389): cubes cut by the video's edge.

    At N = 10, `block_padding(block_valid=torch.tensor([4, 2, 2]), kv_block=4)`:

        ██████··██
        ██████··██
        ██████··██
        ██████··██
        ██████··██
        ██████··██
        ██████··██
        ██████··██
        ██████··██
        ██████··██
    """
    return kv_idx % kv_block < block_valid[kv_idx // kv_block]


def blocks_from_indices(indices: torch.Tensor, columns: int) -> torch.Tensor:
    """The table of `block_sparse` from lists of chosen blocks, as a top-k gives them.

    `indices`: integer [B, H, rows, k], entries in [0, columns); a negative entry chooses nothing.
    Returns bool [B, H, rows, columns]. Works on the tensor's device, without a synchronisation."""
    table = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.bool, device=indices.device)
    chosen = torch.where(indices < 0, columns, indices).long()
    return table.scatter_(-1, chosen, True)[..., :columns]
