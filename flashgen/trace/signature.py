"""What a user's function asks for: index symbols by name, scalars, constants, tensors."""

from __future__ import annotations

import functools
import inspect
import linecache
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from ..errors import FlashgenError, SourceLine, show
from ..expr import INDEX_NAMES

T = TypeVar("T")
_FLEX_NAMES = {
    "mask": ("b", "h", "q_idx", "kv_idx"),
    "score": ("score", "b", "h", "q_idx", "kv_idx"),
}
Role = Literal["index", "score", "scalar", "const", "tensor", "default"]
Style = Literal["named", "flex"]


class Tensor:
    """Annotates a parameter as data: a tensor given at the call (or bound early) by name.

    Inside the function it is indexed by integer expressions, one for each dimension; every index
    is clamped to the dimension. A tensor without dimensions is used bare. Integers of any dtype are
    as wide as is needed: nothing wraps."""

    def __getitem__(self, index: Any) -> Any:
        raise FlashgenError("fg.Tensor is an annotation", write="doc: fg.Tensor")


class Const(Generic[T]):
    """Annotates a parameter as baked into the kernel: `width: fg.Const[int]`.

    A new value makes a new kernel; `width: int` is a runtime scalar and doesn't."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a user's function. `type`: int, float, bool or tensor."""

    name: str
    role: Role
    type: str = ""
    default: Any = inspect.Parameter.empty


@dataclass(frozen=True)
class Function:
    """A user's function with its parameters understood; compares by identity of the function."""

    function: Callable[..., Any]
    parameters: tuple[Parameter, ...] = field(compare=False)
    style: Style = field(compare=False)

    @staticmethod
    def of(function: Callable[..., Any], wants: Literal["mask", "score"]) -> Function:
        """Read the signature. Raises FlashgenError for a parameter whose role can't be told."""
        return _read(function, wants)

    @property
    def name(self) -> str:
        inner = self.function
        while isinstance(inner, functools.partial):
            inner = inner.func
        return getattr(inner, "__name__", type(inner).__name__)

    @property
    def line(self) -> SourceLine | None:
        return _definition(self.function)

    @property
    def arguments(self) -> tuple[Parameter, ...]:
        """The parameters that the call gives, by name."""
        return tuple(p for p in self.parameters if p.role in ("scalar", "const", "tensor"))

    def __deepcopy__(self, memo: Any) -> Function:
        return self

    def __reduce__(self) -> Any:
        if inspect.ismethod(self.function):
            # As Python pickles it: with its object, whose class is found by name.
            return _restore_method, (self.function.__self__, self.function.__name__, self._wants)
        module = getattr(self.function, "__module__", None)
        path = getattr(self.function, "__qualname__", "")
        found = _find(module, path)
        if _function_of(found) is not self.function:
            raise FlashgenError(
                f"{path or self.name} can't be pickled: it can't be found again by its name",
                line=self.line,
                write="the function at the top level of a module",
            )
        return _restore, (module, path, self._wants)

    @property
    def _wants(self) -> Literal["mask", "score"]:
        return "score" if any(p.role == "score" for p in self.parameters) else "mask"


def _definition(function: Callable[..., Any]) -> SourceLine | None:
    """The line where a function starts."""
    inner: Any = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    code = getattr(inspect.unwrap(inner), "__code__", None)
    if code is None:
        return None
    text = linecache.getline(code.co_filename, code.co_firstlineno).strip()
    return SourceLine(code.co_filename, code.co_firstlineno, text)


def _find(module: str | None, path: str) -> Any:
    found: Any = sys.modules.get(module or "")
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


def _function_of(found: Any) -> Any:
    """The plain function behind a name that a decorator may have replaced."""
    return getattr(found, "__wrapped__", found)


def _restore(module: str, path: str, wants: Literal["mask", "score"]) -> Function:
    __import__(module)
    return Function.of(_function_of(_find(module, path)), wants)


def _restore_method(of: Any, name: str, wants: Literal["mask", "score"]) -> Function:
    return Function.of(getattr(of, name), wants)


def _read(function: Callable[..., Any], wants: Literal["mask", "score"]) -> Function:
    if not callable(function):
        raise FlashgenError(
            f"a {wants} must be a function, and {show(function)} is a {type(function).__name__}",
            write=_instead(function, wants),
        )
    parameters = _parameters(function, wants)
    hints = _annotations(function, parameters)
    known = {"score", *INDEX_NAMES} if wants == "score" else set(INDEX_NAMES)
    required = [p for p in parameters if p.default is p.empty]
    if _is_positional(required, hints, known, wants):
        return Function(function, tuple(_flex(wants)), "flex")
    roles = tuple(_named(p, hints.get(p.name), known, function, wants) for p in parameters)
    return Function(function, roles, "named")


