"""Hopper's generated forward walked on a CPU, beside the cpu backend."""

from __future__ import annotations

import math
from typing import Any

import pytest
import stored
import torch
from cases import CASES
from hopper_machine import Machine, Tiles
from stored import Sequences

import flashgen as fg
from flashgen import launch, masks
from flashgen.calls.routes import tile_of
from flashgen.kernel_names import spell
from flashgen.launch import hopper_forward as launch_hopper
from flashgen.launch import tma
from flashgen.schedule import documents
from flashgen.tiling import target_of
from flashgen.tiling.shares import Shares

PICKED = [
    *CASES[::11],
    *(case for case in CASES if case.id in ("prefix_document", "shared_question")),
]


def walk(
    monkeypatch: pytest.MonkeyPatch,
    attend: Any,
    tensors: list[torch.Tensor],
    *,
    tile: tuple[int, int] = (128, 128),
    processors: int = 3,
    shares: Shares | None = None,
    **data: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, LSE and marks of the generated kernel, on a GPU of so many multiprocessors.

    `shares`: other than what is chosen."""
    q, k, v = tensors
    call = attend._check_look(q, k, v, dict(data))
    planned = {name: x for name, x in data.items() if name not in ("scale", "sinks")}
    schedule = attend.schedule(q, k, v, block_size=tile, **planned)
    bound, geometry = spell(call.bound), call.geometry
    # Packed tensors are views from here on.
    q, k, v = call.q, call.k, call.v
    spoilt: list[torch.Tensor] = []
    fresh: set[str] = {"out_ptr", "lse_ptr"}
    machines: dict[Any, Machine] = {}

    def walking(text: str) -> Any:
        machine = Machine(text)
        return machines.setdefault(machine.attention_forward, machine).attention_forward

    def run(kernel: Any, names: Any, values: Any, *rest: Any) -> None:
        if kernel is None:
            return spoilt.append(values["spoilt_ptr"])
        while fresh:
            values[fresh.pop()].fill_(torch.nan)
        machines[kernel].launch(kernel, names, values, *rest)

    monkeypatch.setattr(
        launch_hopper, "_kernels",
        lambda *how: (walking(launch_hopper.generate(*how[:-1])[0].text), None),
    )  # fmt: skip
    monkeypatch.setattr(
        launch_hopper, "_apart_kernel",
        lambda *how: ((made := launch_hopper.apart_text(*how[:-1])), walking(made.text)),
    )  # fmt: skip
    monkeypatch.setattr(launch, "launch", run)
    monkeypatch.setattr(launch, "current_target", lambda device: target_of("cuda", 90))
    monkeypatch.setattr(launch, "multiprocessors", lambda device: processors)
    monkeypatch.setattr(tma, "descriptor", Tiles)
    monkeypatch.setattr(launch_hopper.merging, "merge", merge)
    if shares is not None:
        monkeypatch.setattr(launch_hopper, "_shares", lambda *_: shares)
    out, lse = launch_hopper.forward(
        q, k, v, bound=bound, geometry=geometry, schedule=schedule, scale=call.scale,
        softcap=call.softcap, sinks=data.get("sinks"),
    )  # fmt: skip
    return out, lse, spoilt[0]


def merge(parts: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """What the kernel of this name does."""
    assert not lses.isnan().any()
    total = torch.logsumexp(lses * math.log(2), -1)
    weights = torch.where(total == -math.inf, 0.0, torch.exp(lses.mT * math.log(2) - total)).mT
    lse.copy_(total)
    out.copy_((weights[..., None] * parts).sum(-2))


def inputs(B: int, H: int, Hkv: int, S: int, T: int, D: int, Dv: int) -> list[torch.Tensor]:
    return [torch.randn(s).half() for s in ((B, H, S, D), (B, Hkv, T, D), (B, Hkv, T, Dv))]


def check(
    monkeypatch: pytest.MonkeyPatch, attend: Any, tensors: list[torch.Tensor], **data: Any
) -> None:
    how = {name: data.pop(name) for name in ("tile", "processors", "shares") if name in data}
    right, exact = attend(*tensors, backend="cpu", return_lse=True, **data)
    out, lse, spoilt = walk(monkeypatch, attend, tensors, **how, **data)
    assert not spoilt.any()
    # Weights and outputs are rounded to half.
    torch.testing.assert_close(out, right, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse, exact.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dims", [(128, 128), (40, 72), (192, 128)], ids=str)
@pytest.mark.parametrize("lengths", [(1, 1), (100, 300), (300, 140), (300, 300)], ids=str)
def test_lengths(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, int], dims: tuple[int, int]
) -> None:
    """Later keys are longer: weights outgrow what tiles before were weighed with."""
    tensors = inputs(1, 1, 1, *lengths, *dims)
    tensors[1] *= torch.linspace(0.1, 12, lengths[1])[:, None].half()
    check(monkeypatch, fg.Attention(masks.causal), tensors)


def test_rows_do_not_notice_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are weighed again, some of them NaN, leave those beside them the same bits."""
    q, k, v = inputs(1, 1, 1, 70, 700, 128, 128)
    k *= torch.linspace(0.1, 2, 700)[:, None].half()
    attend, others = fg.Attention(), [*range(20), *range(21, 30), *range(31, 70)]
    whole = Shares(1)
    clean, lse, _ = walk(monkeypatch, attend, [q, k, v], shares=whole)
    q[:, :, 20] = torch.nan
    q[:, :, 30] *= 40
    out, again, _ = walk(monkeypatch, attend, [q, k, v], shares=whole)
    assert torch.equal(out[:, :, others], clean[:, :, others])
    assert torch.equal(again[:, :, others], lse[:, :, others])
    assert out[:, :, 20].isnan().all()
    right = attend(q, k, v, backend="cpu")
    torch.testing.assert_close(out[:, :, 30], right[:, :, 30], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("tile", [(128, 128), (192, 64)], ids=str)
@pytest.mark.parametrize("processors", [1, pytest.param(5, marks=pytest.mark.slow), 100])
def test_programs_share_row_blocks(
    monkeypatch: pytest.MonkeyPatch, processors: int, tile: tuple[int, int]
) -> None:
    tensors = inputs(2, 4, 2, 400, 500, 64, 64)
    attend = fg.Attention(masks.local(left=90, right=20))
    check(monkeypatch, attend, tensors, tile=tile, processors=processors)


@pytest.mark.parametrize("tile", [(128, 64), (192, 128)], ids=str)
@pytest.mark.parametrize("case", PICKED, ids=lambda case: case.id)
def test_masks(monkeypatch: pytest.MonkeyPatch, case: Any, tile: tuple[int, int]) -> None:
    B, H, S, T = 2, 2, 150, 290 if case.below_zero else 150
    data = case.build(B, H, S, T, torch.Generator().manual_seed(0))
    check(
        monkeypatch, fg.Attention(mask=case.bound(data)), inputs(B, H, H, S, T, 64, 64), tile=tile
    )


@pytest.mark.parametrize("is_ordered", [True, False])
def test_data_in_order_and_not(monkeypatch: pytest.MonkeyPatch, is_ordered: bool) -> None:
    """One batch element in order, whose keys' ids nobody reads; and one that may not be."""
    doc = torch.stack([torch.arange(400) // 70, torch.arange(400) // 90])
    if not is_ordered:
        doc[1] = doc[1][torch.randperm(400)]
    attend = fg.Attention(masks.causal_document)
    tensors = inputs(2, 2, 1, 400, 400, 64, 64)
    assert attend.schedule(*tensors, doc=doc).ranges[0].order.tolist() == [1, int(is_ordered)]
    check(monkeypatch, attend, tensors, doc=doc)


@pytest.mark.parametrize(
    ("mask", "dims", "tile"),
    [
        (masks.causal_document, (128, 128), (128, 128)),
        (masks.document, (64, 64), (128, 128)),
        (masks.causal_document & masks.sliding_window(window=100), (192, 128), (128, 64)),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "lie", ["together", "apart", pytest.param("too many", marks=pytest.mark.slow)]
)
def test_documents_as_sequences(
    monkeypatch: pytest.MonkeyPatch,
    lie: str,
    mask: Any,
    dims: tuple[int, int],
    tile: tuple[int, int],
) -> None:
    """Of all lengths, one of them a whole element; by their ids where they are no sequences."""
    monkeypatch.setattr(documents, "ROWS", 1)
    monkeypatch.setattr(documents, "FEWEST", 64)
    cuts = torch.tensor([[1, 130, 258, 350, 351], [600] * 5, [400, 401, 402, 510, 519]])
    doc = (torch.arange(520) >= cuts[..., None]).sum(1)
    if lie == "apart":
        doc[1] = torch.randint(0, 2, (520,))
    if lie == "too many":
        doc[2] = torch.arange(520) // 40
    attend, data = fg.Attention(mask, sinks=True), {"doc": doc, "sinks": torch.randn(2)}
    check(monkeypatch, attend, inputs(3, 2, 1, 520, 520, *dims), tile=tile, **data)


@fg.attention(mask=masks.causal, softcap=9.0, sinks=True)
def bent(score, h, q_idx, kv_idx, slope: fg.Tensor):
    return 1.5 * score + slope[h] * (kv_idx - q_idx)


def test_score_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = inputs(1, 2, 1, 300, 300, 64, 64)
    check(monkeypatch, bent, tensors, slope=torch.rand(2), sinks=torch.randn(2))


@fg.attention(mask=masks.causal_document)
def by_key(score, h, kv_idx, bias: fg.Tensor):  # type: ignore[no-untyped-def]
    return score + bias[h, kv_idx]


@pytest.mark.parametrize("length", [128, 333])
def test_data_of_keys_where_programs_have_few_tiles(
    monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """Fewer turns than stages, so that the last one finds what nobody wrote."""
    tensors = inputs(1, 4, 2, length, length, 64, 64)
    data = {"doc": (torch.arange(length) // 50)[None], "bias": torch.randn(4, length)}
    check(monkeypatch, by_key, tensors, processors=132, **data)
    data.pop("bias")
    check(monkeypatch, fg.Attention(masks.causal_document), tensors, processors=132, **data)


@pytest.mark.parametrize("head_dim", [128, 256])
def test_no_mask(monkeypatch: pytest.MonkeyPatch, head_dim: int) -> None:
    tensors = inputs(1, 2, 2, 300, 320, head_dim, head_dim)
    check(monkeypatch, fg.Attention(), tensors, tile=(128, 64))


@pytest.mark.parametrize("shares", [Shares(0, 3), Shares(4, 3), Shares(3, 7)], ids=str)
def test_the_last_row_blocks_are_shared(monkeypatch: pytest.MonkeyPatch, shares: Shares) -> None:
    """The last one of a head is short; some shares have no tile."""
    tensors = inputs(1, 2, 1, 300, 410, 64, 64)
    attend = fg.Attention(sinks=True)
    check(monkeypatch, attend, tensors, tile=(128, 64), shares=shares, sinks=torch.randn(2))


@pytest.mark.parametrize("mask", [masks.causal, masks.global_window(window=90, globals=5)], ids=str)
def test_row_blocks_of_a_mask_are_shared(monkeypatch: pytest.MonkeyPatch, mask: Any) -> None:
    """Several runs of cut and full tiles in a row; rows that see nothing; shares without a tile."""
    tensors = inputs(2, 2, 1, 500, 420, 64, 64)
    check(monkeypatch, fg.Attention(mask), tensors, tile=(128, 64), shares=Shares(0, 5))


def test_shares_of_sequences_of_other_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(3, 2, 1, 150, 500, 64, 64)
    lens = torch.tensor([500, 0, 177], dtype=torch.int32)
    attend, given = fg.Attention(masks.causal), {"kv_lens": lens, "q_offset": 20}
    right = attend(q, k, v, backend="cpu", **given)
    beyond = torch.arange(500) >= lens[:, None]
    spoilt = [x.masked_fill(beyond[:, None, :, None], torch.nan) for x in (k, v)]
    out, _, marks = walk(monkeypatch, attend, [q, *spoilt], shares=Shares(0, 3), **given)
    assert not marks.any()
    torch.testing.assert_close(out, right, rtol=2e-3, atol=2e-3)


def test_slots_beyond_the_valid_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(3, 2, 1, 150, 300, 64, 64)
    lens = torch.tensor([300, 0, 177], dtype=torch.int32)
    attend = fg.Attention(mask=masks.sliding_window(window=64))
    right = attend(q, k, v, backend="cpu", kv_lens=lens, q_offset=0)
    beyond = torch.arange(300) >= lens[:, None]
    spoilt = [x.masked_fill(beyond[:, None, :, None], torch.nan) for x in (k, v)]
    out, _, marks = walk(monkeypatch, attend, [q, *spoilt], kv_lens=lens, q_offset=0)
    assert not marks.any()
    torch.testing.assert_close(out, right, rtol=2e-3, atol=2e-3)


def test_what_is_not_finite_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(1, 1, 1, 300, 300, 64, 64)
    v[:, :, 20, 3] = torch.inf
    doc = (torch.arange(300) // 150)[None]
    out, _, marks = walk(monkeypatch, fg.Attention(mask=masks.causal_document), [q, k, v], doc=doc)
    assert torch.equal(marks.bool(), ~out.isfinite().all(-1))
    assert marks[0, 0, 20:150].all()


Q_LENS, KV_LENS = [0, 1, 300, 64, 129, 7, 40], [5, 1, 300, 200, 513, 0, 128]


@fg.attention(mask=masks.causal_document, softcap=9.0, sinks=True)
def odd(score, b, h, q_idx, kv_idx, slope: fg.Tensor):
    return score + slope[b, h] * (kv_idx - q_idx)


PACKED: dict[str, tuple[Any, dict[str, Any]]] = {
    "causal": (fg.Attention(masks.causal), {}),
    "window": (fg.Attention(masks.sliding_window(window=70)), {"q_offset": 40}),
    "full": (fg.Attention(), {}),
    "data": (
        odd,
        {
            "doc": torch.arange(600).expand(7, -1) // torch.arange(20, 90, 10)[:, None],
            "slope": torch.rand(7, 4),
            "sinks": torch.randn(4),
            "q_offset": torch.arange(7) * 9,
        },
    ),
}


@pytest.mark.parametrize(
    ("name", "tile"),
    [
        ("causal", (192, 128)),
        pytest.param("window", (128, 64), marks=pytest.mark.slow),
        pytest.param("full", (128, 128), marks=pytest.mark.slow),
        ("data", (128, 64)),
    ],
    ids=str,
)
@pytest.mark.parametrize("processors", [pytest.param(3, marks=pytest.mark.slow), 100])
def test_packed(
    monkeypatch: pytest.MonkeyPatch, name: str, tile: tuple[int, int], processors: int
) -> None:
    """Sequences of all lengths; values of others, that are NaN, reach none of them."""
    attend, data = PACKED[name]
    how: dict[str, Any] = {"tile": tile, "processors": processors}
    sequences = Sequences.random(Q_LENS, KV_LENS, 4, 2, 64, 64, torch.float16)
    tensors, places = sequences.packed()
    data = {**data, **places}
    right, exact = attend(*tensors, backend="cpu", return_lse=True, **data)
    out, lse, marks = walk(monkeypatch, attend, tensors, **how, **data)
    assert not marks.any()
    torch.testing.assert_close(out[0].transpose(0, 1), right, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse[0], exact.float(), rtol=1e-5, atol=1e-5)
    _, k, v = sequences.packed()[0]
    lost = slice(*places["cu_seqlens_kv"][3:5].tolist())
    k[lost], v[lost] = torch.nan, torch.nan
    out, _, marks = walk(monkeypatch, attend, [tensors[0], k, v], **how, **data)
    rows = torch.arange(len(right))
    first, end = places["cu_seqlens_q"][3:5].tolist()
    others = (rows < first) | (rows >= end)
    assert not marks[0][:, others].any()
    assert marks[0][:, ~others].all()
    torch.testing.assert_close(out[0].transpose(0, 1)[others], right[others], rtol=2e-3, atol=2e-3)


SEEN = {"causal": stored.causal, "window": stored.within(70), "full": stored.every}


@pytest.mark.parametrize(
    ("name", "size", "tile", "dims", "is_packed"),
    [
        ("causal", 16, (128, 128), (128, 128), True),
        ("window", 128, (128, 64), (192, 128), False),
        pytest.param("causal", 256, (192, 64), (64, 64), True, marks=pytest.mark.slow),
        pytest.param("full", 32, (128, 64), (40, 72), False, marks=pytest.mark.slow),
        pytest.param("window", 64, (128, 64), (256, 256), False, marks=pytest.mark.slow),
        pytest.param("full", 64, (128, 128), (128, 128), True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_pages(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    size: int,
    tile: tuple[int, int],
    dims: tuple[int, int],
    is_packed: bool,
) -> None:
    """What isn't used of pages is NaN, and of the table no page."""
    lens = [*KV_LENS[:-1], 130]
    q_lens = Q_LENS if is_packed else [40] * len(lens)
    sequences = Sequences.random(q_lens, lens, 2, 1, *dims, torch.float16)
    keys, places = sequences.paged(size)
    q = torch.stack(sequences.q) if not is_packed else stored.join(sequences.q)
    if is_packed:
        places["cu_seqlens_q"] = stored.starts(q_lens)
    how: dict[str, Any] = {"tile": tile, "processors": 3 if is_packed else 100}
    out, lse, marks = walk(monkeypatch, PACKED[name][0], [q, *keys], **how, **places)
    assert not marks.any()
    if is_packed:
        out, lse = out[0].transpose(0, 1), lse[0]
    found = stored.parted(out, lse, q_lens if is_packed else None)
    stored.same(found, sequences.reference(SEEN[name]), 2e-3)


@pytest.mark.parametrize("lengths", [(1, 1), (5, 300)], ids=str)
def test_few_queries(monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, int]) -> None:
    """On the tile that such calls plan, of 64 queries: one warpgroup."""
    monkeypatch.setattr(launch, "current_target", lambda device: target_of("cuda", 90))
    tensors = inputs(1, 2, 1, *lengths, 128, 128)
    attend = fg.Attention(masks.causal)
    tile = tile_of(attend._check_look(*tensors, {}), "hopper")
    assert tile == (64, 64)
    check(monkeypatch, attend, tensors, tile=tile)


@pytest.mark.parametrize(
    "tile", [pytest.param((128, 64), marks=pytest.mark.slow), (192, 64)], ids=str
)
@pytest.mark.parametrize("numbers", [(2, 1, 64, 100), (3, 2, 1, 1)], ids=str)
def test_shapes_that_tuning_tries(
    monkeypatch: pytest.MonkeyPatch, numbers: tuple[int, ...], tile: tuple[int, int]
) -> None:
    monkeypatch.setattr(
        launch_hopper, "tuned", lambda what, device, shape, *_: shape.tuned(numbers)
    )
    attend = fg.Attention(masks.causal)
    check(monkeypatch, attend, inputs(1, 2, 1, 300, 400, 64, 64), tile=tile)


@fg.attention(mask=masks.causal, sinks=True)
def slanted(score, h, q_idx, kv_idx, slope: fg.Tensor):
    return score + (slope[h] - 0.1) * (kv_idx - q_idx)


@pytest.mark.parametrize("tile", [(128, 128), (192, 128)], ids=str)
def test_scores_that_rise_with_the_distance(
    monkeypatch: pytest.MonkeyPatch, tile: tuple[int, int]
) -> None:
    data = {"slope": torch.tensor([0.6, 0.0]), "sinks": torch.randn(2), "scale": 0.3}
    check(monkeypatch, slanted, inputs(2, 2, 1, 200, 300, 64, 64), tile=tile, **data)


def test_level_tiles_want_registers() -> None:
    q = torch.empty(1, 2, 1024, 64, dtype=torch.half)
    slope, table = {"slope": torch.rand(2), "sinks": torch.rand(2)}, {"table": torch.rand(2, 71)}
    for attend, rows, data in ((slanted, 192, slope), (biased, 128, table)):
        assert tile_of(attend._check_look(q, q, q, data), "hopper") == (rows, 128)


@fg.attention(mask=masks.causal)
def biased(score, h, q_idx, kv_idx, table: fg.Tensor):
    return score + table[h, fg.minimum(q_idx - kv_idx, 70)]


def test_data_read_by_distance_is_one_number_far_from_the_diagonal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors, table = inputs(1, 2, 1, 400, 420, 64, 64), torch.randn(2, 71)
    table[0, 70] = table[1, 5:20] = -torch.inf
    check(monkeypatch, biased, tensors, tile=(128, 64), table=table)
