"""Every mask with its comparisons rewritten, for kernels along the keys and along the queries."""

from __future__ import annotations

import pytest
import torch
from cases import CASES, Case

import flashgen as fg
from flashgen.expr import Env, evaluate
from flashgen.lower import isolate

each_case = pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])


@each_case
@pytest.mark.parametrize("moving", ["kv_idx", "q_idx"])
@pytest.mark.parametrize(("q_len", "kv_len"), [(7, 7), (40, 40), (3, 29)])
def test_the_same_mask(case: Case, moving: str, q_len: int, kv_len: int) -> None:
    generator = torch.Generator().manual_seed(q_len + kv_len)
    data = case.build(2, 2, q_len, kv_len, generator)
    q, k = torch.empty(2, 2, q_len, 16), torch.empty(2, 2, kv_len, 16)
    bound = fg.Attention(case.bound(data))._check_look(q, k, k, {"q_offset": kv_len - q_len}).bound
    index = {
        "b": torch.arange(2).reshape(-1, 1, 1, 1),
        "h": torch.arange(2).reshape(-1, 1, 1),
        "h_kv": torch.arange(2).reshape(-1, 1, 1),
        "q_idx": torch.arange(kv_len - q_len, kv_len)[:, None],
        "kv_idx": torch.arange(kv_len),
        "q_len": torch.tensor(q_len),
        "kv_len": torch.tensor(kv_len),
    }
    found, expected = (
        evaluate(mask, Env(index, dict(bound.scalars), dict(bound.tensors)))
        for mask in (isolate(bound.spec.mask, moving), bound.spec.mask)
    )
    assert torch.equal(*torch.broadcast_tensors(found, expected))
