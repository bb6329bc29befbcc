"""The portable kernels compute again what Hopper's found not to be finite, and nothing else."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from stored import Sequences

import flashgen as fg
from flashgen import cache, emit, launch, masks
from flashgen.kernel_names import spell
from flashgen.launch import decode as launch_decode
from flashgen.launch import hopper_backward as launch_hopper_backward
from flashgen.launch import hopper_forward as launch_hopper
from flashgen.launch.backward import Saved
from flashgen.ops.engine import engine
from flashgen.tiling.decode import LATENT_TILE, Splits

MARK = 7.0


@pytest.mark.parametrize("kv_heads", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_flagged_tiles_alone_are_computed(monkeypatch: pytest.MonkeyPatch, kv_heads: int) -> None:
    B, H, S = 1, 2, 140
    shapes = ((B, H, S, 16), (B, kv_heads, S, 16), (B, kv_heads, S, 16))
    q, k, v = (torch.randn(s, requires_grad=True) for s in shapes)
    attend = fg.Attention(mask=masks.causal)
    out, lse = attend(q, k, v, backend="interpret", return_lse=True)
    grad = torch.randn_like(out)
    right = torch.autograd.grad(out, (q, k, v), grad)
    flags = {
        "q": torch.tensor([[[0, 1, 1], [1, 0, 0]]], dtype=torch.int32),
        "kv": torch.tensor([[[1, 0, 1], [0, 1, 0]]], dtype=torch.int32)[:, :kv_heads],
    }

    def leave_marks(*arguments: Any) -> dict[str, torch.Tensor]:
        for made in arguments[5]:
            made.fill_(MARK)
        return flags

    _on_hopper(monkeypatch, leave_marks)
    call = attend._check_look(q, k, v, {})
    schedule = attend.schedule(q, k, v, block_size=(64, 64))
    made = engine("hopper", call.bound, geometry=call.geometry, schedule=schedule, scale=call.scale)
    saved = Saved(*(x.detach() for x in (q, k, v, out, lse)), grad, None)
    got = made.backward(saved, None, (), (True, True, True, False))
    for mine, exact, flag in zip(got, right, (flags["q"], flags["kv"], flags["kv"]), strict=False):
        flagged = flag.bool().repeat_interleave(64, -1)[..., :S, None].expand_as(exact)
        assert mine is not None
        torch.testing.assert_close(mine[flagged], exact[flagged])
        assert (mine[~flagged] == MARK).all()


def _on_hopper(monkeypatch: pytest.MonkeyPatch, backward: Any) -> None:
    monkeypatch.setattr(launch_hopper_backward, "obstacle", lambda *_: "")
    monkeypatch.setattr(launch_hopper_backward, "can_describe", lambda *_: "")
    monkeypatch.setattr(launch_hopper_backward, "backward", backward)


def test_flagged_packed_tiles_alone_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of all sequences stand in one line; those at 3 and 5 are the last two sequences'."""
    sequences = Sequences.random([70, 0, 40, 200], [70, 5, 40, 200], 2, 1)
    tensors, places = sequences.packed()
    leaves = [x.requires_grad_() for x in tensors]
    attend = fg.Attention(mask=masks.causal)
    out, lse = attend(*leaves, **places, backend="cpu", return_lse=True)
    grad = torch.randn_like(out)
    right = torch.autograd.grad(out, leaves, grad)
    call = attend._check_look(*leaves, dict(places))
    schedule = attend.schedule(*leaves, **places, block_size=(64, 64))

    def leave_marks(*arguments: Any) -> dict[str, torch.Tensor]:
        for made in arguments[5]:
            made.fill_(MARK)
        flags = {"q": torch.zeros(1, 2, 8).int(), "kv": torch.zeros(1, 1, 9).int()}
        flags["q"][0, 1, 5] = flags["kv"][0, 0, 3] = 1
        return flags

    _on_hopper(monkeypatch, leave_marks)
    made = engine("hopper", call.bound, geometry=call.geometry, schedule=schedule, scale=call.scale)
    views = (x.transpose(0, 1)[None].detach() for x in (*leaves, out))
    saved = Saved(*views, lse[None].detach(), grad.transpose(0, 1)[None], None)
    found = made.backward(saved, None, (), (True, True, True, False))
    spoilt = {3: (slice(70, 110), slice(0, 1)), 5: (slice(174, 238), slice(1, 2))}
    for mine, exact, tile in zip(found[:3], right, (5, 3, 3), strict=True):
        rows, heads = spoilt[tile]
        if tile == 3:
            rows = slice(75, 115)
        wanted = torch.full_like(exact, MARK)
        wanted[rows, heads] = exact[rows, heads]
        torch.testing.assert_close(mine[0].transpose(0, 1), wanted)


def test_spoilt_latent_rows_alone_are_computed() -> None:
    """Everything is marked, and said to be spoilt in one split of each of two sequences."""
    q, kv = torch.randn(2, 5, 2, 48), torch.randn(2, 1, 200, 48)
    kv[0, 0, 199, 3] = torch.inf
    attend = fg.Attention(masks.causal, heads=fg.MLA(rank=32, rope=16))
    call = attend._check_look(q, kv, None, {"scale": 0.3})
    schedule = attend.schedule(q, kv, block_size=LATENT_TILE)
    common: dict[str, Any] = {
        "bound": spell(call.bound), "geometry": call.geometry, "schedule": schedule,
    }  # fmt: skip
    blocks = launch_decode.blocks_of(call.q, call.v, call.bound, call.geometry, LATENT_TILE)
    work = launch_decode.prepare(
        *(call.q, call.k, call.v), **common, scale=0.3, softcap=None, sinks=None,
        splits=Splits(3, 0),
    )  # fmt: skip
    launch_decode.run(work, blocks, **common)
    right = work.parts.clone()
    work.parts.fill_(MARK)
    spoilt = torch.zeros((*work.lses.shape, 2), dtype=torch.int8)
    spoilt[0, 1, 0, 2, 0] = spoilt[1, 4, 1, 0, 1] = 1
    work.values["spoilt_ptr"] = spoilt
    launch_decode.run(work, blocks, **common, repairs=True)
    for b, split in itertools.product(range(2), range(3)):
        mine, exact = work.parts[b, ..., split, :], right[b, ..., split, :]
        if (b, split) in ((0, 2), (1, 0)):
            torch.testing.assert_close(mine, exact, equal_nan=True)
        else:
            assert (mine == MARK).all()
    assert right[0, :, 0, 2].isfinite().all()


