"""Expressions evaluated by PyTorch, on whatever shapes the indices have."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .node import Expr, walk

Number = bool | int | float


@dataclass
class Env:
    """What an expression reads. Index tensors broadcast against each other; ints are int64."""

    index: dict[str, torch.Tensor]
    scalars: dict[str, Number] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    score: torch.Tensor | None = None
    float_dtype: torch.dtype = torch.float32
    values: dict[Expr, torch.Tensor] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return next(iter(self.index.values())).device


def evaluate(expr: Expr, env: Env) -> torch.Tensor:
    """The value of `expr`; loads clamp every index to the tensor, divisors that are 0 give 0."""
    for node in list(walk(expr, known=env.values)):
        env.values[node] = _node(node, [env.values[arg] for arg in node.args], env)
    return env.values[expr]


def _node(node: Expr, args: list[torch.Tensor], env: Env) -> torch.Tensor:
    if node.op == "const":
        return _tensor(node.attr, node, env)
    if node.op == "scalar":
        return _tensor(env.scalars[node.attr], node, env)
    if node.op == "size":
        name, dim = node.attr
        return _tensor(env.tensors[name].shape[dim], node, env)
    if node.op == "index":
        return env.index[node.attr]
    if node.op == "score":
        assert env.score is not None
        return env.score
    if node.op == "load":
        return _as_kind(_load(env.tensors[node.attr], args), node, env)
    if node.op == "cast":
        return _as_kind(args[0], node, env)
    result: torch.Tensor = _FUNCTIONS[node.op](*args)
    return result


def _tensor(value: Number, node: Expr, env: Env) -> torch.Tensor:
    return torch.tensor(value, dtype=_dtype(node, env), device=env.device)


def _dtype(node: Expr, env: Env) -> torch.dtype:
    if node.kind == "float":
        return env.float_dtype
    return {"bool": torch.bool, "int": torch.int64, "double": torch.float64}[node.kind]


def _as_kind(value: torch.Tensor, node: Expr, env: Env) -> torch.Tensor:
    if node.kind == "bool" and value.dtype != torch.bool:
        return value != 0
    return value.to(_dtype(node, env))


def _load(tensor: torch.Tensor, indices: list[torch.Tensor]) -> torch.Tensor:
    if not indices:
        return tensor
    clamped = tuple(i.clamp(0, n - 1) for i, n in zip(indices, tensor.shape, strict=True))
    return tensor[clamped]


def _floordiv(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.is_floating_point():
        return torch.div(a, b, rounding_mode="floor")
    nonzero = torch.where(b == 0, torch.ones_like(b), b)
    return torch.where(b == 0, torch.zeros_like(a), torch.div(a, nonzero, rounding_mode="floor"))


def _mod(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.is_floating_point():
        return torch.remainder(a, b)
    nonzero = torch.where(b == 0, torch.ones_like(b), b)
    return torch.where(b == 0, torch.zeros_like(a), torch.remainder(a, nonzero))


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "floordiv": _floordiv,
    "mod": _mod,
    "neg": operator.neg,
    "abs": torch.abs,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "clamp_min": lambda value, limit: torch.clamp(value, min=limit),
    "clamp_max": lambda value, limit: torch.clamp(value, max=limit),
    "where": torch.where,
    "lt": operator.lt,
    "le": operator.le,
    "eq": operator.eq,
    "ne": operator.ne,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "not": operator.invert,
    "shl": operator.lshift,
    "shr": operator.rshift,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "log": torch.log,
    "log2": torch.log2,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "erf": torch.erf,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "pow": torch.pow,
    "isnan": torch.isnan,
}
