"""`@fg.mask`: which keys a query may see, as a value that composes."""

from __future__ import annotations

import keyword
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, overload

from ..errors import FlashgenError, format_call
from ..expr import INDEX_NAMES
from ..graphs import outside_graphs
from ..trace import Symbol
from .leaf import Argument, Leaf, unknown_name

if TYPE_CHECKING:
    import torch

# Names that a call uses itself, so that no parameter may have them.
RESERVED = frozenset(
    "q k v kv query key value scale q_offset return_lse schedule deterministic backend sinks "
    "cu_seqlens_q cu_seqlens_kv max_seqlen_q max_seqlen_kv page_table kv_lens page_layout "
    "batch_invariant q_len kv_len batch heads block_size planner dropout dropout_p seed "
    "self".split()
)
SYMBOLS = frozenset({"score", *INDEX_NAMES})


_IN_A_GRAPH = "masks are made before the compiled function, and attentions with them"


class Mask:
    """A predicate over positions: which keys (`kv_idx`) a query (`q_idx`) may see.

    Made by `@fg.mask`; composes with `&`, `|`, `~`. Calling it binds data early
    (`masks.sliding_window(window=4096)`); what is left is given by name at the attention's call.
    Masks are immutable: binding and renaming give new ones."""

    @outside_graphs(_IN_A_GRAPH)
    def __init__(self, op: str, parts: tuple[Any, ...]) -> None:
        self._op, self._parts = op, parts
        if op == "leaf":
            function = parts[0].function.function
            self.__wrapped__ = function
            self.__doc__ = function.__doc__
            self.__name__ = parts[0].function.name
            self.__module__ = getattr(function, "__module__", __name__)
            self.__qualname__ = getattr(function, "__qualname__", self.__name__)
        _check_names(self)

    @property
    def name(self) -> str:
        """A name for titles and for the generated kernel's file."""
        return self._show(0)

    def _show(self, strength: int) -> str:
        if self._op == "leaf":
            return str(self._parts[0].function.name)
        signs = {"or": ("|", 1), "and": ("&", 2), "not": ("~", 3)}
        sign, own = signs[self._op]
        if self._op == "not":
            text = sign + self._parts[0]._show(own)
        else:
            text = f" {sign} ".join(part._show(own) for part in self._parts)
        return text if own >= strength else f"({text})"

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        if self._op == "leaf":
            return self._parts
        return tuple(leaf for part in self._parts for leaf in part.leaves)

    @property
    def params(self) -> tuple[Argument, ...]:
        """What a call may still give, each name once."""
        return tuple({a.name: a for leaf in self.leaves for a in leaf.free}.values())

    def _map(self, change: Callable[[Leaf], Leaf]) -> Mask:
        if self._op == "leaf":
            return Mask("leaf", (change(self._parts[0]),))
        return Mask(self._op, tuple(part._map(change) for part in self._parts))

    @outside_graphs(_IN_A_GRAPH)
    def __call__(self, *symbols: Any, **data: Any) -> Any:
        """Bind data early, by name. With symbols, use the mask inside another one's function."""
        if symbols or any(isinstance(value, Symbol) for value in data.values()):
            return self._inside(*symbols, **data)
        known = [a.name for a in self.params]
        for name in data:
            if name not in known:
                raise unknown_name(name, known, _call_text(self, data))
        bound = self._map(lambda leaf: leaf.bind(data))
        for leaf in bound.leaves:
            leaf.run_check(leaf.bound, _call_text(self, data))
        return bound

    def _inside(self, *symbols: Any, **data: Any) -> Any:
        if self._op != "leaf" or not all(isinstance(s, Symbol) for s in symbols):
            names = ", ".join(f"{a.name}=..." for a in self.params)
            text = f"{self.name}({names})" if names else f"{self.name}, as it is: it takes no data"
            problem = "a mask's data is bound by name"
            if any(getattr(s, "ndim", 0) >= 3 for s in symbols):
                problem = "a mask isn't called with queries, keys and values: an attention is"
                mask = f"masks.{self.name}" if self._op == "leaf" else self.name
                text = f"fg.Attention({mask})(q, k, v{', ' if names else ''}{names})"
            raise FlashgenError(problem, call=format_call(self.name, *symbols, **data), write=text)
        leaf = self._parts[0]
        return leaf.function.function(*symbols, **{**leaf.bound, **data})

    @outside_graphs(_IN_A_GRAPH)
    def to(self, device: torch.device | str) -> Mask:
        """The same mask with the tensors bound to it on another device."""
        return self._map(lambda leaf: leaf.to(device))

    @outside_graphs(_IN_A_GRAPH)
    def rename(self, **changes: str) -> Mask:
        """Give parameters other names: `document.rename(doc="segment")`.

        Raises FlashgenError for a name that isn't a parameter."""
        known = [a.name for a in self.params]
        for name in changes:
            if name not in known:
                raise unknown_name(name, known, f"{self.name}.rename({name}=...)")
        return self._map(lambda leaf: leaf.rename(changes))

    def __and__(self, other: Any) -> Mask:
        return Mask("and", (self, as_mask(other)))

    def __rand__(self, other: Any) -> Mask:
        return Mask("and", (as_mask(other), self))

    def __or__(self, other: Any) -> Mask:
        return Mask("or", (self, as_mask(other)))

    def __ror__(self, other: Any) -> Mask:
        return Mask("or", (as_mask(other), self))

    def __invert__(self) -> Mask:
        return Mask("not", (self,))

    def __bool__(self) -> bool:
        if sys._getframe(1).f_globals.get("__name__", "").startswith("torch._dynamo"):
            # Some ask so of whatever is called.
            return True
        raise FlashgenError(
            "Python asks whether a mask is true (and, or, not)",
            call=self.name,
            write="& for and, | for or, ~ for not",
        )

    @outside_graphs("a mask's dense matrix is made before the compiled function")
    def dense(
        self,
        q_len: int | torch.Tensor,
        kv_len: int | torch.Tensor,
        *,
        batch: int = 1,
        heads: int = 1,
        q_offset: int | torch.Tensor | None = None,
        **data: Any,
    ) -> torch.Tensor:
        """The boolean matrix, [B|1, H|1, Sq, Skv]: 1 where the mask doesn't use `b` or `h`.

        `heads` is the number of query heads. Lengths may be integer tensors [B], of packed or
        padded sequences (`cu_seqlens.diff()`): what lies beyond a sequence's own is False.
        Raises FlashgenError like a call would."""
        from ..check_lengths import checked_lengths
        from ..reference import dense_mask, dense_masks

        q_len, kv_len, batch, heads, q_offset = checked_lengths(
            self.name, q_len, kv_len, batch, heads, q_offset
        )
        if not (isinstance(q_len, int) and isinstance(kv_len, int)):
            return dense_masks(self, q_len, kv_len, heads, q_offset, data)
        return dense_mask(self, q_len, kv_len, batch, heads, q_offset, data)

    def __reduce__(self) -> Any:
        return Mask, (self._op, self._parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mask) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash((self._op, self.name))

    def _key(self) -> Any:
        if self._op == "leaf":
            leaf = self._parts[0]
            bound = {k: id(v) if hasattr(v, "shape") else v for k, v in leaf.bound.items()}
            return leaf.function, tuple(leaf.names.items()), tuple(bound.items())
        return self._op, tuple(part._key() for part in self._parts)

    def __repr__(self) -> str:
        return f"Mask({self.name}{''.join(f', {a}' for a in self.params)})"