@pytest.mark.parametrize("rows", [pytest.param(128, marks=pytest.mark.slow), 192])
def test_marked_rows_alone_are_computed(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """More blocks of rows than one program looks at."""
    flags = torch.rand(2, 4, 300) < 0.003
    assert repaired(monkeypatch, flags, rows) > 0.1


@pytest.mark.parametrize("row", [0, pytest.param(2199, marks=pytest.mark.slow)])
def test_one_marked_row_of_many_blocks(monkeypatch: pytest.MonkeyPatch, row: int) -> None:
    """Of a head whose blocks two programs look at; nobody else is marked."""
    flags = torch.zeros(1, 1, 2200, dtype=torch.bool)
    flags[..., row] = True
    assert repaired(monkeypatch, flags, 128) > 0.9


def repaired(monkeypatch: pytest.MonkeyPatch, flags: torch.Tensor, rows: int) -> float:
    """Compute marked rows of causal attention, and find them right; the share of others that are
    left alone."""
    B, H, S = flags.shape
    q, k, v = (torch.randn(B, h, S, 16) for h in (H, 1, 1))
    attend = fg.Attention(mask=masks.causal)
    right, lse = attend(q, k, v, backend="cpu", return_lse=True)
    call = attend._check_look(q, k, v, {})
    schedule = attend.schedule(q, k, v, block_size=(rows, 64))
    _, repair = launch_hopper.generate(spell(call.bound).spec, emit.Variant(16, 16), rows // 64)
    module = cache.module(repair.name, repair.text, launch.key_parts())
    run = launch.launch

    def leave_marks(kernel: Any, names: Any, values: Any, *rest: Any) -> None:
        if kernel is not None:
            return run(kernel, names, values, *rest)
        values["out_ptr"].fill_(MARK)
        values["lse_ptr"].copy_(lse)
        values["spoilt_ptr"].copy_(flags)

    monkeypatch.setattr(launch, "launch", leave_marks)
    monkeypatch.setattr(launch_hopper, "_kernels", lambda *_: (None, module.repair_rows))
    monkeypatch.setattr(launch_hopper, "descriptors", lambda *_: {})
    out, _ = launch_hopper.forward(
        q, k, v, bound=spell(call.bound), geometry=call.geometry, schedule=schedule,
        scale=call.scale,
    )  # fmt: skip
    torch.testing.assert_close(out[flags], right[flags])
    kept = out == MARK
    torch.testing.assert_close(out[~kept], right[~kept])
    return float(kept.float().mean())


@pytest.mark.parametrize("paged", [pytest.param(False, marks=pytest.mark.slow), True])
def test_packed_rows_that_are_marked_alone_are_computed(
    monkeypatch: pytest.MonkeyPatch, paged: bool
) -> None:
    """By blocks of 64; and rows behind the last sequence get what a query without keys has."""
    sequences = Sequences.random([100, 0, 70, 260], [100, 30, 130, 260], 2, 1, dtype=torch.float16)
    (q, k, v), places = sequences.packed()
    if paged:
        (k, v), pages = sequences.paged(16)
        places = {"cu_seqlens_q": places["cu_seqlens_q"], **pages}
    q = torch.cat([q, q[:5]])
    attend = fg.Attention(mask=masks.causal)
    right, exact = attend(q, k, v, **places, backend="cpu", return_lse=True)
    call = attend._check_look(q, k, v, dict(places))
    schedule = attend.schedule(q, k, v, **places, block_size=(128, 64))
    made = launch_hopper.generate(
        spell(call.bound).spec, launch.variant_of(call.bound, call.geometry, 16, 16)
    )[1]
    repair = cache.module(made.name, made.text, launch.key_parts()).repair_rows
    monkeypatch.setattr(launch_hopper, "_kernels", lambda *_: (None, repair))
    monkeypatch.setattr(launch_hopper, "descriptors", lambda *_: {})
    run, marked = launch.launch, ((0, 99), (1, 100), (1, 250))

    def mark(kernel: Any, names: Any, values: Any, *rest: Any) -> None:
        if kernel is not None:
            return run(kernel, names, values, *rest)
        values["out_ptr"].fill_(MARK)
        values["lse_ptr"][0, :, :-5] = exact[:, :-5]
        values["spoilt_ptr"].zero_()
        for h, row in marked:
            values["spoilt_ptr"][0, h, row] = 1

    monkeypatch.setattr(launch, "launch", mark)
    out, lse = launch_hopper.forward(
        call.q, call.k, call.v, bound=spell(call.bound), geometry=call.geometry,
        schedule=schedule, scale=call.scale,
    )  # fmt: skip
    wanted = torch.full_like(right, MARK)
    for h, rows in ((0, slice(64, 100)), (1, slice(100, 164)), (1, slice(234, 298))):
        wanted[rows, h] = right[rows, h]
    wanted[-5:] = 0
    torch.testing.assert_close(out[0].transpose(0, 1), wanted, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse[0], exact.float())
