"""Masks of Hopper's forward as statements: of rows, of keys, of pairs, or as bits of keys."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..expr import Expr, leaves, walk
from ..lower import isolate
from ..order import ordered
from ..spec import Spec
from . import Variant, lower_for
from .by_key import across, read_of, stages
from .flags import without_flags
from .mask_text import needed


@dataclass(frozen=True)
class Cut:
    """How the pairs of a cut tile are told apart: a tile's statements for its keys, one key a
    thread, `crossing` of their names, and statements of pairs and a test that read these.

    `bits`: the test for all of a thread's keys at once, where it asks for positions alone;
    `bits_inside`: and for keys that there are."""

    key_lines: tuple[str, ...]
    crossing: tuple[str, ...]
    tile_lines: tuple[str, ...]
    keep: str
    bits: str = ""
    bits_inside: str = ""


@dataclass(frozen=True)
class MaskMath:
    """A mask as statements. `ordered`: the same where `holds`, for data in order; None without.

    `row_lines`, `key_lines`: of both."""

    row_lines: tuple[str, ...]
    key_lines: tuple[str, ...]
    general: Cut
    ordered: Cut | None
    holds: str
    helpers: frozenset[str]

    @property
    def lines(self) -> tuple[str, ...]:
        """All statements, and the tests."""
        cuts = [self.general, *([self.ordered] if self.ordered else [])]
        pairs = [line for cut in cuts for line in (*cut.tile_lines, cut.keep)]
        return (*self.row_lines, *self.key_lines, *pairs)

    @property
    def assigned(self) -> frozenset[str]:
        """Names that the statements give."""
        return frozenset(line.partition(" = ")[0] for line in self.lines if " = " in line)


# Keys that there are: of a mask's first tile, whichever that is.
_INSIDE = "hopper.keys_before(s, kv_len, first_key, 0)"


def mask_math(spec: Spec, variant: Variant) -> MaskMath:
    """Statements of a spec's mask; without one, keys that there are."""
    if spec.mask is None:
        inside = Cut((), (), (), "kv_idx >= 0", _INSIDE, _INSIDE)
        return MaskMath((), (), inside, None, "", frozenset())
    forms = [spec.mask, *([cheaper.mask] if (cheaper := ordered(spec.mask)) else [])]
    exprs = [without_flags(isolate(form)) for form in forms]
    stage_of = stages(exprs, frozenset(("q_idx",)))
    exprs += [cheaper.holds] if cheaper else []
    found = lower_for(exprs, spec, variant, frozenset(), stages=3, stage_of=stage_of)
    rows, keys, tile = found.statements
    cuts = [
        _cut(keys, tile, keep, _compares_integers(form))
        for form, keep in zip(exprs[: len(forms)], found.results, strict=False)
    ]
    holds = found.results[2] if cheaper else ""
    return MaskMath(rows, keys, cuts[0], cuts[1] if cheaper else None, holds, found.helpers)


def _compares_integers(mask: Expr) -> bool:
    """Whether keys' positions are compared with nothing else."""
    tests = [n for n in walk(mask) if n.op in ("lt", "le") and "kv_idx" in leaves(n, "index")]
    return all(arg.kind == "int" for test in tests for arg in test.args)


def _cut(keys: tuple[str, ...], tile: tuple[str, ...], keep: str, of_integers: bool) -> Cut:
    tile = needed(tile, [keep])
    keys = needed(keys, [keep, *tile])
    crossing = read_of(keys, [keep, *tile])
    pairs = tuple(_hidden(across(line, crossing)) for line in tile)
    bits = _as_bits(keep) if of_integers and not pairs and not crossing else ""
    inside = _bits_inside(bits) if bits else ""
    return Cut(keys, crossing, pairs, across(keep, crossing), bits, inside)


_COMPARED = re.compile(r"kv_idx (<=?) (\w+)|(\w+) (<=?) kv_idx")


def _as_bits(keep: str) -> str:
    """A test of keys' positions with a bit for each key; empty where it asks for more."""
    if re.sub(r"[()&|~ ]", "", _COMPARED.sub("", keep)) or re.search(r"\d{10}", keep):
        return ""
    return _COMPARED.sub(_bits_of, keep)


def _bits_of(test: re.Match[str]) -> str:
    is_before = test[2] is not None
    including = test[1] == "<=" if is_before else test[4] == "<"
    place = test[2] if is_before else test[3]
    return f"{'' if is_before else '~'}hopper.keys_before(s, {place}, first_key, {int(including)})"


def _bits_inside(bits: str) -> str:
    """The same of keys that there are: the length is one more end, or that of one that is known."""
    first = re.search(r"(?<!~)hopper\.keys_before\(s, (\w+), first_key, ([01])\)", bits)
    if first is None or "|" in bits or "~(" in bits:
        return f"{_INSIDE} & ({bits})"
    place, including = first.groups()
    last = "kv_len - 1" if including == "1" else "kv_len"
    before = f"hopper.keys_before(s, gl.minimum({place}, {last}), first_key, {including})"
    return bits[: first.start()] + before + bits[first.end() :]


def _hidden(line: str) -> str:
    """A test of bits that LLVM doesn't make for several pairs at a time, as it would of those
    compared with one number, to put the results together bit by bit."""
    return re.sub(r"^(\w+) = (.+ & \w+) == 0$", r"\1 = hopper.opaque(\2) == 0", line)
