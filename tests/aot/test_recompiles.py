"""New lengths, scalars, data, strides and closures run the same binary: a counter proves it.

Calls go the way of a launch up to the grid, and are compiled for a GPU that isn't here instead."""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from golden_kernels import GOLDEN, capped_documents
from triton import knobs

import flashgen as fg
from flashgen import aot, cache, launch, masks, plan
from flashgen.tiling import Tiling, target_of

TARGET = "sm_90"
DTYPE = torch.bfloat16
# A captured tensor has one length.
WITH_DATA_GIVEN = [name for name in GOLDEN if name != "flex_function"]
# Integers that Triton treats apart where it is let: 1, multiples of 16, the edges of 32 bits.
EDGES = (0, 1, 2, 7, 16, 17, 32, 128, 2**15, 2**16, 2**20 - 1, 2**24, 2**29, 2**30 - 1)


class Launch(NamedTuple):
    kernel: Any
    arguments: list[Any]
    constants: dict[str, Any]
    tiling: Tiling


@pytest.fixture
def launches(monkeypatch) -> list[Launch]:
    """What would have been launched, on an H200, since the test began."""
    found: list[Launch] = []

    def record(kernel, names, values, constants, tiling, programs):
        assert programs > 0
        arguments = [values[name] for name in names]
        found.append(Launch(kernel.jit, arguments, dict(constants), tiling))

    monkeypatch.setattr(launch, "launch", record)
    monkeypatch.setattr(plan, "launch", record)
    monkeypatch.setattr(launch, "current_target", lambda device: target_of(*aot.TARGETS[TARGET]))
    return found


def run(attention: fg.Attention, q: torch.Tensor, k: torch.Tensor | None = None, **arguments: Any):
    """Plan as on a GPU, and attend; both end in `launches`."""
    k = q if k is None else k
    call = attention._check_look(q, k, k, dict(arguments))
    data = {name: arguments[name] for name in arguments if name not in ("sinks", "scale")}
    schedule = attention.schedule(q, k, **data)
    if call.bound.spec.mask is not None:
        _, runs = plan.plan(call.bound, call.geometry, schedule.block_size, "auto")
        schedule = replace(schedule, _kv_runs=runs)
    launch.forward(
        *(q, k, k),
        bound=call.bound,
        geometry=call.geometry,
        schedule=schedule,
        scale=call.scale,
        softcap=call.softcap,
        sinks=call.sinks,
    )


@contextmanager
def fresh(launches: list[Launch]) -> Iterator[None]:
    """Kernels forget what they compiled, and remember it afterwards."""
    kernels = {id(x.kernel): x.kernel for x in launches}.values()
    before = [kernel.device_caches for kernel in kernels]
    for kernel in kernels:
        kernel.device_caches = defaultdict(kernel.create_binder)
    try:
        with aot.compiling_for(TARGET), knobs.runtime.scope():
            yield
    finally:
        for kernel, known in zip(kernels, before, strict=True):
            kernel.device_caches = known


def warm_up(launches: list[Launch]) -> None:
    for kernel, arguments, constants, tiling in launches:
        options = {"num_warps": tiling.warps, "num_stages": tiling.stages}
        kernel.warmup(*arguments, grid=(1,), **constants, **options)


def compiles(launches: list[Launch]) -> Counter[str]:
    """How often Triton compiles each kernel for these launches, by the kernel's name."""
    found: Counter[str] = Counter()

    def count(*, fn, **_):
        found[fn.name.rpartition(".")[2]] += 1

    with fresh(launches):
        knobs.runtime.jit_post_compile_hook = count
        warm_up(launches)
    return found


def binaries(launches: list[Launch]) -> Counter[str]:
    """The same without compiling: how many different keys Triton looks binaries up by."""
    found = set()

    def skip(*, fn, key, **_):
        found.add((fn.module, fn.name.rpartition(".")[2], key))
        return True

    with fresh(launches):
        knobs.runtime.jit_cache_hook = skip
        warm_up(launches)
    return Counter(name for _, name, _ in found)


def once(launches: list[Launch]) -> dict[str, int]:
    """One binary for each kernel that is launched."""
    return dict.fromkeys((x.kernel.__name__ for x in launches), 1)


def queries(length: int, batch: int = 2, heads: int = 4, head_dim: int = 64) -> torch.Tensor:
    return torch.zeros(batch, heads, length, head_dim, dtype=DTYPE)


