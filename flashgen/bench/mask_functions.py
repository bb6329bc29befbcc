"""Masks as functions of FlexAttention's form, made from their expressions: the same for both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..expr import Expr, const, make, substitute
from ..spec import Bound

Function = Callable[..., torch.Tensor]


def mask_function(bound: Bound, q_len: int, kv_len: int) -> Function:
    """`mask_mod(b, h, q_idx, kv_idx)` of a mask with its data, for queries from position 0 on.

    Indices of data are kept inside it, as flashgen keeps them; of heads there is one."""
    assert bound.spec.mask is not None
    text = str(spelled_out(bound.spec.mask))
    names: dict[str, Any] = {**bound.scalars, **bound.tensors, **_WORDS}
    names |= {"q_len": q_len, "kv_len": kv_len}
    source = f"def mask_mod(b, h, q_idx, kv_idx):\n    h_kv = h\n    return {text}\n"
    exec(compile(source, f"<{bound.spec.name}>", "exec"), names)
    function: Function = names["mask_mod"]
    return function


def spelled_out(mask: Expr) -> Expr:
    """A mask with indices of data clamped, and without `==` and `!=` between truth values, on which
    Inductor fails."""
    return substitute(substitute(mask, _inside), _equal)


def _equal(node: Expr) -> Expr | None:
    if node.op not in ("eq", "ne") or node.args[0].kind != "bool":
        return None
    both, neither = make("and", *node.args), make("not", make("or", *node.args))
    same = make("or", both, neither)
    return same if node.op == "eq" else make("not", same)


def _inside(node: Expr) -> Expr | None:
    """A load whose indices are clamped, but for bare and constant ones."""
    if node.op != "load":
        return None
    places = []
    for dim, place in enumerate(node.args):
        last = make("sub", Expr("size", "int", (), (node.attr, dim)), const(1))
        is_plain = place.op in ("index", "const")
        places.append(
            place if is_plain else make("minimum", make("maximum", place, const(0)), last)
        )
    return Expr("load", node.kind, tuple(places), node.attr)


def _minimum(left: Any, right: Any) -> Any:
    return left.clamp(max=right) if isinstance(left, torch.Tensor) else right.clamp(max=left)


def _maximum(left: Any, right: Any) -> Any:
    return left.clamp(min=right) if isinstance(left, torch.Tensor) else right.clamp(min=left)


def _int(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.int64)


def _float(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.float32)


_WORDS = {"minimum": _minimum, "maximum": _maximum, "where": torch.where}
_WORDS |= {"int": _int, "float": _float, "bool": torch.Tensor.bool}
