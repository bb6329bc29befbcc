"""What Hopper's backward reads for each query: loaded by the warp that loads, a few steps ahead.

The warpgroups that compute have no registers for addresses, and would wait for memory in the middle
of a step. They find the numbers in shared memory."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..spec import Spec
from .mask_text import needed

Lines = tuple[str, ...]


@dataclass(frozen=True)
class Value:
    """A number of each query, as it lies in memory.

    `name`: of what the pairs read; `pointer`: to data of its type; `change`: what to make of it."""

    name: str
    pointer: str
    change: str

    @property
    def loaded(self) -> str:
        """What the warp that loads calls it."""
        return f"{self.name}_loaded"


@dataclass(frozen=True)
class Shipped:
    """`mask`: values for steps that the mask cuts; `score`: for all steps. The statements that load
    them: once for a key block, and for each step."""

    mask: tuple[Value, ...]
    score: tuple[Value, ...]
    key_lines: Lines
    query_lines: Lines

    @property
    def values(self) -> tuple[Value, ...]:
        return self.score + self.mask


@dataclass(frozen=True)
class Read:
    """Statements of queries, and what reads them."""

    lines: Lines
    texts: Lines


def ship(spec: Spec, key_lines: Lines, mask: Read, score: Read) -> tuple[Lines, Lines, Shipped]:
    """The mask's and the score's statements of queries without what is loaded, and that."""
    loader: list[str] = []
    found = [_part(spec, part, loader) for part in (mask, score)]
    (mask_lines, of_mask), (score_lines, of_score) = found
    query_lines = needed(loader, [value.loaded for value in of_mask + of_score])
    keys = needed(key_lines, query_lines)
    return mask_lines, score_lines, Shipped(of_mask, of_score, keys, query_lines)


def _part(spec: Spec, part: Read, loader: list[str]) -> tuple[Lines, tuple[Value, ...]]:
    """What is computed of a part's statements, and values of what they load; `loader` grows by all
    of them, each load apart from what is done with it."""
    loads = [line for line in part.lines if " = tl.load(" in line]
    computed = needed([line for line in part.lines if line not in loads], part.texts)
    words = set(re.findall(r"\w+", "\n".join((*computed, *part.texts))))
    values = []
    for line in part.lines:
        if line not in loads:
            loader.append(line)
            continue
        name, _, load = line.partition(" = ")
        end = _end_of_call(load)
        value = Value(name, _pointer(spec, load), load[end:])
        loader += [f"{value.loaded} = {load[:end]}", f"{name} = {value.loaded}{value.change}"]
        if name in words:
            values.append(value)
    return computed, tuple(values)


def _end_of_call(text: str) -> int:
    """Behind the parenthesis that closes the first one."""
    depth = 0
    for place, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == ")" and depth == 0:
            return place + 1
    raise AssertionError(text)


def _pointer(spec: Spec, load: str) -> str:
    """The data that a load reads: of several names that fit the longest."""
    address = load.removeprefix("tl.load(")
    names = [tensor.name for tensor in spec.tensors]
    fits = [name for name in names if re.match(rf"{name}_(ptr\b|row\b|row_)", address)]
    return f"{max(fits, key=len)}_ptr"
