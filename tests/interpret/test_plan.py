"""Planning kernels, interpreted: states and runs are those of the planner on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import CASES, Case
from hypothesis import assume, given
from stored import Sequences
from strategies import Problem, bounded, problems, shapes, tile_sizes
from triton.runtime.errors import InterpreterError

import flashgen as fg
from flashgen import masks
from flashgen.call import Call, check
from flashgen.check_storage import Storage
from flashgen.errors import CallText
from flashgen.kernel_names import spell
from flashgen.plan import compact as compact_by_kernel
from flashgen.plan import plan
from flashgen.plan import queue as queue_by_kernel
from flashgen.schedule import Runs, classify, compact
from flashgen.schedule.queue import queue

pytestmark = pytest.mark.usefixtures("nan_filled_empty")


def call_of(mask: Any, q: torch.Tensor, k: torch.Tensor, **arguments: Any) -> Call:
    options = {n: arguments.pop(n, None) for n in ("scale", "q_offset", "sinks")}
    options["storage"] = Storage.take(arguments)
    program = fg.Attention(mask)._program
    return check(program, CallText("test", {}), q, k, k, data=arguments, **options)


def same_runs(got: Runs, wanted: Runs) -> None:
    assert torch.equal(got.counts, wanted.counts)
    for mine, right in ((got.masked, wanted.masked), (got.full, wanted.full)):
        count = (right[..., 1] > 0).sum(-1, keepdim=True)
        valid = torch.arange(right.shape[-2]) < count
        width = min(mine.shape[-2], right.shape[-2])
        assert not valid[..., width:].any()
        assert torch.equal(mine[..., :width, :][valid[..., :width]], right[valid])
        # Two more that a kernel reads ahead.
        for ahead in (0, 1):
            at = (count + ahead)[..., None].expand(*count.shape, 2)
            assert (mine.gather(-2, at) == 0).all()


def check_plan(call: Call, block: tuple[int, int], planner: Any) -> torch.Tensor:
    """Compare both planners; returns the states."""
    geometry = call.geometry
    states, runs = plan(call.bound, geometry, block, planner)
    assert torch.equal(states, classify(call.bound, geometry, block, planner))
    lens = geometry.kv_lens
    ends = (torch.arange(states.shape[3]) + 1) * block[1]
    ragged = ends > (geometry.kv_len if lens is None else lens.reshape(-1, 1, 1, 1))
    ragged = ragged.expand(states.shape[0], 1, 1, -1)
    rows = compact(states, ragged)
    columns = compact(states.mT, ragged.mT, by_key=True)
    # A row with more runs than its list has room for becomes one masked run.
    if max(_runs(rows.masked), _runs(rows.full)) < runs.masked.shape[-2] - 2:
        same_runs(runs, rows)
    room = states.shape[2] // 2 + 1
    got = compact_by_kernel(states, geometry.kv_len, lens, block, room, by_key=True)
    same_runs(got, columns)
    return states


def _runs(lists: torch.Tensor) -> int:
    return int((lists[..., 1] > 0).sum(-1).max()) if lists.numel() else 0


def check_case(case: Case, S: int, T: int, block: tuple[int, int]) -> None:
    S = S if case.below_zero else T
    data = case.build(2, 2, S, T, torch.Generator().manual_seed(S))
    q, k = torch.zeros(2, 2, S, 1), torch.zeros(2, 2, T, 1)
    check_plan(call_of(case.bound(data), q, k), block, "exact")


@pytest.mark.parametrize("case", CASES[::5], ids=lambda case: case.id)
def test_masks(case: Case) -> None:
    check_case(case, 51, 67, (16, 32))


LENGTHS = {
    "rows": lambda q_idx, kv_idx: q_idx > 3,
    "causal": lambda q_idx, kv_idx: kv_idx <= q_idx,
    "keys": lambda q_idx, kv_idx, kv_len: (kv_idx % 7 < 5) | (kv_idx > kv_len // 2),
    "from the end": lambda kv_idx, q_len, kv_len: kv_len - kv_idx < 30 + q_len * 0,
}


# Each mask with offsets of each sequence, two of them with the others.
OFFSETS = [
    pytest.param(name, offset, marks=[pytest.mark.slow] if turn % 3 and offset in (None, 5) else [])
    for offset in (None, 5, (40, -3, 0, 7))
    for turn, name in enumerate(LENGTHS)
]


@pytest.mark.parametrize(("name", "offset"), OFFSETS, ids=str)
def test_lengths_of_each_sequence(name: str, offset: Any) -> None:
    """Tiles beyond a sequence's own length are empty, and its last one decides by what is in it."""
    offset = torch.tensor(offset) if isinstance(offset, tuple) else offset
    lens = torch.tensor([0, 5, 48, 70], dtype=torch.int32)
    q, k = torch.zeros(4, 1, 20, 1), torch.zeros(4, 1, 70, 1)
    call = call_of(LENGTHS[name], q, k, kv_lens=lens, q_offset=offset)
    states = check_plan(call, (16, 16), "exact")
    assert (states[0] == 0).all()
    assert (states[1, 0, :, 1:] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_mask(case: Case) -> None:
    check_case(case, 70, 131, (48, 16))
    check_case(case, 131, 70, (32, 32))


def check_problem(problem: Problem, block: tuple[int, int], planner: str) -> None:
    shape = problem.shape
    q = torch.zeros(shape.batch, shape.heads, shape.q_len, 1)
    k = torch.zeros(shape.batch, shape.kv_heads, shape.kv_len, 1)
    options = {"q_offset": shape.q_offset, "kv_lens": shape.kv_lens}
    call = call_of(problem.function, q, k, **options, **problem.data)
    try:
        check_plan(call, block, planner)
    except InterpreterError as error:
        # Triton 3.7 interprets a scalar comparison of floats, spread over a block, as floats.
        assume("bitwise_" not in str(error))
        raise


small = shapes(most=60, batch=2, groups=(1, 2))


@bounded(15, shrink=False)
@given(problems(small), tile_sizes)
def test_random_masks(problem: Problem, block: tuple[int, int]) -> None:
    check_problem(problem, block, "exact")


@bounded(8, shrink=False)
@given(problems(small), tile_sizes)
def test_random_rules(problem: Problem, block: tuple[int, int]) -> None:
    check_problem(problem, block, "bounds")


@pytest.mark.slow
@bounded(600, shrink=False)
@given(problems(shapes(), depth=6), tile_sizes)
def test_many_random_masks(problem: Problem, block: tuple[int, int]) -> None:
    check_problem(problem, block, "exact")


def test_more_runs_than_there_is_room_for() -> None:
    """Each query sees one key of its own, far from its neighbours': time is lost, truth isn't."""
    S, T = 32, 32 * 16 * 2
    place = torch.arange(S) * 32 + 3

    @fg.mask
    def own_key(q_idx, kv_idx, place: fg.Tensor):
        return (kv_idx >= place[q_idx]) & (kv_idx < place[q_idx] + 1)

    q, k, v = torch.randn(1, 1, S, 16), torch.randn(1, 1, T, 16), torch.randn(1, 1, T, 16)
    call = call_of(own_key, q, k, q_offset=0, place=place)
    states, runs = plan(call.bound, call.geometry, (16, 16), "exact")
    assert (states != 0).sum(-1).flatten().tolist() == [16, 16]
    assert runs.counts.flatten(0, 2).tolist() == [[31, 0, 0], [31, 0, 0]]
    assert runs.masked[0, 0, :, 0].tolist() == [[0, 31], [32, 63]]
    attend = fg.Attention(own_key)
    schedule = attend.schedule(q, k, v, q_offset=0, place=place, block_size=16)
    object.__setattr__(schedule, "_kv_runs", runs)
    out = attend(q, k, v, q_offset=0, place=place, schedule=schedule, backend="interpret")
    torch.testing.assert_close(out, v[:, :, place])


def test_names_of_data_in_planning_kernels() -> None:
    @fg.mask
    def odd(q_idx, kv_idx, states: fg.Tensor, corner: int, test: int):
        return (states[q_idx] == states[kv_idx]) & (kv_idx % 5 != corner) | (q_idx % 7 == test)

    q = torch.zeros(1, 1, 60, 1)
    call = call_of(odd, q, q, states=torch.arange(60) // 25, corner=2, test=1)
    spelled = spell(call.bound)
    assert set(spelled.tensors) != {"states"}
    check_plan(call, (16, 16), "exact")


@pytest.mark.parametrize("sizes", [(0, 2, 4, 4), (2, 0, 4, 4), (1, 1, 0, 4), (1, 1, 4, 0)], ids=str)
def test_sizes_of_zero(sizes: tuple[int, ...]) -> None:
    B, H, S, T = sizes
    q, k = torch.zeros(B, H, S, 1), torch.zeros(B, H, T, 1)
    call = call_of(lambda h, b, q_idx, kv_idx: kv_idx + h + b <= q_idx, q, k)
    states, runs = plan(call.bound, call.geometry, (16, 16), "exact")
    assert torch.equal(states, classify(call.bound, call.geometry, (16, 16), "exact"))
    assert (runs.counts == 0).all()


@pytest.mark.parametrize(("by_key", "late_first"), [(False, False), (True, False), (True, True)])
def test_packed_rows_in_order(by_key: bool, late_first: bool) -> None:
    """More than a program looks at together, and sequences without queries or keys."""
    sequences = Sequences.random([0, 700, 33, 5, 2500, 40], [9, 700, 0, 64, 1300, 41], 1, 1, 1)
    tensors, places = sequences.packed()
    made = fg.Attention(masks.sliding_window(window=60)).schedule(
        *tensors, **places, block_size=(16, 16)
    )
    packing, counts = made.packing, (made.q_runs if by_key else made.kv_runs).counts
    assert packing is not None
    wanted = queue(counts, packing, made.block_size, by_key, late_first)
    found = queue_by_kernel(counts, packing, made.block_size, by_key, late_first)
    rows = int(wanted[0, 0])
    lens = sequences.kv_lens if by_key else sequences.q_lens
    assert rows == sum(-(-n // 16) for n in lens)
    assert found[0, 0] == rows
    assert torch.equal(found[1 : rows + 1], wanted[1 : rows + 1])
