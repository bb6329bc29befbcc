"""Data in order: where equal ids lie together, `doc[q_idx] == doc[kv_idx]` is a range of keys.

Whether they do is known on the device only, so a kernel has both forms and takes one. A tensor's
ranges are found with the schedule, once for all that use it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from .bounds import side
from .expr import Expr, const, make, substitute
from .geometry import MAX_POSITION
from .spec import Spec, TensorParam

# Where a tensor begins and ends: beyond, positions read its first and its last element.
FAR = MAX_POSITION + 1


@dataclass(frozen=True)
class Table:
    """What is found of one tensor along one dimension, int32.

    `range_name` [2, *shape]: for each element the first position of those that equal it, and the
    one past the last; `order_name` [the other dimensions]: whether that holds."""

    tensor: str
    dim: int
    range_name: str
    order_name: str


@dataclass(frozen=True)
class Ordered:
    """A mask that is equal to another one where `holds`, which is fixed for b and h."""

    mask: Expr
    holds: Expr
    tables: tuple[Table, ...]

    def __str__(self) -> str:
        names = ", ".join(table.tensor for table in self.tables)
        return f"where equal {names} lie together: {self.mask}"


@functools.lru_cache(maxsize=1024)
def tables_of(mask: Expr | None) -> tuple[Table, ...]:
    """The tensors whose order makes a mask cheaper."""
    found = {} if mask is None else _tables(mask)
    return tuple(dict.fromkeys(found.values()))


@functools.lru_cache(maxsize=1024)
def with_tables(spec: Spec) -> Spec:
    """The spec of a kernel, which reads the tables too."""
    ranks = {t.name: t.ndim for t in spec.tensors}
    extra = [
        TensorParam(name, torch.int32, ranks[table.tensor] + step)
        for table in tables_of(spec.mask)
        for name, step in ((table.range_name, 1), (table.order_name, -1))
    ]
    known = {t.name for t in spec.tensors}
    return replace(spec, tensors=(*spec.tensors, *(t for t in extra if t.name not in known)))


@functools.lru_cache(maxsize=1024)
def ordered(mask: Expr | None, fixed: str = "q_idx") -> Ordered | None:
    """The mask by ranges, for kernels whose rows are fixed along `q_idx` or `kv_idx`."""
    if mask is None or not (found := _tables(mask)):
        return None
    holds = [_holds(node, table) for node, table in found.items()]
    moving = "kv_idx" if fixed == "q_idx" else "q_idx"

    def by_range(node: Expr) -> Expr | None:
        return _in_range(node, found[node], fixed, moving) if node in found else None

    both = functools.reduce(lambda a, b: make("and", a, b), dict.fromkeys(holds))
    return Ordered(substitute(mask, by_range), both, tables_of(mask))


def _tables(mask: Expr) -> dict[Expr, Table]:
    """Equalities that all pairs need, or all but those of a row, and their tensors."""
    found: dict[Expr, Table] = {}
    numbers: dict[tuple[str, int], int] = {}
    for node in _needed(mask):
        left, right = node.args
        dim = next(d for d, (a, b) in enumerate(zip(left.args, right.args, strict=True)) if a != b)
        number = numbers.setdefault((left.attr, dim), len(numbers))
        names = (f"{left.attr}_{word}_{number}" for word in ("range", "order"))
        found[node] = Table(left.attr, dim, *names)
    return found


def apart(mask: Expr | None) -> tuple[Expr, Table, tuple[Expr, ...]] | None:
    """The one equality that all pairs need, its table, and what they need beside; else None."""
    if mask is None or len(found := _tables(mask)) != 1:
        return None
    ((node, table),) = found.items()
    parts = dict.fromkeys(_flat("and", mask))
    return (node, table, tuple(part for part in parts if part != node)) if node in parts else None


def _needed(mask: Expr) -> Iterator[Expr]:
    for part in _flat("and", mask):
        options = _flat("or", part)
        equal = [option for option in options if _is_equality(option)]
        if len(equal) == 1 and all(o in equal or side(o) in ("", "q") for o in options):
            yield equal[0]


def _flat(op: str, expr: Expr) -> list[Expr]:
    if expr.op == op and expr.kind == "bool":
        return [part for arg in expr.args for part in _flat(op, arg)]
    return [expr]


def _is_equality(node: Expr) -> bool:
    """Two elements of one integer tensor, at the query and at the key, all else alike."""
    if node.op != "eq" or any(arg.op != "load" or arg.kind != "int" for arg in node.args):
        return False
    left, right = node.args
    if left.attr != right.attr or len(left.args) != len(right.args):
        return False
    apart = [(a, b) for a, b in zip(left.args, right.args, strict=True) if a != b]
    alike = [a for a, b in zip(left.args, right.args, strict=True) if a == b]
    ends = [{a.attr, b.attr} for a, b in apart if a.op == b.op == "index"]
    return ends == [{"q_idx", "kv_idx"}] and len(apart) == 1 and all(map(_is_plain, alike))


def _is_plain(place: Expr) -> bool:
    return place.is_const or place.op == "index" and place.attr in ("b", "h", "h_kv")


def _at(node: Expr, symbol: str) -> Expr:
    """The side of an equality that reads at `symbol`."""
    return next(arg for arg in node.args if any(place.attr == symbol for place in arg.args))


def _holds(node: Expr, table: Table) -> Expr:
    places = tuple(p for d, p in enumerate(node.args[0].args) if d != table.dim)
    return make("ne", Expr("load", "int", places, table.order_name), const(0))


def _in_range(node: Expr, table: Table, fixed: str, moving: str) -> Expr:
    own = _at(node, fixed)
    low, high = (Expr("load", "int", (const(end), *own.args), table.range_name) for end in (0, 1))
    position = next(p for p in _at(node, moving).args if p.attr == moving)
    return make("and", make("le", low, position), make("lt", position, high))


@dataclass(frozen=True, eq=False)
class Ranges:
    """A table's values: `range` int32 [2, *shape], `order` int32 [the other dimensions]."""

    range: torch.Tensor
    order: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes held; what is broadcast counts once."""
        kept = (self.range.untyped_storage(), self.order.untyped_storage())
        return sum(storage.nbytes() for storage in kept)


def lead(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """The tensor with `dim` last, and what is broadcast along the others once."""
    for other, stride in enumerate(tensor.stride()):
        if other != dim and stride == 0 and tensor.shape[other] > 1:
            tensor = tensor.narrow(other, 0, 1)
    return tensor.movedim(dim, -1)


def ranges_like(tensor: torch.Tensor, dim: int, found: torch.Tensor, order: torch.Tensor) -> Ranges:
    """From what was found of `lead(tensor, dim)` to the tensor's own shape."""
    shape = tensor.shape
    others = [size for other, size in enumerate(shape) if other != dim]
    return Ranges(found.movedim(-1, dim + 1).expand(2, *shape), order.expand(others))


