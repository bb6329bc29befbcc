"""Hand-written kernels to stand beside: which masks each has, and those that are installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from .sides import HEADS, ROWS, Side, packed
from .work import WINDOW, Work, edges

CUDNN, FA2 = "cuDNN", "FlashAttention 2"
FA3, FA4 = "FlashAttention 3", "FlashAttention 4"
TRITON, FLASH = "FlexAttention", "FlexAttention FLASH"
_SDPA = {CUDNN: SDPBackend.CUDNN_ATTENTION, FA2: SDPBackend.FLASH_ATTENTION}
# Modules that hold FlashAttention's functions, as their wheels call them.
_MODULES = {FA3: ("fa3_fwd_interface", "flash_attn_interface"), FA4: ("flash_attn.cute",)}
# A wheel that has the forward alone.
_FORWARD_ONLY = ("fa3_fwd_interface",)
_CAUSAL = {"full": False, "causal": True, "document": False, "causal document": True}


def names(mask: str) -> list[str]:
    """Who can do a mask of `work.masks`, installed or not; FlexAttention first."""
    found = [TRITON, FLASH]
    if mask in ("full", "causal"):
        found += _SDPA
    if mask in _CAUSAL or mask == "sliding window":
        found += _MODULES
    return found


def absent() -> dict[str, str]:
    """Who isn't installed, and why that is thought."""
    missing = {name: reason for name in _MODULES if (reason := _import(name)[1])}
    if FA4 in missing:
        missing[FLASH] = missing[FA4]
    return missing


def hand_written(name: str, work: Work) -> Side:
    """A peer other than FlexAttention on a mask that `names` says it can do.

    Raises ImportError where it isn't installed."""
    if name in _SDPA:
        return Side(partial(sdpa, name, work.mask == "causal"), HEADS)
    module, problem = _import(name)
    if problem:
        raise ImportError(f"{name}: {problem}")
    trains = module.__name__ not in _FORWARD_ONLY
    if work.mask in ("document", "causal document"):
        given = _sequences(work) | {"causal": _CAUSAL[work.mask]}
        attend = partial(_first, module.flash_attn_varlen_func, given)
        return Side(attend, packed(work.batch), trains)
    given = {"causal": _CAUSAL.get(work.mask, True)}
    if work.mask == "sliding window":
        given["window_size"] = (WINDOW - 1, 0)
    return Side(partial(_first, module.flash_attn_func, given), ROWS, trains)


def _sequences(work: Work) -> dict[str, Any]:
    """The documents of all batch elements, one after the other."""
    cuts = edges(work.length)
    starts = [cuts[:-1] + element * work.length for element in range(work.batch)]
    ends = torch.cat([*starts, torch.tensor([work.batch * work.length])]).int().to(work.device)
    longest = int(cuts.diff().max())
    found: dict[str, Any] = {f"cu_seqlens_{side}": ends for side in "qk"}
    return found | {f"max_seqlen_{side}": longest for side in "qk"}


def _first(function: Callable[..., Any], given: dict[str, Any], *tensors: Any) -> torch.Tensor:
    """The output of what may return more."""
    found = function(*tensors, **given)
    out: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return out


def sdpa(
    name: str, causal: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """PyTorch's attention by cuDNN or FlashAttention 2."""
    with sdpa_kernel(_SDPA[name]):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def _import(name: str) -> tuple[Any, str]:
    """The module, or why there is none. A broken installation raises what it likes."""
    problem = ""
    for module in _MODULES[name]:
        try:
            return importlib.import_module(module), ""
        except ModuleNotFoundError as error:
            problem = problem or f"no module {error.name}"
        except Exception as error:
            problem = f"{module} doesn't import: {str(error).strip().splitlines()[:1]}"
    return None, problem
