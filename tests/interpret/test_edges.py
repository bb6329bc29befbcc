"""Interpreted kernels where others went wrong: strides, dimensions, poison, decoding, 2^31."""

from __future__ import annotations

import math
from typing import Any

import dense
import numpy as np
import pytest
import torch

import flashgen as fg
from flashgen import masks

NAN, INF = math.nan, math.inf
DIMS = [1, 8, 12, 16, 40, 72, 80, 96, 112, 160, 192, 256]


def inputs(
    B: int = 1, H: int = 2, Hkv: int = 1, S: int = 40, T: int = 40, D: int = 16, Dv: int = 16
) -> list[torch.Tensor]:
    shapes = ((B, H, S, D), (B, Hkv, T, D), (B, Hkv, T, Dv))
    return [torch.randn(shape) for shape in shapes]


def causal(S: int, T: int, offset: int | None = None) -> torch.Tensor:
    first = T - S if offset is None else offset
    return torch.arange(T) <= torch.arange(S)[:, None] + first


def run(attend: fg.Attention, tensors: Any, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = attend(*tensors, return_lse=True, backend="interpret", **arguments)
    return out, lse


def agree(
    attend: fg.Attention, tensors: Any, allowed: Any, tolerance: float = 1e-5, **arguments: Any
) -> None:
    out, lse = run(attend, tensors, **arguments)
    known = {n: arguments.get(n) for n in ("scale", "sinks")}
    right, right_lse = dense.attention(*tensors, allowed, **known)
    torch.testing.assert_close(out.double(), right, rtol=0, atol=tolerance)
    torch.testing.assert_close(lse.double(), right_lse, rtol=0, atol=tolerance)


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("dim", DIMS)
def test_head_dimensions(dim: int) -> None:
    """Padding in a dimension reads neither the neighbour's row nor garbage."""
    v_dim = DIMS[(DIMS.index(dim) + 5) % len(DIMS)]
    wide = [torch.full((1, h, n, 300), NAN) for h, n in ((2, 20), (1, 70), (1, 70))]
    tensors = []
    for buffer, size in zip(wide, (dim, dim, v_dim), strict=True):
        tensors.append(buffer[..., 7 : 7 + size].normal_())
    agree(fg.Attention(masks.causal), tensors, causal(20, 70))


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("dim", [8, 64, 80, 192])
def test_half_precision(dim: int) -> None:
    tensors = [x.half() for x in inputs(H=6, Hkv=2, S=33, T=70, D=dim, Dv=dim)]
    out, lse = run(fg.Attention(masks.causal), tensors)
    assert (out.dtype, lse.dtype) == (torch.float16, torch.float32)
    right, right_lse = dense.attention(*tensors, causal(33, 70))
    torch.testing.assert_close(out.double(), right, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse.double(), right_lse, rtol=0, atol=1e-4)


def test_double_precision_is_double() -> None:
    tensors = [x.double() for x in inputs(S=70, T=70)]
    agree(fg.Attention(masks.causal), tensors, causal(70, 70), tolerance=1e-13)


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("garbage", [NAN, INF, pytest.param(-INF, marks=pytest.mark.slow)])
@pytest.mark.parametrize("which", ["k", "v"])
def test_garbage_around_a_tensor(which: str, garbage: float) -> None:
    """Keys are a slice of a longer, poisoned buffer; lengths end inside a tile; some are hidden."""
    lens = torch.tensor([37, 0, 70])
    q, k, v = inputs(B=3, S=70, T=70)
    clean = [q, k.clone(), v.clone()]
    buffer = torch.full((3, 1, 200, 16), garbage)
    part = buffer[:, :, 50:120]
    part.copy_(k if which == "k" else v)
    for b, n in enumerate(lens.tolist()):
        part[b, :, n:] = garbage
    part[2, :, 60] = garbage
    rows = torch.arange(70)[:, None] + (lens - 70).reshape(3, 1, 1, 1)
    allowed = (torch.arange(70) <= rows) & (torch.arange(70) < lens.reshape(3, 1, 1, 1))
    allowed = allowed & (torch.arange(70) != 60)
    mask = masks.causal & fg.mask(lambda kv_idx: kv_idx != 60)
    spoilt = [q, part, v] if which == "k" else [q, k, part]
    out, lse = run(fg.Attention(mask), spoilt, kv_lens=lens)
    right, right_lse = dense.attention(*clean, allowed)
    torch.testing.assert_close(out.double(), right, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), right_lse, rtol=0, atol=1e-5)


