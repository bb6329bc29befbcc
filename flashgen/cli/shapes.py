"""How many heads a mask is shown with."""

from __future__ import annotations

from ..errors import FlashgenError
from ..expr import walk
from ..spec import Bound


def heads_of(
    bound: Bound, asked: tuple[int | None, int | None, int | None]
) -> tuple[int, int, int]:
    """(B, Hq, Hkv) where not asked for: the lengths of the data under `b`, `h`, `h_kv`."""
    sizes = {"b": 1, "h": 1, "h_kv": 1}
    for node in walk(bound.spec.mask) if bound.spec.mask is not None else ():
        for dim, position in enumerate(node.args if node.op == "load" else ()):
            if position.op == "index" and position.attr in sizes:
                length = bound.tensors[node.attr].shape[dim]
                sizes[position.attr] = max(sizes[position.attr], length)
    batch, heads, kv_heads = asked
    kv_heads = kv_heads or (sizes["h_kv"] if sizes["h_kv"] > 1 else heads or sizes["h"])
    heads = heads or max(sizes["h"], kv_heads)
    if heads % kv_heads:
        raise FlashgenError(f"{heads} query heads don't share {kv_heads} heads of keys evenly")
    return batch or sizes["b"], heads, kv_heads
