"""FlexAttention's functions, as they are.

A function of (b, h, q, k) is a mask here too, and one of (score, b, h, q, k) a score function.
Tensors that it captures are data; numbers are baked in. The results are compared with
FlexAttention's own.

    python examples/flex_functions.py
"""

from __future__ import annotations

import warnings

import torch
from torch.nn.attention.flex_attention import (
    and_masks,
    create_block_mask,
    flex_attention,
    noop_mask,
    or_masks,
)

import flashgen as fg
from flashgen import masks

# Here it is the reference.
warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")

LENGTH = 256
doc = torch.arange(LENGTH) // 100
bias = torch.linspace(-1, 1, 2 * LENGTH - 1)


def causal(b, h, q, k):
    return q >= k


def same_document(b, h, q, k):
    return doc[q] == doc[k]


def window(width: int):
    def near(b, h, q, k):
        return (q - k).abs() < width

    return near


def relative(score, b, h, q, k):
    return score + bias[q - k + LENGTH - 1]


def soft(score, b, h, q, k):
    return 20 * torch.tanh(score / 20)


MASKS = {
    "causal": causal,
    "causal documents": and_masks(causal, same_document),
    "window or document": or_masks(window(32), same_document),
    "no mask": noop_mask,
}


def main() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, LENGTH, 64).unbind()
    for name, mask in MASKS.items():
        for score in (None, relative, soft):
            ours = fg.Attention(mask=mask, score=score)(q, k, v)
            block_mask = create_block_mask(mask, None, None, LENGTH, LENGTH, device="cpu")
            theirs = flex_attention(q, k, v, score_mod=score, block_mask=block_mask)
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
            difference = (ours - theirs).abs().max().item()
            changed = "" if score is None else f", {score.__name__}"
            print(f"{name + changed:<32} differs from FlexAttention by {difference:.1e} at most")

    # They compose with masks of either kind, and a BlockMask is a mask as well.
    both = masks.sliding_window(window=64) & fg.mask(same_document)
    from_block_mask = masks.from_block_mask(block_mask)
    print(f"\n{both}\n{from_block_mask}")

    # There the first query is position 0; here the queries are the last positions. A function whose
    # parameters are not called q_idx and kv_idx is FlexAttention's for sure, so where the
    # lengths differ flashgen asks what is meant.
    attend = fg.Attention(mask=causal)
    try:
        attend(q[:, :, -16:], k, v)
    except fg.FlashgenError as error:
        print(f"\n{error}")
    last = attend(q[:, :, -16:], k, v, q_offset=LENGTH - 16)
    torch.testing.assert_close(last, attend(q, k, v)[:, :, -16:])


if __name__ == "__main__":
    main()
