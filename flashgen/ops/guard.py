"""What graphs of `torch.compile` were told of a declaration, looked at again before each run.

A mask reads `self.window`, `self.documents` or a parameter when a graph is made. The graph has a
guard on the program's `Guarded`, which PyTorch compares with the one that the graph was made with:
another object by then, as equal pointers aren't compared. Where the functions read something else
than then, they are traced again: if they mean the same, the graph runs, with the tensors that are
there now; else PyTorch makes another graph."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree

from ..graphs import outside_graphs
from ..trace.reads import Reads

if TYPE_CHECKING:
    from ..spec import Program

# Digest of a form, names of the data that a call gives, and the tensors that the declaration holds.
Told = tuple[str, tuple[str, ...], tuple[torch.Tensor, ...]]

# Programs of which a graph's guard holds the very object that it looks at.
_new: list[weakref.ref[Program]] = []
_numbers = itertools.count()


@dataclass
class _Record:
    """What graphs were told, and what had been read by then. Tensors aren't kept: they may be
    replaced and dropped."""

    told: list[tuple[str, tuple[Any, ...], Callable[[], Told]]] = field(default_factory=list)
    read: Reads = field(default_factory=Reads)
    # Nobody notes what a function read that was refused.
    is_refused: bool = False


class Held:
    """Lists of tensors that a declaration holds, by the digest of the form they are for: inputs of
    graphs, which find them here before each run."""


class Guarded:
    """A constant of graphs, equal to another one where what that was told is so still.

    Guards live as long as the code that was compiled, and nothing follows what they hold. So one
    that a guard holds has nothing of the model: its record is the program's."""

    def __init__(self, program: Program, held: Held) -> None:
        self.held = held
        self._program = weakref.ref(program)
        self._label = program.label
        self.number = next(_numbers)

    def __hash__(self) -> int:
        return hash(self._label)

    def __eq__(self, other: object) -> bool:
        """PyTorch asks the one that is there now about the one that its guard holds."""
        if not isinstance(other, Guarded):
            return NotImplemented
        program = self._program()
        if program is None or other._program() is not program:
            return False
        record = program.in_graphs.records[other.number]
        is_known = record.read.are_current() and not record.is_refused
        return is_known or _looked_at_again(program, record)

    def __del__(self) -> None:
        if (program := self._program()) is not None:
            program.in_graphs.records.pop(self.number, None)


_pytree.register_constant(Guarded)


@outside_graphs("a guard isn't a part of the graph")
def _looked_at_again(program: Program, record: _Record) -> bool:
    """Whether functions that read something else mean the same."""
    try:
        # PyTorch asks with it off, and symbols answer for tensors by it.
        with torch._C._EnableTorchFunction():
            now = [again() for _, _, again in record.told]
    except Exception:  # of a user's function; making another graph says what is wrong
        return False
    pairs = [*zip(now, record.told, strict=True)]
    if any(new[:2] != old for new, (_, old, _) in pairs):
        return False
    for (found, _, tensors), (digest, _, _) in pairs:
        if found == digest:
            setattr(program.in_graphs.guarded.held, digest, list(tensors))
    record.read = program.read
    return True


def tell(
    program: Program, digest: str, told: Told, again: Callable[[], Told], is_refused: bool
) -> bool:
    """Note what a graph that is being made is told, by the digest that it carries, or that it
    `is_refused`; `again()`: what it would be told later. Not where the program's functions read
    nothing that may change: False."""
    seen, read = program.in_graphs, program.read
    if seen.guarded is None and read.complete and not (read.checks or is_refused):
        return False
    seen.guarded = seen.guarded or Guarded(program, Held())
    record = seen.records.setdefault(seen.guarded.number, _Record())
    record.told.append((digest, told[:2], again))
    record.read = read
    record.is_refused |= is_refused
    setattr(seen.guarded.held, digest, [] if is_refused else list(told[2]))
    _new.append(weakref.ref(program))
    return True


def renew() -> None:
    """Give programs another one than guards have now that these are made. On the way of every
    run of the attention operator."""
    while _new:
        program = _new.pop()()
        if program is not None:
            before = program.in_graphs.guarded
            program.in_graphs.guarded = Guarded(program, before.held)
            before.held = None
