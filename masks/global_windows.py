"""Windows with global tokens: a few keys that everybody sees."""

from __future__ import annotations

import flashgen as fg

from .checks import at_least


@fg.mask(check=at_least(window=0, globals=0))
def global_window(q_idx, kv_idx, window: int, globals: int):
    """Causal: a query sees the last `window` positions and the first `globals` ones.

    Allowed iff `j <= i` and (`i - j < window` or `j < globals`). The window counts the query
    itself. This is a window with attention sinks, as StreamingLLM keeps it in a cache.

    Parameters: `window`, int, at least 0; `globals`, int, at least 0.

    Source: StreamingLLM (arXiv 2309.17453), section 3.2.

    At N = 10, `global_window(window=3, globals=2)`:

        █·········
        ██········
        ███·······
        ████······
        █████·····
        ██·███····
        ██··███···
        ██···███··
        ██····███·
        ██·····███
    """
    return (kv_idx <= q_idx) & ((q_idx - kv_idx < window) | (kv_idx < globals))


@fg.mask(check=at_least(left=0, right=0, globals=0))
def global_local(q_idx, kv_idx, left: int, right: int, globals: int):
    """Both ways: a local window, and first tokens that see everybody and are seen by everybody.

    Allowed iff `i - left <= j <= i + right` or `j < globals` or `i < globals`: left + 1 + right
    keys in the window. FlashMask's "global + sliding window" with (Wl, Wr) counts the same.

    Parameters: `left`, `right`, `globals`, ints, at least 0.

    Source: Longformer (arXiv 2004.05150), section 3.1; FlashMask (arXiv 2410.01359), figure 1(6).

    At N = 10, `global_local(left=1, right=1, globals=2)`:

        ██████████
        ██████████
        ████······
        █████·····
        ██·███····
        ██··███···
        ██···███··
        ██····███·
        ██·····███
        ██······██
    """
    near = (q_idx - left <= kv_idx) & (kv_idx <= q_idx + right)
    return near | (kv_idx < globals) | (q_idx < globals)


@fg.mask
def global_tokens(b, q_idx, kv_idx, is_global: fg.Tensor):
    """Marked tokens see everybody and are seen by everybody; for use with `|`.

    Allowed iff `is_global[b, i]` or `is_global[b, j]`: `local | global_tokens` is Longformer's
    pattern with global tokens anywhere.

    Data: `is_global`, bool or integer (non-zero is global) [B or 1, S].

    Source: Longformer (arXiv 2004.05150), section 3.1; BigBird (arXiv 2007.14062), section 2.

    At N = 10, `global_tokens(is_global=torch.tensor([[0, 0, 0, 1, 0, 0, 0, 0, 1, 0]]))`:

        ···█····█·
        ···█····█·
        ···█····█·
        ██████████
        ···█····█·
        ···█····█·
        ···█····█·
        ···█····█·
        ██████████
        ···█····█·
    """
    return (is_global[b, q_idx] != 0) | (is_global[b, kv_idx] != 0)
