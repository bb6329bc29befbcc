"""The values a user's function runs on: they record operations instead of computing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import FlashgenError
from ..expr import Expr, Kind, const, load, make
from ..expr.build import KindError
from .meaning import as_torch

if TYPE_CHECKING:
    from .run import Recorder, TensorType


def reject(problem: str, write: str) -> NoReturn:
    """Raise for the operation being traced; `trace` adds the user's line."""
    raise FlashgenError(problem, write=write)


class Symbol:
    """A value known only on the device: an index, a scalar, a score, or what comes of them."""

    __slots__ = ("expr", "recorder")
    __array_ufunc__ = None
    ndim = 0

    def __init__(self, expr: Expr, recorder: Recorder) -> None:
        self.expr = expr
        self.recorder = recorder

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        from .functions import call

        first = next(a for a in _flat((*args, *(kwargs or {}).values())) if isinstance(a, Symbol))
        return call(first.recorder, func.__name__, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        from .functions import METHODS, call

        if name.startswith("__"):
            raise AttributeError(name)
        if name not in METHODS:
            reject(
                f"a symbol has no `.{name}`: it is one number of a kernel, not a tensor",
                "element-wise arithmetic: comparisons, & | ~, fg.where, fg.minimum, ...",
            )
        return lambda *args, **kwargs: call(self.recorder, name, (self, *args), kwargs)

    def __bool__(self) -> bool:
        reject(
            "Python asks whether a symbol is true (if, and, or, not, a chained comparison, min, "
            "max), and it has no value yet",
            "& for and, | for or, ~ for not, fg.where(condition, yes, no) for if, "
            "(a <= x) & (x < b) for a <= x < b, fg.minimum for min",
        )

    def __index__(self) -> int:
        reject(
            "a symbol is used where Python wants a plain integer",
            "a tensor for data that is indexed by symbols (fg.Tensor), not a list or an array",
        )

    def __float__(self) -> float:
        reject(
            "a symbol is used where Python wants a plain number (math.* functions, NumPy, .item())",
            "fg.exp, fg.log, fg.sqrt, fg.tanh, ... instead of the functions of math or numpy",
        )

    __int__ = __index__

    def __iter__(self) -> NoReturn:
        reject("a symbol is one number, and can't be iterated over", "an element-wise expression")

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        reject(
            "NumPy is called on a symbol",
            "fg.where, fg.minimum, fg.exp, ... or the function of the same name from torch",
        )

    def __len__(self) -> int:
        reject("a symbol is one number, and has no length", "q_len or kv_len for the lengths")

    def __getitem__(self, _: Any) -> NoReturn:
        reject("a symbol is one number, and can't be indexed", "the name of a tensor parameter")

    def __hash__(self) -> int:
        return hash(self.expr)

    @property
    def shape(self) -> Any:
        import torch

        return torch.Size([])

    @property
    def dtype(self) -> Any:
        import torch

        return {"bool": torch.bool, "int": torch.int64, "float": torch.float32}[self.expr.kind]

    @property
    def device(self) -> str:
        return "cpu"

    def __repr__(self) -> str:
        return f"Symbol({self.expr})"


def _flat(values: Any) -> list[Any]:
    flat: list[Any] = []
    for value in values:
        flat.extend(_flat(value) if isinstance(value, (tuple, list)) else [value])
    return flat


class TensorSymbol(Symbol):
    """A tensor parameter, read by indexing; only what is fully indexed is a number."""

    __slots__ = ("_kind", "_ndim", "_type", "indices", "name")

    def __init__(
        self,
        name: str,
        kind: Kind,
        ndim: int,
        recorder: Recorder,
        indices: tuple[Expr, ...] = (),
        tensor: TensorType | None = None,
    ) -> None:
        self.name, self._kind, self._ndim, self.indices = name, kind, ndim, indices
        self._type = tensor
        self.recorder = recorder

    @property
    def expr(self) -> Expr:  # type: ignore[override]
        if len(self.indices) != self._ndim:
            reject(
                f"{self.name} has {self._ndim} dimensions and is used with "
                f"{len(self.indices)} of them indexed",
                f"{self.name}[{', '.join(['b', 'h', 'q_idx', 'kv_idx'][: self._ndim])}], "
                "one index for each dimension",
            )
        return load(self.name, self._kind, self.indices)

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return self._ndim - len(self.indices)

    @property
    def shape(self) -> tuple[Any, ...]:
        dims = range(len(self.indices), self._ndim)
        return tuple(Symbol(Expr("size", "int", (), (self.name, d)), self.recorder) for d in dims)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        reject(
            f"len({self.name}) must be a plain integer, and the tensor is known only at the call",
            f"{self.name}.shape[0]",
        )

    def __getitem__(self, position: Any) -> Symbol:  # type: ignore[override]
        positions = position if isinstance(position, tuple) else (position,)
        if len(positions) > self.ndim:
            reject(
                f"{self.name} has {self._ndim} dimensions and is indexed by "
                f"{len(self.indices) + len(positions)}",
                "one index for each dimension",
            )
        first = len(self.indices)
        indices = tuple(_position(self, p, first + i) for i, p in enumerate(positions))
        partial = TensorSymbol(
            self.name, self._kind, self._ndim, self.recorder, self.indices + indices, self._type
        )
        return partial if partial.ndim else Symbol(partial.expr, self.recorder)

    def __hash__(self) -> int:
        return hash((self.name, self.indices))

    def __repr__(self) -> str:
        return f"TensorSymbol({self.name}, {self._ndim} dimensions)"


class ScalarSymbol(Symbol):
    """A tensor parameter that was given one number: used bare, or indexed by anything."""

    __slots__ = ()

    def __getitem__(self, _: Any) -> Symbol:  # type: ignore[override]
        return self

    def __hash__(self) -> int:
        return hash(self.expr)


def _position(tensor: TensorSymbol, position: Any, dim: int) -> Expr:
    if isinstance(position, slice) or position is None or position is Ellipsis:
        reject(
            f"{tensor.name} is indexed by a slice, None or ..., and a symbol reads one element",
            "one integer expression for each dimension",
        )
    expr = tensor.recorder.lift(position)
    if expr.kind == "float":
        reject(
            f"{tensor.name} is indexed by {expr}, which is a float",
            f"({expr}).to(int), or integer arithmetic with //",
        )
    # A negative number in the source counts from the end; what comes of symbols clamps.
    if not isinstance(position, Symbol) and expr.is_const and expr.attr < 0:
        return make("add", Expr("size", "int", (), (tensor.name, dim)), expr)
    return const(0) if _is_spread(tensor, dim, expr) else expr


def _is_spread(tensor: TensorSymbol, dim: int, position: Expr) -> bool:
    """Whether one element stands for every batch element or head."""
    kind = tensor._type
    if kind is None or dim not in kind.single or position.op != "index":
        return False
    return position.attr in kind.spread


def _binary(op: str, swap: bool = False, reverse: bool = False) -> Any:
    def method(self: Symbol, other: Any) -> Any:
        try:
            left, right = self.expr, self.recorder.lift(other)
        except TypeError:
            return NotImplemented
        pair = (right, left) if swap != reverse else (left, right)
        return Symbol(apply(op, *pair), self.recorder)

    return method


def apply(op: str, *args: Expr) -> Expr:
    """`make`, with its complaints turned into errors that show the user's line."""
    try:
        found = as_torch(op, *args)
        return make(op, *args) if found is None else found
    except KindError as error:
        reject(str(error), "operands of the right kind, e.g. value.to(int) or value != 0")
    except ZeroDivisionError as error:
        reject(f"{error}: {args[0]} by {args[1]}", "a divisor that is not zero")


_OPERATORS = {
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "truediv": "truediv",
    "floordiv": "floordiv",
    "mod": "mod",
    "pow": "pow",
    "and": "and",
    "or": "or",
    "xor": "xor",
    "lshift": "shl",
    "rshift": "shr",
}
for _name, _op in _OPERATORS.items():
    setattr(Symbol, f"__{_name}__", _binary(_op))
    setattr(Symbol, f"__r{_name}__", _binary(_op, reverse=True))
for _name, _op, _swap in (
    ("lt", "lt", False),
    ("le", "le", False),
    ("gt", "lt", True),
    ("ge", "le", True),
    ("eq", "eq", False),
    ("ne", "ne", False),
):
    setattr(Symbol, f"__{_name}__", _binary(_op, swap=_swap))


def _unary(op: str) -> Any:
    return lambda self: Symbol(apply(op, self.expr), self.recorder)


for _name, _op in (("neg", "neg"), ("abs", "abs"), ("invert", "not")):
    setattr(Symbol, f"__{_name}__", _unary(_op))
setattr(Symbol, "__pos__", lambda self: self)  # noqa: B010


def number(value: Any) -> Expr | None:
    """A plain Python or NumPy number as a constant."""
    if getattr(value, "shape", None) == () and type(value).__module__ == "numpy":
        value = value.item()
    if not isinstance(value, (bool, int, float)):
        return None
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        reject(f"{value} is beyond 64 bits", "2**62, which is further than any position")
    return const(value)
