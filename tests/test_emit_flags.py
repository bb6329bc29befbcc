"""Truth values of keys as numbers: the same mask, with fewer predicates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import CASES

import flashgen as fg
from flashgen.emit.flags import without_flags
from flashgen.expr import Env, Expr, evaluate, walk
from flashgen.lower import isolate

CHANGED = ("prefix_document", "shared_question")


def spec_of(case: Any, data: dict[str, Any]) -> Any:
    return fg.Attention(case.bound(data))._program.bind({}, "test")


def dense(mask: Expr, bound: Any, lengths: tuple[int, int, int, int]) -> torch.Tensor:
    """The mask of every pair; queries are the last ones."""
    B, H, S, T = lengths
    names = ("b", "h", "q_idx", "kv_idx")
    grids = torch.meshgrid(*(torch.arange(n) for n in (B, H, S, T)), indexing="ij")
    index = dict(zip(names, grids, strict=True))
    index["q_idx"] = index["q_idx"] + T - S
    index |= {"h_kv": index["h"], "q_len": torch.tensor(S), "kv_len": torch.tensor(T)}
    return evaluate(mask, Env(index, dict(bound.scalars), dict(bound.tensors)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_mask_is_the_same(case: Any) -> None:
    lengths = (2, 2, 60, 90 if case.below_zero else 60)
    data = case.build(*lengths, torch.Generator().manual_seed(3))
    bound = spec_of(case, data)
    plain = isolate(bound.spec.mask)
    found = without_flags(plain)
    right, mine = (dense(mask, bound, lengths) for mask in (plain, found))
    assert torch.equal(*torch.broadcast_tensors(mine, right))
    if case.id in CHANGED:
        assert found != plain
        assert sum(node.op == "or" and node.kind == "bool" for node in walk(found)) == 0
