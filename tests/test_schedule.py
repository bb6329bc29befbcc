"""Schedules against brute force: sound always, exact where the elements are looked at."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from cases import CASES
from hypothesis import given
from hypothesis import strategies as st
from strategies import bounded

import flashgen as fg
from flashgen import masks
from flashgen.schedule import Runs, Schedule


def brute_force(allowed: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Each tile's state, looked at one by one."""
    rows, columns = (-(-n // size) for n, size in zip(allowed.shape[2:], block, strict=True))
    states = torch.zeros(*allowed.shape[:2], rows, columns, dtype=torch.int8)
    for i in range(rows):
        for j in range(columns):
            tile = allowed[
                ..., i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]
            ].flatten(2)
            states[:, :, i, j] = tile.any(-1).to(torch.int8) + tile.all(-1)
    return states


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_masks_exactly(case):
    for (S, T), block in (((67, 130), (16, 48)), ((129, 129), (64, 16))):
        S = S if case.below_zero else T
        data = case.build(2, 2, S, T, torch.Generator().manual_seed(S))
        truth = brute_force(case.expected(2, 2, S, T, data), block)
        q, k = torch.empty(2, 2, S, 1), torch.empty(2, 2, T, 1)
        attend = fg.Attention(case.bound(data))
        exact = attend.schedule(q, k, block_size=block, planner="exact").to_dense()
        assert torch.equal(exact.expand_as(truth), truth)
        bounds = attend.schedule(q, k, block_size=block, planner="bounds").to_dense()
        said, is_open = bounds.expand_as(truth), (bounds == 1).expand_as(truth)
        assert torch.equal(said[~is_open], truth[~is_open])


def test_names_of_flex_attention():
    """Counts and indices, along rows and columns, are those of torch's BlockMask."""
    from torch.nn.attention.flex_attention import create_block_mask

    doc = torch.tensor([0] * 100 + [1] * 156)

    def causal_document(b, h, q, k):
        return (q >= k) & (doc[q] == doc[k])

    theirs = create_block_mask(causal_document, 1, 1, 256, 256, device="cpu", BLOCK_SIZE=32)
    q = torch.empty(1, 1, 256, 1)
    ours = fg.Attention(causal_document).schedule(q, q, block_size=32)
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name))
    for name in ("kv", "full_kv", "q", "full_q"):
        counts = getattr(ours, f"{name}_num_blocks")
        valid = torch.arange(8) < counts[..., None]
        mine, right = (getattr(x, f"{name}_indices") for x in (ours, theirs))
        assert torch.equal(mine[valid], right[valid])
    assert ours.density == pytest.approx(1 - theirs.sparsity() / 100)


def test_a_ragged_end_alone_makes_nothing_partial():
    q = torch.empty(1, 1, 100, 1)
    assert (fg.Attention().schedule(q, q, block_size=64).to_dense() == 2).all()
    lens = torch.tensor([0, 65])
    states = fg.Attention().schedule(q.expand(2, 1, 100, 1), q.expand(2, 1, 100, 1), kv_lens=lens,
                                     block_size=64).to_dense()  # fmt: skip
    assert states[:, 0, 0].tolist() == [[0, 0], [2, 2]]


