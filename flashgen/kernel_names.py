"""Names of a user's data that no kernel uses itself."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from .emit import identifiers
from .expr import Expr, substitute
from .spec import Bound, Spec

# Kernels number what comes in parts: q0, acc1, dims_64, q_summary_0, doc_range_0.
_NUMBERED = re.compile(r".*\d|(q|kv)_summary_\d+_(min|max)|.*_(range|order)_\d+_(ptr|value)")


def spell(bound: Bound) -> Bound:
    """The same call with its data renamed where a kernel has a variable of that name."""
    changes = _changes(bound.spec)
    if not changes:
        return bound
    return Bound(
        _renamed(bound.spec),
        {changes.get(name, name): value for name, value in bound.scalars.items()},
        {changes.get(name, name): tensor for name, tensor in bound.tensors.items()},
    )


def name_in_kernels(spec: Spec) -> Callable[[str], str]:
    """What kernels call a scalar or tensor."""
    changes = _changes(spec)
    return lambda name: changes.get(name, name)


@functools.lru_cache(maxsize=1024)
def _renamed(spec: Spec) -> Spec:
    changes = _changes(spec)

    def rename(node: Expr) -> Expr | None:
        if node.op in ("load", "scalar"):
            return Expr(node.op, node.kind, node.args, changes.get(node.attr, node.attr))
        if node.op == "size":
            name, dim = node.attr
            return Expr(node.op, node.kind, (), (changes.get(name, name), dim))
        return None

    return replace(
        spec,
        mask=None if spec.mask is None else substitute(spec.mask, rename),
        score=None if spec.score is None else substitute(spec.score, rename),
        tensors=tuple(replace(t, name=changes.get(t.name, t.name)) for t in spec.tensors),
        scalars=tuple(replace(s, name=changes.get(s.name, s.name)) for s in spec.scalars),
    )


@functools.lru_cache(maxsize=1024)
def _changes(spec: Spec) -> Mapping[str, str]:
    """Old name to new, for those that have to change."""
    used = set(identifiers())
    changes: dict[str, str] = {}
    names: list[tuple[str, tuple[str, ...]]] = [(s.name, (s.name,)) for s in spec.scalars]
    names += [(t.name, _words_of(t.name)) for t in spec.tensors]
    taken = {name for name, _ in names}
    pointers = {f"{t.name}_ptr" for t in spec.tensors}
    for name, words in names:
        if _is_free(words, used) and name not in pointers:
            continue
        new = f"{name}_"
        while new in taken | pointers or not _is_free(_words_of(new), used):
            new += "_"
        taken.add(new)
        changes[name] = new
    return changes


def _words_of(tensor: str) -> tuple[str, ...]:
    return (tensor, f"{tensor}_ptr", f"{tensor}_size_", f"{tensor}_stride_")


def _is_free(words: Iterable[str], used: set[str]) -> bool:
    return not any(word in used or _NUMBERED.fullmatch(word) for word in words)
