"""A first mask and a first score function, and what becomes of them.

Run it with `python examples/first_mask.py`.
"""

from __future__ import annotations

import torch

import flashgen as fg
from flashgen import masks
from flashgen.show import mask_text


# A mask says which keys (kv_idx) a query (q_idx) may see. `window` is a number of the call: a new
# one runs the same kernel.
@fg.mask
def near(q_idx, kv_idx, window: int):
    return (kv_idx <= q_idx) & (q_idx - kv_idx < window)


# Masks compose, with each other and with those of flashgen.masks. The decorated function changes
# the scaled score: here with ALiBi's slope of each head h, which can be learned.
@fg.attention(mask=near & masks.document)
def attend(score, h, q_idx, kv_idx, slope: fg.Tensor):
    return score + slope[h] * (kv_idx - q_idx)


def main() -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 4, 192, 64)
    k, v = torch.randn(2, 2, 2, 192, 64)  # two query heads share a head of keys
    doc = (torch.arange(192) // 80).expand(2, -1)
    slope = torch.tensor([0.5, 0.25, 0.125, 0.0625], requires_grad=True)
    data = {"window": 48, "doc": doc, "slope": slope}

    out, lse = attend(q, k, v, **data, return_lse=True)
    out.sum().backward()
    print(f"out {list(out.shape)}, lse {list(lse.shape)}, d slope {slope.grad.tolist()}\n")

    # The mask as a boolean matrix, for pictures and for tests.
    dense = attend.mask.dense(48, 48, window=12, doc=torch.arange(48)[None] // 20)
    print(mask_text(dense[0, 0]), "\n")

    # What the mask empties (··), cuts (░░) and fills (██), in tiles of queries x keys.
    print(attend.schedule(q, k, v, window=48, doc=doc, block_size=(16, 16)), "\n")

    # Every stage in words, from the spec to the file of the generated kernel.
    print(attend.explain(q, k, v, **data), "\n")

    # The generated Triton kernel, whatever the machine: the scores of a tile that is cut.
    source = attend.source(q, k, v, **data)
    first = source.index("    # Tiles that the mask cuts.")
    print(source[first : source.index("\n\n", first)])


if __name__ == "__main__":
    main()
