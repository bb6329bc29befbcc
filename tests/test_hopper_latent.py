"""Hopper's kernel for latent heads: walked on a CPU beside a dense reference, and when it runs."""

from __future__ import annotations

import ast
import itertools
import math
from typing import Any

import dense
import pytest
import torch
from hopper_machine import Machine, Tiles
from test_emit import AWKWARD, arguments, assigned, functions, read

import flashgen as fg
from flashgen import emit, launch, masks
from flashgen.kernel_names import spell
from flashgen.launch import decode as launch_decode
from flashgen.launch import hopper_latent as launch_hopper_latent
from flashgen.launch import tma
from flashgen.tiling import target_of
from flashgen.tiling.decode import LATENT_TILE, Splits

RANK, ROPE, SCALE = 128, 16, 0.1
MLA = fg.MLA(RANK, ROPE)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a call: out, LSE, and which halves of rows of which split are to be repaired."""

    def walk(attend: fg.Attention, q: Any, kv: Any, splits: Splits, **data: Any) -> Any:
        call = attend._check_look(q, kv, None, {"scale": SCALE, **data})
        schedule = None
        if attend.mask is not None:
            planned = {n: x for n, x in data.items() if n not in ("scale", "sinks")}
            schedule = attend.schedule(q, kv, block_size=LATENT_TILE, **planned)
        bound, variant = spell(call.bound), None
        variant = launch.variant_of(bound, call.geometry, q.shape[-1], RANK)
        made = launch_hopper_latent.generate(bound.spec, variant)
        machine, works = Machine(made.text), []
        kernel = (machine.attention_latent, made)
        monkeypatch.setattr(launch_hopper_latent, "kernel_of", lambda *_: kernel)
        monkeypatch.setattr(launch, "launch", machine.launch)
        monkeypatch.setattr(launch_decode, "splits_of", lambda *_, **__: splits)
        monkeypatch.setattr(launch_decode, "run", lambda work, *_, **__: works.append(work))
        monkeypatch.setattr(launch_decode.merging, "merge", merge)
        monkeypatch.setattr(tma, "descriptor", Tiles)
        out, lse = launch_hopper_latent.forward(
            *(call.q, call.k, call.v),
            bound=bound,
            geometry=call.geometry,
            schedule=schedule,
            scale=call.scale,
            softcap=call.softcap,
            sinks=call.sinks,
        )
        return out, lse, works[0].values["spoilt_ptr"]

    return walk


def merge(parts: Any, lses: Any, out: Any, lse: Any) -> None:
    lse.copy_(torch.logsumexp(lses * math.log(2), -1))
    weights = (lses * math.log(2) - lse[..., None].clamp(min=-1e30)).exp()[..., None]
    out.copy_(torch.where(weights == 0, 0.0, parts * weights).sum(-2))


def inputs(B: int, H: int, S: int, T: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(B, H, S, RANK + ROPE).half(), torch.randn(B, 1, T, RANK + ROPE).half()


def check(got: Any, q: Any, kv: Any, allowed: Any, **changes: Any) -> None:
    out, lse, spoilt = got
    right, right_lse = dense.attention(q, kv, kv[..., :RANK], allowed, scale=SCALE, **changes)
    torch.testing.assert_close(out.double(), right, rtol=0, atol=4e-3)
    torch.testing.assert_close(lse.double(), right_lse, rtol=0, atol=1e-3)
    assert (out[right_lse == -math.inf] == 0).all()
    assert not spoilt.any()


def positions(S: int, T: int, lens: Any) -> tuple[Any, Any]:
    """i [B, 1, S, 1], the queries being the last positions, and j [1, 1, 1, T]."""
    first = torch.as_tensor(lens).reshape(-1, 1, 1, 1) - S
    return torch.arange(S)[None, None, :, None] + first, torch.arange(T)[None, None, None]


@pytest.mark.parametrize("splits", [Splits(1, 0), Splits(3, 0), Splits(4, 2)], ids=str)
@pytest.mark.parametrize(("heads", "queries"), [(1, 1), (16, 3), (70, 1), (3, 40)], ids=str)
def test_heads_queries_and_splits(run, heads, queries, splits):
    q, kv = inputs(2, heads, queries, 333)
    i, j = positions(queries, 333, 333)
    check(run(fg.Attention(masks.causal, heads=MLA), q, kv, splits), q, kv, j <= i)


@pytest.mark.parametrize("splits", [Splits(1, 0), Splits(5, 0)], ids=str)
@pytest.mark.parametrize("name", ["none", "sliding_window", "global_window"])
def test_lengths_of_each_sequence(run, name, splits):
    """Keys beyond a length hold NaN, and a sequence without keys loads nothing."""
    T, lens = 300, torch.tensor([0, 1, 64, 65, 300], dtype=torch.int32)
    q, kv = inputs(5, 4, 2, T)
    i, j = positions(2, T, lens)
    inside = j < lens[:, None, None, None]
    near = (j <= i) & (i - j < 70)
    wanted, attend = {
        "none": (torch.ones_like(inside), None),
        "sliding_window": (near, masks.sliding_window(window=70)),
        "global_window": (
            near | ((j <= i) & (j < 3)), masks.global_window(window=70, globals=3),
        ),
    }[name]  # fmt: skip
    spoilt = kv.masked_fill(~inside.mT, math.nan)
    got = run(fg.Attention(attend, heads=MLA), q, spoilt, splits, kv_lens=lens)
    check(got, q, kv, wanted & inside)


@fg.attention(mask=masks.causal, heads=MLA, softcap=9.0, sinks=True)
def bent(score, b, h, h_kv, q_idx, kv_idx, slope: fg.Tensor, bias: fg.Tensor, table: fg.Tensor):
    return 1.5 * score + slope[h] * (kv_idx - q_idx) + bias[b, h_kv, kv_idx] * table[h, kv_idx]


def test_score_functions(run):
    B, H, S, T = 2, 6, 3, 150
    q, kv = inputs(B, H, S, T)
    slope, bias, table = torch.rand(H), torch.randn(B, 1, T), torch.randn(H, T)
    sinks = torch.randn(H)
    i, j = positions(S, T, T)

    added = slope[:, None, None] * (j - i) + (bias * table)[:, :, None]

    def score(s):
        return 1.5 * s + added.numpy()

    got = run(bent, q, kv, Splits(2, 0), slope=slope, bias=bias, table=table, sinks=sinks)
    check(got, q, kv, j <= i, score=score, softcap=9.0, sinks=sinks)


def test_scores_that_outgrow_the_first_maximum(run):
    """Of some heads they rise along the keys, of others they fall; each has bits of its own."""
    q, kv = inputs(2, 6, 1, 400)
    kv[..., RANK:] = torch.arange(400)[:, None] / 50
    q[..., RANK:] = torch.tensor([1.5, 0, -1.5, 1, 0.3, -1])[:, None, None]
    attend = fg.Attention(heads=MLA)
    got = run(attend, q, kv, Splits(1, 0))
    check(got, q, kv, torch.ones(1, 1, 1, 400, dtype=torch.bool))
    for h in range(6):
        assert torch.equal(run(attend, q[:, [h]], kv, Splits(1, 0))[0], got[0][:, [h]])


def test_data_of_a_mask(run):
    q, kv = inputs(2, 5, 4, 260)
    doc = torch.randint(0, 3, (2, 260), dtype=torch.int32)
    allowed = doc[:, None, -4:, None] == doc[:, None, None, :]
    got = run(fg.Attention(masks.document, heads=MLA), q, kv, Splits(2, 0), doc=doc)
    check(got, q, kv, allowed)


def pages_of(kv: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same rows in a pool of pages in no order, and its table."""
    B, _, T, D = kv.shape
    order = torch.randperm(B * T // size)
    pool = torch.empty(B * T // size, size, 1, D, dtype=kv.dtype)
    pool[order] = kv.transpose(1, 2).reshape(-1, size, 1, D)
    return pool, order.reshape(B, -1).int()


@pytest.mark.parametrize("size", [64, 128])
def test_pages(run, size):
    lens = torch.tensor([0, 100, 384], dtype=torch.int32)
    q, kv = inputs(3, 16, 2, 384)
    pool, table = pages_of(kv, size)
    # What a length doesn't reach is no page at all.
    table[0], table[1, -(-100 // size) :] = 1 << 30, -5
    i, j = positions(2, 384, lens)
    attend = fg.Attention(masks.causal, heads=MLA)
    got = run(attend, q, pool, Splits(2, 0), page_table=table, kv_lens=lens)
    check(got, q, kv, (j <= i) & (j < lens[:, None, None, None]))


def test_rows_that_are_not_finite_are_left_for_repair(run):
    """An infinity that the first query must not see: 0 x inf has reached the left half."""
    q, kv = inputs(1, 3, 2, 200)
    kv[0, 0, 199, 5] = math.inf
    _, _, spoilt = run(fg.Attention(masks.causal, heads=MLA), q, kv, Splits(2, 0))
    assert (spoilt[0, :, 0] == torch.tensor([[0, 0], [1, 0]], dtype=torch.int8)).all()
    assert spoilt[0, :, 1, 1, 0].all()


@pytest.fixture
def reasons(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As if there were an H200: why a call wouldn't run on Hopper's kernel."""
    monkeypatch.setattr(launch, "current_target", lambda device: target_of("cuda", 90))

    def why(q: Any, kv: Any, heads: Any = MLA, schedule: Any = None, **data: Any) -> str:
        attend = fg.Attention(masks.causal, heads=heads)
        call = attend._check_look(q, kv, None, {"scale": SCALE, **data})
        given = (torch.device("cuda", 0), q.dtype, heads, call.q, call.k, call.geometry, schedule)
        return launch_hopper_latent.obstacle(*given)

    return why


def test_what_it_takes(reasons):
    q, kv = inputs(2, 5, 2, 128)
    lens, table = torch.tensor([100, 64], dtype=torch.int32), torch.arange(4).reshape(2, 2).int()
    pool = kv.reshape(4, 64, 1, -1)
    assert reasons(q, kv) == reasons(q.transpose(1, 2).contiguous().transpose(1, 2), kv) == ""
    assert reasons(q, pool, page_table=table, kv_lens=lens) == ""


def test_what_it_does_not_take(reasons):
    q, kv = inputs(2, 5, 2, 128)
    lens, table = torch.tensor([100, 64], dtype=torch.int32), torch.arange(8).reshape(2, 4).int()
    pool = kv.reshape(8, 32, 1, -1)
    why = reasons(q, pool, page_table=table, kv_lens=lens)
    assert why == "pages of 32 are no multiple of 64"
    assert "takes no MLA(rank=96" in reasons(q[..., :112], kv[..., :112], fg.MLA(96, 16))
    assert "16-bit floats, not float32" in reasons(q.float(), kv.float())
    assert "kv has strides" in reasons(q, kv[:, :, :1].expand(-1, -1, 9, -1))
    small = fg.Attention(masks.causal, heads=MLA).schedule(q, kv, block_size=(16, 32))
    assert "tiles of 32 keys" in reasons(q, kv, schedule=small)


@pytest.mark.parametrize("tile", [16, 48, 1 << 30])
def test_blocks_hold_every_row_and_lie_in_a_row_of_tiles(tile):
    for queries, heads in itertools.product((1, 2, 3, 16, 17, 100), (1, 3, 16, 64, 100, 128)):
        blocks = launch_hopper_latent.blocks_of(queries, heads, (tile, 64))
        assert blocks.group * blocks.queries == 64
        assert queries <= tile or tile % blocks.queries == 0
        assert blocks.count(queries, heads) * 64 >= queries * heads


def test_slots_fit_shared_memory():
    for rank, rope in itertools.product(launch_hopper_latent.RANKS, launch_hopper_latent.ROPES):
        stages = launch_hopper_latent.stages_of(fg.MLA(rank, rope))
        used = 2 * 64 * ((1 + stages) * (rank + rope) + 64) + 4 * 64
        assert stages >= 2
        assert used + 1024 <= target_of("cuda", 90).shared


NAMES = [
    *AWKWARD,
    *"turn slot walk left right rope weights factors first_tile loads hopper".split(),
]


@pytest.mark.parametrize("name", NAMES)
def test_names_are_the_users_own(name):
    """And what a function reads is an argument, assigned in it, or the module's."""
    scope: dict[str, Any] = {"Tensor": fg.Tensor}
    formula = f"{name}[h, kv_idx // 3] < q_idx + other_"
    exec(f"def odd(h, q_idx, kv_idx, {name}: Tensor, other_: int): return {formula}", scope)
    attend = fg.Attention(scope["odd"], heads=MLA)
    data = {name: torch.arange(9)[None], "other_": 3}
    spec = spell(attend._program.bind(data, "test")).spec
    variant = emit.Variant(RANK + ROPE, RANK)
    own = set(map(emit.bare, emit.data_arguments(spec, variant)))
    module = ast.parse(launch_hopper_latent.generate(spec, variant).text)
    top = {f.name for f in functions(module)} | {"gl", "gluon", "hopper", "range", "float"}
    top |= {"LOG2E", "LN2", "FLOAT", "READ", "FACTORS", "WEIGHTS"}
    for function in functions(module):
        taken = arguments(function)
        assert len(set(taken)) == len(taken)
        assert not assigned(function) & own
        known = top | set(taken) | assigned(function)
        assert read(function) <= known, read(function) - known
