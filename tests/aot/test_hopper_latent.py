"""Hopper's kernel for latent heads: its text, kept as files, and the instructions it becomes."""

from __future__ import annotations

import pytest
import torch
from spilling import at_most
from test_decode import LENS, TABLE, Decoding
from test_golden import kernel_file  # noqa: F401

import flashgen as fg
from flashgen import masks
from flashgen.aot_decode import compile_decode, compile_hopper_latent
from flashgen.launch import decode as launch_decode
from flashgen.launch import hopper_latent as launch_hopper_latent

LIMIT = 232448
MLA = fg.MLA(rank=512, rope=64)


@fg.attention(mask=masks.causal, heads=MLA, softcap=30.0, sinks=True)
def biased(score, h, q_idx, kv_idx, slope: fg.Tensor, bias: fg.Tensor):
    return score + slope[h] * (kv_idx - q_idx) + bias[kv_idx]


DATA = {"slope": torch.zeros(16), "bias": torch.zeros(96), "sinks": torch.zeros(16)}
LATENT = {
    "full": Decoding(fg.Attention(heads=MLA), (2, 16, 1, 576), (2, 1, 96, 576), {"scale": 1.0}),
    "score": Decoding(biased, (2, 16, 4, 576), (2, 1, 96, 576), {"scale": 1.0, **DATA}),
    "paged": Decoding(
        fg.Attention(masks.causal, heads=MLA),
        (2, 128, 2, 576),
        (12, 64, 1, 576),
        {"scale": 1.0, "page_table": TABLE, "kv_lens": LENS},
    ),
    "small": Decoding(
        fg.Attention(heads=fg.MLA(128, 16)), (2, 16, 1, 144), (2, 1, 96, 144), {"scale": 1.0}
    ),
}


@pytest.mark.parametrize("name", LATENT)
def test_latent(name, kernel_file):  # noqa: F811
    text = launch_hopper_latent.generate(*LATENT[name].parts()).text
    assert max(map(len, text.splitlines())) <= 100
    assert text == kernel_file


def test_repair_latent(kernel_file):  # noqa: F811
    assert launch_decode.repairing(*LATENT["full"].parts()).text == kernel_file


# Each text once; the others take as long again.
COMPILED = {"full": False, "paged": True, "score": True, "small": True}
ALL = [
    pytest.param(name, partial, marks=[] if COMPILED[name] == partial else pytest.mark.slow)
    for name in LATENT
    for partial in (False, True)
]


@pytest.mark.parametrize(("name", "partial"), ALL)
def test_compiles(name, partial):
    case = LATENT[name]
    rows = (case.q[2], case.q[1])
    found = compile_hopper_latent(*case.parts(), rows=rows, partial=partial)
    assert found.shared <= LIMIT
    assert found.spills_in_loops() <= at_most(0, 75)
    assert not found.warnings
    count = found.instructions()
    rank, rope = case.attention._program.heads.rank, case.attention._program.heads.rope
    scores, outputs = (rank + rope) // 16, 64 // 16
    # Scores and the left half of the output, before the loop, in it and behind it; the right half.
    assert count["HGMMA"] == 2 * scores + 3 * outputs
    # Of queries and of keys, 64 columns at a time.
    assert count["UTMALDG"] == 2 * -(-(rank + rope) // 64)


@pytest.mark.parametrize("heads", [16, pytest.param(64, marks=pytest.mark.slow)])
def test_what_repairs_compiles(heads):
    found = compile_decode(*LATENT["paged"].parts(), "sm_90", rows=(2, heads), repairs=True)
    assert not found.warnings
