"""What kernels do for each pair: a mask that is an interval of each row, or of each column, is at
most two comparisons, and what belongs to one side alone is computed for that side alone."""

from __future__ import annotations

import ast
import functools
from typing import Any, NamedTuple

import pytest
import torch

import flashgen as fg
from flashgen import emit, launch, masks
from flashgen.emit.mask_text import Cut, MaskText, mask_text
from flashgen.kernel_names import spell
from flashgen.order import with_tables
from flashgen.spec import Mask, Spec

LENGTH = 1000
NAMES = [name for name in masks.EXAMPLES if isinstance(getattr(masks, name), Mask)]
# Intervals by what their data holds, which no form of them says: as many comparisons.
BY_DATA = {"prefix_document": 3, "qk_sparse": 3, "shared_prefix": 4, "tree": 3}


class Written(NamedTuple):
    """A mask with its text along the keys."""

    mask: fg.Mask
    spec: Spec
    text: MaskText


@functools.cache
def written(name: str) -> Written:
    mask = getattr(masks, name)(**masks.EXAMPLES[name](LENGTH, torch.Generator().manual_seed(0)))
    q = torch.empty(1, 1, LENGTH, 64, dtype=torch.bfloat16)
    call = fg.Attention(mask)._check_look(q, q, q, {})
    bound = spell(call.bound)
    spec, variant = with_tables(bound.spec), launch.variant_of(bound, call.geometry, 64, 64)
    lower = lambda exprs: emit.lower_for(exprs, spec, variant, frozenset())  # noqa: E731
    return Written(mask, spec, mask_text(spec, "q_idx", lower))


def sides(cut: Cut) -> dict[str, set[str]]:
    """For each name of a kernel, whether it changes with the query, with the key, or with both."""
    found: dict[str, set[str]] = {"q_idx": {"q"}, "kv_idx": {"kv"}}
    for line in (*cut.row_lines, *cut.tile_lines):
        (statement,) = ast.parse(line).body
        assert isinstance(statement, ast.Assign)
        found[statement.targets[0].id] = side(statement.value, found)  # type: ignore[attr-defined]
    return found


def side(node: ast.AST, known: dict[str, set[str]]) -> set[str]:
    names = (n.id for n in ast.walk(node) if isinstance(n, ast.Name))
    return set().union(*(known.get(name, set()) for name in names))


def comparisons(cut: Cut) -> list[str]:
    """The comparisons that are made for each pair."""
    known = sides(cut)
    trees = [ast.parse(text) for text in (*cut.tile_lines, cut.keep)]
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Compare))
    return [ast.unparse(node) for node in nodes if side(node, known) == {"q", "kv"}]


def is_interval(matrix: torch.Tensor) -> bool:
    """Whether each row has at most one run."""
    edges = torch.nn.functional.pad(matrix.int(), (1, 1)).diff()
    return bool(((edges == 1).sum(1) <= 1).all())


@pytest.mark.parametrize("name", NAMES)
def test_an_interval_is_two_comparisons(name: str) -> None:
    mask, _, text = written(name)
    dense = mask.dense(LENGTH, LENGTH)[0, 0]
    if not is_interval(dense) and not is_interval(dense.T):
        pytest.skip("rows and columns of several runs")
    cut = text.ordered or text.general
    assert len(comparisons(cut)) <= BY_DATA.get(name, 2), cut


@pytest.mark.parametrize("name", NAMES)
def test_what_a_row_fixes_is_computed_for_the_row(name: str) -> None:
    """In a tile's statements, an operation on queries alone would be repeated for each tile."""
    text = written(name).text
    for cut in filter(None, (text.general, text.ordered)):
        known = sides(cut)
        for line in (*cut.tile_lines, cut.keep):
            for node in ast.walk(ast.parse(line)):
                if isinstance(node, (ast.BinOp, ast.Call, ast.Compare)):
                    assert side(node, known) != {"q"}, (ast.unparse(node), line)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_key_fixes_is_computed_for_the_key(name: str) -> None:
    """Arithmetic, loads and calls on keys alone hold no query, so they have a key's shape; for
    pairs there are comparisons, logic, and differences of positions that the mask asks for."""
    text = written(name).text
    known = sides(text.general)
    for line in (*text.general.tile_lines, text.general.keep):
        for node in ast.walk(ast.parse(line)):
            if isinstance(node, ast.Call) and "tl.load" in ast.unparse(node.func):
                is_table = name in ("block_sparse", "tree", "dense_table")
                assert is_table or side(node, known) == {"kv"}, ast.unparse(node)


@pytest.mark.parametrize("name", NAMES)
def test_pairs_are_compared_in_32_bits(name: str) -> None:
    """A bound that needs 64 bits is clamped to the positions' range once a row."""
    text = written(name).text
    for cut in filter(None, (text.general, text.ordered)):
        known = sides(cut)
        wide = [c for c in comparisons(cut) if "int64" in c]
        assert not wide, (wide, known)


@pytest.mark.parametrize(
    ("mask", "data", "keep"),
    [
        (masks.prefix_lm(prefix=3), {}, "kv_idx < q_maximum"),
        (masks.chunked(chunk=7), {}, "(kv_idx < q_minimum_near) & (q_add_near <= kv_idx)"),
        (
            masks.causal_document & masks.sliding_window(window=8),
            {"doc": torch.zeros(1, LENGTH, dtype=torch.int32)},
            "(q_maximum <= kv_idx) & (kv_idx < q_minimum)",
        ),
    ],
    ids=str,
)
def test_how_it_is_written(mask: fg.Mask, data: dict[str, Any], keep: str) -> None:
    q = torch.empty(1, 1, LENGTH, 64, dtype=torch.bfloat16)
    call = fg.Attention(mask)._check_look(q, q, q, data)
    bound = spell(call.bound)
    spec, variant = with_tables(bound.spec), launch.variant_of(bound, call.geometry, 64, 64)
    text = mask_text(spec, "q_idx", lambda exprs: emit.lower_for(exprs, spec, variant, frozenset()))
    assert (text.ordered or text.general).keep == keep
