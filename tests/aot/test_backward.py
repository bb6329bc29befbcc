"""Backward kernels compile ahead of time for GPUs that aren't here, and spill next to nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen import aot, cache, launch, masks
from flashgen.emit import Variant
from flashgen.emit.gradients import Wanted
from flashgen.launch.backward_run import generate
from flashgen.order import with_tables
from flashgen.spec import Spec
from flashgen.tiling import target_of
from flashgen.tiling.backward import square, tilings

POINTERS = {
    "counts": torch.int32, "masked_runs": torch.int32, "full_runs": torch.int32,
    "kv_lens_ptr": torch.int32, "q_offset_ptr": torch.int32, "states": torch.int8,
    "lse_ptr": torch.float32, "grad_lse_ptr": torch.float32, "lse_log2_ptr": torch.float32,
    "minus_delta_ptr": torch.float32, "sequences_ptr": torch.int32, "cu_seqlens_q_ptr": torch.int32,
    "cu_seqlens_kv_ptr": torch.int32,
}  # fmt: skip


def spec_of(attention: Any, **data: Any) -> Spec:
    q = torch.empty(1, 1, 16, 16)
    return attention._check_look(q, q, q, data).bound.spec


def compile_backward(
    spec: Spec,
    target: str,
    kind: str,
    head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    wanted: Wanted = Wanted(),  # noqa: B008
    tile: tuple[int, int] = (128, 128),
    variant: Variant | None = None,
) -> aot.Compiled:
    """Compile one of the kernels (`q`, `kv` or `diagonal`) on a schedule's tiles."""
    variant = variant or Variant(head_dim, head_dim)
    made = generate(spec, variant, wanted)
    module = cache.module(made.name, made.text, launch.key_parts())
    dtypes = POINTERS | {f"{t.name}_ptr": t.dtype for t in with_tables(spec).tensors}
    added = torch.int64 if wanted.exact else torch.float32
    dtypes |= {
        f"grad_{n}_ptr": torch.bfloat16 if n in wanted.stored else added for n in wanted.data
    }
    floats = {"scale", "scale_log2", "to_cap"}
    names = {"q": made.queries, "kv": made.keys, "diagonal": made.diagonals}[kind]
    values = [
        torch.empty(0, dtype=dtypes.get(name, dtype))
        if name in dtypes or name.endswith("_ptr")
        else (1.0 if name in floats else 3)
        for name in names
    ]
    arch = target_of(*aot.TARGETS[target])
    changed = bool(spec.score or spec.softcap or variant.dropout)
    pair = tilings(arch, dtype, head_dim, head_dim, tile, changed, made.per_pair)
    along = square(arch, dtype, head_dim, head_dim, tile)
    tiling = along if kind == "diagonal" else pair[kind == "kv"]
    sample = torch.empty(1, 16, 16, 16, dtype=dtype)
    return aot.compile_kernel(
        target=target,
        kernel=getattr(module, f"attention_backward_{kind}"),
        values=values,
        constants=launch.constants_of(sample, [sample], tiling, tile),
        tiling=tiling,
    )


def check(target: str, compiled: aot.Compiled) -> None:
    """Hopper's tilings are measured: outside of their loops they may spill."""
    print(compiled)
    limit = 255 if target.startswith("sm") else 512
    assert compiled.registers is not None
    assert compiled.registers <= limit
    assert compiled.spills is not None
    assert compiled.spills <= (512 if target == "sm_90" else 16)
    assert compiled.shared <= target_of(*aot.TARGETS[target]).shared


KERNELS = [(target, dim, kind) for target in ("sm_90", "sm_80", "gfx942")
           for dim in (64, 128) for kind in ("q", "kv")]  # fmt: skip
SOME = {("sm_90", 128, "q"), ("sm_90", 128, "kv"), ("sm_80", 128, "kv"), ("gfx942", 128, "q")}


@pytest.mark.parametrize(
    ("target", "head_dim", "kind"),
    [pytest.param(*one, marks=[] if one in SOME else pytest.mark.slow) for one in KERNELS],
)
def test_causal(target: str, head_dim: int, kind: str) -> None:
    spec = spec_of(fg.Attention(mask=masks.causal))
    check(target, compile_backward(spec, target, kind, head_dim))


@fg.attention(mask=masks.causal)
def rows_and_columns(score, h, q_idx, kv_idx, slope: fg.Tensor, gate: fg.Tensor, column: fg.Tensor):
    return score + slope[h] * kv_idx + gate[q_idx] * column[kv_idx]


@fg.attention(mask=masks.causal)
def relative(score, q_idx, kv_idx, table: fg.Tensor):
    return score + table[q_idx - kv_idx]


@fg.attention(mask=masks.causal)
def by_sum(score, q_idx, kv_idx, table: fg.Tensor):
    return score + table[q_idx + kv_idx]


@fg.attention(mask=masks.causal)
def biased(score, b, h, q_idx, kv_idx, bias: fg.Tensor):
    return score + bias[b, h, q_idx, kv_idx]


