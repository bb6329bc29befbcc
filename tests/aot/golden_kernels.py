"""The golden kernels: calls whose generated text is kept, and compiled for every target."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import flashgen as fg
from flashgen import emit, launch, masks, plan
from flashgen.call import Call
from flashgen.emit.hopper_backward import Module
from flashgen.emit.plan import PlanModule
from flashgen.kernel_names import spell
from flashgen.launch import hopper_backward as launch_hopper_backward
from flashgen.launch import hopper_forward as launch_hopper
from flashgen.spec import Spec

BATCH, HEADS, LENGTH = 2, 4, 96


class Golden(NamedTuple):
    """An attention, and what one call of it takes beside q, k and v."""

    attention: fg.Attention
    arguments: dict[str, Any]
    head_dim: int = 128
    v_head_dim: int | None = None

    def call(self) -> Call:
        """The call, checked."""
        q = torch.empty(BATCH, HEADS, LENGTH, self.head_dim, dtype=torch.bfloat16)
        v = q.new_empty(BATCH, HEADS, LENGTH, self.v_head_dim or self.head_dim)
        return self.attention._check_look(q, q, v, dict(self.arguments))

    def spec(self) -> Spec:
        """What kernels are made from: data has names that no kernel uses itself."""
        return spell(self.call().bound).spec

    def variant(self, *, planning: bool = False) -> emit.Variant:
        call = self.call()
        dims = (0, 0) if planning else (call.q.shape[-1], call.v.shape[-1])
        return launch.variant_of(spell(call.bound), call.geometry, *dims)

    def forward(self) -> emit.Generated:
        return launch.generate(self.spec(), self.variant())

    def hopper(self) -> tuple[emit.Generated, emit.Generated]:
        """Hopper's kernel, and the portable one that repairs its rows."""
        return launch_hopper.generate(self.spec(), self.variant())

    def hopper_backward(self, ordered: bool = False) -> Module:
        return launch_hopper_backward.generate(self.spec(), self.variant(), ordered)

    def planning(self) -> PlanModule:
        return plan.generate(self.spec(), self.variant(planning=True))


def _integers(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


@fg.attention(mask=masks.causal)
def alibi(score, h, q_idx, kv_idx, slope: fg.Tensor):
    return score + slope[h] * (kv_idx - q_idx)


def capped_documents(documents):
    """A function of FlexAttention's form, with a captured tensor."""

    def same_document(b, h, q_idx, kv_idx):
        return (documents[b, q_idx] == documents[b, kv_idx]) & (q_idx >= kv_idx)

    return same_document


_DOC = {"doc": _integers(BATCH, LENGTH)}
_NATTEN = {"height": 12, "width": 8, "kernel_h": 5, "kernel_w": 3}

GOLDEN: dict[str, Golden] = {
    "causal": Golden(fg.Attention(masks.causal), {}),
    "causal_document": Golden(fg.Attention(masks.causal_document), _DOC),
    "sliding_window": Golden(fg.Attention(masks.sliding_window), {"window": 32}, 64),
    "wide_window": Golden(fg.Attention(masks.sliding_window), {"window": 2**40}, 64),
    "flashmask": Golden(
        fg.Attention(masks.flashmask(causal=True, vectors=2)),
        {"columns": _integers(BATCH, 1, LENGTH, 2)},
    ),
    "alibi": Golden(alibi, {"slope": torch.zeros(HEADS)}),
    "softcap_sinks": Golden(
        fg.Attention(masks.sliding_window, softcap=50.0, sinks=True),
        {"window": 32, "sinks": torch.zeros(HEADS)},
        64,
    ),
    "head_dim_96": Golden(fg.Attention(masks.causal), {}, 96),
    "head_dim_192_128": Golden(fg.Attention(masks.causal_document), _DOC, 192, 128),
    "head_dim_40": Golden(fg.Attention(), {}, 40),
    "head_dim_256": Golden(fg.Attention(masks.causal), {}, 256),
    "lengths_and_offsets": Golden(
        fg.Attention(masks.causal),
        {"kv_lens": torch.full((BATCH,), 7), "q_offset": torch.zeros(BATCH, dtype=torch.int64)},
    ),
    "natten_2d": Golden(fg.Attention(masks.natten_2d), _NATTEN, 64),
    "flex_function": Golden(
        fg.Attention(capped_documents(_integers(BATCH, LENGTH).to(torch.int64))), {}, 64
    ),
}

PLANS = ("causal_document", "flashmask", "natten_2d", "lengths_and_offsets")

# What Hopper's kernels are kept of; all of them compile.
HOPPER = (
    "causal_document", "flashmask", "alibi", "softcap_sinks", "head_dim_192_128",
    "lengths_and_offsets",
)  # fmt: skip
# `causal` with sums in order.
HOPPER_BACKWARD = (
    "causal", "causal_document", "alibi", "softcap_sinks", "head_dim_192_128",
    "lengths_and_offsets",
)  # fmt: skip
