"""What a graph's operators are told of a declaration, found out while the graph is made.

`torch.compile` runs these functions as they are, on constants, of which one is the declaration's
label, and takes their results for constants."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch.overrides import _pop_mode_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import FlashgenError
from ..geometry import Geometry
from ..graphs import outside_graphs
from ..spec import Bound, Program
from . import guard, refused
from .form import Form, register
from .pending import refuse_pending
from .refused import Refused

_F = TypeVar("_F", bound=Callable[..., Any])
# Digest, names of the data that a call gives, tensors that the declaration holds, and the tile.
_Found = tuple[str, tuple[str, ...], tuple[torch.Tensor, ...], tuple[int, int] | None]


def _constant(function: _F) -> _F:
    """Dynamo runs the function and takes its result for a constant."""
    made: _F = torch.compiler.assume_constant_result(function)  # type: ignore[no-untyped-call]
    return made


@contextmanager
def _outside_modes() -> Iterator[None]:
    """With true tensors and numbers, whatever traces the call: export without Dynamo runs all of
    this under its modes, where a tensor has no value."""
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        for _ in range(torch._C._len_torch_function_stack()):
            stack.enter_context(_pop_mode_temporarily())
        yield


_CPU = torch.device("cpu")
# Lengths at which the tile is chosen: a graph serves any.
_LONG = 1 << 20


@_constant
def constants_of(label: str) -> tuple[str, ...]:
    """Names of data that is baked into kernels."""
    return tuple(a.name for a in Program.called(label).params if a.const)


@_constant
def names_of(label: str) -> tuple[str, ...]:
    """Names of the data that a call may give."""
    return tuple(a.name for a in Program.called(label).params)


@outside_graphs(
    "in a graph attention is an operator, for which torch.func's transforms have no rule; "
    "torch.autograd.grad is compiled"
)
def refuse_transforms(label: str) -> None:
    """A function transform around operators. Raises FlashgenError."""
    raise FlashgenError(
        "a function transform (torch.func) differentiates attention inside torch.compile or under "
        "a dispatch mode, where it is an operator, and PyTorch has no rule for those",
        call=Program.called(label).name,
        write="torch.func.grad without torch.compile; or torch.autograd.grad, in or outside it",
    )


@_constant
@_outside_modes()
def declare(
    label: str, names: tuple[Any, ...], how: tuple[Any, ...], by_dynamo: bool, *shape: Any
) -> tuple[str, tuple[str, ...], tuple[torch.Tensor, ...], tuple[int, int] | None, bool]:
    """Trace the declaration for data of these kinds, and register what operators must know.

    `names` are what `graph._names` finds; `how`: backend, deterministic, tile (None: chosen here),
    what a given schedule was made for, and how many lists of runs are made; `shape`: what
    `graph._shape_of` finds. Returns the form's digest, the names of the data that the call gives,
    the tensors that the declaration holds itself, the tile, and whether a graph's guard looks at
    what the program has for it, with those tensors then.
    Raises FlashgenError for data that don't fit the declaration; for Dynamo the operator does, when
    it runs, and there is no tile."""
    program = Program.called(label)
    # Dynamo doesn't answer for export when this runs.
    in_graph = by_dynamo and not torch.compiler.is_exporting()
    told: guard.Told | None = None
    is_refused = is_guarded = False
    try:
        found = _declared(label, names, how, *shape)
        told = found[:3]
        if by_dynamo:
            refuse_pending(program.read, program.name)
    except FlashgenError as error:
        if not in_graph:
            raise
        is_refused, told = True, told or _refusal(error)
        found = _refuse(program.name, names, error)
    if in_graph:
        again = functools.partial(_told, label, names, how, *shape)
        is_guarded = guard.tell(program, found[0], told, again, is_refused)
    digest, given, kept, tile = found
    # What is returned stays as long as the graph.
    return digest, given, () if is_guarded else kept, tile, is_guarded


@_outside_modes()
def _told(*declared: Any) -> guard.Told:
    """What a graph is told, or why it is refused, as `guard` compares it."""
    try:
        return _declared(*declared)[:3]
    except FlashgenError as error:
        return _refusal(error)


def _refusal(error: FlashgenError) -> guard.Told:
    return str(error), (), ()


def _refuse(name: str, names: tuple[Any, ...], error: FlashgenError) -> _Found:
    tensors, ints, static, kinds = names
    data: dict[str, list[str]] = {kind: [] for kind in ("tensor", "float", "int", "static")}
    for own, kind, *_ in kinds:
        data[kind].append(own)
    fixed = tuple((own, rest[0]) for own, kind, *rest in kinds if kind == "static")
    given = tuple(data["tensor"])
    found = Refused(
        problem=error.problem,
        line=error.line,
        write=error.write,
        name=name,
        static=(*static, *fixed),
        tensors=(*tensors, *given, *data["float"]),
        ints=(*ints, *data["int"]),
    )
    return refused.keep(found), given, (), None


def _declared(
    label: str,
    names: tuple[Any, ...],
    how: tuple[Any, ...],
    spread: tuple[str, ...],
    dtype: torch.dtype,
    device: torch.device,
    head_dim: int,
    v_head_dim: int,
) -> _Found:
    program = Program.called(label)
    tensors, ints, static, kinds = names
    backend, deterministic, block, made_for, lists = how
    stand_ins = {kind[0]: _stand_in(*kind[1:]) for kind in kinds}
    bound = program.bind(stand_ins, program.name, frozenset(spread), check=False)
    given = tuple(n for n, x in stand_ins.items() if isinstance(x, torch.Tensor))
    kept = {n: x for n, x in bound.tensors.items() if x is not stand_ins.get(n)}
    varying = {kind[0] for kind in kinds if kind[1] != "static"}
    assigned, values = program.assigned(stand_ins)
    numbers = {**values, **bound.scalars}.items()
    fixed = {n: x for n, x in numbers if n not in varying and not isinstance(x, torch.Tensor)}
    if block is None:
        block = _block_size(bound, backend, dtype, device, head_dim, v_head_dim)
    form = Form(
        bound.spec,
        program.name,
        program.flex_function,
        program.softcap,
        program.sinks,
        tensors,
        ints,
        static,
        (*given, *kept),
        tuple(kind[0] for kind in kinds if kind[1] == "float"),
        tuple(kind[0] for kind in kinds if kind[1] == "int"),
        tuple(sorted(fixed.items())),
        backend,
        deterministic,
        tuple(block),
        made_for,
        lists,
        _checks(program, assigned),
    )
    return register(form), given, tuple(kept.values()), form.block_size


def _stand_in(kind: str, *rest: Any) -> Any:
    """A value of the kind, for tracing. The smallest integer: a window is taken to be short."""
    if kind == "tensor":
        dtype, ndim, single, device = rest
        if ndim == 0 and device.type == "cpu":
            return torch.ones((), dtype=dtype, device="cpu")
        shape = [1 if dim in single else 2 for dim in range(ndim)]
        return torch.empty(shape, dtype=dtype, device="meta")
    return {"int": 1, "float": 1.0}[kind] if kind != "static" else rest[0]


def _block_size(
    bound: Bound,
    backend: str,
    dtype: torch.dtype,
    device: torch.device,
    head_dim: int,
    v_head_dim: int,
) -> tuple[int, int]:
    """The tile that the kernel works on, for lengths that aren't known."""
    from .. import backends

    q, v = (torch.empty(1, 1, 1, d, dtype=dtype, device="meta") for d in (head_dim, v_head_dim))
    name = bound.spec.name
    on, doubles = _on(device, backend), bound.spec.reads_doubles
    choice = backends.choose(on, device, dtype, name, tensors=(q, q, v), doubles=doubles)
    geometry, dims = Geometry(1, 1, 1, _LONG, _LONG, _CPU), (head_dim, v_head_dim)
    long_rows = backends.takes_long_rows(choice.name, bound, geometry, dims)
    return backends.block_size(choice.name, device, dtype, *dims, long_rows)


def _on(device: torch.device, backend: str) -> str:
    """Without a GPU all kernels have the interpreter's tile."""
    return "auto" if device.type == "cpu" else backend


def _checks(program: Program, assigned: list[dict[str, str]]) -> Any:
    """Leaves with a check of their own, without what is bound to them: a form holds no tensor."""
    pairs = zip(program.leaves, assigned, strict=True)
    return tuple((leaf.without_data(), tuple(names.items())) for leaf, names in pairs if leaf.check)
