"""Trees of draft tokens, as speculative decoding verifies them."""

from __future__ import annotations

import flashgen as fg


@fg.mask
def tree(b, q_idx, kv_idx, prefix: fg.Tensor, ancestors: fg.Tensor):
    """After a causal context of `prefix` positions a node sees the context and its ancestors.

    Allowed iff (`j < prefix[b]` and `j <= i`) or (both are nodes and `ancestors[b, i - prefix,
    j - prefix]`). The queries are usually the nodes alone, the last positions. A node is its own
    ancestor: set the table's diagonal. Nodes may come in any order.

    Data: `prefix`, an int for the whole batch, or an integer tensor [B or 1]; `ancestors`, bool
    or integer [B or 1, N, N], N at least Skv - prefix: pad smaller trees with 0.

    Source: SpecInfer (arXiv 2305.09781), section 4.2; Medusa (arXiv 2401.10774), section 2.1.2.

    At N = 10, `tree(prefix=4, ancestors=torch.tensor([[[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0],
    [1, 0, 1, 0, 0, 0], [1, 1, 0, 1, 0, 0], [1, 1, 0, 0, 1, 0], [1, 0, 1, 0, 0, 1]]]))`:

        █·········
        ██········
        ███·······
        ████······
        █████·····
        ██████····
        █████·█···
        ██████·█··
        ██████··█·
        █████·█··█
    """
    start = prefix[b]
    context = (kv_idx < start) & (kv_idx <= q_idx)
    nodes = (q_idx >= start) & (kv_idx >= start)
    return context | (nodes & (ancestors[b, q_idx - start, kv_idx - start] != 0))


@fg.mask
def tree_dfs(b, q_idx, kv_idx, subtree_end: fg.Tensor):
    """A tree whose nodes stand in depth-first order: each is seen by its own subtree.

    Allowed iff `j <= i < subtree_end[b, j]`: the subtree of node j is the positions from j to
    `subtree_end[b, j]`, the end excluded. A leaf has `j + 1`; context before the tree, which all
    see, has any value past the last position. It needs O(S) data where `tree` needs N x N, and
    is scheduled like a window.

    Data: `subtree_end`, integer [B or 1, S], S at least Skv.

    Source: the column form of FlashMask (arXiv 2410.01359), section 4.1, LTS = j + subtree size.

    At N = 10, `tree_dfs(subtree_end=torch.tensor([[10, 10, 10, 10, 10, 8, 7, 8, 10, 10]]))`:

        █·········
        ██········
        ███·······
        ████······
        █████·····
        ██████····
        ███████···
        ██████·█··
        █████···█·
        █████···██
    """
    return (kv_idx <= q_idx) & (q_idx < subtree_end[b, kv_idx])