LENGTHS = (1, 2, 15, 16, 17, 31, 48, 63, 64, 65, 100, 127, 128, 129, 160, 200, 255, 256, 272, 600)
# Rows of more tiles than one program of the planner sees have their runs written by another kernel.
LENGTHS = (*LENGTHS, (plan.CHUNK + 1) * 64)


def test_lengths_and_windows_compile_once(launches):
    attend = fg.Attention(masks.sliding_window)
    for number, length in enumerate(LENGTHS):
        run(attend, queries(length), window=max(1, EDGES[number % len(EDGES)]))
    assert compiles(launches) == once(launches)
    assert len(once(launches)) == 3


def test_the_counter_sees_what_is_specialised(launches):
    attend = fg.Attention(masks.causal)
    for length in (1, 16, 17):
        run(attend, queries(length))
    forward = [x for x in launches if x.kernel.__name__ == "attention_forward"]
    text = Path(sys.modules[forward[0].kernel.__module__].__file__).read_text()
    text = re.sub(r"do_not_specialize=\[.*?\],", "", text, flags=re.DOTALL)
    kernel = cache.module("specialised", text, launch.key_parts()).attention_forward
    assert binaries([x._replace(kernel=kernel) for x in forward])["attention_forward"] == 3


def test_a_window_beyond_32_bits_compiles_once_more(launches):
    attend = fg.Attention(masks.sliding_window)
    for window in (5, 2**30 - 1):
        run(attend, queries(64), window=window)
    narrow = binaries(launches)
    for window in (2**30, 2**31, 2**32 + 1, 2**62):
        run(attend, queries(64), window=window)
    assert narrow == {"attention_forward": 1, "classify": 1}
    assert binaries(launches) == {"attention_forward": 2, "classify": 2}


def test_documents_of_other_lengths_and_strides_compile_once(launches):
    attend = fg.Attention(masks.causal_document)
    for number, length in enumerate(LENGTHS):
        doc = torch.zeros(2, length + 3, dtype=torch.int32)
        # Views that start off every alignment, rows that are reversed in memory, broadcast rows.
        views = (doc[:, 1 : length + 1], doc[:, :length], doc[:1, 3:].expand(2, -1), doc.T[3:].T)
        run(attend, queries(length), doc=views[number % 4])
    assert compiles(launches) == once(launches)
    assert set(once(launches)) == {*("summarize", "classify", "compact", "attention_forward")}


@pytest.mark.parametrize("value", EDGES)
def test_scalars_at_edges_are_the_same_binary(launches, value):
    @fg.mask
    def every(q_idx, kv_idx, whole: int, real: float, flag: bool):
        return (kv_idx <= q_idx + whole) & (kv_idx * 1.0 <= real) | flag

    attend = fg.Attention(every)
    run(attend, queries(64), whole=3, real=0.5, flag=True)
    run(attend, queries(64), whole=value, real=float(value), flag=False)
    run(attend, queries(64), whole=-value, real=value, flag=False)
    assert binaries(launches) == once(launches)


def test_heads_groups_and_batches_are_the_same_binary(launches):
    attend = fg.Attention(masks.causal_document)
    for batch, heads, kv_heads in ((2, 16, 2), (3, 6, 2), (16, 8, 8), (2, 15, 3), (5, 1, 1)):
        doc = torch.zeros(batch, 80, dtype=torch.int32)
        run(attend, queries(80, batch, heads), queries(80, batch, kv_heads), doc=doc)
    assert binaries(launches) == once(launches)


def test_aligned_strides_are_the_same_binary(launches):
    attend = fg.Attention(masks.causal)
    run(attend, queries(80))
    run(attend, queries(80, head_dim=192)[..., 64:128])
    run(attend, queries(80, head_dim=80)[..., :64])
    run(attend, torch.zeros(2, 80, 4, 64, dtype=DTYPE).transpose(1, 2))
    run(attend, queries(1, 1, 1).expand(2, 4, 80, 64))
    assert binaries(launches) == once(launches)


