"""Hand-written kernels to stand beside: those that are installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

# FlashAttention 3's module, as its wheels call it.
_FA3 = ("fa3_fwd_interface", "flash_attn_interface")


@dataclass(frozen=True)
class Peer:
    """What runs the forward; and on tensors that want gradients, if it has a backward."""

    forward: Callable[[], Any]
    with_gradients: Callable[..., torch.Tensor] | None = None


def dense_peers(causal: bool, tensors: list[torch.Tensor]) -> dict[str, Peer]:
    """What else computes full or causal attention here: cuDNN, and FlashAttention 3.

    Each gets the layout it likes best, made before."""
    q, k, v = (x.detach() for x in tensors)
    cudnn = partial(_cudnn, causal=causal)
    peers = {"cuDNN": Peer(partial(cudnn, q, k, v), cudnn)}
    attend = _flash_attention_3()
    if attend is not None:
        rows = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        peers["FlashAttention 3"] = Peer(partial(attend, *rows, causal=causal))
    return peers


def _cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def _flash_attention_3() -> Callable[..., Any] | None:
    for name in _FA3:
        try:
            found: Callable[..., Any] = importlib.import_module(name).flash_attn_func
        except ImportError:
            continue
        return found
    return None
