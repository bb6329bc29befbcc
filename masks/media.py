"""Cross attention from text to the images in it."""

from __future__ import annotations

import flashgen as fg

from .checks import at_least


@fg.mask(check=at_least(image_tokens=1))
def flamingo(b, q_idx, kv_idx, intervals: fg.Tensor, image_tokens: int):
    """An image's tokens are seen by one range of text positions.

    Allowed iff `intervals[b, m, 0] <= i < intervals[b, m, 1]` with `m = j // image_tokens`. This
    is cross attention: queries are text and keys are images, so pass `q_offset=0` (or the number
    of text tokens before the first query), or the default takes the last positions of the keys.

    Data: `intervals`, integer [B or 1, M, 2]: for each image the first text position that sees
    it and the one past the last; equal numbers for an image that is padding. `image_tokens`: int,
    at least 1, keys per image.

    Source: Flamingo (arXiv 2204.14198), section 2.3.

    At N = 10, `flamingo(intervals=torch.tensor([[[0, 3], [3, 8], [5, 10]]]), image_tokens=4)`:

        ████······
        ████······
        ████······
        ····████··
        ····████··
        ····██████
        ····██████
        ····██████
        ········██
        ········██
    """
    image = kv_idx // image_tokens
    return (intervals[b, image, 0] <= q_idx) & (q_idx < intervals[b, image, 1])
