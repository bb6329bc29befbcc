"""One immutable node type, and the walks that every stage needs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["bool", "int", "float", "double"]
FLOATS: tuple[Kind, ...] = ("float", "double")

INDEX_NAMES = ("b", "h", "h_kv", "q_idx", "kv_idx", "q_len", "kv_len")


@dataclass(frozen=True)
class Expr:
    """An operation on sub-expressions; a leaf has no `args` and says what it is in `attr`.

    Leaves: `const` (attr: the value), `index` (attr: one of INDEX_NAMES), `score`,
    `scalar` (attr: the parameter's name). `load` reads the tensor named by `attr` at `args`,
    `size` (attr: tensor and dimension) is a length of one.
    Integers are mathematical integers: their width is chosen when the expression is lowered. A
    `double` is a float of 64 bits, as masks have that read such data.
    """

    op: str
    kind: Kind
    args: tuple[Expr, ...] = ()
    attr: Any = None
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.op, self.kind, self.args, self.attr)))

    def __hash__(self) -> int:
        # Cached: expressions are graphs with shared nodes, and a deep hash would unfold them.
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Expr) or self._hash != other._hash:
            return False
        mine = (self.op, self.kind, self.attr, self.args)
        return mine == (other.op, other.kind, other.attr, other.args)

    def __str__(self) -> str:
        from .text import format_expr

        return format_expr(self)

    def __reduce__(self) -> tuple[Any, ...]:
        # Hashes of strings differ between processes, so the cached one must not travel.
        return Expr, (self.op, self.kind, self.args, self.attr)

    @property
    def is_const(self) -> bool:
        return self.op == "const"


def walk(expr: Expr, known: Container[Expr] = ()) -> Iterator[Expr]:
    """Every distinct node below and including `expr`, arguments before users.

    Nodes in `known`, and what only they use, are left out."""
    seen: set[Expr] = set()
    stack: list[tuple[Expr, bool]] = [(expr, False)]
    while stack:
        node, ready = stack.pop()
        if ready:
            yield node
        elif node not in seen and node not in known:
            seen.add(node)
            stack.append((node, True))
            stack.extend((arg, False) for arg in reversed(node.args))


def extent(expr: Expr) -> tuple[int, int]:
    """How long the expression is when it is written out, in operations, and how deep it nests."""
    sizes: dict[Expr, tuple[int, int]] = {}
    for node in walk(expr):
        below = [sizes[arg] for arg in node.args]
        sizes[node] = (1 + sum(n for n, _ in below), 1 + max((d for _, d in below), default=0))
    return sizes[expr]


@functools.lru_cache(maxsize=4096)
def leaves(expr: Expr | None, op: str) -> frozenset[str]:
    """The names (`attr`) of all nodes of one operation: indices, scalars or loaded tensors."""
    if expr is None:
        return frozenset()
    return frozenset(node.attr for node in walk(expr) if node.op == op)


def substitute(expr: Expr, change: Callable[[Expr], Expr | None]) -> Expr:
    """Rebuild `expr` bottom-up; `change` returns a node's replacement, or None to keep it."""
    done: dict[Expr, Expr] = {}
    for node in walk(expr):
        args = tuple(done[arg] for arg in node.args)
        same = node if args == node.args else Expr(node.op, node.kind, args, node.attr)
        replacement = change(same)
        done[node] = same if replacement is None else replacement
    return done[expr]
