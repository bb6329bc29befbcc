"""Neighborhoods and sliding tiles from tuples, one number an axis; and orders of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

import flashgen as fg

from .neighborhoods import natten_1d, natten_2d, natten_3d, natten_ordered
from .sliding_tiles import sliding_tile_2d, sliding_tile_3d

AXES = (("depth", "d"), ("height", "h"), ("width", "w"))


def natten(
    extent: int | Sequence[int],
    kernel: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    dilation: int | Sequence[int] = 1,
    causal: bool | Sequence[bool] = False,
    order: torch.Tensor | None = None,
) -> Any:
    """Neighborhood attention over `extent` (1, 2 or 3 axes, the slowest first), NATTEN's way.

    A number stands for all axes. `order` gives the tokens another order (see `natten_ordered`).
    Returns `natten_1d`, `natten_2d`, `natten_3d` or `natten_ordered` with everything bound.
    Raises FlashgenError for a geometry that doesn't fit (see `natten_1d`)."""
    call = f"natten({extent}, {kernel}, stride={stride}, dilation={dilation}, causal={causal})"
    sizes = _extent(extent, (1, 2, 3), call)
    given = {"kernel": kernel, "stride": stride, "dilation": dilation, "causal": causal}
    axes = {name: _per_axis(name, value, len(sizes), call) for name, value in given.items()}
    if order is not None:
        return natten_ordered(order=order, **_named(*_as_video(sizes, axes)))
    if len(sizes) == 1:
        return natten_1d(length=sizes[0], **{name: values[0] for name, values in axes.items()})
    return (natten_2d if len(sizes) == 2 else natten_3d)(**_named(sizes, axes))


def sliding_tile(
    canvas: Sequence[int],
    kernel: int | Sequence[int],
    tile: int | Sequence[int],
    text: int = 0,
) -> Any:
    """Sliding tile attention over `canvas` (2 or 3 axes, the slowest first), in tokens.

    Returns `sliding_tile_2d` or `sliding_tile_3d` with everything bound. Raises FlashgenError for
    a canvas or kernel that isn't made of whole tiles, or a kernel larger than the canvas."""
    call = f"sliding_tile({canvas}, {kernel}, {tile}, text={text})"
    sizes = _extent(canvas, (2, 3), call)
    given = {"kernel": kernel, "tile": tile}
    axes = {name: _per_axis(name, value, len(sizes), call) for name, value in given.items()}
    masks = {2: sliding_tile_2d, 3: sliding_tile_3d}
    return masks[len(sizes)](**_named(sizes, axes), text=text)


def tile_order(extent: Sequence[int], tile: Sequence[int]) -> torch.Tensor:
    """int32 [S]: row-by-row places of tokens that stand tile by tile; tiles at the edge are cut.

    `extent` and `tile` have an entry an axis, the slowest first."""
    places = torch.arange(math.prod(extent)).reshape(*extent)
    coordinates = torch.meshgrid(*(torch.arange(n) for n in extent), indexing="ij")
    return _sorted_by(places, [c // t for c, t in zip(coordinates, tile, strict=True)])


def morton_order(extent: Sequence[int]) -> torch.Tensor:
    """int32 [S]: row-by-row places of tokens that stand along a Z-curve, the last axis lowest.

    An extent that isn't a power of two is the curve with the missing places left out."""
    places = torch.arange(math.prod(extent)).reshape(*extent)
    coordinates = torch.meshgrid(*(torch.arange(n) for n in extent), indexing="ij")
    bits = range(max(extent).bit_length() - 1, -1, -1)
    return _sorted_by(places, [c >> bit & 1 for bit in bits for c in coordinates])


def _sorted_by(places: torch.Tensor, keys: list[torch.Tensor]) -> torch.Tensor:
    """The places by the first key, then the second, ..., then by place."""
    order = places.flatten()
    for key in reversed(keys):
        order = order[torch.argsort(key.flatten()[order], stable=True)]
    return order.to(torch.int32)


def _extent(extent: int | Sequence[int], ranks: tuple[int, ...], call: str) -> tuple[int, ...]:
    sizes = (extent,) if isinstance(extent, int) else tuple(extent)
    if len(sizes) not in ranks:
        raise fg.FlashgenError(
            f"{extent} has {len(sizes)} axes",
            call=call,
            write=f"Write {' or '.join(map(str, ranks))} of them, the slowest first.",
        )
    return sizes


def _per_axis(name: str, value: Any, rank: int, call: str) -> tuple[Any, ...]:
    values = (value,) * rank if isinstance(value, int) else tuple(value)
    if len(values) != rank:
        raise fg.FlashgenError(
            f"{name} has {len(values)} values for {rank} axes",
            call=call,
            write=f"Write one number, or {rank} of them.",
        )
    return values


def _as_video(
    sizes: tuple[int, ...], axes: dict[str, Any]
) -> tuple[tuple[int, ...], dict[str, Any]]:
    missing = 3 - len(sizes)
    axes = {n: (n != "causal" and 1,) * missing + values for n, values in axes.items()}
    return (1,) * missing + sizes, axes


def _named(sizes: tuple[int, ...], axes: dict[str, Any]) -> dict[str, Any]:
    """height=..., width=..., kernel_h=..., ... as the masks call them."""
    used = AXES[-len(sizes) :]
    values = {axis: size for (axis, _), size in zip(used, sizes, strict=True)}
    for name, per_axis in axes.items():
        values |= {f"{name}_{c}": v for (_, c), v in zip(used, per_axis, strict=True)}
    return values