def test_a_long_sequence():
    """131072 positions: n (n - 1) / 2 full and n partial tiles, and no square of anything."""
    n = 1024
    q = torch.empty(1).expand(1, 32, 128 * n, 1)
    states = fg.Attention(masks.causal).schedule(q, q, block_size=128).states
    assert states.shape == (1, 1, n, n)
    assert [(states == s).sum().item() for s in (1, 2)] == [n, n * (n - 1) // 2]


def test_made_once_and_used_by_layers_with_other_scores():
    @fg.attention(mask=masks.document)
    def cooler(score, temperature: float):
        return score * temperature

    q = torch.randn(1, 2, 90, 8)
    doc = torch.arange(90)[None] // 30
    schedule = cooler.schedule(q, q, q, doc=doc)
    plain = fg.Attention(mask=masks.document)
    assert torch.equal(plain(q, q, q, doc=doc, schedule=schedule), plain(q, q, q, doc=doc))
    assert torch.allclose(
        cooler(q, q, q, doc=doc, temperature=1.0, schedule=schedule), plain(q, q, q, doc=doc)
    )


@fg.attention(mask=masks.sliding_window(window=9) & masks.document)
def shifted(score, h, shift: fg.Tensor):
    """At the top level of a module, so that it can be found again by its name."""
    return score + shift[h]


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_attention_survives_copies(again):
    q = torch.randn(1, 2, 40, 8)
    data = {"doc": torch.arange(40)[None] // 15, "shift": torch.randn(2)}
    assert torch.equal(again(shifted)(q, q, q, **data), shifted(q, q, q, **data))
    module = torch.nn.Module()
    module.attend = again(shifted)
    assert torch.equal(module.attend(q, q, q, **data), shifted(q, q, q, **data))


MEMORY = """
import resource, torch, flashgen as fg
from flashgen import masks

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

def plan(S, block):
    q = torch.empty(1).expand(1, 32, S, 1)
    ids = torch.searchsorted(torch.arange(0, S, 1000), torch.arange(S), right=True)[None]
    made = [fg.Attention(masks.causal).schedule(q, q, block_size=block)]
    made.append(fg.Attention(masks.causal_document).schedule(q, q, doc=ids, block_size=block))
    return made

plan(512, 128)
before = peak()
for schedule in plan(131072, 128):
    counts = [(schedule.states == state).sum().item() for state in (1, 2)]
    print(*schedule.states.shape, *counts)
print(peak() - before)
"""


def test_memory_is_that_of_tiles() -> None:
    """131072 positions squared are 16 GiB of booleans; a schedule needs a few of its tiles' bytes.

    Documents of 1000: no full tile but those on no edge."""
    result = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True
    )
    causal, document, extra = result.stdout.split("\n")[:3]
    assert causal == f"1 1 1024 1024 1024 {1024 * 1023 // 2}"
    assert document.startswith("1 1 1024 1024 ")
    assert sum(map(int, document.split()[4:])) < 12 * 1024
    assert float(extra) < 64


def unrolled(runs: torch.Tensor, tiles: int) -> list[int]:
    """The tiles of one row's runs, in the order a kernel walks them."""
    visited: list[int] = []
    for start, end in runs.tolist():
        assert start <= end <= tiles
        visited += range(start, end)
    return visited


def check_runs(runs: Runs, states: torch.Tensor, ragged: torch.Tensor, by_key: bool) -> None:
    """Each visited tile once; full ones where no element needs a mask."""
    rows, tiles = states.shape[2:]
    for b in range(states.shape[0]):
        for h in range(states.shape[1]):
            for row in range(rows):
                masked = unrolled(runs.masked[b, h, row], tiles)
                full = unrolled(runs.full[b, h, row], tiles)
                counts = runs.counts[b, h, row].tolist()
                state = states[b, h, row].tolist()
                cut = [bool(ragged[b, row if by_key else tile]) for tile in range(tiles)]
                apart = [t for t in range(tiles) if state[t] and cut[t] and not by_key]
                want_full = [t for t in range(tiles) if state[t] == 2 and not cut[t]]
                rest = [t for t in range(tiles) if state[t] and t not in want_full + apart]
                assert (masked, full) == (rest, want_full)
                assert counts == [len(rest), len(want_full), len(apart)]
                # A kernel reads two runs ahead of the one it is in.
                assert (runs.masked[b, h, row, -2:] == 0).all()
                assert (runs.full[b, h, row, -2:] == 0).all()


@bounded(150)
@given(st.data())
def test_runs_are_the_states(data: st.DataObject) -> None:
    rows, tiles = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 9))
    batch, heads = data.draw(st.sampled_from([1, 2])), data.draw(st.sampled_from([1, 2]))
    numbers = st.lists(st.integers(0, 2), min_size=tiles * rows, max_size=tiles * rows)
    parts = [data.draw(numbers) for _ in range(batch * heads)]
    states = torch.tensor(parts, dtype=torch.int8).reshape(batch, heads, rows, tiles)
    kv_len = 16 * tiles - data.draw(st.integers(0, 15))
    lens = None
    if data.draw(st.booleans()):
        lens = torch.tensor([data.draw(st.integers(0, kv_len)) for _ in range(batch)])
    ends = torch.full((batch,), kv_len) if lens is None else lens
    starts = torch.arange(tiles) * 16
    states = states * (starts < ends.reshape(-1, 1, 1, 1))
    ragged = (starts + 16 > ends[:, None]).expand(batch, tiles)
    schedule = Schedule(states, (16, 16), rows * 16, kv_len, None, lens, "random", "", "auto")
    check_runs(schedule.kv_runs, states, ragged, by_key=False)
    check_runs(schedule.q_runs, states.mT, ragged, by_key=True)
    for name, kind in (("kv", 1), ("full_kv", 2), ("q", 1), ("full_q", 2)):
        grid = states if "kv" in name else states.mT
        counts = getattr(schedule, f"{name}_num_blocks")
        indices = getattr(schedule, f"{name}_indices")
        assert torch.equal(counts, (grid == kind).sum(-1, dtype=torch.int32))
        listed = torch.arange(grid.shape[3]) < counts[..., None]
        assert (grid.gather(-1, indices.long())[listed] == kind).all()
        assert torch.equal(indices.sort(-1).values, torch.arange(grid.shape[3]).expand_as(grid))


