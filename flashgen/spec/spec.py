"""The traced declaration: expressions, and the data they read."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ..expr import Expr, Kind, leaves, walk
from .heads import MLA


def sizes_read(expr: Expr | None) -> frozenset[str]:
    """Tensors whose lengths an expression uses."""
    if expr is None:
        return frozenset()
    return frozenset(node.attr[0] for node in walk(expr) if node.op == "size")


@dataclass(frozen=True)
class TensorParam:
    """A tensor that the expressions read."""

    name: str
    dtype: torch.dtype
    ndim: int

    def __str__(self) -> str:
        return f"{self.name}: {str(self.dtype).removeprefix('torch.')}[{self.ndim}-d]"


@dataclass(frozen=True)
class ScalarParam:
    """A runtime scalar: a kernel argument, never part of a cache key."""

    name: str
    kind: Kind

    def __str__(self) -> str:
        return f"{self.name}: {self.kind}"


@dataclass(frozen=True)
class Spec:
    """Everything that decides which kernels are generated, and nothing else."""

    name: str
    mask: Expr | None
    score: Expr | None
    softcap: bool
    sinks: bool
    heads: MLA | None
    tensors: tuple[TensorParam, ...]
    scalars: tuple[ScalarParam, ...]

    @cached_property
    def digest(self) -> str:
        """Names the spec in registries and schedules; equal for equal expressions."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]

    def __hash__(self) -> int:
        # By the digest, which is kept: specs are keys of every cache on the way of a call.
        return hash(self.digest)

    @cached_property
    def mask_digest(self) -> str:
        """Names the mask alone: layers with different scores share a schedule."""
        types = [str(t) for t in self.tensors if t.name in self.mask_tensors]
        return hashlib.sha256(f"{self.mask} {types}".encode()).hexdigest()[:16]

    @cached_property
    def mask_tensors(self) -> frozenset[str]:
        """Data that the mask reads, if only its lengths."""
        return leaves(self.mask, "load") | sizes_read(self.mask)

    @cached_property
    def mask_scalars(self) -> frozenset[str]:
        """Runtime scalars that the mask reads."""
        return leaves(self.mask, "scalar")

    def uses(self, *names: str) -> bool:
        """Whether the mask reads one of these indices."""
        return not leaves(self.mask, "index").isdisjoint(names)

    @cached_property
    def reads_doubles(self) -> bool:
        """Whether the mask compares in 64 bits."""
        return self.mask is not None and any(node.kind == "double" for node in walk(self.mask))

    @cached_property
    def nodes(self) -> tuple[Expr, ...]:
        """Every distinct node of the mask and of the score function."""
        exprs = [expr for expr in (self.mask, self.score) if expr is not None]
        return tuple(dict.fromkeys(node for expr in exprs for node in walk(expr)))

    @cached_property
    def slug(self) -> str:
        """The name as part of a file's name."""
        words = re.sub(r"[^a-zA-Z0-9]+", "_", self.name.replace("~", "not_"))
        return words.strip("_").lower()[:60] or "attention"

    def __str__(self) -> str:
        lines = [f"spec {self.name}"]
        lines.append(f"  mask    {'every key' if self.mask is None else self.mask}")
        if self.score is not None:
            lines.append(f"  score   {self.score}")
        extras = [n for n, on in (("softcap", self.softcap), ("sinks", self.sinks)) if on]
        if self.heads is not None:
            extras.append(str(self.heads))
        if extras:
            lines.append(f"  with    {', '.join(extras)}")
        if self.scalars:
            lines.append(f"  scalars {', '.join(map(str, self.scalars))}")
        if self.tensors:
            lines.append(f"  data    {', '.join(map(str, self.tensors))}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Bound:
    """A Spec with the data of one call. Scalars are Python numbers."""

    spec: Spec
    scalars: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
