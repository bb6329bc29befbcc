"""Documents as sequences: which calls have some, and where they begin."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen import masks
from flashgen.order import find_ranges
from flashgen.schedule import documents
from flashgen.schedule.documents import Apart, apart_of, cut

S = 400


@pytest.fixture(autouse=True)
def at_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "ROWS", 1)
    monkeypatch.setattr(documents, "FEWEST", 64)


def apart(mask: Any, keys: int = S, **data: Any) -> Apart | None:
    q, k = torch.empty(3, 4, S, 64), torch.empty(3, 4, keys, 64)
    call = fg.Attention(mask)._check_look(q, k, k, data)
    return apart_of(call.bound, call.geometry, (128, 128))


DOC = torch.zeros(3, S, dtype=torch.int32)
LONGER = torch.zeros(3, S + 9, dtype=torch.int32)


@fg.mask
def near(q_idx, kv_idx, far: int):  # type: ignore[no-untyped-def]
    return (q_idx - kv_idx).abs() < far


@pytest.mark.parametrize(
    ("mask", "rest"),
    [
        (masks.document, "every key"),
        (masks.causal_document, "kv_idx <= q_idx"),
        (masks.document & near(far=9), "abs(q_idx - kv_idx) < far"),
        (masks.document & ~masks.causal, "~(kv_idx <= q_idx)"),
    ],
    ids=str,
)
def test_what_is_left_of_a_mask(mask: Any, rest: str) -> None:
    found = apart(mask, doc=DOC)
    assert found is not None
    assert f"mask    {rest}" in str(found.bound.spec)
    assert set(found.bound.scalars) == ({"far"} if "far" in rest else set())
    assert (found.batch, found.length, found.most) == (3, S, S // documents.FEWEST)


@fg.mask
def first_half(kv_idx, kv_len):  # type: ignore[no-untyped-def]
    return kv_idx < kv_len // 2


@fg.mask
def of_heads(h, q_idx, kv_idx, group: fg.Tensor):  # type: ignore[no-untyped-def]
    return group[h, q_idx] == group[h, kv_idx]


@pytest.mark.parametrize(
    ("mask", "given"),
    [
        (masks.causal, {}),
        (masks.document & masks.prefix_lm(prefix=3), {"doc": DOC}),
        (masks.document & first_half, {"doc": DOC}),
        (masks.document & masks.document.rename(doc="other"), {"doc": DOC, "other": DOC}),
        (masks.prefix_document, {"doc": DOC, "prefix_end": DOC}),
        (of_heads, {"group": DOC[:1].expand(4, -1)}),
        (masks.document, {"doc": LONGER, "q_offset": 1}),
        (masks.document, {"doc": DOC, "kv_lens": torch.tensor([S, 9, 0])}),
        (masks.document, {"doc": LONGER, "keys": S + 9}),
    ],
    ids=str,
)
def test_masks_whose_documents_are_no_sequences(mask: Any, given: dict[str, Any]) -> None:
    assert apart(mask, **given) is None


@pytest.mark.parametrize("length", [S, S + 60])
@pytest.mark.parametrize("alike", [False, True])
def test_where_documents_begin(length: int, alike: bool) -> None:
    """There may be ids of more positions."""
    lens = [[100, 1, 199, 100], [400], [3, 2, 1, 194, 200]]
    lens = [lens[2]] * 3 if alike else lens
    ids = torch.stack([torch.arange(len(n)).repeat_interleave(torch.tensor(n)) for n in lens])
    ids = torch.cat([ids, ids[:, -1:].expand(-1, 60)], 1)[:, :length]
    found = apart(masks.document, doc=ids[:1] if alike else ids)
    assert found is not None
    cu, holds = cut(find_ranges(ids[:1] if alike else ids, 1), found)
    assert bool(holds)
    starts = sorted({b * S + sum(n[:i]) for b, n in enumerate(lens) for i in range(len(n))})
    assert sorted(set(cu.tolist())) == [*starts, 3 * S]
    assert cu.tolist() == sorted(cu.tolist())


def test_documents_that_are_apart_or_too_many() -> None:
    found = apart(masks.document, doc=DOC)
    assert found is not None
    for last in (torch.arange(S) % 2, torch.arange(S) // (S // (found.most + 1))):
        cu, holds = cut(find_ranges(torch.stack([DOC[0].long(), DOC[0].long(), last]), 1), found)
        assert not holds
        assert not cu.any()
