"""Hopper's generated backward walked on a CPU, beside the cpu backend's gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hopper_machine
import pytest
import torch
from backward_walk import check, inputs, walk
from cases import CASES
from hopper_machine import Tiles
from stored import Sequences

import flashgen as fg
from flashgen import masks
from flashgen.emit import Variant
from flashgen.emit.sums import NO_DATA, summed
from flashgen.launch import hopper_backward as launch_hopper_backward
from flashgen.tiling.hopper import Steps


@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (40, 96), (192, 128)], ids=str)
@pytest.mark.parametrize("lengths", [(1, 1), (100, 300), (300, 140)], ids=str)
def test_lengths(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, int], dims: tuple[int, int]
) -> None:
    tensors, grad = inputs(1, 1, 1, *lengths, *dims)
    check(monkeypatch, fg.Attention(masks.causal), tensors, grad)


@pytest.mark.parametrize(("head_dim", "ordered"), [(64, False), (256, False), (256, True)])
def test_heads_that_share_keys(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, ordered: bool
) -> None:
    tensors, grad = inputs(1, 6, 2, 150, 200, head_dim, head_dim)
    check(monkeypatch, fg.Attention(masks.local(left=90, right=20)), tensors, grad, ordered=ordered)


@pytest.mark.parametrize("case", CASES[::11], ids=lambda case: case.id)
def test_masks(monkeypatch: pytest.MonkeyPatch, case: Any) -> None:
    B, H, S, T = 2, 2, 150, 290 if case.below_zero else 150
    data = case.build(B, H, S, T, torch.Generator().manual_seed(0))
    tensors, grad = inputs(B, H, H, S, T, 64, 64)
    check(monkeypatch, fg.Attention(mask=case.bound(data)), tensors, grad)


@fg.attention(mask=masks.causal, softcap=9.0)
def bent(score, h, q_idx, kv_idx, slope: fg.Tensor):
    return 1.5 * score + slope[h] * (kv_idx - q_idx)


@pytest.mark.parametrize("head_dim", [64, 192])
def test_score_functions(monkeypatch: pytest.MonkeyPatch, head_dim: int) -> None:
    tensors, grad = inputs(1, 2, 1, 200, 200, head_dim, 64)
    check(monkeypatch, bent, tensors, grad, slope=torch.rand(2))


@fg.mask
def lit(b, q_idx, kv_idx, doc: fg.Tensor, near: fg.Tensor, seen: fg.Tensor):
    return (doc[b, q_idx] == doc[b, kv_idx]) & seen[near[q_idx]] & (kv_idx <= q_idx)


@fg.attention(mask=lit)
def gated(score, q_idx, kv_idx, gate: fg.Tensor, column: fg.Tensor):
    return score * gate[q_idx] + column[kv_idx]


@pytest.mark.parametrize("head_dim", [64, 128])
def test_data_of_queries(monkeypatch: pytest.MonkeyPatch, head_dim: int) -> None:
    """Through shared memory: of masks and scores, in each type, at addresses that are data too."""
    S = 300
    tensors, grad = inputs(2, 2, 1, S, S, head_dim, head_dim)
    data = {
        "doc": torch.randint(0, 3, (2, S)).sort().values,
        "near": torch.randint(0, S, (S,), dtype=torch.int32),
        "seen": torch.rand(S) < 0.9,
        "gate": torch.rand(S).half(),
        "column": torch.rand(S),
    }
    check(monkeypatch, gated, tensors, grad, **data)


def paired(score, h, q_idx, kv_idx, bias: fg.Tensor):
    return score + bias[h, q_idx, kv_idx]


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_data_of_pairs(monkeypatch: pytest.MonkeyPatch, head_dim: int, ordered: bool) -> None:
    """Of which each pair reads its own: dP's product stands behind the weights."""
    tensors, grad = inputs(1, 2, 1, 200, 300, head_dim, 64)
    attend = fg.Attention(masks.causal, paired)
    check(monkeypatch, attend, tensors, grad, bias=torch.randn(2, 300, 300), ordered=ordered)


@pytest.mark.parametrize("tiles", [(192, 128), (128, 256)], ids=str)
def test_sums_in_order(monkeypatch: pytest.MonkeyPatch, tiles: tuple[int, int]) -> None:
    """Blocks that wait for each other, beside heads that share keys and sums in turns."""
    tensors, grad = inputs(1, 2, 1, 390, 650, 64, 64)
    how = {"tile": tiles[0], "key_tile": tiles[1], "ordered": True}
    attend = fg.Attention(masks.local(left=200, right=130))
    check(monkeypatch, attend, tensors, grad, q_offset=100, **how)