def test_batches_far_apart_are_the_same_binary(launches):
    """Only the distance of rows in a tile decides between 32 and 64 bits for offsets."""
    attend = fg.Attention(masks.causal)
    run(attend, queries(80))
    run(
        attend,
        torch.empty(2, 4 * 2**16, 64, dtype=DTYPE).as_strided(
            (2, 4, 80, 64), (2**24, 2**22, 64, 1)
        ),
    )
    assert binaries(launches) == once(launches)


def test_unaligned_rows_are_one_binary_more(launches):
    attend = fg.Attention(masks.causal)
    run(attend, queries(80))
    for offset in (1, 2, 4):
        run(attend, queries(80, head_dim=80)[..., offset : offset + 64])
    assert binaries(launches)["attention_forward"] == 2


@pytest.mark.parametrize("name", WITH_DATA_GIVEN)
def test_every_golden_kernel_is_one_binary(launches, name):
    """Other lengths and other data of the same kind."""
    golden = GOLDEN[name]
    for length in (96, 113, 256):
        arguments = {n: resized(v, length) for n, v in golden.arguments.items()}
        q = queries(length, head_dim=golden.head_dim)
        run(golden.attention, q, **arguments)
    assert binaries(launches) == once(launches)


def resized(value: Any, length: int) -> Any:
    """Data with `length` where the golden call has its own, off every alignment."""
    if not isinstance(value, torch.Tensor):
        return value
    shape = [length if n == 96 else n for n in value.shape]
    return torch.zeros(3 + torch.Size(shape).numel(), dtype=value.dtype)[3:].reshape(shape)


def test_offsets_and_lengths_on_the_device_are_one_binary(launches):
    attend = fg.Attention(masks.causal)
    for first in (0, 1, 2, 4):
        lens = torch.full((6,), 7, dtype=torch.int32)[first : first + 2]
        run(attend, queries(80), kv_lens=lens, q_offset=lens)
    assert binaries(launches) == once(launches)


@pytest.mark.parametrize("offset", [-(2**30 - 1), -16, -1, 0, 1, 16, 2**30 - 100])
def test_offsets_are_the_same_binary(launches, offset):
    attend = fg.Attention(masks.sliding_window(window=8))
    run(attend, queries(80))
    run(attend, queries(80), q_offset=offset)
    assert binaries(launches) == once(launches)


def test_scales_caps_and_sinks_are_the_same_binary(launches):
    for cap, scale in ((50.0, 1.0), (30, 1), (1, 16), (16.0, 0.125)):
        attend = fg.Attention(masks.causal, softcap=cap, sinks=True)
        sinks = torch.zeros(8)[int(scale) % 2 : 4 + int(scale) % 2]
        run(attend, queries(80), scale=scale, sinks=sinks)
    assert binaries(launches) == once(launches)


def test_a_closure_made_anew_is_the_same_file_and_binary(launches):
    sources = set()
    for length in (96, 97):
        attend = fg.Attention(capped_documents(torch.zeros(2, length, dtype=torch.int64)))
        run(attend, queries(length))
        sources.add(attend.source(queries(length), queries(length), queries(length)))
    assert len(sources) == 1
    assert len({id(x.kernel) for x in launches}) == 3
    assert binaries(launches) == once(launches)


def test_another_number_in_a_closure_is_another_file():
    def window(size):
        return lambda b, h, q, k: (q >= k) & (q - k < size)

    q = queries(80)
    texts = {fg.Attention(window(size)).source(q, q, q) for size in (8, 8, 9)}
    assert len(texts) == 2


@pytest.mark.parametrize("name", WITH_DATA_GIVEN)
def test_text_and_path_depend_on_no_length_or_value(name):
    golden = GOLDEN[name]
    texts = set()
    for length in (96, 113):
        q = queries(length, heads=4, head_dim=golden.head_dim)
        v = queries(length, heads=4, head_dim=golden.v_head_dim or golden.head_dim)
        arguments = {n: resized(v, length) for n, v in golden.arguments.items()}
        texts.add(golden.attention.source(q, q, v, **arguments))
    assert len(texts) == 1


def test_placeholders_of_aot_are_the_launch_s_binary(launches):
    """What is compiled ahead of time is what a call looks up."""
    golden = GOLDEN["causal_document"]
    run(golden.attention, queries(96, head_dim=128), **golden.arguments)
    called = launches[-1]
    made = aot.forward_launch(golden.spec(), golden.variant(), DTYPE, called.tiling)
    assert binaries([called, Launch(*made)]) == once(launches[-1:])
