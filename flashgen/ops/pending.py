"""What a function that is being compiled has set by now, and PyTorch sets when its graph has run.

A declaration is traced while the graph is made, and would read what was there before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ..errors import FlashgenError
from ..trace.reads import Check, Reads, same


def refuse_pending(read: Reads, call: str) -> None:
    """Raises FlashgenError where one of the things that were read has been set."""
    for check in read.checks:
        for new in _set_since(check):
            if not _is_so(new, check):
                raise FlashgenError(
                    f"the compiled function sets {check.key!r}, which the declaration reads, ahead "
                    "of the call; PyTorch sets it when the graph has run",
                    call=call,
                    write=f"a parameter of the mask or score function, {check.key}: ..., that the "
                    "call gives; or set it before the compiled function is called",
                )


def _set_since(check: Check) -> Iterator[Any]:
    """What was set on the thing that was read, of Dynamo's own kinds; nothing where Dynamo keeps
    that otherwise than is known here."""
    with contextlib.suppress(AttributeError, ImportError, TypeError):
        from torch._dynamo.symbolic_convert import InstructionTranslator

        effects = InstructionTranslator.current_tx().output.side_effects
        for variable, names in [*effects.store_attr_mutations.items()]:
            value = getattr(variable, "value", None)
            if check.key in names and (value is check.holder or _has(value, check.holder)):
                yield names[check.key]
        entries = effects.id_to_variable.get(id(check.holder))
        if isinstance(check.holder, dict) and entries is not None:
            yield from _replaced(entries, check.key)


def _has(module: Any, holder: Any) -> bool:
    """Whether a module keeps in `holder` what is set on it."""
    kinds = ("_parameters", "_buffers", "_modules")
    return any(getattr(module, kind, None) is holder for kind in kinds)


def _replaced(entries: Any, name: str) -> Iterator[Any]:
    """An entry of a dictionary that isn't the one it had: `functional_call` replaces parameters."""
    for key, entry in entries.items.items():
        if key.vt.as_python_constant() == name:
            # What was there is read by its place in the dictionary.
            if getattr(entry.source, "base", None) != entries.source:
                yield entry


def _is_so(new: Any, check: Check) -> bool:
    """Whether what is set is a constant that was there before."""
    try:
        return same(new.as_python_constant(), check.then)
    except Exception:  # Dynamo's own, of what is no constant
        return False
