"""Sparse VideoGen: heads that look around in space, and heads that look along time."""

from __future__ import annotations

import flashgen as fg

from .checks import at_least


@fg.mask(check=at_least(prompt=0, reach=0, sink=0))
def spatial_head(q_idx, kv_idx, prompt: int, reach: int, sink: int = 0):
    """Prompt tokens and everybody see each other; a video token sees what is near in the row.

    Allowed iff `i < prompt` or `j < prompt + sink` or `|i - j| < reach`. `reach` counts the query
    itself, so each side has `reach - 1` more. Sparse VideoGen takes `reach = width * frame // 128
    * 128` tokens of a frame, and `sink = frame` where the first frame is seen by all.

    Parameters: `prompt`, `reach`, `sink`, ints, at least 0.

    Source: Sparse VideoGen (arXiv 2502.01776).

    At N = 10, `spatial_head(prompt=2, reach=2, sink=1)`:

        ██████████
        ██████████
        ████······
        █████·····
        ██████····
        ███·███···
        ███··███··
        ███···███·
        ███····███
        ███·····██
    """
    near = fg.abs(q_idx - kv_idx) < reach
    return (q_idx < prompt) | (kv_idx < prompt + sink) | near


@fg.mask(check=at_least(prompt=0, frame=1, reach=0))
def temporal_head(q_idx, kv_idx, prompt: int, frame: int, reach: int):
    """Prompt tokens and everybody see each other; a video token sees its place in every frame.

    Allowed iff `i < prompt` or `j < prompt` or `|(i - prompt) % frame - (j - prompt) % frame| <
    reach`. The places in a frame don't wrap around. Sparse VideoGen takes `reach = width * frame
    // frames`.

    Parameters: `prompt`, int, at least 0; `frame`, int, at least 1: tokens of a frame; `reach`,
    int, at least 0, counts the place itself.

    Source: Sparse VideoGen (arXiv 2502.01776).

    At N = 10, `temporal_head(prompt=1, frame=3, reach=1)`:

        ██████████
        ██··█··█··
        █·█··█··█·
        █··█··█··█
        ██··█··█··
        █·█··█··█·
        █··█··█··█
        ██··█··█··
        █·█··█··█·
        █··█··█··█
    """
    apart = (q_idx - prompt) % frame - (kv_idx - prompt) % frame
    return (q_idx < prompt) | (kv_idx < prompt) | (fg.abs(apart) < reach)
