"""The form of the mask for data in order beside the general one, in the portable kernels.

Both are in one kernel, which takes one by what the device found. Documents named 0, 1, 2, ... are
in order; named at random they are the same documents, the same tiles, and in no order."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch

from .. import api
from ..errors import FlashgenError
from .measure import Times
from .table import Row, rows_of
from .turns import medians

SHAPE = (4, 16, 8192, 128)


def title() -> str:
    """What was measured, and on what."""
    import triton

    return (
        f"{list(SHAPE)}, bf16, {torch.cuda.get_device_name()}, torch {torch.__version__}, "
        f"triton {triton.__version__}; portable kernels, schedules reused"
    )


def run(rounds: int) -> list[Row]:
    """Two masks of documents; raises AssertionError where results differ."""
    if not torch.cuda.is_available():
        raise FlashgenError("there is no GPU", call="flashgen bench order", write="bench cpu")
    device = torch.device("cuda", torch.cuda.current_device())
    tensors = [
        torch.randn(SHAPE, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    rows: list[Row] = []
    for name in ("document", "causal_document"):
        rows += rows_of(name, _compare(name, tensors, rounds))
        print(*rows[-2:], sep="\n", flush=True)
    return rows


def _compare(name: str, tensors: list[torch.Tensor], rounds: int) -> dict[str, Times]:
    masks = importlib.import_module("flashgen.masks")
    attend = api.Attention(mask=getattr(masks, name))
    ids = _documents(tensors[0].device)
    names = torch.tensor([5, 2, 7, 0, 6, 1, 4, 3], dtype=ids.dtype, device=ids.device)
    sides = {"in no order": names[ids.long()], "in order": ids}
    calls: dict[str, Any] = {}
    for side, doc in sides.items():
        schedule = attend.schedule(*tensors, doc=doc, block_size=(64, 64))
        assert [r.order.item() for r in schedule.ranges] == [int(side == "in order")]
        calls[side] = partial(attend, *tensors, doc=doc, schedule=schedule, backend="portable")
    outs = {side: call() for side, call in calls.items()}
    torch.testing.assert_close(*outs.values())
    grad = torch.randn_like(tensors[0])
    backs = {
        side: partial(torch.autograd.grad, out, tensors, grad, retain_graph=True)
        for side, out in outs.items()
    }
    forward, backward = medians(calls, rounds), medians(backs, rounds)
    return {side: Times(forward[side], backward[side]) for side in sides}


def _documents(device: torch.device) -> torch.Tensor:
    """[1, S]: eight documents of random lengths, numbered as they come."""
    generator = torch.Generator().manual_seed(0)
    cuts = torch.randperm(SHAPE[2] - 1, generator=generator)[:7].sort().values + 1
    return torch.bucketize(torch.arange(SHAPE[2]), cuts, right=True).int()[None].to(device)
