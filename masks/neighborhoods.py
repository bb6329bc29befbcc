"""Neighborhood attention: a window that is clamped at the edges, along 1, 2 or 3 axes."""

from __future__ import annotations

from typing import Any

import flashgen as fg


def _near(
    q: Any, kv: Any, extent: int, kernel: int, stride: int, dilation: int, causal: bool
) -> Any:
    """One axis: whether coordinate `kv` is in the window of coordinate `q`."""
    length = (extent - q % dilation + dilation - 1) // dilation
    query, key = q // dilation, kv // dilation
    leader = query
    if stride > 1:
        place = stride - 1 if causal else stride // 2
        leader = fg.minimum(query // stride * stride + place, length - 1)
    if causal:
        start, end = fg.maximum(leader - (kernel - 1), 0), query + 1
    else:
        start = fg.minimum(fg.maximum(leader - kernel // 2, 0), length - kernel)
        end = start + kernel
    return (q % dilation == kv % dilation) & (start <= key) & (key < end)


def check_axis(axis: str, extent: int, kernel: int, stride: int, dilation: int) -> None:
    """Raises ValueError for a geometry that neighborhood attention has no meaning for."""
    if min(extent, kernel, stride, dilation) < 1:
        raise ValueError(f"{axis}, its kernel, stride and dilation must be at least 1")
    if kernel * dilation > extent:
        raise ValueError(
            f"the kernel reaches over {kernel} * {dilation} = {kernel * dilation} positions and "
            f"{axis} is {extent}; write a kernel or a dilation that fits"
        )
    if stride > kernel:
        raise ValueError(f"the stride {stride} is larger than the kernel {kernel}")


def _check_1d(length: int, kernel: int, stride: int, dilation: int) -> None:
    check_axis("length", length, kernel, stride, dilation)


def _check_2d(
    height: int,
    width: int,
    kernel_h: int,
    kernel_w: int,
    stride_h: int,
    stride_w: int,
    dilation_h: int,
    dilation_w: int,
) -> None:
    check_axis("height", height, kernel_h, stride_h, dilation_h)
    check_axis("width", width, kernel_w, stride_w, dilation_w)


def _check_3d(
    depth: int,
    height: int,
    width: int,
    kernel_d: int,
    kernel_h: int,
    kernel_w: int,
    stride_d: int,
    stride_h: int,
    stride_w: int,
    dilation_d: int,
    dilation_h: int,
    dilation_w: int,
) -> None:
    check_axis("depth", depth, kernel_d, stride_d, dilation_d)
    check_axis("height", height, kernel_h, stride_h, dilation_h)
    check_axis("width", width, kernel_w, stride_w, dilation_w)


@fg.mask(check=_check_1d)
def natten_1d(
    q_idx,
    kv_idx,
    length: fg.Const[int],
    kernel: fg.Const[int],
    stride: fg.Const[int] = 1,
    dilation: fg.Const[int] = 1,
    causal: fg.Const[bool] = False,
):
    """Each query sees exactly `kernel` keys around it: at the edges the window moves, uncut.

    Allowed iff `start <= j < start + kernel`, `start = clamp(l - kernel // 2, 0, length -
    kernel)`, where the leader l is i itself, or with a stride the middle of i's group:
    `min(i // stride * stride + stride // 2, length - 1)`. An even kernel has kernel / 2 keys on
    the left and one less on the right. Causal: allowed iff `max(l - kernel + 1, 0) <= j <= i`,
    the leader being the group's last. With a dilation d the positions that agree modulo d are a
    sequence of their own, and only they see each other.

    Parameters, all baked in: `length`, `kernel`, `stride` <= kernel, `dilation` with `kernel *
    dilation <= length`, `causal`.

    Source: "Neighborhood Attention Transformer" (arXiv 2204.07143), section 3.1; strides and
    causal axes: "Generalized Neighborhood Attention" (arXiv 2504.16922).

    At N = 10, `natten_1d(length=10, kernel=3)`:

        ███·······
        ███·······
        ·███······
        ··███·····
        ···███····
        ····███···
        ·····███··
        ······███·
        ·······███
        ·······███
    """
    return _near(q_idx, kv_idx, length, kernel, stride, dilation, causal)


@fg.mask(check=_check_2d)
def natten_2d(
    q_idx,
    kv_idx,
    height: fg.Const[int],
    width: fg.Const[int],
    kernel_h: fg.Const[int],
    kernel_w: fg.Const[int],
    stride_h: fg.Const[int] = 1,
    stride_w: fg.Const[int] = 1,
    dilation_h: fg.Const[int] = 1,
    dilation_w: fg.Const[int] = 1,
    causal_h: fg.Const[bool] = False,
    causal_w: fg.Const[bool] = False,
):
    """The rule of `natten_1d` along both axes of an image, whose tokens stand row by row.

    Position p is the pixel (p // width, p % width); allowed iff both axes allow it.

    Parameters, all baked in: per axis as for `natten_1d`.

    Source: "Neighborhood Attention Transformer" (arXiv 2204.07143), section 3.1.

    At N = 10, `natten_2d(height=2, width=5, kernel_h=1, kernel_w=3)`:

        ███·······
        ███·······
        ·███······
        ··███·····
        ··███·····
        ·····███··
        ·····███··
        ······███·
        ·······███
        ·······███
    """
    row = _near(q_idx // width, kv_idx // width, height, kernel_h, stride_h, dilation_h, causal_h)
    return row & _near(
        q_idx % width, kv_idx % width, width, kernel_w, stride_w, dilation_w, causal_w
    )


def _near_3d(q: Any, kv: Any, extents: tuple[int, int, int], *rest: tuple[Any, ...]) -> Any:
    _, height, width = extents
    places = [(p // (height * width), p // width % height, p % width) for p in (q, kv)]
    first, second, third = (_near(*axis) for axis in zip(*places, extents, *rest, strict=True))
    return first & second & third


@fg.mask(check=_check_3d)
def natten_3d(
    q_idx,
    kv_idx,
    depth: fg.Const[int],
    height: fg.Const[int],
    width: fg.Const[int],
    kernel_d: fg.Const[int],
    kernel_h: fg.Const[int],
    kernel_w: fg.Const[int],
    stride_d: fg.Const[int] = 1,
    stride_h: fg.Const[int] = 1,
    stride_w: fg.Const[int] = 1,
    dilation_d: fg.Const[int] = 1,
    dilation_h: fg.Const[int] = 1,
    dilation_w: fg.Const[int] = 1,
    causal_d: fg.Const[bool] = False,
    causal_h: fg.Const[bool] = False,
    causal_w: fg.Const[bool] = False,
):
    """The rule of `natten_1d` along the three axes of a video, frame by frame, row by row.

    Position p is (p // (height * width), p // width % height, p % width); allowed iff all three
    axes allow it.

    Parameters, all baked in: per axis as for `natten_1d`.

    Source: "Generalized Neighborhood Attention" (arXiv 2504.16922).

    At N = 10, `natten_3d(depth=2, height=1, width=5, kernel_d=2, kernel_h=1, kernel_w=3)`:

        ███··███··
        ███··███··
        ·███··███·
        ··███··███
        ··███··███
        ███··███··
        ███··███··
        ·███··███·
        ··███··███
        ··███··███
    """
    return _near_3d(
        q_idx,
        kv_idx,
        (depth, height, width),
        (kernel_d, kernel_h, kernel_w),
        (stride_d, stride_h, stride_w),
        (dilation_d, dilation_h, dilation_w),
        (causal_d, causal_h, causal_w),
    )


@fg.mask(check=_check_3d)
def natten_ordered(
    q_idx,
    kv_idx,
    order: fg.Tensor,
    depth: fg.Const[int],
    height: fg.Const[int],
    width: fg.Const[int],
    kernel_d: fg.Const[int],
    kernel_h: fg.Const[int],
    kernel_w: fg.Const[int],
    stride_d: fg.Const[int] = 1,
    stride_h: fg.Const[int] = 1,
    stride_w: fg.Const[int] = 1,
    dilation_d: fg.Const[int] = 1,
    dilation_h: fg.Const[int] = 1,
    dilation_w: fg.Const[int] = 1,
    causal_d: fg.Const[bool] = False,
    causal_h: fg.Const[bool] = False,
    causal_w: fg.Const[bool] = False,
):
    """`natten_3d` for tokens in any order: tile by tile, or along a Z-curve, has fewer tiles.

    The token at position p is the one that stands at `order[p]` row by row. Images are videos of
    one frame (depth 1, kernel_d 1). `tile_order` and `morton_order` make the usual orders.

    Data: `order`, integer [S], a permutation. The rest as for `natten_3d`.

    Source: attention-gym, `tiled_natten` and `morton_natten`.

    At N = 10, `natten_ordered(order=torch.tensor([0, 5, 1, 6, 2, 7, 3, 8, 4, 9]), depth=1,
    height=2, width=5, kernel_d=1, kernel_h=2, kernel_w=3)`:

        ██████····
        ██████····
        ██████····
        ██████····
        ··██████··
        ··██████··
        ····██████
        ····██████
        ····██████
        ····██████
    """
    return _near_3d(
        order[q_idx],
        order[kv_idx],
        (depth, height, width),
        (kernel_d, kernel_h, kernel_w),
        (stride_d, stride_h, stride_w),
        (dilation_d, dilation_h, dilation_w),
        (causal_d, causal_h, causal_w),
    )