def test_schedules_kept_are_those_of_the_call() -> None:
    """A mask without data is planned once for its lengths, scalars, offset and tiles."""
    attend = fg.Attention(masks.sliding_window)
    q = torch.zeros(1, 1, 64, 8)
    first = attend.schedule(q, q, window=8)
    assert attend.schedule(q, q, window=8) is first
    for q_len, more in (
        (64, {"window": 9}),
        (32, {"window": 8}),
        (64, {"window": 8, "q_offset": 3}),
        (64, {"window": 8, "block_size": 16}),
        (64, {"window": 8, "planner": "bounds"}),
    ):
        assert attend.schedule(q[:, :, :q_len], q, **more) is not first
    doc = torch.zeros(1, 64)
    documents = fg.Attention(masks.document)
    assert documents.schedule(q, q, doc=doc) is not documents.schedule(q, q, doc=doc)


@pytest.mark.slow
@pytest.mark.parametrize("block", [16, 32, (48, 96), 64, (64, 128), (128, 64), (256, 16), 256])
def test_every_tile_size(block: int | tuple[int, int]) -> None:
    """One schedule's tiles or another's: the same output."""
    q = torch.randn(1, 2, 300, 8, dtype=torch.float64)
    data = {"doc": torch.randint(0, 2, (1, 300)).cumsum(1) // 20}
    attend = fg.Attention(masks.causal_document)
    schedule = attend.schedule(q, q, q, block_size=block, **data)
    pair = (block, block) if isinstance(block, int) else block
    allowed = masks.causal_document.dense(300, 300, **data)
    assert torch.equal(schedule.states, brute_force(allowed, pair))
    torch.testing.assert_close(attend(q, q, q, schedule=schedule, **data), attend(q, q, q, **data))


@pytest.mark.parametrize("storage", ["dense", "packed"])
def test_debugging_looks_at_a_schedule_s_data(storage: str) -> None:
    attend = fg.Attention(masks.causal_document)
    q, places = torch.randn(2, 2, 300, 16), {}
    docs = [(torch.arange(300) // size).expand(2, -1) for size in (100, 130)]
    if storage == "packed":
        q = q.transpose(1, 2).flatten(0, 1)
        ends = torch.tensor([0, 300, 600], dtype=torch.int32)
        places = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    made = attend.schedule(q, q, q, doc=docs[0], **places)
    with fg.config.override(debug=True):
        attend(q, q, q, doc=docs[0].clone(), schedule=made, **places)
        with pytest.raises(fg.FlashgenError, match="the schedule was made of other data"):
            attend(q, q, q, doc=docs[1], schedule=made, **places)
