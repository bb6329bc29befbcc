"""Walks of Hopper's generated backward on a CPU, beside the cpu backend's gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hopper_machine import Machine, Tiles

from flashgen import launch
from flashgen.emit.gradients import Wanted
from flashgen.emit.sums import NO_DATA, summed
from flashgen.kernel_names import spell
from flashgen.launch import arguments, tma
from flashgen.launch import hopper_backward as launch_hopper_backward
from flashgen.launch.backward_run import key_schedule

LOG2E = 1.4426950408889634


def walk(
    monkeypatch: pytest.MonkeyPatch,
    attend: Any,
    tensors: list[torch.Tensor],
    grad: torch.Tensor,
    *,
    tile: int = 128,
    key_tile: int = 128,
    ordered: bool = False,
    wanted: Wanted = NO_DATA,
    **data: Any,
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """dq, dk and dv by the generated kernels, and the flags of what isn't finite.

    `wanted`: of data, whose gradients stand behind those."""
    q, k, v = tensors
    call = attend._check_look(q, k, v, dict(data))
    planned = {name: x for name, x in data.items() if name != "scale"}
    schedule = attend.schedule(q, k, v, block_size=(tile, key_tile), **planned)
    out, lse = attend(q, k, v, backend="cpu", return_lse=True, **data)
    bound, geometry = spell(call.bound), call.geometry
    packing = geometry.packing
    if packing is not None:
        out, lse, grad = out.transpose(0, 1)[None], lse[None], grad.transpose(0, 1)[None]
    # Packed tensors are views from here on.
    q, k, v = call.q, call.k, call.v
    padded = schedule.states.shape[2] * tile
    places = torch.arange(q.shape[2])
    if packing is not None:
        b = torch.repeat_interleave(torch.arange(packing.batch), packing.q_lens)
        places = packing.first_rows(tile)[b] * tile + places[: len(b)] - packing.cu_q[b]
    lse, own = lse.float(), (out.float() * grad.float()).sum(-1)
    lse, own = lse[..., : len(places)], own[..., : len(places)]
    rows = torch.full((*lse.shape[:2], padded), torch.inf)
    rows[..., places] = torch.where(lse == -torch.inf, torch.inf, lse * LOG2E)
    minus_delta = torch.zeros_like(rows)
    minus_delta[..., places] = -own
    values = {
        "q_ptr": q, "k_ptr": k, "v_ptr": v, "grad_out_ptr": grad, "lse_log2_ptr": rows,
        "minus_delta_ptr": minus_delta, "padded_len": padded, "heads": geometry.heads,
        "kv_heads": geometry.kv_heads, "group": geometry.group, "capacity": geometry.kv_len,
        **arguments.score_values(call.scale, call.softcap, bound.spec.score is not None),
        **launch.position_values(geometry), **launch.data_values(bound),
        **key_schedule(schedule),
        "dq_sum_ptr": torch.zeros(*rows.shape, launch_hopper_backward.sum_width(q.shape[-1])),
    }  # fmt: skip
    if packing is not None:
        # Rows behind a sequence's last step belong to nobody: neither cleared nor read.
        b = torch.as_tensor(schedule.q_sequences).long().repeat_interleave(tile)
        row = torch.arange(padded) - packing.first_rows(tile)[b] * tile
        is_behind = row >= -(-packing.q_lens[b] // 64) * 64
        values["dq_sum_ptr"][:, :, is_behind] = torch.nan
        queued = {"queue_ptr": schedule.queue(True, ordered), "total_kv": packing.total_kv}
        values |= {**queued, "q_sequences_ptr": schedule.q_sequences}
        values["kv_sequences_ptr"] = schedule.kv_sequences
    tiles = schedule.q_runs.counts[..., :2].sum(-1)
    longest = tiles.sort(dim=-1, descending=True, stable=True).indices.int()
    values |= {"longest_ptr": longest, "sorted_rows": longest.numel()}
    variant = launch.variant_of(bound, geometry, q.shape[-1], v.shape[-1])
    spelled = dict(zip(call.bound.tensors, bound.tensors, strict=True))
    wanted = replace(wanted, data=tuple(spelled[name] for name in wanted.data))
    wanted = summed(bound.spec, wanted, variant, 64)
    of_data = {name: torch.zeros_like(bound.tensors[name]) for name in wanted.data}
    values |= {f"grad_{name}_ptr": grad for name, grad in of_data.items()}
    made = launch_hopper_backward.generate(bound.spec, variant, ordered, wanted)
    machine = Machine(made.text)
    # Blocks of keys that wait for each other do so among programs that run at once.
    machine.at_once = ordered
    monkeypatch.setattr(launch_hopper_backward, "_module", lambda *_: (machine, made))
    monkeypatch.setattr(launch_hopper_backward, "launch", machine.launch)
    monkeypatch.setattr(launch_hopper_backward, "multiprocessors", lambda _: 3)
    monkeypatch.setattr(tma, "descriptor", Tiles)
    grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    flags = launch_hopper_backward.backward(
        bound.spec, variant, values, geometry, schedule.block_size, tuple(grads), ordered, wanted
    )
    _clear_unseen(schedule, flags["kv"], grads[1:], key_tile, packing)
    if packing is not None:
        grads = [x[0].transpose(0, 1) for x in grads]
    return [*grads, *of_data.values()], flags


def _clear_unseen(
    schedule: Any, flags: torch.Tensor, grads: list[torch.Tensor], tile: int, packing: Any
) -> None:
    """What repairs do to tiles of keys that no query sees, which are flagged: zeros."""
    is_empty = (schedule.q_runs.counts[..., :2].sum(-1) == 0).expand(flags.shape) & (flags != 0)
    for b, h, row in is_empty.nonzero().tolist():
        first, end = row * tile, (row + 1) * tile
        if packing is not None:
            b = int(schedule.kv_sequences[row])
            first += int(packing.cu_kv[b]) - int(packing.first_rows(tile, True)[b]) * tile
            end, b = min(first + tile, int(packing.cu_kv[b + 1])), 0
        for grad in grads:
            grad[b, h, first:end] = 0.0
    flags[is_empty] = 0


def inputs(B: int, H: int, Hkv: int, S: int, T: int, D: int, Dv: int) -> tuple[list[Any], Any]:
    shapes = ((B, H, S, D), (B, Hkv, T, D), (B, Hkv, T, Dv))
    tensors = [torch.randn(s).half().requires_grad_() for s in shapes]
    return tensors, torch.randn(B, H, S, Dv).half()


def check(
    monkeypatch: pytest.MonkeyPatch,
    attend: Any,
    tensors: list[Any],
    grad: Any,
    **given: Any,
) -> None:
    how = {n: given.pop(n) for n in ("tile", "key_tile", "ordered") if n in given}
    names = [n for n, x in given.items() if isinstance(x, torch.Tensor) and x.requires_grad]
    out = attend(*tensors, backend="cpu", **given)
    right = torch.autograd.grad(out, [*tensors, *(given[name] for name in names)], grad)
    bare = [x.detach() for x in tensors]
    data = {n: x.detach() if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    wanted = replace(NO_DATA, data=tuple(names))
    got, flags = walk(monkeypatch, attend, bare, grad, wanted=wanted, **how, **data)
    assert not flags["q"].any()
    assert not flags["kv"].any()
    for name, mine, exact in zip([*"qkv", *names], got, right, strict=True):
        error, size = (mine.float() - exact.float()).norm(), exact.float().norm()
        # What both round to half is p and ds; one key alone has no gradient but that error.
        assert error <= 4e-3 * size + 1e-2, f"d{name}: {error} of {size}"