@pytest.mark.parametrize("how", [pytest.param("add", marks=pytest.mark.slow), "exact"])
@pytest.mark.parametrize("target", ["sm_90", pytest.param("gfx942", marks=pytest.mark.slow)])
def test_gradients_of_data_by_rows_and_columns(target: str, how: str) -> None:
    data = {"slope": torch.zeros(1), "gate": torch.zeros(16), "column": torch.zeros(16)}
    wanted = Wanted(data=tuple(data), exact=how == "exact")
    compiled = compile_backward(spec_of(rows_and_columns, **data), target, "q", 64, wanted=wanted)
    print(compiled)
    assert compiled.spills is not None
    assert compiled.spills <= 128


@pytest.mark.parametrize(
    ("target", "how"),
    [
        ("sm_90", "stored"),
        ("gfx942", "exact"),
        pytest.param("sm_90", "exact", marks=pytest.mark.slow),
        pytest.param("gfx942", "stored", marks=pytest.mark.slow),
    ],
)
def test_gradients_of_data_by_pairs(target: str, how: str) -> None:
    """Added up in integers; or stored, where no two pairs share an element."""
    learned, size = (biased, (1, 1, 16, 16)) if how == "stored" else (by_sum, (16,))
    (name,) = (a.name for a in learned._program.params)
    wanted = Wanted(data=(name,), exact=how == "exact", stored=(name,) * (how == "stored"))
    spec = spec_of(learned, **{name: torch.zeros(size)})
    compiled = compile_backward(spec, target, "q", 64, wanted=wanted)
    print(compiled)
    assert compiled.spills is not None
    assert compiled.spills <= 64


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("target", ["sm_90", pytest.param("gfx942", marks=pytest.mark.slow)])
def test_gradients_of_data_by_distance(target: str, exact: bool) -> None:
    (name,) = (a.name for a in relative._program.params)
    spec = spec_of(relative, **{name: torch.zeros(16)})
    wanted = Wanted(q=False, k=False, v=False, data=(name,), exact=exact)
    compiled = compile_backward(spec, target, "diagonal", 64, wanted=wanted)
    print(compiled)
    assert compiled.spills is not None
    assert compiled.spills <= 64
    assert compiled.shared <= target_of(*aot.TARGETS[target]).shared


@pytest.mark.parametrize("kind", ["q", "kv"])
@pytest.mark.parametrize("target", ["sm_90", pytest.param("gfx942", marks=pytest.mark.slow)])
def test_documents_with_learned_slopes(target: str, kind: str) -> None:
    @fg.attention(mask=masks.causal_document, softcap=30.0)
    def alibi(score, h, q_idx, kv_idx, slope: fg.Tensor):
        return score + slope[h] * (kv_idx - q_idx)

    doc = torch.zeros(1, 16, dtype=torch.int32)
    spec = spec_of(alibi, doc=doc, slope=torch.zeros(1))
    wanted = Wanted(data=("slope",), lse=True)
    compiled = compile_backward(spec, target, kind, 64, wanted=wanted)
    print(compiled)
    assert compiled.spills is not None
    assert compiled.spills <= 512


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        pytest.param("sm_90", "q", marks=pytest.mark.slow),
        ("sm_90", "kv"),
        pytest.param("gfx942", "q", marks=pytest.mark.slow),
        pytest.param("gfx942", "kv", marks=pytest.mark.slow),
    ],
)
def test_dropout(target: str, kind: str) -> None:
    spec = spec_of(fg.Attention(mask=masks.causal))
    compiled = compile_backward(spec, target, kind, 64, variant=Variant(64, 64, dropout=True))
    print(compiled)
    assert compiled.spills is not None
    assert compiled.spills <= 256


@pytest.mark.parametrize(
    "wanted",
    [Wanted(q=False, k=False), pytest.param(Wanted(v=False), marks=pytest.mark.slow)],
    ids=["of values", "of keys"],
)
def test_fewer_gradients(wanted: Wanted) -> None:
    spec = spec_of(fg.Attention(mask=masks.causal))
    check("sm_90", compile_backward(spec, "sm_90", "kv", 64, wanted=wanted))


@pytest.mark.parametrize("kind", [pytest.param("q", marks=pytest.mark.slow), "kv"])
def test_padded_keys_and_true_float32(kind: str) -> None:
    spec = spec_of(fg.Attention(mask=masks.causal))
    variant = Variant(40, 72, "lens", True)
    compiled = compile_backward(spec, "sm_90", kind, 72, torch.float32, variant=variant)
    print(compiled)
    assert compiled.shared <= target_of("cuda", 90).shared


def test_the_text_is_the_same_each_time() -> None:
    spec = spec_of(fg.Attention(mask=masks.causal))
    generate.cache_clear()
    first = generate(spec, Variant(64, 64), Wanted())
    generate.cache_clear()
    assert generate(spec, Variant(64, 64), Wanted()) == first
