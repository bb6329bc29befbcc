"""When Hopper's backward runs, what it is made of, and what `source` shows of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen import emit, look, masks
from flashgen.backends import Choice
from flashgen.decoding import Kernel
from flashgen.emit_backward import Wanted
from flashgen.emit_hopper_backward import hopper_backward, queries_of, width_of
from flashgen.launch_hopper_backward import obstacle

HALF = torch.bfloat16


@fg.attention(mask=masks.causal)
def constant(score, q_idx, bias: fg.Tensor):
    return bias[q_idx]


@fg.attention(mask=masks.causal)
def alibi(score, h, q_idx, kv_idx, slope: fg.Tensor):
    return score + slope[h] * (kv_idx - q_idx)


def call_of(attend: Any, head_dim: int = 64, **data: torch.Tensor) -> Any:
    q = torch.empty(2, 2, 40, head_dim, dtype=HALF)
    return attend._check_look(q, q, q, data)


def reason(attend: Any = None, dims: tuple[int, int] = (128, 64), **changes: Any) -> str:
    data = changes.pop("data", {})
    call = call_of(attend or fg.Attention(masks.causal), **data)
    given: dict[str, Any] = {
        "bound": call.bound, "geometry": call.geometry, "head_dims": dims, "dtype": HALF,
        "block_size": (128, 128), "wanted": Wanted(),
        "scale": 0.1,
    }  # fmt: skip
    return obstacle(**(given | changes))


def test_nothing_is_in_the_way_of_plain_calls() -> None:
    assert reason() == ""
    assert reason(dims=(40, 96), dtype=torch.float16, block_size=(256, 128)) == ""
    assert reason(alibi, data={"slope": torch.ones(2)}, scale=-1.0) == ""


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"deterministic": True}, "no fixed order"),
        ({"dropout": True}, "drops"),
        ({"dtype": torch.float32}, "16-bit"),
        ({"dims": (192, 128)}, "192"),
        ({"block_size": (128, 64)}, "128 x 64"),
        ({"block_size": (64, 128), "dims": (64, 64)}, "64 x 128"),
        ({"wanted": Wanted(data=("slope",))}, "slope"),
        ({"scale": 0.0}, "scale"),
        ({"attend": constant, "data": {"bias": torch.zeros(40)}}, "ignores the score"),
    ],
)
def test_what_is_in_the_way(changes: dict[str, Any], why: str) -> None:
    assert why in reason(**changes)


def test_packed_sequences_are_in_the_way() -> None:
    q = torch.empty(40, 2, 64, dtype=HALF)
    ends = torch.tensor([0, 30, 40], dtype=torch.int32)
    lens = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    packed = fg.Attention(masks.causal)._check_look(q, q, q, dict(lens))
    assert "packed" in reason(bound=packed.bound, geometry=packed.geometry)


def test_small_head_dimensions_take_more_queries_at_once() -> None:
    assert [width_of(d) for d in (1, 64, 65, 128)] == [64, 64, 128, 128]
    assert [queries_of(*d) for d in ((64, 64), (64, 65), (128, 40))] == [128, 64, 64]


def test_source_shows_the_kernels_that_run() -> None:
    on_hopper, kernel = Choice("hopper", "asked for"), Kernel("forward", "")
    text = look.source(call_of(fg.Attention(masks.causal)), on_hopper, kernel)
    assert "def attend(" in text
    assert "spoilt_ptr" in text, "portable kernels repair what isn't finite"
    wide = look.source(call_of(fg.Attention(masks.causal), 192), on_hopper, kernel)
    assert "def attend(" not in wide
    assert "def attention_backward_kv(" in wide


def test_masks_alone_are_looked_at_in_masked_steps_only() -> None:
    """A changed score is computed in every step, with its slope; a mask's test behind a branch."""
    call = call_of(alibi, slope=torch.ones(2))
    variant = emit.Variant(64, 64)
    text = hopper_backward(call.bound.spec, variant).text
    assert "slope_tile" not in text, "the slope of an added bias is 1"
    capped = fg.Attention(masks.causal, softcap=5.0)
    assert "slope_tile" in hopper_backward(call_of(capped).bound.spec, variant).text
    loop = text[text.index("for turn in range(steps):") :]
    before, _, after = loop.partition("if turn + 1 < masked_steps:")
    assert "kv_idx <= q_idx" not in before
    assert "kv_idx <= q_idx" in after