def _instead(value: Any, wants: str) -> str:
    """What to write for what isn't a function."""
    if wants == "score":
        return "@fg.attention(mask=...) above a function"
    if type(value).__name__ == "BlockMask":
        return "masks.from_block_mask(block_mask)"
    if getattr(value, "ndim", 0) >= 2:
        return "masks.from_dense(matrix) for a boolean matrix; masks of a formula need no memory"
    return "@fg.mask above a function, or one of flashgen.masks"


def _parameters(function: Callable[..., Any], wants: str) -> list[inspect.Parameter]:
    """Raises FlashgenError for what Python knows no parameters of: functions of C, many types."""
    is_type = isinstance(function, type)
    try:
        found = None if is_type else inspect.signature(function)
    except (ValueError, TypeError):
        found = None
    if found is not None:
        return list(found.parameters.values())
    name = getattr(function, "__name__", type(function).__name__)
    raise FlashgenError(
        f"{name} is a {'type' if is_type else 'function without a Python signature'}, and a "
        f"{wants} is a function whose parameters say what it reads",
        write=_instead(None, wants),
    )


def _is_positional(
    required: list[inspect.Parameter], hints: dict[str, Any], known: set[str], wants: str
) -> bool:
    """FlexAttention's form: names of the author's own, and no annotation that gives them a role.

    torch.Tensor is how its users annotate indices; it counts so only if every parameter has one.
    A symbol of ours in another place than its own is no such function, but one that forgot an
    annotation."""
    places = _FLEX_NAMES[wants]
    strangers = [p for p in required if p.name not in known]
    if len(required) != len(places):
        return False
    if any(p.name in places and p.name != n for p, n in zip(required, places, strict=True)):
        return False
    all_annotated = all(p.annotation is not p.empty for p in required)
    loose = {None, Any, *(["torch.Tensor"] if all_annotated else [])}
    return bool(strangers) and all(hints.get(p.name) in loose for p in strangers)


def _flex(wants: str) -> list[Parameter]:
    return [Parameter(n, "score" if n == "score" else "index") for n in _FLEX_NAMES[wants]]


def _named(
    parameter: inspect.Parameter,
    hint: Any,
    known: set[str],
    function: Callable[..., Any],
    wants: str,
) -> Parameter:
    name, default = parameter.name, parameter.default
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        stars = "*" if parameter.kind is parameter.VAR_POSITIONAL else "**"
        problem = f"the {wants} takes {stars}{name}, and flashgen binds parameters by their names"
    elif name in known:
        return Parameter(name, "score" if name == "score" else "index")
    elif hint in ("int", "float", "bool"):
        return Parameter(name, "scalar", hint, default)
    elif hint in ("tensor", "torch.Tensor"):
        return Parameter(name, "tensor", "tensor", default)
    elif isinstance(hint, str) and hint.startswith("const "):
        return Parameter(name, "const", hint.removeprefix("const "), default)
    elif hint is None and default is not parameter.empty:
        return Parameter(name, "default")
    elif hint is None:
        problem = f"nothing says what the parameter {name} of this {wants} is"
    else:
        problem = f"the parameter {name} of this {wants} is annotated {hint!r}"
    raise FlashgenError(
        problem,
        line=_definition(function),
        write=f"an index symbol ({', '.join(sorted(known))}), or {name}: int, float or bool for a "
        f"runtime scalar, {name}: fg.Const[int] for a constant, {name}: fg.Tensor for data; a "
        f"FlexAttention function has {'4' if wants == 'mask' else '5'} plain parameters",
    )


def _annotations(
    function: Callable[..., Any], parameters: list[inspect.Parameter]
) -> dict[str, Any]:
    """Parameter name to int, float, bool, tensor, torch.Tensor, `const int`, or what it is.

    Annotations of index symbols are ignored."""
    return {
        p.name: _annotation(p.annotation, function)
        for p in parameters
        if p.annotation is not p.empty and p.name not in ("score", *INDEX_NAMES)
    }


def _annotation(annotation: Any, function: Callable[..., Any]) -> Any:
    if isinstance(annotation, str):
        text = annotation.strip()
        try:
            inner: Any = inspect.unwrap(function)
            while isinstance(inner, functools.partial):
                inner = inner.func
            annotation = eval(text, getattr(inner, "__globals__", {}))
            if isinstance(annotation, str):
                # Quoted, in a module whose annotations are strings anyway.
                return _annotation(annotation, function)
        except Exception:  # names that exist only for type checkers: read the text instead
            return _annotation_text(text)
    if annotation in (int, float, bool):
        return annotation.__name__
    if annotation is Tensor:
        return "tensor"
    if getattr(annotation, "__name__", "") == "Tensor":
        return "torch.Tensor"
    if getattr(annotation, "__origin__", None) is Const:
        return f"const {annotation.__args__[0].__name__}"
    return annotation


def _annotation_text(text: str) -> str:
    last = text.rsplit(".", 1)[-1]
    if last == "Tensor":
        return "tensor"
    if last.startswith("Const["):
        return f"const {last[6:-1]}"
    return last