def test_garbage_in_a_query_stays_in_its_row() -> None:
    tensors = inputs(S=40)
    clean, _ = run(fg.Attention(masks.causal), tensors)
    tensors[0][:, :, 7] = NAN
    out, _ = run(fg.Attention(masks.causal), tensors)
    assert out[:, :, 7].isnan().all()
    others = torch.arange(40) != 7
    torch.testing.assert_close(out[:, :, others], clean[:, :, others])


def test_what_is_seen_is_not_hidden() -> None:
    """A NaN that a row attends shows, also where the tile is full."""
    tensors = inputs(S=130, T=130)
    tensors[2][:, :, 0, 3] = NAN
    out, _ = run(fg.Attention(masks.causal), tensors)
    assert out[..., 3].isnan().all()
    assert out[..., [0, 1, 2, 4, 15]].isfinite().all()


@pytest.mark.parametrize("size", [-INF, INF, NAN])
def test_scores_that_are_not_finite(size: float) -> None:
    """-inf takes a pair out; +inf and NaN show in their rows, and only there."""
    table = torch.zeros(40)
    table[3] = size

    def shifted(score, kv_idx, table: fg.Tensor):
        return score + table[kv_idx]

    tensors = inputs()
    out, lse = run(fg.Attention(masks.causal, score=shifted, softcap=2.0), tensors, table=table)
    assert torch.equal(out[:, :, :3].isfinite().all(-1), torch.ones(1, 2, 3, dtype=torch.bool))
    if size == -INF:
        plain = fg.Attention(masks.causal & fg.mask(lambda kv_idx: kv_idx != 3), softcap=2.0)
        torch.testing.assert_close((out, lse), run(plain, tensors))
    if math.isnan(size):
        assert lse[:, :, 3:].isnan().all()
    if size == INF:
        assert out.isfinite().all(), "the cap holds it"


def test_rows_without_keys_have_the_sink() -> None:
    sinks = torch.tensor([30.0, -30.0, 0.25, -INF])
    tensors = inputs(H=4, Hkv=2, S=90, T=40)
    out, lse = run(fg.Attention(masks.causal, sinks=True), tensors, sinks=sinks)
    assert (out[:, :, :50] == 0).all()
    torch.testing.assert_close(lse[0, :, :50], sinks[:, None].expand(4, 50))
    agree(fg.Attention(masks.causal, sinks=True), tensors, causal(90, 40), sinks=sinks)


def test_two_halves_of_the_keys_merge() -> None:
    """The LSE is a natural logarithm: partial results are weighed by it."""
    tensors = q, k, v = inputs(S=8, T=96)
    whole, whole_lse = run(fg.Attention(), tensors)
    parts = [run(fg.Attention(), (q, k[:, :, s], v[:, :, s])) for s in (np.s_[:32], np.s_[32:])]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    merged = sum(o * (part - lse).exp()[..., None] for o, part in parts)
    torch.testing.assert_close((merged, lse), (whole, whole_lse))


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("S", [1, 2, 3, 8, 17])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 1), (12, 4), (7, 1)])
def test_decoding(S: int, heads: int, kv_heads: int) -> None:
    """The last rows of a long sequence: windows and documents move with the positions."""
    T = 203
    tensors = inputs(H=heads, Hkv=kv_heads, S=S, T=T)
    allowed = causal(S, T) & (torch.arange(T) > torch.arange(S)[:, None] + T - S - 70)
    mask = masks.sliding_window(window=70)
    agree(fg.Attention(mask), tensors, allowed)
    out, _ = run(fg.Attention(mask), tensors)
    for form in (T - S, torch.tensor(T - S), torch.tensor([T - S])):
        assert torch.equal(run(fg.Attention(mask), tensors, q_offset=form)[0], out)


@pytest.mark.slow
@pytest.mark.parametrize("S", [1, 7, 17])
def test_decoding_after_70000_keys(S: int) -> None:
    tensors = inputs(S=S, T=70_000)
    agree(fg.Attention(masks.causal), tensors, causal(S, 70_000))


