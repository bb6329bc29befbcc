"""The cpu backend beside dense masked SDPA, forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

import flashgen as fg
from flashgen.masks.documents import causal_document  # type: ignore[import-not-found]
from flashgen.masks.sliding_windows import sliding_window  # type: ignore[import-not-found]

from .measure import Attend, check_equal, interleave
from .table import Row, rows_of

LENGTH, DIM, HEADS, DOCUMENTS, WINDOW = 4096, 64, 8, 16, 256


def run(rounds: int = 9) -> list[Row]:
    """Causal documents and a causal window, fp32; a schedule is made once, as in training.

    `is_causal` SDPA computes something else (every earlier key); it is there for reference.
    Raises AssertionError where results differ."""
    torch.manual_seed(0)
    leaves = [torch.randn(1, HEADS, LENGTH, DIM, requires_grad=True) for _ in range(3)]
    grad = torch.randn(1, HEADS, LENGTH, DIM)
    rows = []
    for work, mask, data in _works():
        attends = _backends(leaves, mask, data)
        check_equal(attends, leaves, grad, tolerance=1e-4)
        attends["sdpa, is_causal"] = functools.partial(_sdpa, leaves, None, True)
        rows += rows_of(work, interleave(attends, leaves, grad, rounds))
    return rows


def title() -> str:
    threads = torch.get_num_threads()
    return f"B=1 H={HEADS} S={LENGTH} D={DIM} fp32, {threads} threads, torch {torch.__version__}"


def _works() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    starts = torch.randperm(LENGTH - 1)[: DOCUMENTS - 1] + 1
    doc = torch.zeros(1, LENGTH, dtype=torch.int32)
    doc[0, starts] = 1
    yield f"{DOCUMENTS} causal documents", causal_document, {"doc": doc.cumsum(1)}
    yield f"window of {WINDOW}", sliding_window, {"window": WINDOW}


def _backends(leaves: list[torch.Tensor], mask: Any, data: dict[str, Any]) -> dict[str, Attend]:
    attend = fg.Attention(mask=mask)
    schedule = attend.schedule(*leaves, **data)
    dense = mask.dense(LENGTH, LENGTH, **data)
    sdpa = functools.partial(_sdpa, leaves, dense)
    ours = functools.partial(attend, *leaves, schedule=schedule, **data)
    return {"sdpa, dense mask": sdpa, "flashgen cpu": ours}


def _sdpa(
    leaves: list[torch.Tensor], mask: torch.Tensor | None, is_causal: bool = False
) -> torch.Tensor:
    q, k, v = leaves
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)
