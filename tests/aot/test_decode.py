"""Kernels for few queries: their text, kept as files, and what they cost where they'd run."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from golden_kernels import GOLDEN
from test_golden import kernel_file  # noqa: F401
from triton import knobs

import flashgen as fg
from flashgen import emit, launch, masks, tiling
from flashgen.aot import TARGETS, compiling_for
from flashgen.aot_decode import blocks_for, compile_decode, compile_merge
from flashgen.call import Call
from flashgen.emit import decode as emit_decode
from flashgen.kernel_names import spell
from flashgen.launch import decode as launch_decode
from flashgen.spec import Spec
from flashgen.tiling.decode import Splits


class Decoding(NamedTuple):
    """An attention, and a call's queries, keys and other arguments."""

    attention: fg.Attention
    q: tuple[int, ...]
    k: tuple[int, ...]
    arguments: dict[str, Any]

    def checked(self) -> Call:
        q, k = (torch.empty(shape, dtype=torch.bfloat16) for shape in (self.q, self.k))
        latent = self.attention._program.heads is not None
        return self.attention._check_look(q, k, None if latent else k, dict(self.arguments))

    def parts(self) -> tuple[Spec, emit.Variant]:
        call = self.checked()
        bound = spell(call.bound)
        dims = (call.q.shape[-1], call.v.shape[-1])
        return bound.spec, launch.variant_of(bound, call.geometry, *dims)

    @property
    def dealt(self) -> bool:
        call = self.checked()
        return launch_decode.is_dealt(call.bound, call.geometry, batch_invariant=False)

    def text(self) -> str:
        return launch_decode.generate(*self.parts(), dealt=self.dealt).text


LENS = torch.full((2,), 90, dtype=torch.int32)
TABLE = torch.arange(12, dtype=torch.int32).reshape(2, 6)
DECODING = {
    "full": Decoding(fg.Attention(), (2, 8, 1, 128), (2, 2, 96, 128), {}),
    "sliding_window": Decoding(
        fg.Attention(masks.sliding_window, softcap=30.0, sinks=True),
        (2, 8, 1, 128),
        (2, 2, 96, 128),
        {"window": 32, "kv_lens": LENS, "sinks": torch.zeros(8)},
    ),
    "alibi": Decoding(
        GOLDEN["alibi"].attention, (2, 4, 3, 64), (2, 2, 96, 64), {"slope": torch.zeros(4)}
    ),
    "paged": Decoding(
        fg.Attention(masks.causal),
        (2, 8, 1, 128),
        (12, 16, 2, 128),
        {"page_table": TABLE, "kv_lens": LENS},
    ),
    "latent": Decoding(
        fg.Attention(masks.causal, heads=fg.MLA(rank=512, rope=64)),
        (2, 16, 1, 576),
        (2, 1, 96, 576),
        {"scale": 1.0},
    ),
}


@pytest.mark.parametrize("name", DECODING)
def test_decode(name, kernel_file):  # noqa: F811
    assert DECODING[name].text() == kernel_file


def test_merge(kernel_file):  # noqa: F811
    assert emit_decode.merging().text == kernel_file


def test_merge_dealt(kernel_file):  # noqa: F811
    assert emit_decode.merging(dealt=True).text == kernel_file


def test_visit(kernel_file):  # noqa: F811
    assert emit_decode.visiting().text == kernel_file


@pytest.mark.parametrize("name", DECODING)
def test_lines_are_short(name):
    assert max(map(len, DECODING[name].text().splitlines())) <= 100


def check(name: str, target: str, rows: tuple[int, int] = (1, 4)) -> None:
    spec, variant = DECODING[name].parts()
    found = compile_decode(spec, variant, target, rows=rows, dealt=DECODING[name].dealt)
    assert found.shared <= tiling.target_of(*TARGETS[target]).shared
    assert not found.warnings
    if variant.head_dim <= 128:
        assert found.spills == 0 or found.spills_in_loops() == 0
    if target == "sm_90":
        assert "wgmma.mma_async" in found.assembly


@pytest.mark.parametrize(
    ("name", "target"),
    [("sliding_window", "sm_90"), ("full", "sm_90"), ("full", "sm_80"), ("alibi", "gfx942")],
)
def test_a_few_kernels(name, target):
    check(name, target)


def test_pages_are_copied_as_far_ahead_as_other_keys():
    """All stages are there: a load of the table that the loop waits for would take one away."""
    masked, variant = DECODING["paged"].parts()
    for spec in (masked, replace(masked, mask=None)):
        tiling = blocks_for(spec, variant, "sm_90", torch.bfloat16, (1, 4), dealt=True).tiling
        stage = tiling.block_n * 2 * (variant.head_dim + variant.v_head_dim)
        found = compile_decode(spec, variant, "sm_90", dealt=True)
        assert found.shared >= tiling.stages * stage
        assert found.spills == 0 or found.spills_in_loops() == 0


def test_latent_values_are_loaded_once():
    """Copies to shared memory: of the keys' parts, none of values."""
    text = DECODING["latent"].text()
    loop = text[text.index("def attend_share(") :]
    assert loop.count("tl.load(k_tile") == 5
    assert "v_ptr" not in text


@pytest.mark.slow
@pytest.mark.parametrize("rows", [(1, 1), (1, 4), (16, 4), (3, 12)], ids=str)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["full", "sliding_window", "alibi", "paged"])
def test_every_kernel(name, target, rows):
    check(name, target, rows)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize("target", ["sm_90", "sm_80", "sm_100"])
def test_latent_kernels(target, heads):
    check("latent", target, (1, heads))


@pytest.mark.parametrize(("target", "dealt"), [("sm_90", True), ("gfx942", False)])
def test_merging(target, dealt):
    assert compile_merge(target, dealt=dealt).spills == 0


def test_lengths_scalars_splits_and_batches_are_one_binary(monkeypatch):
    """What Triton looks a binary up by, for launches that go nowhere."""
    found: list[tuple[Any, ...]] = []

    def record(kernel, names, values, constants, tiling, programs):
        found.append((kernel, [values[name] for name in names], constants, tiling))

    monkeypatch.setattr(launch_decode, "launch", record)
    monkeypatch.setattr(launch_decode.merging, "launch", record)
    monkeypatch.setattr(launch_decode, "current_target", lambda _: tiling.target_of("cuda", 90))
    attend = fg.Attention(masks.sliding_window)
    for length, window, batch in ((700, 5, 2), (1024, 16, 1), (4097, 1, 3), (640, 17, 2)):
        count = length // 64
        monkeypatch.setattr(launch_decode, "splits_of", lambda *_, n=count, **__: Splits(n, 0))
        q, k = (
            torch.zeros(batch, h, s, 64, dtype=torch.bfloat16) for h, s in ((8, 1), (2, length))
        )
        call = attend._check_look(q, k, k, {"window": window})
        schedule = attend.schedule(q, k, window=window, block_size=64)
        parts = {"bound": spell(call.bound), "geometry": call.geometry, "schedule": schedule}
        launch_decode.forward(q, k, k, scale=1.0, **parts)
    keys = set()

    def skip(*, fn, key, **_):
        keys.add((fn.name, key))
        return True

    for kernel in {id(kernel): kernel for kernel, *_ in found}.values():
        monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
    with compiling_for("sm_90"), knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = skip
        for kernel, arguments, constants, blocks in found:
            options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
            kernel.warmup(*arguments, grid=(1,), **constants, **options)
    assert len(found) == 8
    assert len(keys) == 2