# PyTorch compares none of these.
_UNORDERED = (torch.uint16, torch.uint32, torch.uint64)


def find_ranges(tensor: torch.Tensor, dim: int) -> Ranges:
    """The ranges of equal elements along `dim`, with PyTorch's operations.

    In order are elements that never fall or never rise, but for one step over the end: equal ones
    then lie together."""
    x = lead(tensor, dim)
    if x.dtype in _UNORDERED:
        x = x.long()
    n = x.shape[-1]
    position = torch.arange(n, dtype=torch.int32, device=x.device)
    fresh = torch.ones_like(x, dtype=torch.bool)
    fresh[..., 1:] = x[..., 1:] != x[..., :-1]
    first = torch.where(fresh, position, 0).cummax(-1).values
    past = torch.where(fresh, position, n).roll(-1, -1)
    past[..., -1:] = n
    past = past.flip(-1).cummin(-1).values.flip(-1)
    first = torch.where(first == 0, -FAR, first)
    past = torch.where(past == n, FAR, past)
    falls = (x[..., 1:] < x[..., :-1]).sum(-1)
    rises = (x[..., 1:] > x[..., :-1]).sum(-1)
    start, end = (x[..., 0], x[..., -1]) if n else (falls, falls)
    order = (
        (falls == 0) | (falls == 1) & (end < start) | (rises == 0) | (rises == 1) & (end > start)
    )
    found = torch.stack([first, past]).to(torch.int32)
    return ranges_like(tensor, dim, found, order.to(torch.int32))
