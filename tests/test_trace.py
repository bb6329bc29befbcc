"""Functions on symbols: what they may ask for and say, FlexAttention's included."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

import flashgen as fg
from flashgen.expr import Env, evaluate
from flashgen.spec import Program, as_mask

ROWS, COLUMNS = torch.arange(-3, 12)[:, None], torch.arange(12)[None]


def traced(function, **data):
    """The mask's matrix, and the same from running the function on tensors itself."""
    bound = Program(mask=as_mask(function)).bind(data, "test")
    index = {"q_idx": ROWS, "kv_idx": COLUMNS, "b": torch.zeros(1, 1, dtype=torch.long)}
    index |= {"h": index["b"], "h_kv": index["b"]}
    assert bound.spec.mask is not None
    env = Env(index, dict(bound.scalars), dict(bound.tensors))
    return evaluate(bound.spec.mask, env).expand(15, 12)


WORDS = {
    "sums": lambda q_idx, kv_idx: q_idx + 2 * kv_idx - 5 < -kv_idx,
    "floors": lambda q_idx, kv_idx: (q_idx // 4 == kv_idx // 3) | (q_idx % 5 > kv_idx % 2),
    "negative divisors": lambda q_idx, kv_idx: (q_idx // -4) + (kv_idx % -3) < 0,
    "comparisons": lambda q_idx, kv_idx: (q_idx != kv_idx) & ~(q_idx >= 3) | (kv_idx == 4),
    "bits": lambda q_idx, kv_idx: ((q_idx & 3) ^ (kv_idx | 8)) > ((kv_idx << 1) >> 2),
    "booleans": lambda q_idx, kv_idx: (q_idx > 2) ^ (kv_idx > 5),
    "where": lambda q_idx, kv_idx: fg.where(q_idx > kv_idx, q_idx, 7) > 5,
    "bounds": lambda q_idx, kv_idx: fg.minimum(q_idx, 6) > fg.maximum(kv_idx, fg.abs(q_idx - 4)),
    "floats": lambda q_idx, kv_idx: fg.exp(-kv_idx / 4.0) < fg.tanh(q_idx * 0.1) + 0.5,
    "roots": lambda q_idx, kv_idx: (
        fg.sqrt(kv_idx * 1.0) < fg.log(kv_idx + 2.0) + fg.sin(q_idx * 1.0)
    ),
    "powers": lambda q_idx, kv_idx: q_idx**2 > kv_idx**3 - 2,
    "torch": lambda q_idx, kv_idx: torch.where(q_idx > 2, (q_idx - kv_idx).abs(), kv_idx) < 4,
    "clamps": lambda q_idx, kv_idx: q_idx.clamp(0, 5) >= torch.clamp(kv_idx, min=3),
    "logic": lambda q_idx, kv_idx: torch.logical_and(q_idx > 0, torch.logical_not(kv_idx > 4)),
    "casts": lambda q_idx, kv_idx: (q_idx > 3).to(torch.int32) * 5 > kv_idx.float() - 2.5,
}


@pytest.mark.parametrize("name", WORDS)
def test_vocabulary(name):
    """A symbol answers as a tensor of the same numbers does."""
    assert torch.equal(traced(WORDS[name]), WORDS[name](ROWS, COLUMNS).expand(15, 12))


def test_data_of_any_index_is_clamped():
    table, page = torch.randn(2, 9), torch.randint(0, 9, (5,))

    def through_pages(q_idx, kv_idx, table: fg.Tensor, page: fg.Tensor):
        return table[q_idx % 2, page[kv_idx // 3]] > table[1, q_idx * 2]

    right = table[ROWS % 2, page[(COLUMNS // 3).clamp(0, 4)]] > table[1, (ROWS * 2).clamp(0, 8)]
    assert torch.equal(traced(through_pages, table=table, page=page), right)


def test_flex_functions_as_they_are():
    doc = torch.randint(0, 3, (12,))
    window = 4

    def causal(b, h, q, k):
        return q >= k

    def same(b, h, q, k):
        return doc[q] == doc[k]

    def near(batch, head, q, k, reach):
        return q - k < reach

    here = ROWS.clamp(0)
    parts = {
        "causal": ROWS >= COLUMNS,
        "same": doc[here] == doc[COLUMNS],
        "near": window > ROWS - COLUMNS,
    }
    assert torch.equal(traced(and_masks(causal, same)), parts["causal"] & parts["same"])
    assert torch.equal(traced(or_masks(causal, same)), parts["causal"] | parts["same"])
    assert torch.equal(traced(functools.partial(near, reach=window)), parts["near"])
    assert Program(mask=as_mask(noop_mask)).bind({}, "test").spec.mask is None
    mixed = as_mask(causal) & same | ~as_mask(near_of(window))
    right = parts["causal"] & parts["same"] | ~parts["near"]
    assert torch.equal(traced(mixed), right)


def near_of(window):
    return lambda b, h, q, k: q - k < window


def test_new_closures_have_the_same_spec():
    """Captured tensors are data and captured numbers are baked in."""

    def of(doc, window):
        return lambda b, h, q, k: (doc[q] == doc[k]) & (q - k < window)

    def digest(doc, window):
        return Program(mask=as_mask(of(doc, window))).bind({}, "test").spec.digest

    first = digest(torch.zeros(12, dtype=torch.int32), 3)
    assert first == digest(torch.ones(40, dtype=torch.int32), 3)
    assert first != digest(torch.zeros(12, dtype=torch.int32), 4)


@fg.mask
def within(q_idx, kv_idx, window: int):
    return (kv_idx <= q_idx) & (q_idx - kv_idx < window)


def test_two_windows_of_one_mask():
    both = within(window=2) | (within(window=6) & ~within(window=4))
    away = ROWS - COLUMNS
    right = (away >= 0) & ((away < 2) | ((away < 6) & (away >= 4)))
    assert torch.equal(traced(both), right)
    assert both.params == ()
    assert torch.equal(traced(within.rename(window="reach"), reach=3), (away >= 0) & (away < 3))


def test_defaults_and_constants():
    @fg.mask
    def strided(q_idx, kv_idx, step: fg.Const[int], first: int = 1):
        pairs = [kv_idx % step == r for r in range(step - 1)]
        return functools.reduce(lambda x, y: x | y, pairs) & (kv_idx >= first)

    right = (COLUMNS % 3 < 2) & (COLUMNS >= 1)
    assert torch.equal(traced(strided, step=3), right.expand(15, 12))
    assert torch.equal(
        traced(strided, step=3, first=5), ((COLUMNS % 3 < 2) & (COLUMNS >= 5)).expand(15, 12)
    )


def test_masks_inside_masks():
    @fg.mask
    def causal_or_near(q_idx, kv_idx):
        return within(q_idx, kv_idx, window=3) | (kv_idx == 0)

    away = ROWS - COLUMNS
    assert torch.equal(traced(causal_or_near), (away >= 0) & (away < 3) | (COLUMNS == 0))
