"""The tile rule: what it says of ranges, and that NaN and infinities leave tiles open."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen import masks
from flashgen.bounds import side, tile_rule
from flashgen.expr import Expr, const, index, load, make, scalar
from flashgen.schedule.runs import MOST_RUNS, run_capacity

Q, K, N = index("q_idx"), index("kv_idx"), scalar("n", "int")
NAN, INF = float("nan"), float("inf")


def states(mask: Any, S: int = 64, T: int = 64, block: Any = 16, **data: Any) -> torch.Tensor:
    """What the rule alone says, [query tiles, key tiles]."""
    q, k = torch.zeros(1, 1, S, 1), torch.zeros(1, 1, T, 1)
    schedule = fg.Attention(mask).schedule(q, k, block_size=block, planner="bounds", **data)
    return schedule.to_dense()[0, 0]


def truth(mask: Any, S: int = 64, T: int = 64, block: Any = 16, **data: Any) -> torch.Tensor:
    """Every tile looked at, whole ones only."""
    m, n = (block, block) if isinstance(block, int) else block
    dense = fg.mask(mask) if not hasattr(mask, "dense") else mask
    tiles = dense.dense(S, T, **data)[0, 0].unflatten(1, (-1, n)).unflatten(0, (-1, m))
    return tiles.any(3).any(1).to(torch.int8) + tiles.all(3).all(1)


@pytest.mark.parametrize(
    ("expr", "where"),
    [
        (make("add", Q, K), "both"),
        (make("mul", Q, N), "q"),
        (load("doc", "int", (index("b"), K)), "kv"),
        (make("add", index("h"), N), ""),
        (load("doc", "int", (load("page", "int", (K,)), Q)), "both"),
    ],
)
def test_sides(expr: Expr, where: str) -> None:
    assert side(expr) == where


def test_the_rule_reads_like_the_mask() -> None:
    rule = tile_rule(make("le", K, Q))
    assert str(rule.may) == "~(max[q](q_idx) < min[kv](kv_idx))"
    assert str(rule.must) == "max[kv](kv_idx) <= min[q](q_idx)"
    assert rule.summaries == ()
    document = tile_rule(make("eq", load("doc", "int", (Q,)), load("doc", "int", (K,))))
    assert len(document.summaries) == 4
    assert tile_rule(None).must == const(True)


# Two-sided expressions that intervals decide exactly, corners included.
EXACT: dict[str, Callable[..., Any]] = {
    "causal": lambda q_idx, kv_idx: kv_idx <= q_idx,
    "strictly": lambda q_idx, kv_idx: kv_idx < q_idx - 15,
    "window": lambda q_idx, kv_idx: (q_idx - kv_idx < 20) & (kv_idx - q_idx <= 3),
    "distance": lambda q_idx, kv_idx: abs(q_idx - kv_idx) < 17,
    "far": lambda q_idx, kv_idx: ~(abs(kv_idx - q_idx) <= 30),
    "negated": lambda q_idx, kv_idx: -kv_idx >= -q_idx,
    "blocks": lambda q_idx, kv_idx: q_idx // 16 == kv_idx // 16,
    "block stairs": lambda q_idx, kv_idx: q_idx // 32 > kv_idx // 32,
    "sum": lambda q_idx, kv_idx: q_idx + kv_idx < 60,
    "either": lambda q_idx, kv_idx: (kv_idx < 16) | (kv_idx == q_idx),
    "halves": lambda q_idx, kv_idx: (q_idx >= 32) ^ (kv_idx >= 32),
    "equal halves": lambda q_idx, kv_idx: (q_idx >= 32) == (kv_idx >= 32),
    "chosen": lambda q_idx, kv_idx: fg.where(q_idx < 32, kv_idx < 16, kv_idx >= 48),
    "values": lambda q_idx, kv_idx: fg.where(q_idx < 32, kv_idx, -kv_idx) < 0,
    "extremes": lambda q_idx, kv_idx: fg.minimum(q_idx, kv_idx) < 16,
    "most": lambda q_idx, kv_idx: fg.maximum(q_idx, kv_idx) >= 48,
    "product": lambda q_idx, kv_idx: (q_idx - 100) * (kv_idx + 1) > -900,
    "cast": lambda q_idx, kv_idx: (kv_idx > q_idx).to(torch.int32) * 5 < 3,
    "floats": lambda q_idx, kv_idx: q_idx * 0.5 + 3.25 > kv_idx,
    "never": lambda q_idx, kv_idx: q_idx + kv_idx < 0,
    "always": lambda q_idx, kv_idx: q_idx + kv_idx >= 0,
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("block", [16, (16, 32), (32, 16)], ids=str)
def test_exact_without_looking_at_elements(name: str, block: Any) -> None:
    assert torch.equal(states(EXACT[name], block=block), truth(EXACT[name], block=block))


@pytest.mark.parametrize("name", ["causal", "window", "document", "causal_document"])
def test_ordered_data_needs_no_elements(name: str) -> None:
    data: dict[str, Any] = {}
    if "document" in name:
        data = {"doc": torch.arange(64)[None] // 21}
    if name == "window":
        name, data = "sliding_window", {"window": 19}
    mask = getattr(masks, name)
    if name == "document":
        assert torch.equal(states(mask, **data), truth(mask, **data))
        return
    found, right = states(mask, **data), truth(mask, **data)
    assert torch.equal(found[found != 1], right[found != 1])
    # Causal and document meet in a tile that neither empties alone.
    assert ((found == 1) & (right != 1)).sum() <= (0 if name != "causal_document" else 4)


def test_positions_below_zero() -> None:
    """`%` and `//` floor, also in the ranges of a tile that holds position 0."""

    @fg.mask
    def phased(q_idx, kv_idx):
        return (q_idx % 24 <= kv_idx % 24) & (q_idx // 5 <= kv_idx // 7)

    @fg.mask
    def slanted(q_idx, kv_idx):
        return ((q_idx - kv_idx) % 100 < 50) | ((q_idx + kv_idx) // 31 % 3 == 1)

    q, k = torch.zeros(1, 1, 96, 1), torch.zeros(1, 1, 48, 1)
    for mask, offset in itertools.product((phased, slanted), (-50, -7, 0, 3)):
        options = {"q_offset": offset, "block_size": 16}
        found = fg.Attention(mask).schedule(q, k, planner="bounds", **options).states[0, 0]
        assert mask is phased or (found == 2).any()
        dense = mask.dense(96, 48, q_offset=offset)[0, 0]
        tiles = dense.unflatten(1, (-1, 16)).unflatten(0, (-1, 16))
        right = tiles.any(3).any(1).to(torch.int8) + tiles.all(3).all(1)
        assert torch.equal(found[found != 1], right[found != 1])


def test_what_lies_beyond_the_lengths_decides_nothing() -> None:
    """Data go on after the last query and the last valid key."""

    @fg.mask
    def marked(b, q_idx, kv_idx, rows: fg.Tensor, keys: fg.Tensor):
        return rows[q_idx] & keys[b, kv_idx]

    rows, keys = torch.arange(64) < 20, torch.arange(64) < torch.tensor([[30], [64]])
    q, k = torch.zeros(2, 1, 20, 1), torch.zeros(2, 1, 64, 1)
    options = {"kv_lens": torch.tensor([30, 50]), "q_offset": 0, "block_size": 16}
    schedule = fg.Attention(marked).schedule(
        q, k, planner="bounds", rows=rows, keys=keys, **options
    )
    assert schedule.to_dense()[:, 0, 1].tolist() == [[2, 2, 0, 0], [2, 2, 2, 2]]


TIMES = torch.arange(64.0) / 4
ODD = {
    "NaN": {7: NAN},
    "infinite": {3: INF, 40: INF},
    "both infinities": {3: -INF, 20: INF, 41: INF},
    "all": {5: NAN, 6: -INF, 22: INF, 50: INF},
}
# Each may hide a NaN (inf - inf, 0 * inf, log of a negative number) inside a range.
HIDING: dict[str, Callable[..., Any]] = {
    "less": lambda q_idx, kv_idx, t: t[q_idx] - t[kv_idx] < 2.0,
    "not less": lambda q_idx, kv_idx, t: ~(t[q_idx] - t[kv_idx] < 2.0),
    "at most infinity": lambda q_idx, kv_idx, t: t[q_idx] - t[kv_idx] <= INF,
    "equal": lambda q_idx, kv_idx, t: t[q_idx] == t[kv_idx],
    "unequal": lambda q_idx, kv_idx, t: t[q_idx] - t[kv_idx] != 0.0,
    "near": lambda q_idx, kv_idx, t: abs(t[q_idx] - t[kv_idx]) < 2.0,
    "distance": lambda q_idx, kv_idx, t: abs(t[q_idx] - t[kv_idx]) >= 0.0,
    "cut below": lambda q_idx, kv_idx, t: fg.maximum(t[q_idx] - t[kv_idx], 0.0) >= 0.0,
    "cut above": lambda q_idx, kv_idx, t: fg.minimum(t[q_idx] - t[kv_idx], 5.0) <= 5.0,
    "clamped": lambda q_idx, kv_idx, t: (t[q_idx] + t[kv_idx]).clamp(0.0, 1.0) <= 1.0,
    "product": lambda q_idx, kv_idx, t: fg.minimum(t[q_idx] * (t[kv_idx] - 1.0), 3.0) <= 3.0,
    "logarithm": lambda q_idx, kv_idx, t: abs(fg.log(t[q_idx] - t[kv_idx])) >= 0.0,
    "chosen": lambda q_idx, kv_idx, t: fg.where(t[kv_idx] > 3.0, t[q_idx], t[kv_idx]) <= INF,
    "floored": lambda q_idx, kv_idx, t: fg.floor(t[q_idx] - t[kv_idx]) <= 1.0,
    "an integer": lambda q_idx, kv_idx, t: (t[q_idx] - t[kv_idx]).to(torch.int32) <= 5,
    "is NaN": lambda q_idx, kv_idx, t: fg.isnan(t[q_idx] - t[kv_idx]),
}


@pytest.mark.parametrize("data", ODD)
@pytest.mark.parametrize("name", HIDING)
def test_what_is_not_finite_leaves_tiles_open(name: str, data: str) -> None:
    times = TIMES.clone()
    for place, value in ODD[data].items():
        times[place] = value
    mask = lambda b, h, q, k: HIDING[name](q, k, times)  # noqa: E731
    for block in (16, (16, 32)):
        found, right = states(mask, block=block), truth(mask, block=block)
        assert torch.equal(found[found != 1], right[found != 1])


def test_finite_floats_are_decided() -> None:
    """What a NaN could hide in is closed where there is none."""
    times = TIMES.clone()
    near = lambda b, h, q, k: abs(times[q] - times[k]) < 4.25  # noqa: E731
    assert torch.equal(states(near), truth(near))
    late = lambda b, h, q, k: fg.maximum(times[q] - times[k], 0.0) < 4.25  # noqa: E731
    assert torch.equal(states(late), truth(late))


def test_a_long_rule_is_not_written_out() -> None:
    value = K
    for n in range(30):
        value = make("where", make("eq", make("add", Q, K), const(n)), Q, value)
    rule = tile_rule(make("le", value, Q))
    assert len(str(rule)) < 200
    assert "operations" in str(rule)


@pytest.mark.parametrize(
    ("mask", "capacity"),
    [
        (None, 2),
        (make("le", K, Q), 4),
        (make("and", make("le", K, Q), make("lt", make("sub", Q, K), N)), 6),
        (make("or", make("le", K, load("end", "int", (Q,))), make("lt", K, N)), 6),
        (make("eq", Q, K), MOST_RUNS),
        (make("lt", make("mul", K, K), Q), MOST_RUNS),
        (make("lt", load("end", "int", (K,)), Q), MOST_RUNS),
    ],
)
def test_room_for_runs(mask: Expr | None, capacity: int) -> None:
    assert run_capacity(mask, 10_000) == capacity
    assert run_capacity(mask, 2) <= 2