def test_decoding_a_row_equals_that_row() -> None:
    """A cache with room to spare, and a runtime offset: step t is row t."""
    q, k, v = inputs(S=50, T=50)
    whole, _ = run(fg.Attention(masks.causal), (q, k, v))
    k[:, :, 30:], v[:, :, 30:] = NAN, NAN
    for t in (0, 15, 16, 29):
        step = run(fg.Attention(masks.causal), (q[:, :, t : t + 1], k, v), q_offset=t)[0]
        torch.testing.assert_close(step[:, :, 0], whole[:, :, t])
        lens = torch.tensor([t + 1])
        step = run(fg.Attention(masks.causal), (q[:, :, t : t + 1], k, v), kv_lens=lens)[0]
        torch.testing.assert_close(step[:, :, 0], whole[:, :, t])


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("S", [129, 255])
def test_masks_of_each_sequence_and_a_score(S: int) -> None:
    doc = torch.stack([torch.arange(S) // n for n in (S, 40, 1)])

    def leaning(score, b, h, q_idx, kv_idx, slope: fg.Tensor):
        return score + slope[b, h] * (kv_idx - q_idx)

    slope = torch.rand(3, 2) / 10
    tensors = inputs(B=3, S=S, T=S)
    attend = fg.Attention(masks.causal_document, score=leaning)
    away = (torch.arange(S) - torch.arange(S)[:, None]).numpy()
    right, right_lse = dense.attention(
        *tensors,
        causal(S, S) & (doc[:, None, :, None] == doc[:, None, None]),
        score=lambda s: s + slope.double().numpy()[..., None, None] * away,
    )
    out, lse = run(attend, tensors, doc=doc, slope=slope)
    torch.testing.assert_close(out.double(), right, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), right_lse, rtol=0, atol=1e-5)


def test_any_strides() -> None:
    S = 40
    packed = torch.randn(2, S, 3, 4, 16)
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    agree(fg.Attention(masks.causal), [q, k, v], causal(S, S))
    every_other = torch.randn(2, 4, S, 32)[..., ::2]
    shared = torch.randn(2, 1, 1, 16).expand(2, 4, S, 16)
    columns = torch.randn(2, 4, 16, S).mT
    for tensors in ((every_other, k, v), (q, columns, shared), (shared, k, every_other)):
        agree(fg.Attention(masks.causal), list(tensors), causal(S, S))


def test_rows_and_batches_beyond_32_bits() -> None:
    """Offsets of more than 2^31 elements, in memory that is never touched in between."""
    S, far = 40, 2**31 + 2**20
    for strides in ((0, 0, far // (S - 1), 1), (far, far // 2, 16, 1)):
        B, H = (1, 1) if strides[0] == 0 else (2, 1)
        buffers = [torch.empty(far + 2**16, dtype=torch.float16) for _ in range(2)]
        k, v = (x.as_strided((B, H, S, 16), strides).normal_() for x in buffers)
        q = torch.randn(B, 2, S, 16).half()
        out, _ = run(fg.Attention(masks.causal), (q, k, v))
        right, _ = dense.attention(q, k, v, causal(S, S))
        torch.testing.assert_close(out.double(), right, rtol=2e-3, atol=2e-3)
        del buffers, k, v


def test_gradients_beyond_32_bits() -> None:
    """Rows of keys and of the output's gradient that lie 2^31 elements apart in all."""
    S, far = 20, 2**31 + 2**20
    strides = (0, 0, far // (S - 1), 1)
    buffers = [torch.empty(far + 2**16, dtype=torch.float16) for _ in range(2)]
    k, grad = (x.as_strided((1, 1, S, 16), strides).normal_() for x in buffers)
    q, v = (torch.randn(1, 1, S, 16).half().requires_grad_() for _ in range(2))
    k = k.detach().requires_grad_()
    out = fg.Attention(masks.causal)(q, k, v, backend="interpret")
    ours = torch.autograd.grad(out, (q, v), grad)
    near = [x.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
            for x in (q, k, v)]  # fmt: skip
    out = fg.Attention(masks.causal)(*near, backend="interpret")
    theirs = torch.autograd.grad(out, (near[0], near[2]), grad.contiguous())
    assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


@pytest.mark.slow
def test_a_matrix_of_50000_squared() -> None:
    """A flattened index beyond 2^31, into data and into a bias that is expanded."""
    S = 50_000
    matrix = torch.from_numpy(np.zeros(S * S, dtype=np.bool_))
    hidden = [(S - 1, 0), (S - 1, S - 1), (S - 2, 49_000), (S - 3, 17)]
    for i, j in hidden:
        matrix[i * S + j] = True

    @fg.mask
    def flat(q_idx, kv_idx, matrix: fg.Tensor):
        return ~matrix[q_idx * 50_000 + kv_idx]

    q, k = torch.zeros(1, 1, 4, 16), torch.randn(1, 1, S, 16)
    v = torch.zeros(1, 1, S, 16)
    for n, (_, j) in enumerate(hidden):
        v[:, :, j, n] = S
    attend = fg.Attention(flat)
    block = {"block_size": (16, 256)}
    schedule = attend.schedule(q, k, v, matrix=matrix, **block, planner="bounds")
    out, lse = run(attend, (q, k, v), matrix=matrix, schedule=schedule)
    seen = torch.ones(4, 4)
    for n, (i, _) in enumerate(hidden):
        seen[i - (S - 4), n] = 0
    counts = torch.tensor([S, S - 1, S - 1, S - 2.0])
    torch.testing.assert_close(lse[0, 0], counts.log())
    torch.testing.assert_close(out[0, 0, :, :4], seen * S / counts[:, None], rtol=1e-4, atol=1e-4)


def test_the_same_mask_said_differently() -> None:
    """All ones is no mask; the causal flag is a mask; tiles change nothing but rounding."""
    tensors = inputs(H=4, Hkv=2, S=1, T=70)
    ones = fg.Attention(masks.from_dense(torch.ones(1, 70, dtype=torch.bool)))
    torch.testing.assert_close(run(ones, tensors), run(fg.Attention(), tensors))
    torch.testing.assert_close(run(fg.Attention(masks.causal), tensors), run(ones, tensors))


def test_future_keys_change_nothing() -> None:
    """Bit for bit, with a softcap, which must come before the mask."""
    q, k, v = inputs(S=100, T=100)
    attend = fg.Attention(masks.causal, softcap=1.0)
    first = run(attend, (q * 30, k, v))
    k[:, :, 60:], v[:, :, 60:] = 100.0, -100.0
    second = run(attend, (q * 30, k, v))
    for before, after in zip(first, second, strict=True):
        assert torch.equal(before[:, :, :60], after[:, :, :60])
        assert not torch.equal(before[:, :, 60:], after[:, :, 60:])


def test_runs_of_one_call_are_bit_equal() -> None:
    tensors = inputs(H=4, Hkv=2, S=70, T=70)
    attend = fg.Attention(masks.sliding_window(window=30))
    first = run(attend, tensors)
    for _ in range(3):
        for mine, other in zip(run(attend, tensors), first, strict=True):
            assert torch.equal(mine, other)


@pytest.mark.parametrize("cap", [1.0, 50.0, 1e3, 1e6, 1e30])
def test_softcaps_that_are_large_beside_scores(cap: float) -> None:
    """tanh of small numbers, where 1 - exp cancels."""
    tensors = inputs()
    exact = [x.double() for x in tensors]
    attend = fg.Attention(masks.causal, softcap=cap)
    right, right_lse = attend(*exact, return_lse=True, backend="cpu")
    out, lse = run(attend, tensors)
    torch.testing.assert_close(out.double(), right, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(lse.double(), right_lse, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint8, torch.int16])
def test_ids_of_any_integers(dtype: torch.dtype) -> None:
    doc = (torch.arange(40) // 17)[None]
    allowed = doc[0, :, None] == doc[0]
    agree(fg.Attention(masks.document), inputs(), allowed, doc=doc.to(dtype))


def test_data_that_is_a_view_of_negated_numbers() -> None:
    def seen(b: Any, kv_idx: Any, x: fg.Tensor) -> Any:
        return x[b, kv_idx] > 0

    x = torch.randn(1, 40, dtype=torch.cfloat).conj().imag
    assert x.is_neg()
    allowed = (x.resolve_neg() > 0).expand(40, 40)
    for given in (x, x.resolve_neg(), x):
        agree(fg.Attention(fg.mask(seen)), inputs(), allowed, x=given)


def evens(score, q_idx):
    return torch.where(q_idx % 2 == 0, score, -torch.inf)


@pytest.mark.parametrize("S", [2, 40])
@pytest.mark.parametrize("poison", [NAN, INF])
def test_scores_of_minus_infinity_beside_values_that_are_not_finite(S: int, poison: float) -> None:
    """A score of -inf takes a key away as a mask does, in rows that have no other one too."""
    q, k, v = inputs(S=S)
    v[..., -1, :] = poison
    out, lse = run(fg.Attention(masks.causal, evens), (q, k, v))
    cpu, cpu_lse = fg.Attention(masks.causal, evens)(q, k, v, return_lse=True, backend="cpu")
    torch.testing.assert_close(out, cpu, rtol=0, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(lse, cpu_lse, rtol=0, atol=1e-5)
    odd = (torch.arange(S) + 40 - S) % 2 == 1
    assert (out[..., odd, :] == 0).all()
    assert (lse[..., odd] == -INF).all()
