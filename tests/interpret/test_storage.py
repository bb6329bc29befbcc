"""Interpreted kernels on packed and paged tensors: the cases of the cpu backend's tests."""

from __future__ import annotations

from typing import Any

import pytest
import stored
import torch
from cases import CASES
from stored import Sequences
from test_packed import LENGTHS, check_gradients, plain
from test_packed import check as check_packed
from test_paged import check as check_paged

import flashgen as fg
from flashgen import masks
from flashgen.launch import decode as launch_decode
from flashgen.plan import plan
from flashgen.schedule import classify
from flashgen.tiling.decode import Splits

POSITIONAL = stored.by_position(CASES)
KV_LENS = [0, 1, 5, 127, 129]

pytestmark = pytest.mark.usefixtures("nan_filled_empty")


@pytest.mark.parametrize("name", LENGTHS)
def test_packed_lengths(name: str) -> None:
    sequences = Sequences.random(*zip(*LENGTHS[name], strict=True), 4, 2, 16, 24)
    check_packed(fg.Attention(masks.causal), sequences, stored.causal, "interpret")
    check_packed(fg.Attention(), sequences, stored.every, "interpret")


@pytest.mark.parametrize("name", LENGTHS)
def test_packed_gradients(name: str) -> None:
    sequences = Sequences.random(*zip(*LENGTHS[name], strict=True), 2, 1)
    attend = fg.Attention(masks.sliding_window(window=40))
    check_gradients(attend, sequences, plain(stored.within(40)), "interpret")


def test_packed_sinks_and_data_have_gradients() -> None:
    """Of rows between sequences, which the kernels add, and behind the last one, nothing."""

    def tilt(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, slope: fg.Tensor) -> Any:
        return score + slope[b, h] * (kv_idx - q_idx)

    attend = fg.Attention(masks.causal, score=tilt, sinks=True, softcap=3.0)
    starts, ends = (torch.tensor(x, dtype=torch.int32) for x in ([0, 70, 70, 79], [0, 40, 47, 90]))
    where = {"cu_seqlens_q": starts, "cu_seqlens_kv": ends}
    shapes = ((85, 4, 16), (90, 2, 16), (90, 2, 16), (3, 4), (4,))
    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
    grads = (torch.randn(85, 4, 16), torch.randn(4, 85))
    found: list[Any] = []
    for backend in ("interpret", "cpu"):
        *tensors, slope, sinks = leaves
        given = {**where, "slope": slope, "sinks": sinks, "backend": backend}
        results = attend(*tensors, **given, return_lse=True)
        found.append((*results, *torch.autograd.grad(results, leaves, grads)))
    for mine, right in zip(*found, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "block",
    [*(pytest.param(x, marks=pytest.mark.slow) for x in ((64, 16), (16, 64))), (48, 96)],
    ids=str,
)
def test_gradients_on_every_tile(block: tuple[int, int]) -> None:
    """Lengths of one more than a tile: all kernels lay out prepared rows alike."""
    q_lens, kv_lens = [65, 97, 1, 17], [65, 97, 65, 49]
    sequences = Sequences.random(q_lens, kv_lens, 2, 1)
    tensors, arguments = sequences.packed()
    attend = fg.Attention(masks.causal)
    leaves = [x.requires_grad_() for x in tensors]
    schedule = attend.schedule(*leaves, **arguments, block_size=block)
    grads = []
    for options in ({"backend": "interpret", "schedule": schedule}, {"backend": "cpu"}):
        out = attend(*leaves, **arguments, **options)
        grads.append(torch.autograd.grad(out, leaves, torch.ones_like(out)))
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=2e-5)


PAGES = [
    pytest.param(layout, *pages, marks=[pytest.mark.slow] if layout == "HND" and turn % 2 else [])
    for layout in ("NHD", "HND")
    for turn, pages in enumerate([(16, 3), (1, 3), (3, 1), (64, 3), (256, 1)])
]


@pytest.mark.parametrize(("layout", "size", "splits"), PAGES)
def test_pages(monkeypatch: Any, size: int, splits: int, layout: str) -> None:
    """Unused slots and pages are NaN, unused entries of the table are no pages."""
    monkeypatch.setattr(launch_decode, "splits_of", lambda *_, **__: Splits(splits, 0))
    decode = Sequences.random([3] * 5, KV_LENS, 4, 2, 16, 24)
    window = fg.Attention(masks.sliding_window(window=40))
    check_paged(window, decode, stored.within(40), size, layout, "interpret")
    mixed = Sequences.random([0, 1, 5, 70, 1], KV_LENS, 4, 2)
    check_paged(
        fg.Attention(masks.causal), mixed, stored.causal, size, layout, "interpret", packed=True
    )


@pytest.mark.parametrize("size", [3, 64])
def test_pages_of_every_other_tile(monkeypatch: Any, size: int) -> None:
    """What the table says of a tile is read while another one is computed, of another run."""
    monkeypatch.setattr(launch_decode, "splits_of", lambda *_, **__: Splits(3, 0))

    @fg.mask
    def every_other(kv_idx):
        return kv_idx // 64 % 2 == 1

    sequences = Sequences.random([2] * 3, [650, 400, 30], 4, 2, 16, 24)
    keep = lambda b, i, j: (j // 64 % 2 == 1).expand(len(i), -1)  # noqa: E731
    check_paged(fg.Attention(every_other), sequences, keep, size, "NHD", "interpret")


def test_hidden_pages_that_are_not_finite() -> None:
    """NaN in slots that the mask hides inside a tile: the second pass reads pages too."""
    sequences = Sequences.random([8, 8], [100, 40])
    keys, arguments = sequences.paged(16)
    q = torch.stack(sequences.q)
    attend = fg.Attention(masks.sliding_window(window=20))
    clean = attend(q, *keys, **arguments, backend="interpret")
    for b, length in enumerate((100, 40)):
        for position in range(length - 27):
            page = arguments["page_table"][b, position // 16]
            keys[1][page, position % 16] = stored.NAN
    spoilt = attend(q, *keys, **arguments, backend="interpret")
    torch.testing.assert_close(spoilt, clean, rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", POSITIONAL[4::12], ids=lambda case: case.id)
@pytest.mark.parametrize("block", [(32, 48), (64, 16)], ids=str)
def test_planning_kernels(case: Any, block: tuple[int, int]) -> None:
    """Packed states are those of the planner on the CPU, and so are the runs' counts."""
    data = case.build(3, 2, 70, 70, torch.Generator().manual_seed(4))
    sequences = Sequences.random([40, 0, 70], [70, 9, 70], 2, 2)
    tensors, arguments = sequences.packed()
    attend = fg.Attention(case.bound(data))
    call = attend._check_look(*tensors, {**arguments})
    states, runs = plan(call.bound, call.geometry, block, "exact")
    assert torch.equal(states, classify(call.bound, call.geometry, block, "exact"))
    schedule = attend.schedule(*tensors, **arguments, block_size=block, planner="exact")
    assert torch.equal(schedule.kv_runs.counts, runs.counts)
