"""FlexAttention, and block masks that are counted pair by pair, whatever flashgen plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

TILE = 128
# Pairs that are looked at in one go.
_STRIP = 1 << 28


@dataclass(frozen=True)
class Counted:
    """How many pairs of each tile of 128 x 128 attend, [B or 1, H or 1, S / 128, S / 128].

    A dimension is 1 where the mask doesn't read its index."""

    tiles: torch.Tensor

    @property
    def pairs(self) -> float:
        """How many pairs attend, in the mean over heads and batch elements."""
        return float(self.tiles.sum(dtype=torch.float64)) / self.tiles[..., 0, 0].numel()

    @property
    def density(self) -> float:
        """Tiles that aren't empty, of all."""
        return float((self.tiles > 0).double().mean())

    def block_mask(self, mask: Any) -> Any:
        """FlexAttention's block mask."""
        from torch.nn.attention.flex_attention import BlockMask

        full = self.tiles == TILE * TILE
        partial = (self.tiles > 0) & ~full
        lists = (*_ordered(partial), *_ordered(full))
        return BlockMask.from_kv_blocks(*lists, TILE, mask)


def count(mask: Any, batch: int, heads: int, length: int, device: torch.device) -> Counted:
    """Look at every pair of positions below `length`, a multiple of 128.

    `mask`: a function of FlexAttention's form; None attends everywhere."""
    tiles = length // TILE
    if mask is None:
        return Counted(torch.full((1, 1, tiles, tiles), TILE * TILE, device=device))
    rows = max(1, _STRIP // (batch * heads * length * TILE)) * TILE
    b, h = _index(batch, -4, device), _index(heads, -3, device)
    q, k = _index(length, -2, device), _index(length, -1, device)
    strips = []
    for first in range(0, length, rows):
        part = q[:, :, first : first + rows]
        strip = mask(b, h, part, k)
        strip = strip.expand(*strip.shape[:2], part.shape[2], length)
        split = strip.unflatten(-1, (tiles, TILE)).unflatten(-3, (-1, TILE))
        strips.append(split.sum((-3, -1), dtype=torch.int32))
    return Counted(torch.cat(strips, -2))


def _index(size: int, dim: int, device: torch.device) -> torch.Tensor:
    shape = [1, 1, 1, 1]
    shape[dim] = size
    return torch.arange(size, dtype=torch.int32, device=device).reshape(shape)


def _ordered(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many tiles of each row are chosen, and their numbers first of all numbers."""
    order = chosen.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), order.int()


def flex_attention(
    mask: Any,
    counted: Counted | None,
    *,
    score: Any = None,
    backend: str | None = None,
) -> Callable[..., torch.Tensor]:
    """FlexAttention compiled for static shapes, with its block mask made before.

    `backend`: what `kernel_options` name, as in "FLASH"."""
    from torch.nn.attention.flex_attention import flex_attention as attend

    # A process compiles many; and timing the backward alone runs it repeatedly after one forward.
    torch._dynamo.config.recompile_limit = 256
    torch._functorch.config.donated_buffer = False
    given: dict[str, Any] = {"score_mod": score}
    if mask is not None and counted is not None:
        given["block_mask"] = counted.block_mask(mask)
    if backend is not None:
        given["kernel_options"] = {"BACKEND": backend}
    compiled = torch.compile(attend, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, **given)
