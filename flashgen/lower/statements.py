"""Expressions as statements: each value is computed where it changes, once, and named if shared."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from ..bounds import side
from ..expr import Expr, walk
from . import spell
from .spell import ATOM, Text
from .widths import Widths, inside, size_name

# What floats are in a kernel.
_FLOATS = {"float": "FLOAT", "double": "tl.float64"}
# Where a value is computed: 0 outermost. A kernel names its stages (say: row block, tile).
Stage = int


@dataclass(frozen=True)
class Lowered:
    """Statements by stage, the text of each result, and the helper functions they call."""

    statements: tuple[tuple[str, ...], ...]
    results: tuple[str, ...]
    helpers: frozenset[str]


def lower(
    exprs: list[Expr],
    *,
    stages: int,
    stage_of: Callable[[Expr], Stage],
    names: Mapping[str, str],
    dtypes: Mapping[str, torch.dtype],
    wide_scalars: frozenset[str] = frozenset(),
    tiles: Mapping[Expr, str] | None = None,
    taken: frozenset[str] = frozenset(),
) -> Lowered:
    """Write `exprs` as Triton.

    `stage_of` says where a value changes; `names` spells indices, the score and distances; `tiles`
    spells summaries of tiles; `taken` are names that can't be given. A value of an earlier
    stage than its user gets a name there, and so does one that is used twice."""
    lowering = _Lowering(stages, stage_of, names, dtypes, wide_scalars, tiles or {}, set(taken))
    return lowering.run(exprs)


@dataclass
class _Lowering:
    stages: int
    stage_of: Callable[[Expr], Stage]
    names: Mapping[str, str]
    dtypes: Mapping[str, torch.dtype]
    wide_scalars: frozenset[str]
    tiles: Mapping[Expr, str]
    taken: set[str]
    statements: list[list[str]] = field(init=False)
    _texts: dict[Expr, Text] = field(default_factory=dict)
    _bindings: dict[tuple[Stage, str], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.statements = [[] for _ in range(self.stages)]
        self.widths = Widths(self.dtypes, self.wide_scalars)

    def run(self, exprs: list[Expr]) -> Lowered:
        order = list(dict.fromkeys(n for e in exprs for n in walk(e, known=self.tiles)))
        self._uses = Counter(arg for node in order for arg in node.args)
        self._users: dict[Expr, int] = {}
        for node in order:
            for arg in node.args:
                stage = self.stage_of(node)
                self._users[arg] = max(self._users.get(arg, 0), stage)
        for node in order:
            self._texts[node] = self._named(node, self._spell(node), node in exprs)
        results = tuple(self._text(e)[0] for e in exprs)
        lines = "\n".join([*(line for part in self.statements for line in part), *results])
        called = frozenset(h for h in spell.HELPERS if re.search(rf"\b{h}\(", lines))
        return Lowered(tuple(tuple(part) for part in self.statements), results, called)

    def _text(self, node: Expr) -> Text:
        if node in self.tiles:
            return self.tiles[node], ATOM
        return self._texts[node]

    def _named(self, node: Expr, text: Text, is_result: bool) -> Text:
        """Give a value a name where it is worth one."""
        if not node.args and node.op != "load":
            return text
        stage = self.stage_of(node)
        hoisted = stage < self._users.get(node, stage) and not is_result
        shared = self._uses[node] > 1
        if not (hoisted or shared or node.op == "load"):
            return text
        name = self._fresh(self._hint(node))
        self.statements[stage].append(f"{name} = {text[0]}")
        return name, ATOM

    def _hint(self, node: Expr) -> str:
        if node.op == "load":
            sides = [s for s, i in (("q", "q_idx"), ("kv", "kv_idx")) if i in _indices(node)]
            return "_".join([node.attr, *sides, *([] if sides else ["value"])])
        if node.kind == "bool":
            return "test"
        sides = [s for s, i in (("q", "q_idx"), ("kv", "kv_idx")) if i in _indices(node)]
        return "_".join([*sides, node.op]) if sides else node.op + "_value"

    def _fresh(self, hint: str) -> str:
        name, turn = hint, 2
        while name in self.taken:
            name, turn = f"{hint}_{turn}", turn + 1
        self.taken.add(name)
        return name

    def _spell(self, node: Expr) -> Text:
        if node.op == "const":
            return spell.double(node.attr) if node.kind == "double" else spell.constant(node.attr)
        if node.op in ("index", "score"):
            return self.names[node.attr or "score"], ATOM
        if node.op == "ahead":
            return self.names["ahead"], ATOM
        if node.op == "scalar":
            name = self.names.get(node.attr, node.attr)
            if node.kind == "double":
                # Its bits, as Triton passes numbers with a point in 32.
                return f"{name}.to(tl.int64).to(tl.float64, bitcast=True)", ATOM
            return (f"{name} != 0", 1) if node.kind == "bool" else (name, ATOM)
        if node.op == "size":
            return size_name(*node.attr), ATOM
        if node.op == "load":
            return self._load(node)
        if node.op == "cast":
            return self._cast(node)
        args = self._operands(node)
        return spell.operation(node, args, self._nonnegative(node), self._safe(node))

    def _operands(self, node: Expr) -> list[Text]:
        """Arguments, widened where 32 bits are not enough for what the node does with them."""
        if node.op in ("lt", "le", "eq", "ne") and (texts := self._narrowed(node)):
            return texts
        wide = self.widths.is_wide(node)
        texts = []
        for arg in node.args:
            text = self._text(arg)
            narrow = arg.kind == "int" and not arg.is_const and not self.widths.is_wide(arg)
            texts.append(spell.cast(text, "tl.int64") if wide and narrow else text)
        return texts

    def _narrowed(self, node: Expr) -> list[Text] | None:
        """A comparison of a 32-bit position with a wider bound, which is clamped for its row or key
        to what the position reaches, and one beyond: pairs are compared in 32 bits."""
        wide = [self.widths.is_wide(arg) for arg in node.args]
        if node.args[0].kind != "int" or wide[0] == wide[1]:
            return None
        far, near = node.args if wide[0] else reversed(node.args)
        low, high = (end + step for end, step in zip(self.widths.range(near), (-1, 1), strict=True))
        if "both" in (side(far), side(near)) or not inside((low, high)):
            return None
        clamped = f"tl.minimum(tl.maximum({self._text(far)[0]}, {low}), {high}).to(tl.int32)"
        name = self._bind(self.stage_of(far), f"{self._hint(far)}_near", clamped)
        return [(name, ATOM) if arg is far else self._text(arg) for arg in node.args]

    def _nonnegative(self, node: Expr) -> bool:
        return node.kind == "int" and all(self.widths.range(a)[0] >= 0 for a in node.args)

    def _safe(self, node: Expr) -> bool:
        """A divisor known on the host was checked there."""
        if node.op not in ("floordiv", "mod"):
            return True
        return not any(n.op in ("index", "load", "size") for n in walk(node.args[1]))

    def _cast(self, node: Expr) -> Text:
        value = self._text(node.args[0])
        if node.kind == "bool":
            return f"{spell.wrap(value, 2)} != 0", 1
        wide = node.kind == "int" and self.widths.is_wide(node)
        return spell.cast(value, _FLOATS.get(node.kind) or ("tl.int64" if wide else "tl.int32"))

    def _load(self, node: Expr) -> Text:
        address, stage = f"{node.attr}_ptr", self.stage_of(node)
        terms = [self._term(node, dim) for dim in range(len(node.args)) if not _is_zero(node, dim)]
        # Of earlier stages the first alone: a later one may be another axis, not a loop inside it.
        first = min((at for _, at in terms), default=stage)
        if first < stage:
            fixed = [text for text, at in terms if at == first]
            address = self._bind(first, f"{node.attr}_row", " + ".join([address, *fixed]))
            terms = [term for term in terms if term[1] != first]
        address = " + ".join([address, *(text for text, _ in terms)])
        value: Text = (f"tl.load({address})", ATOM)
        dtype = self.dtypes[node.attr]
        if node.kind == "bool":
            return f"{value[0]} != 0", 1
        if node.kind in _FLOATS:
            return spell.cast(value, _FLOATS[node.kind])
        if dtype in (torch.int32, torch.int64):
            return value
        return spell.cast(value, "tl.int64" if self.widths.is_wide(node) else "tl.int32")

    def _term(self, node: Expr, dim: int) -> tuple[str, Stage]:
        """One dimension's part of an address, and where it is known."""
        position, stage = node.args[dim], self.stage_of(node.args[dim])
        text = self._text(position)
        # Bare b, h and h_kv were checked on the host; any other index is kept inside the tensor.
        if position.op != "index" or position.attr not in ("b", "h", "h_kv"):
            low, _ = self.widths.range(position)
            inner = text[0] if low >= 0 else f"tl.maximum({text[0]}, 0)"
            clamped = f"tl.minimum({inner}, {size_name(node.attr, dim)} - 1)"
            text = self._bind(stage, f"{self._hint(node)}_at", clamped), ATOM
        return f"{spell.wrap(text, 7)} * {node.attr}_stride_{dim}", stage

    def _bind(self, stage: Stage, hint: str, text: str) -> str:
        """A name for a text in a stage; the same text gets the same one."""
        if (stage, text) not in self._bindings:
            name = self._bindings[stage, text] = self._fresh(hint)
            self.statements[stage].append(f"{name} = {text}")
        return self._bindings[stage, text]


def _is_zero(node: Expr, dim: int) -> bool:
    return node.args[dim].is_const and node.args[dim].attr == 0


def _indices(node: Expr) -> set[str]:
    return {n.attr for n in walk(node) if n.op == "index"}
