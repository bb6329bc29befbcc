"""A declaration, and how a call's data turns it into a Spec."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any
from weakref import WeakValueDictionary

import torch

from ..errors import FlashgenError, show
from ..expr import Expr, cast, extent, in_double, leaves, make, substitute, walk
from ..trace import TensorType
from ..trace.reads import Reads
from ..trace.run import is_odd
from .heads import MLA
from .leaf import Argument, Leaf, unknown_name
from .mask import Mask, check_arguments
from .spec import Bound, ScalarParam, Spec, TensorParam, sizes_read

# What calls take beside tensors and data, for who misspells one.
CALL_ARGUMENTS = (
    "scale", "q_offset", "kv_lens", "sinks", "dropout_p", "seed", "cu_seqlens_q", "cu_seqlens_kv",
    "max_seqlen_q", "max_seqlen_kv", "page_table", "page_layout", "schedule", "return_lse",
    "deterministic", "batch_invariant", "backend",
)  # fmt: skip
_NUMBERS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,)}


_labels = itertools.count()
_labelled: WeakValueDictionary[str, Program] = WeakValueDictionary()


class InGraphs:
    """What graphs of `torch.compile` look at: by `guarded` they notice that functions read
    something else than was noted when they were made (`ops/guard.py`)."""

    def __init__(self) -> None:
        self.guarded: Any = None
        self.records: dict[int, Any] = {}


@dataclass(frozen=True)
class Program:
    """What `fg.Attention` declares once: mask, score function, heads, softcap, sinks."""

    mask: Mask | None = None
    score: Leaf | None = None
    softcap: float | None = None
    sinks: bool = False
    heads: MLA | None = None
    _specs: dict[Any, Spec] = field(default_factory=dict, compare=False, repr=False)
    # What `Program.called` finds it by: a constant in graphs, which can't hold the object itself.
    label: str = field(default_factory=lambda: str(next(_labels)), compare=False, repr=False)
    in_graphs: InGraphs = field(default_factory=InGraphs, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        _labelled[self.label] = self
        check_arguments([a for leaf in self.leaves for a in leaf.arguments], self.name)

    def __reduce__(self) -> Any:
        return Program, (self.mask, self.score, self.softcap, self.sinks, self.heads)

    @staticmethod
    def called(label: str) -> Program:
        """The living program with this label."""
        return _labelled[label]

    @cached_property
    def name(self) -> str:
        parts = [self.mask.name if self.mask is not None else "full"]
        if self.score is not None:
            parts.append(self.score.function.name)
        return " + ".join(parts)

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        masks = self.mask.leaves if self.mask is not None else ()
        return (*masks, self.score) if self.score is not None else masks

    @cached_property
    def params(self) -> tuple[Argument, ...]:
        """What a call may give, each name once."""
        return tuple({a.name: a for leaf in self.leaves for a in leaf.free}.values())

    @cached_property
    def flex_function(self) -> str | None:
        """The name of a function in FlexAttention's form, if the declaration has one."""
        return next((x.function.name for x in self.leaves if x.function.style == "flex"), None)

    @property
    def read(self) -> Reads:
        """What its functions read besides their arguments, when they were traced."""
        return Reads.joined(leaf.read for leaf in self.leaves)

    def changes(self) -> int:
        """How often one of its functions was found to mean something else than before."""
        return sum(leaf.changes() for leaf in self.leaves)

    def bind(
        self,
        data: Mapping[str, Any],
        call: object,
        spread: frozenset[str] = frozenset(),
        lengths: Mapping[str, int] = MappingProxyType({}),
        check: bool = True,
    ) -> Bound:
        """Check names and kinds of a call's data, and trace. Raises FlashgenError.

        `spread`: which of b, h and h_kv take several values; a dimension of size 1 stands for all
        of them, and a schedule need not tell them apart. `lengths`: what masks' own checks may ask
        for of a call, `q_len`, `kv_len` and `q_offset`. `check`: run the masks' own checks; False
        where values only stand in for those of a call."""
        self._check_given(data, call)
        names, values = self.assigned(data)
        arguments = {
            leaf_names[p.name]: Argument(leaf_names[p.name], p.type, p.role == "const")
            for leaf, leaf_names in zip(self.leaves, names, strict=True)
            for p in leaf.function.arguments
        }
        values = {n: _value(arguments[n], v, call) for n, v in values.items()}
        for leaf, mine in zip(self.leaves, names, strict=True):
            if check:
                own = {own: values[name] for own, name in mine.items()}
                leaf.run_check({**lengths, **own}, call)
        types = {n: _type(arguments[n], v, spread) for n, v in values.items()}
        dtypes = {n: v.dtype for n, v in values.items() if isinstance(v, torch.Tensor)}
        try:
            spec, captured = self._traced(names, types, dtypes, call)
        except FlashgenError as error:
            error.call = error.call or str(call)
            raise
        values.update(captured)
        return Bound(
            spec,
            {s.name: values[s.name] for s in spec.scalars},
            {t.name: values[t.name] for t in spec.tensors},
        )

    def assigned(self, data: Mapping[str, Any]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        """For each leaf, its parameters and the names they have in the call; and each name's
        value, given or bound early."""
        return _assign_names(self.leaves, data)

    def _check_given(self, data: Mapping[str, Any], call: object) -> None:
        known = [a.name for a in self.params]
        for name in data:
            if name not in known:
                raise unknown_name(name, known, call, CALL_ARGUMENTS)
        missing = [a for leaf in self.leaves for a in leaf.required if a.name not in data]
        if missing:
            unique = list(dict.fromkeys(map(str, missing)))
            raise FlashgenError(
                f"{self.name} also needs {', '.join(unique)}",
                call=call,
                write=", ".join(f"{m.split(':')[0]}=..." for m in unique),
            )

    def _traced(
        self,
        names: list[dict[str, str]],
        types: Mapping[str, Any],
        dtypes: Mapping[str, torch.dtype],
        call: object,
    ) -> tuple[Spec, dict[str, torch.Tensor]]:
        exprs: list[Expr] = []
        captured: dict[str, torch.Tensor] = {}
        for leaf, leaf_names in zip(self.leaves, names, strict=True):
            used = {name: types[name] for name in leaf_names.values()}
            traced = leaf.traced(used, leaf_names)
            exprs.append(_with_captured(traced.expr, traced.captured, captured, set(types)))
        dtypes = {**dtypes, **{n: t.dtype for n, t in captured.items()}}
        ranks = {n: t.ndim for n, t in types.items() if isinstance(t, TensorType)}
        ranks.update({n: t.ndim for n, t in captured.items()})
        key = (tuple(exprs), tuple(sorted((n, str(d)) for n, d in dtypes.items())))
        if key not in self._specs:
            spec = self._spec(exprs, dtypes, ranks)
            _check_extent(spec, call)
            self._specs[key] = spec
        return self._specs[key], captured

    def _spec(
        self, exprs: list[Expr], dtypes: Mapping[str, torch.dtype], ranks: Mapping[str, int]
    ) -> Spec:
        rest = iter(exprs)
        mask = _compose(self.mask, rest) if self.mask is not None else None
        score = next(rest, None)
        if mask is not None and _reads_doubles(mask, dtypes):
            mask, score = _in_double(mask, score)
        if mask is not None and mask.is_const and mask.attr:
            mask = None
        if score is not None and score.op == "score":
            score = None
        loads = leaves(mask, "load") | leaves(score, "load")
        sizes = sizes_read(mask) | sizes_read(score)
        tensors = tuple(TensorParam(n, dtypes[n], ranks[n]) for n in sorted(loads | sizes))
        kinds = {node.attr: node.kind for node in _nodes("scalar", mask, score)}
        scalars = tuple(ScalarParam(n, kinds[n]) for n in sorted(kinds))
        return Spec(
            self.name,
            mask,
            score,
            self.softcap is not None,
            self.sinks,
            self.heads,
            tensors,
            scalars,
        )


# Stages walk an expression by recursion, and text holds what is shared as often as it is used.
_LONGEST, _DEEPEST = 20_000, 200


def _check_extent(spec: Spec, call: object) -> None:
    for what, expr in (("mask", spec.mask), ("score function", spec.score)):
        size, depth = extent(expr) if expr is not None else (0, 0)
        if size > _LONGEST or depth > _DEEPEST:
            raise FlashgenError(
                f"the {what} has {size} operations, nested {depth} deep; at most {_LONGEST} and "
                f"{_DEEPEST} make a kernel",
                call=call,
                write="a tensor that holds the cases of a Python loop: table[kv_idx // size]",
            )


def _nodes(op: str, *exprs: Expr | None) -> list[Expr]:
    return [node for expr in exprs if expr is not None for node in walk(expr) if node.op == op]


def _reads_doubles(mask: Expr, dtypes: Mapping[str, torch.dtype]) -> bool:
    loads = (node for node in walk(mask) if node.op == "load" and node.kind == "float")
    return any(dtypes[node.attr] == torch.float64 for node in loads)


def _in_double(mask: Expr, score: Expr | None) -> tuple[Expr, Expr | None]:
    """The mask in floats of 64 bits, and a score function that reads its scalars as they are."""
    mask = in_double(mask)
    doubles = {node.attr: node for node in _nodes("scalar", mask) if node.kind == "double"}

    def rounded(node: Expr) -> Expr | None:
        is_shared = node.op == "scalar" and node.attr in doubles
        return cast(doubles[node.attr], "float") if is_shared else None

    return mask, None if score is None else substitute(score, rounded)


def _compose(tree: Mask, exprs: Any) -> Expr:
    if tree._op == "leaf":
        expr: Expr = next(exprs)
        return expr
    parts = [_compose(part, exprs) for part in tree._parts]
    return make(tree._op, *parts)


def _assign_names(
    all_leaves: tuple[Leaf, ...], data: Mapping[str, Any]
) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """For each leaf, parameter to name; and the value of each name.

    What is bound early is no longer the call's, so it must not collide with other parameters."""
    values = dict(data)
    taken = {a.name for leaf in all_leaves for a in leaf.required} | set(values)
    names = []
    for leaf in all_leaves:
        mine = {}
        for parameter in leaf.function.arguments:
            name = leaf.public(parameter)
            given = name in data and any(a.name == name for a in leaf.free)
            if parameter.name in leaf.bound and not given:
                name = _unique(name, leaf.bound[parameter.name], taken, values)
                values[name] = leaf.bound[parameter.name]
                taken.add(name)
            mine[parameter.name] = name
        names.append(mine)
    return names, values


def _unique(name: str, value: Any, taken: set[str], values: Mapping[str, Any]) -> str:
    candidate, turn = name, 2
    while candidate in taken and not _same(values.get(candidate), value):
        candidate, turn = f"{name}_{turn}", turn + 1
    return candidate


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return left is right
    return type(left) is type(right) and bool(left == right)


def _value(argument: Argument, value: Any, call: object) -> Any:
    """The value in the form kernels take it: a Python number, or a tensor."""
    if argument.type == "tensor":
        if isinstance(value, torch.Tensor):
            return _checked_tensor(argument, value, call)
        if isinstance(value, (bool, int, float)):
            return _in_range(argument, value, call)
        raise FlashgenError(
            f"{argument.name} must be a tensor, and is a {type(value).__name__}",
            call=call,
            write=f"{argument.name}=torch.tensor(...)",
        )
    if isinstance(value, torch.Tensor):
        value = _host_number(argument, value, call)
    elif not isinstance(value, (bool, int, float)) and hasattr(value, "item"):
        value = value.item()
    wanted = _NUMBERS[argument.type]
    if not isinstance(value, wanted) or (argument.type != "bool" and isinstance(value, bool)):
        raise FlashgenError(
            f"{argument.name} must be a Python {argument.type}, and is {show(value)}",
            call=call,
            write=f"{argument.name}={'True' if argument.type == 'bool' else '128'}",
        )
    return _in_range(argument, value, call)


def _in_range(argument: Argument, number: Any, call: object) -> Any:
    if type(number) is int and argument.type != "float" and not -(2**63) <= number < 2**63:
        raise FlashgenError(
            f"{argument.name} is {number}, beyond 64 bits",
            call=call,
            write=f"{argument.name}=2**62, which is further than any position",
        )
    return float(number) if argument.type == "float" else number


def _host_number(argument: Argument, value: torch.Tensor, call: object) -> Any:
    if value.ndim == 0 and value.device.type == "cpu":
        return value.item()
    raise FlashgenError(
        f"{argument.name} is a runtime scalar, and is given a tensor on {value.device} of shape "
        f"{list(value.shape)}: reading it would wait for the device",
        call=call,
        write=f"a Python {argument.type}, or `{argument.name}: fg.Tensor` in the function",
    )


def _checked_tensor(argument: Argument, value: torch.Tensor, call: object) -> torch.Tensor:
    if is_odd(value):
        raise FlashgenError(
            f"{argument.name} is a {'nested' if value.is_nested else value.layout} tensor of "
            f"{value.dtype}",
            call=call,
            write="a dense tensor of booleans, integers or floats",
        )
    return value


def _type(argument: Argument, value: Any, spread: frozenset[str]) -> Any:
    if argument.const:
        return value
    if isinstance(value, torch.Tensor):
        return TensorType.of(value, spread)
    return argument.type if argument.type != "tensor" else type(value).__name__


def _with_captured(
    expr: Expr,
    found: Mapping[str, torch.Tensor],
    captured: dict[str, torch.Tensor],
    taken: set[str],
) -> Expr:
    """Give captured tensors names of their own among all that the declaration reads."""
    changes: dict[str, str] = {}
    for name, tensor in found.items():
        unique, turn = name, 2
        while unique in taken or captured.get(unique, tensor) is not tensor:
            unique, turn = f"{name}_{turn}", turn + 1
        captured[unique] = tensor
        changes[name] = unique
    if all(old == new for old, new in changes.items()):
        return expr

    def rename(node: Expr) -> Expr | None:
        if node.op == "load" and node.attr in changes:
            return Expr("load", node.kind, node.args, changes[node.attr])
        if node.op == "size" and node.attr[0] in changes:
            return Expr("size", node.kind, (), (changes[node.attr[0]], node.attr[1]))
        return None

    return substitute(expr, rename)