def as_mask(value: Any) -> Mask:
    """A Mask as it is; a function, FlexAttention's included, made into one."""
    return value if isinstance(value, Mask) else Mask("leaf", (Leaf.of(value, "mask"),))


@overload
def mask(function: Callable[..., Any], /) -> Mask: ...
@overload
def mask(*, check: Callable[..., None]) -> Callable[[Callable[..., Any]], Mask]: ...
@outside_graphs(_IN_A_GRAPH)
def mask(
    function: Callable[..., Any] | None = None, *, check: Callable[..., None] | None = None
) -> Any:
    """Make a Mask of a predicate over positions.

    The function asks by name for what it needs: the indices `b, h, h_kv, q_idx, kv_idx, q_len,
    kv_len`; runtime scalars (`window: int`), constants (`width: fg.Const[int]`) and data
    (`doc: fg.Tensor`). It returns a boolean expression. A FlexAttention mask function is accepted
    as it is. `check` is called on the host with the data it names, and raises ValueError for
    values that make no sense. Raises FlashgenError if a parameter's role can't be told."""
    if function is None:
        return lambda f: Mask("leaf", (Leaf.of(f, "mask", check),))
    return Mask("leaf", (Leaf.of(function, "mask"),))


def _check_names(composed: Mask) -> None:
    check_arguments([a for leaf in composed.leaves for a in leaf.arguments], composed.name)


def check_arguments(arguments: Any, call: object) -> None:
    """No reserved name, and the same name always the same kind. Raises FlashgenError."""
    seen: dict[str, Argument] = {}
    for argument in arguments:
        if not argument.name.isidentifier() or keyword.iskeyword(argument.name):
            raise FlashgenError(
                f"{argument.name!r} can't be given as a keyword argument",
                call=call,
                write="an identifier",
            )
        if argument.name in SYMBOLS:
            raise FlashgenError(
                f"{argument.name} is what functions ask for the index symbol by",
                call=call,
                write=f"another name for the parameter, e.g. {argument.name}_",
            )
        if argument.name in RESERVED:
            raise FlashgenError(
                f"{argument.name} is a name of the call's own arguments",
                call=call,
                write=f"another name for the parameter, e.g. {argument.name}_ or data_"
                f"{argument.name}",
            )
        other = seen.setdefault(argument.name, argument)
        if other != argument:
            raise FlashgenError(
                f"`{other}` and `{argument}` share a name and are of different kinds",
                call=call,
                write=f'.rename({argument.name}="another_name") on one of the two masks',
            )


def walk_masks(root: Mask) -> Iterator[Mask]:
    yield root
    if root._op != "leaf":
        for part in root._parts:
            yield from walk_masks(part)


def _call_text(called: Mask, data: Mapping[str, Any]) -> str:
    return format_call(called.name, **data)
