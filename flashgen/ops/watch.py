"""What graphs of `torch.compile` were told of a declaration, looked at again before each run.

A mask reads `self.window`, `self.documents` or a parameter when a graph is made. The graph has a
guard on the program's `Watch`, which PyTorch compares with the one that the graph was made with:
another object by then, as equal pointers aren't compared. Where the functions read something else
than then, they are traced again: if they mean the same, the graph runs, with the tensors that are
there now; else PyTorch makes another graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.utils import _pytree

from ..graphs import outside_graphs

if TYPE_CHECKING:
    from ..spec import Program

# Digest of a form, names of the data that a call gives, and the tensors that the declaration holds.
Told = tuple[str, tuple[str, ...], tuple[torch.Tensor, ...]]

# Programs whose watch is the one that a graph's guard holds itself.
_guarded: list[weakref.ref[Program]] = []


class Held:
    """Lists of tensors that a declaration holds, by the digest of the form they are for: inputs of
    graphs, which find them here before each run."""


class Watch:
    """A constant of graphs, equal to another one where what that was told is so still."""

    def __init__(self, program: Program, held: Held) -> None:
        self.held = held
        self._program = weakref.ref(program)
        self._read = program.read
        self._told: list[tuple[str, Told, Callable[[], Told]]] = []
        # Nobody notes what a function read that was refused.
        self._is_refused = False

    def __hash__(self) -> int:
        return hash(id(self.held))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Watch) and other.held is self.held and other._is_current()

    def _tell(
        self, program: Program, digest: str, again: Callable[[], Told], is_refused: bool
    ) -> None:
        told = again()
        self._told.append((digest, told, again))
        self._is_refused |= is_refused
        self._read = program.read
        setattr(self.held, digest, [] if is_refused else list(told[2]))

    def _is_current(self) -> bool:
        is_known = self._read.are_current() and not self._is_refused
        return is_known or self._looked_at_again()

    @outside_graphs("a guard isn't a part of the graph")
    def _looked_at_again(self) -> bool:
        """Whether functions that read something else mean the same."""
        program = self._program()
        if program is None:
            return False
        try:
            # PyTorch asks with it off, and symbols answer for tensors by it.
            with torch._C._EnableTorchFunction():
                now = [again() for _, _, again in self._told]
        except Exception:  # of a user's function; making another graph says what is wrong
            return False
        pairs = [*zip(now, self._told, strict=True)]
        if any(new[:2] != old[:2] for new, (_, old, _) in pairs):
            return False
        for (found, _, tensors), (digest, _, _) in pairs:
            if found == digest:
                setattr(self.held, digest, list(tensors))
        self._read = program.read
        return True


_pytree.register_constant(Watch)


def tell(program: Program, digest: str, again: Callable[[], Told], is_refused: bool) -> bool:
    """Note what a graph that is being made is told, `again()`, by the form's digest; or that it
    `is_refused`. Not where the program's functions read nothing that may change: False."""
    read = program.read
    seen = program.in_graphs
    if seen.watch is None and read.complete and not (read.checks or is_refused):
        return False
    seen.watch = seen.watch or Watch(program, Held())
    seen.watch._tell(program, digest, again, is_refused)
    _guarded.append(weakref.ref(program))
    return True


def renew() -> None:
    """Give programs another watch than graphs have now that these are made. On the way of every
    operator."""
    while _guarded:
        program = _guarded.pop()()
        if program is not None:
            program.in_graphs.watch = Watch(program, program.in_graphs.watch.held)