@fg.mask
def dotted(q_idx, kv_idx):
    return (q_idx // 128 + kv_idx // 128) % 2 == 0


def test_rows_of_more_runs_than_there_is_room_for_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashgen.schedule.runs.MOST_RUNS", 2)
    tensors, grad = inputs(1, 1, 1, 900, 500, 64, 64)
    check(monkeypatch, fg.Attention(dotted), tensors, grad, q_offset=0, ordered=True)


def test_negative_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, grad = inputs(1, 1, 1, 130, 130, 128, 128)
    check(monkeypatch, fg.Attention(masks.causal), tensors, grad, scale=-0.2)


Q_LENS, KV_LENS = [0, 1, 300, 64, 129, 7, 40], [5, 1, 300, 200, 300, 0, 128]


@fg.attention(mask=lit)
def by_sequence(score, b, q_idx, kv_idx, gate: fg.Tensor):
    return score * gate[b, q_idx]


PACKED: dict[str, tuple[Any, dict[str, Any]]] = {
    "causal": (fg.Attention(masks.causal), {}),
    "full": (fg.Attention(softcap=9.0), {}),
    "data": (
        by_sequence,
        {
            "doc": torch.arange(600).expand(7, -1) // torch.arange(20, 90, 10)[:, None],
            "near": torch.randint(0, 600, (600,)),
            "seen": torch.rand(600) < 0.9,
            "gate": torch.rand(7, 600),
            "q_offset": torch.arange(7) * 9,
        },
    ),
}


@pytest.mark.parametrize(
    ("name", "kv_heads", "head_dim", "tile", "ordered"),
    [
        ("causal", 2, 64, 192, True),
        pytest.param("causal", 4, 128, 128, False, marks=pytest.mark.slow),
        ("full", 4, 40, 128, False),
        pytest.param("full", 2, 128, 128, True, marks=pytest.mark.slow),
        ("data", 4, 64, 192, False),
        ("data", 2, 192, 128, True),
    ],
)
def test_packed(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    kv_heads: int,
    head_dim: int,
    tile: int,
    ordered: bool,
) -> None:
    """Sequences of all lengths, and rows behind the last one: zeros."""
    attend, data = PACKED[name]
    sequences = Sequences.random(Q_LENS, KV_LENS, 4, kv_heads, head_dim, None, torch.float16)
    tensors, places = sequences.packed()
    behind = [torch.cat([x, torch.full_like(x[:3], torch.nan)]) for x in tensors]
    behind[0][-3:] = 1.0
    tensors = [x.requires_grad_() for x in behind]
    grad = torch.randn_like(tensors[0])
    check(monkeypatch, attend, tensors, grad, tile=tile, ordered=ordered, **data, **places)


def test_packed_neighbours_that_are_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile that reaches into them is flagged, if it isn't finite; dQ never needs that."""
    sequences = Sequences.random([300, 200], [300, 200], 2, 2, 64, None, torch.float16)
    tensors, places = sequences.packed()
    grad = torch.randn_like(tensors[0])
    attend = fg.Attention(masks.causal)
    tensors = [x.requires_grad_() for x in tensors]
    right = torch.autograd.grad(attend(*tensors, backend="cpu", **places), tensors, grad)
    spoilt = [x.detach().clone() for x in tensors]
    for x in (*spoilt, grad):
        x[300:] = torch.nan
    got, flags = walk(monkeypatch, attend, spoilt, grad, **places)
    torch.testing.assert_close(got[0][:300], right[0][:300], rtol=2e-2, atol=2e-2)
    assert flags["q"][0, :, :3].sum() == 0
    for mine, exact in zip(got[1:], right[1:], strict=True):
        finite = mine[:300].isfinite().all(-1).all(-1)
        torch.testing.assert_close(mine[:300][finite], exact[:300][finite], rtol=2e-2, atol=2e-2)
        is_flagged = flags["kv"][0, 0, :3].bool().repeat_interleave(128)[:300]
        assert (finite | is_flagged).all()


@pytest.mark.parametrize("tile", [192, 256])
def test_tiles_of_many_steps(monkeypatch: pytest.MonkeyPatch, tile: int) -> None:
    tensors, grad = inputs(1, 2, 2, 520, 260, 128, 128)
    check(monkeypatch, fg.Attention(masks.causal), tensors, grad, tile=tile)


@pytest.mark.parametrize(("tile", "head_dim"), [(128, 64), (192, 64), (192, 256)])
def test_slots_beyond_the_valid_keys(
    monkeypatch: pytest.MonkeyPatch, tile: int, head_dim: int
) -> None:
    """Tiles of 192 queries are an odd number of steps."""
    tensors, grad = inputs(3, 2, 1, 150, 300, head_dim, head_dim)
    lens = torch.tensor([300, 41, 177], dtype=torch.int32)
    beyond = torch.arange(300) >= lens[:, None]
    attend = fg.Attention(mask=masks.sliding_window(window=64))
    given = {"kv_lens": lens, "q_offset": 0}
    right = torch.autograd.grad(attend(*tensors, backend="cpu", **given), tensors, grad)
    spoilt = [x.detach().clone() for x in tensors]
    for x, poison in ((spoilt[1], torch.nan), (spoilt[2], torch.inf)):
        x.masked_fill_(beyond[:, None, :, None], poison)
    got, flags = walk(monkeypatch, attend, spoilt, grad, tile=tile, **given)
    assert not flags["q"].any()
    assert not flags["kv"].any()
    for mine, exact in zip(got, right, strict=True):
        torch.testing.assert_close(mine, exact, rtol=2e-2, atol=2e-2)


def test_what_is_not_finite_is_flagged(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, grad = inputs(1, 1, 1, 300, 300, 64, 64)
    doc = (torch.arange(300) // 150)[None]
    tensors[2].detach()[:, :, 20] = torch.inf
    attend = fg.Attention(mask=masks.causal_document)
    got, flags = walk(monkeypatch, attend, [x.detach() for x in tensors], grad, doc=doc)
    for mine, flag in zip(got, (flags["q"], flags["kv"], flags["kv"]), strict=True):
        tiles = mine.isfinite().all(-1).split(128, -1)
        spoilt = torch.stack([~tile.all(-1) for tile in tiles], -1)
        assert (spoilt <= flag.bool()).all()
    assert flags["q"].tolist() == [[[1, 1, 0]]]


def slanted(score, h, q_idx, kv_idx, slope: fg.Tensor):
    return score + (slope[h] - 0.1) * (kv_idx - q_idx)


@pytest.mark.parametrize(("head_dim", "is_wanted"), [(64, False), (128, False), (128, True)])
@pytest.mark.parametrize("mask", [masks.causal, None], ids=str)
def test_scores_that_rise_with_the_distance(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, is_wanted: bool, mask: Any
) -> None:
    """A full tile may hold keys behind the last one, which have no part in sums."""
    tensors, grad = inputs(1, 2, 1, 200, 300, head_dim, 64)
    slope = torch.tensor([0.6, 0.0], requires_grad=is_wanted)
    check(monkeypatch, fg.Attention(mask, slanted), tensors, grad, slope=slope)


@pytest.mark.parametrize("softcap", [None, 6.0])
def test_keys_that_nobody_sees_have_no_part_in_sums(
    monkeypatch: pytest.MonkeyPatch, softcap: float | None
) -> None:
    """Rows beyond the last query would see them, if there were any."""
    tensors, grad = inputs(1, 2, 1, 200, 300, 128, 64)
    slope = torch.tensor([0.5, -0.1], requires_grad=True)
    attend = fg.Attention(masks.causal, slanted, softcap=softcap)
    right = attend(*tensors, backend="cpu", slope=slope, q_offset=0)
    right = torch.autograd.grad(right, slope, grad)[0]
    bare = [x.detach().clone() for x in tensors]
    bare[1][:, :, 200:] = bare[2][:, :, 200:] = torch.nan
    wanted = replace(NO_DATA, data=("slope",))
    data = {"slope": slope.detach(), "q_offset": 0}
    (*_, got), _ = walk(monkeypatch, attend, bare, grad, wanted=wanted, **data)
    torch.testing.assert_close(got, right, rtol=5e-3, atol=5e-3)


@fg.attention(mask=masks.causal & masks.document, softcap=6.0)
def heated(score, h, h_kv, q_idx, kv_idx, gate: fg.Tensor, heat: fg.Tensor, own: fg.Tensor):
    away = (kv_idx - q_idx) / 16
    return score + heat * gate[h] * away + gate[0] * away + own[h_kv, q_idx]


def test_sums_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read twice, at any head and at one; without an index; and beside data of queries."""
    tensors, grad = inputs(2, 2, 1, 200, 200, 128, 64)
    gate, heat = torch.rand(2, requires_grad=True), torch.tensor(1.5, requires_grad=True)
    doc = torch.arange(200).expand(2, 200) // 70
    data = {"gate": gate, "heat": heat, "own": torch.rand(1, 200), "doc": doc}
    check(monkeypatch, heated, tensors, grad, **data)


def biased(score, h, q_idx, kv_idx, table: fg.Tensor):
    return score + table[h, fg.minimum(q_idx - kv_idx, 70)]


def braked(score, h, q_idx, kv_idx, table: fg.Tensor, brake: fg.Tensor):
    return score + brake[h] * table[h, fg.minimum(q_idx - kv_idx, 70)]


@fg.mask
def distant(q_idx, kv_idx):
    return q_idx - kv_idx > 196


def test_data_read_by_distance_is_one_number_far_from_the_diagonal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors, grad = inputs(1, 2, 1, 300, 320, 128, 64)
    table = torch.randn(2, 71)
    check(monkeypatch, fg.Attention(masks.causal, biased), tensors, grad, table=table)
    wide, wide_grad = inputs(1, 2, 1, 200, 220, 192, 64)
    check(monkeypatch, fg.Attention(masks.causal, biased), wide, wide_grad, table=table)
    data = {"table": table.requires_grad_(), "brake": torch.tensor([0.5, -2.0])}
    check(monkeypatch, fg.Attention(distant, braked), tensors, grad, **data)


@fg.attention(mask=masks.causal)
def scaled(score, h, q_idx, kv_idx, table: fg.Tensor, factor: fg.Tensor):
    return score * table[h, fg.minimum(q_idx - kv_idx, 70)] * factor


def test_derivatives_that_read_data_by_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, grad = inputs(1, 2, 1, 200, 220, 128, 64)
    factor = torch.tensor(0.7)
    check(monkeypatch, scaled, tensors, grad, table=torch.rand(2, 71), factor=factor)


def test_what_is_left_to_portable_kernels() -> None:
    """Derivatives that read scores, or data of keys or queries, which may be anything."""
    tensors = {"slope": torch.zeros(8), "own": torch.zeros(8)}

    def summed_of(score: Any, head_dim: int = 128) -> tuple[str, ...]:
        names = [name for name in tensors if name in score.__annotations__]
        spec = (
            fg.Attention(masks.causal, score)
            ._program.bind({n: tensors[n] for n in names}, "test")
            .spec
        )
        wanted = replace(NO_DATA, data=("slope",))
        return summed(spec, wanted, Variant(head_dim, head_dim)).data

    def gated(score, h, slope: fg.Tensor):
        return score * slope[h]

    def beside_keys(score, h, kv_idx, slope: fg.Tensor, own: fg.Tensor):
        return score + slope[h] * own[kv_idx]

    def beside_queries(score, h, q_idx, slope: fg.Tensor, own: fg.Tensor):
        return score + slope[h] * own[q_idx]

    def of_keys(score, kv_idx, slope: fg.Tensor):
        return score + slope[kv_idx]

    assert summed_of(slanted) == ("slope",)
    assert summed_of(slanted, 64) == ()
    for left in (gated, beside_keys, beside_queries, of_keys):
        assert summed_of(left) == ()


@pytest.mark.parametrize(
    "steps", [Steps(2, 1, 1), pytest.param(Steps(3, 64, 2), marks=pytest.mark.slow)], ids=str
)
def test_steps_that_tuning_tries(monkeypatch: pytest.MonkeyPatch, steps: Steps) -> None:
    monkeypatch.setattr(launch_hopper_backward, "tuned", lambda *_: steps)
    tensors, grad = inputs(1, 1, 1, 300, 140, 64, 64)
    ordered = steps.order == 2
    check(monkeypatch, fg.Attention(masks.causal), tensors, grad, ordered=ordered)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_who_takes_a_block_and_where_it_begins(
    monkeypatch: pytest.MonkeyPatch, head_dim: int
) -> None:
    """A block's keys come in the last steps of the one before, and no block meets a row of queries
    twice; without a cut tile blocks begin with different rows."""
    tensors, grad = inputs(1, 1, 1, 1024, 1024, head_dim, head_dim)
    q, k = (x.data_ptr() for x in tensors[:2])
    loads: list[tuple[str, int]] = []
    load = hopper_machine._load_tile

    def seen(tiles: Tiles, place: list[Any], barrier: Any, into: Any, pred: Any = True) -> None:
        name = {q: "q", k: "k"}.get(tiles.tensor.data_ptr())
        if name and pred:
            loads.append((name, int(place[2])))
        load(tiles, place, barrier, into, pred)

    monkeypatch.setattr(hopper_machine, "_load_tile", seen)
    walk(monkeypatch, fg.Attention(), [x.detach() for x in tensors], grad)
    steps = 1024 // 64
    first = [number for number, (name, _) in enumerate(loads) if name == "k"]
    # The first program takes a block after the other; each of the others its first one alone.
    assert len(first) == 8
    rows = [row for name, row in loads if name == "q"]
    blocks = [rows[n : n + steps] for n in range(0, len(rows), steps)]
    assert all(sorted(block) == list(range(0, 1024, 64)) for block in blocks)
    assert len({block[0] for block in blocks}) >= 5
    for number in range(1, 6):
        before = sum(name == "q" for name, _ in loads[: first[number]])
        assert number * steps - 4 < before <= number * steps
