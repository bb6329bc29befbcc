"""Around latent attention: its scale, and the up-projections absorbed, or expanded.

DeepSeek-V2 (2405.04434), section 2.1: a token's keys and values are up-projections of one latent
row `c` [rank], beside a rotary key [rope] that all heads share. For a few queries, the
up-projection of the keys is absorbed into the queries, and that of the values into the output: the
cache is read as it is. For many, keys and values are expanded, and attention is the ordinary one.

    q_nope [B, H, Sq, nope], q_rope [B, H, Sq, rope], w_key [H, nope, rank], w_value [H, v, rank]

Appending to a cache and rotary embeddings are the model's own. Autocast works as in calls.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from .call import autocast
from .errors import CallText, FlashgenError
from .graphs import outside_graphs


def softmax_scale(
    nope: int, rope: int, *, factor: float = 1.0, mscale_all_dim: float = 0.0
) -> float:
    """(nope + rope)^-0.5, the scale of the expanded heads: never (rank + rope)^-0.5.

    `factor`, `mscale_all_dim`: YaRN's, whose mscale = 0.1 * mscale_all_dim * ln(factor) + 1 is
    squared into the scale (2309.00071; DeepSeek-V3 has 40 and 1.0).
    Raises FlashgenError for sizes or a factor that aren't positive."""
    numbers = (nope, rope, factor, mscale_all_dim)
    are_numbers = all(isinstance(x, (int, float)) and math.isfinite(x) for x in numbers)
    if not are_numbers or nope <= 0 or rope < 0 or factor <= 0:
        raise FlashgenError(
            f"nope={nope}, rope={rope}, factor={factor} make no scale",
            call=f"softmax_scale({nope}, {rope}, factor={factor})",
            write="softmax_scale(128, 64, factor=40, mscale_all_dim=1.0)",
        )
    mscale = 0.1 * mscale_all_dim * math.log(factor) + 1.0 if factor > 1 else 1.0
    return float((nope + rope) ** -0.5 * mscale * mscale)


def absorb_queries(q_nope: torch.Tensor, q_rope: torch.Tensor, w_key: torch.Tensor) -> torch.Tensor:
    """Queries in the latent space, [B, H, Sq, rank + rope]: what meets a latent row directly.

    q·k = q_nope·(w_key c) + q_rope·k_rope = (q_nope w_key)·c + q_rope·k_rope.
    Raises FlashgenError for shapes that don't fit together."""
    q_nope, q_rope, w_key = autocast(q_nope, q_rope, w_key)
    given = {"q_nope": q_nope, "q_rope": q_rope, "w_key": w_key}
    _fit("absorb_queries", given, {"q_nope": "BHSn", "q_rope": "BHSp", "w_key": "Hnr"})
    return torch.cat([torch.einsum("bhsn,hnr->bhsr", q_nope, w_key), q_rope], dim=-1)


def expand_output(out: torch.Tensor, w_value: torch.Tensor) -> torch.Tensor:
    """The heads' values [B, H, Sq, v] from outputs in the latent space [B, H, Sq, rank].

    Raises FlashgenError for shapes that don't fit together."""
    out, w_value = autocast(out, w_value)
    _fit("expand_output", {"out": out, "w_value": w_value}, {"out": "BHSr", "w_value": "Hvr"})
    return torch.einsum("bhsr,hvr->bhsv", out, w_value)


def expand_cache(
    kv: torch.Tensor, w_key: torch.Tensor, w_value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [B, H, S, nope + rope] and values [B, H, S, v] of latent rows [B, 1, S, rank + rope].

    Raises FlashgenError for shapes that don't fit together."""
    kv, w_key, w_value = autocast(kv, w_key, w_value)
    given = {"kv": kv, "w_key": w_key, "w_value": w_value}
    _fit("expand_cache", given, {"kv": "B1Sx", "w_key": "Hnr", "w_value": "Hvr"})
    rank = w_key.shape[-1]
    if kv.shape[-1] < rank:
        raise _refuse(
            "expand_cache", given, f"kv has {kv.shape[-1]} columns, and the rank is {rank}"
        )
    latent, rope = kv[:, 0, :, :rank], kv[..., rank:]
    keys = torch.einsum("bsr,hnr->bhsn", latent, w_key)
    values = torch.einsum("bsr,hvr->bhsv", latent, w_value)
    return torch.cat([keys, rope.expand(-1, keys.shape[1], -1, -1)], dim=-1), values


_SHAPES = {
    "q_nope": "[B, H, Sq, nope]", "q_rope": "[B, H, Sq, rope]", "w_key": "[H, nope, rank]",
    "w_value": "[H, v, rank]", "out": "[B, H, Sq, rank]", "kv": "[B, 1, S, rank + rope]",
}  # fmt: skip


def _fit(function: str, given: Mapping[str, Any], letters: Mapping[str, str]) -> None:
    """The same letter is the same length everywhere. Raises FlashgenError."""
    sizes: dict[str, int] = {"1": 1}
    for name, x in given.items():
        if not isinstance(x, torch.Tensor):
            raise _refuse(function, given, f"{name} is a {type(x).__name__}")
        if x.ndim != len(letters[name]):
            raise _refuse(function, given, f"{name} has {x.ndim} dimensions")
        for letter, size in zip(letters[name], x.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise _refuse(function, given, f"{name} is {list(x.shape)}")
    first, *rest = given.values()
    if any(x.dtype != first.dtype or x.device != first.device for x in rest):
        found = ", ".join(f"{name} {x.dtype} on {x.device}" for name, x in given.items())
        raise _refuse(function, given, found)


@outside_graphs("what doesn't fit together is said outside a graph")
def _refuse(function: str, given: Mapping[str, Any], problem: str) -> FlashgenError:
    shapes = ", ".join(f"{name} {_SHAPES[name]}" for name in given)
    call = CallText(f"latent.{function}", given)
    return FlashgenError(problem, call=call, write=f"{shapes}, of one dtype on one device")
