"""Speculative decoding: a tree of drafts is verified in one call, each draft seeing its ancestors.

    python examples/speculative_tree.py

The mask is one line: a draft sees the whole prefix, and of the drafts what a table says. What the
accepted path gives is compared with attending to it token by token.
"""

from __future__ import annotations

import torch

import flashgen as fg
from flashgen import masks


@fg.mask
def drafts(q_idx, kv_idx, prefix: int, ancestors: fg.Tensor):
    return (kv_idx < prefix) | ancestors[q_idx - prefix, kv_idx - prefix]


# Draft n continues draft PARENTS[n]; -1 stands for the prefix.
PARENTS = (-1, 0, 0, 1, 1, 2, 5)


def ancestors_of(parents: tuple[int, ...]) -> torch.Tensor:
    """[n, n]: which drafts each draft continues, itself included."""
    seen = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


def path_to(node: int) -> list[int]:
    """The drafts from the prefix to a draft."""
    return [*path_to(PARENTS[node]), node] if node >= 0 else []


def main() -> None:
    torch.manual_seed(0)
    prefix, count, heads, kv_heads, dim = 500, len(PARENTS), 8, 2, 64
    q = torch.randn(1, heads, count, dim)
    k, v = torch.randn(2, 1, kv_heads, prefix + count, dim)
    verify = fg.Attention(mask=drafts)
    out = verify(q, k, v, prefix=prefix, ancestors=ancestors_of(PARENTS))

    accepted = path_to(6)
    print(f"drafts {accepted} accepted of {count}, after {prefix} tokens")
    kept = [*range(prefix), *(prefix + node for node in accepted)]
    decode = fg.Attention(mask=masks.causal)
    for step, node in enumerate(accepted):
        rows = kept[: prefix + step + 1]
        alone = decode(q[:, :, node : node + 1], k[:, :, rows], v[:, :, rows])
        torch.testing.assert_close(out[:, :, node : node + 1], alone)
    print("each equals decoding its path token by token")


if __name__ == "__main__":
    main()
