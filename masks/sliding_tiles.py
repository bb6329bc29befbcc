"""Sliding tile attention: a window that moves by whole tiles, for images and video with text."""

from __future__ import annotations

from typing import Any

import flashgen as fg


def check_axis(axis: str, extent: int, kernel: int, tile: int) -> None:
    """Raises ValueError for a canvas or a kernel that isn't made of whole tiles."""
    if min(extent, kernel, tile) < 1:
        raise ValueError(f"{axis}, its kernel and its tile must be at least 1")
    if extent % tile or kernel % tile:
        raise ValueError(f"{axis} {extent} and its kernel {kernel} must be multiples of {tile}")
    if kernel > extent:
        raise ValueError(f"the kernel {kernel} is larger than {axis}, which is {extent}")


def _check_2d(
    height: int, width: int, kernel_h: int, kernel_w: int, tile_h: int, tile_w: int, text: int
) -> None:
    check_axis("height", height, kernel_h, tile_h)
    check_axis("width", width, kernel_w, tile_w)
    _check_text(text)


def _check_3d(
    depth: int,
    height: int,
    width: int,
    kernel_d: int,
    kernel_h: int,
    kernel_w: int,
    tile_d: int,
    tile_h: int,
    tile_w: int,
    text: int,
) -> None:
    check_axis("depth", depth, kernel_d, tile_d)
    check_axis("height", height, kernel_h, tile_h)
    check_axis("width", width, kernel_w, tile_w)
    _check_text(text)


def _check_text(text: int) -> None:
    if isinstance(text, int) and text < 0:
        raise ValueError(f"text must be at least 0, and is {text}")


def _near(q_tile: Any, kv_tile: Any, tiles: int, kernel: int) -> Any:
    """One axis, all in tiles: the window of `kernel` tiles stays inside the canvas."""
    left, right = kernel // 2, kernel - kernel // 2 - 1
    centre = fg.minimum(fg.maximum(q_tile, left), tiles - 1 - right)
    return (centre - left <= kv_tile) & (kv_tile <= centre + right)


def _with_text(q_idx: Any, kv_idx: Any, near: Any, canvas: int, text: Any) -> Any:
    """Vision near vision; vision sees text; text sees everything up to the text's end."""
    q_vision, kv_vision = q_idx < canvas, kv_idx < canvas
    return (q_vision & kv_vision & near) | (~(q_vision & kv_vision) & (kv_idx < canvas + text))


@fg.mask(check=_check_2d)
def sliding_tile_2d(
    q_idx,
    kv_idx,
    height: fg.Const[int],
    width: fg.Const[int],
    kernel_h: fg.Const[int],
    kernel_w: fg.Const[int],
    tile_h: fg.Const[int],
    tile_w: fg.Const[int],
    text: int = 0,
):
    """An image token sees the tiles around its own tile, and the text; text sees everything.

    The height * width image tokens stand tile by tile and `text` text tokens follow; what is
    behind the text is padding, seen by nobody. Along each axis a window of kernel / tile tiles is
    centred at the query's tile (an even one has one tile less on the right) and moved inside the
    canvas, so that all queries see equally many image tokens.

    Parameters, in tokens: `height`, `width`, `kernel_*`, `tile_*`, baked in, the first two
    multiples of the tile; `text`, int, at least 0.

    Source: Sliding Tile Attention (arXiv 2502.04507).

    At N = 10, `sliding_tile_2d(height=2, width=4, kernel_h=2, kernel_w=1, tile_h=1, tile_w=1,
    text=2)`:

        █···█···██
        ·█···█··██
        ··█···█·██
        ···█···███
        █···█···██
        ·█···█··██
        ··█···█·██
        ···█···███
        ██████████
        ██████████
    """
    q_tile, kv_tile = q_idx // (tile_h * tile_w), kv_idx // (tile_h * tile_w)
    rows, columns = height // tile_h, width // tile_w
    near = _near(q_tile // columns, kv_tile // columns, rows, kernel_h // tile_h)
    near &= _near(q_tile % columns, kv_tile % columns, columns, kernel_w // tile_w)
    return _with_text(q_idx, kv_idx, near, height * width, text)


@fg.mask(check=_check_3d)
def sliding_tile_3d(
    q_idx,
    kv_idx,
    depth: fg.Const[int],
    height: fg.Const[int],
    width: fg.Const[int],
    kernel_d: fg.Const[int],
    kernel_h: fg.Const[int],
    kernel_w: fg.Const[int],
    tile_d: fg.Const[int],
    tile_h: fg.Const[int],
    tile_w: fg.Const[int],
    text: int = 0,
):
    """`sliding_tile_2d` for video: tiles are cubes, in the order frame, row, column.

    Parameters, in tokens: `depth` (frames), `height`, `width`, `kernel_*`, `tile_*`, baked in,
    the first two multiples of the tile; `text`, int, at least 0.

    Source: Sliding Tile Attention (arXiv 2502.04507).

    At N = 10, `sliding_tile_3d(depth=2, height=2, width=2, kernel_d=1, kernel_h=2, kernel_w=2,
    tile_d=1, tile_h=2, tile_w=1, text=1)`:

        ████····█·
        ████····█·
        ████····█·
        ████····█·
        ····█████·
        ····█████·
        ····█████·
        ····█████·
        █████████·
        █████████·
    """
    size = tile_d * tile_h * tile_w
    q_tile, kv_tile = q_idx // size, kv_idx // size
    frames, rows, columns = depth // tile_d, height // tile_h, width // tile_w
    plane = rows * columns
    near = _near(q_tile // plane, kv_tile // plane, frames, kernel_d // tile_d)
    near &= _near(q_tile // columns % rows, kv_tile // columns % rows, rows, kernel_h // tile_h)
    near &= _near(q_tile % columns, kv_tile % columns, columns, kernel_w // tile_w)
    return _with_text(q_idx, kv_idx, near, depth * height * width, text)
