"""Hopper's forward kernels, asked for by name: what is special to them.

`auto` takes them on an H200, so what tests/gpu/test_forward.py asks of every backend is asked of
them there."""

from __future__ import annotations

from typing import Any

import pytest
import sm_90
import torch
from cases import CASES
from dense_checks import FIRST, check_against_sdpa, inputs, oracle, sdpa_error, to_gpu

import flashgen as fg
from flashgen import masks
from flashgen.errors import FlashgenError
from flashgen.launch import hopper_forward as launch_hopper

pytestmark = sm_90.marks(60)
BF16 = torch.bfloat16


def causal(S: int, T: int) -> torch.Tensor:
    i, j = torch.arange(S, device="cuda")[:, None], torch.arange(T, device="cuda")
    return j <= i + T - S


def hopper(attend: Any) -> Any:
    return lambda *tensors, **data: attend(*tensors, backend="hopper", **data)


@pytest.mark.parametrize("case", FIRST[::6], ids=lambda case: case.id)
def test_masks_at_odd_sizes(case: Any, nan_filled_empty: None) -> None:
    B, H, S, T = 2, 2, 197, 329 if case.below_zero else 197
    data = case.build(B, H, S, T, torch.Generator().manual_seed(2))
    allowed = case.expected(B, H, S, T, data).cuda()
    attend = fg.Attention(mask=case.bound(to_gpu(data)).to("cuda"))
    check_against_sdpa(hopper(attend), inputs(B, H, H, S, T, 128, 128, BF16), allowed)


@pytest.mark.parametrize("block_n", [64, 128])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_bounds_of_keys(dtype: torch.dtype, block_n: int, nan_filled_empty: None) -> None:
    """Each query's own first and last key, also where a bound is as far as numbers go."""
    S, far = 333, torch.iinfo(dtype)
    generator = torch.Generator().manual_seed(5)
    ends = torch.randint(-9, S + 9, (2, S), generator=generator, dtype=dtype)
    ends[:, ::5], ends[0, 1::7], ends[1, 2::7] = far.max, far.min, far.min
    first, last, other = (x.to("cuda") for x in (ends[0], ends[1], ends[0].flip(0)))

    def between(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k <= last[q]) & ((k > first[q]) | (k < other[q]) | (k == 7))

    q, k = torch.arange(S, device="cuda")[:, None], torch.arange(S, device="cuda")
    attend = fg.Attention(mask=between)
    tensors = inputs(2, 2, 2, S, S, 128, 128, BF16)
    schedule = attend.schedule(*tensors, block_size=(128, block_n))
    check_against_sdpa(hopper(attend), tensors, between(0, 0, q, k), schedule=schedule)

    def ranges(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k <= last[q]) & ((k > first[q]) | (k < other[q]))

    attend = fg.Attention(mask=ranges)
    schedule = attend.schedule(*tensors, block_size=(128, block_n))
    check_against_sdpa(hopper(attend), tensors, ranges(0, 0, q, k), schedule=schedule)


@pytest.mark.parametrize("heads", [(4, 4), (3, 1), (8, 1)], ids=str)
@pytest.mark.parametrize("lengths", [(1, 1), (5, 700), (300, 100), (1000, 1000)], ids=str)
def test_lengths_and_groups(
    lengths: tuple[int, int], heads: tuple[int, int], nan_filled_empty: None
) -> None:
    """Rows that see nothing among them; in the last, more row blocks than multiprocessors."""
    tensors = inputs(8, *heads, *lengths, 128, 128, BF16)
    check_against_sdpa(hopper(fg.Attention(mask=masks.causal)), tensors, causal(*lengths))


@pytest.mark.parametrize(
    ("head_dim", "tile"), [(128, (128, 128)), (128, (128, 64)), (64, (192, 128)), (40, (192, 64))]
)
def test_strides_and_shapes_of_tiles(
    head_dim: int, tile: tuple[int, int], nan_filled_empty: None
) -> None:
    S = 1717
    tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(
        4, 6, 6, S, S, head_dim, head_dim, BF16)]  # fmt: skip
    attend = fg.Attention(mask=masks.causal)
    schedule = attend.schedule(*tensors, block_size=tile)
    check_against_sdpa(hopper(attend), tensors, causal(S, S), schedule=schedule)


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_maxima_that_come_late(head_dim: int, dtype: torch.dtype, nan_filled_empty: None) -> None:
    """Weights outgrow what tiles before were weighed with: later keys are longer, of some heads."""
    S = 1100
    q, k, v = inputs(2, 4, 4, S, S, head_dim, head_dim, dtype)
    growth = torch.linspace(0.1, 12, S, device="cuda")[:, None].to(dtype)
    k[:, ::2] *= growth
    k[:, 1] *= growth.flip(0)
    everything = torch.ones(S, S, dtype=torch.bool, device="cuda")
    check_against_sdpa(hopper(fg.Attention()), [q, k, v], everything)
    check_against_sdpa(hopper(fg.Attention(mask=masks.causal)), [q, k, v], causal(S, S))


def test_gradients_of_tall_tiles() -> None:
    """Which both directions take."""
    S = 700
    tensors = [x.requires_grad_() for x in inputs(2, 4, 2, S, S, 64, 64, BF16)]
    attend = fg.Attention(mask=masks.causal)
    grad = torch.randn_like(tensors[0])
    tall, low = (attend.schedule(*tensors, block_size=(n, 128)) for n in (192, 128))
    assert attend.schedule(*tensors).block_size == (192, 128)
    for schedule in (tall, low):
        out = attend(*tensors, backend="hopper", schedule=schedule)
        found = torch.autograd.grad(out, tensors, grad)
        right = torch.autograd.grad(
            attend(*tensors, backend="portable", schedule=low), tensors, grad
        )
        for x, exact in zip(found, right, strict=True):
            torch.testing.assert_close(x, exact, rtol=2e-2, atol=2e-2)


def test_what_lies_beyond_the_lengths_is_never_read() -> None:
    S, T = 300, 700
    lens = torch.tensor([700, 0, 129, 390], device="cuda")
    q, k, v = inputs(4, 2, 2, S, T, 128, 128, BF16)
    attend = hopper(fg.Attention(mask=masks.causal))
    j, i = torch.arange(T, device="cuda"), torch.arange(S, device="cuda")[:, None]
    ends = lens.view(-1, 1, 1, 1)
    check_against_sdpa(attend, [q, k, v], (j < ends) & (j <= i + ends - S), kv_lens=lens)
    clean = attend(q, k, v, kv_lens=lens)
    for b, n in enumerate(lens.tolist()):
        k[b, :, n:], v[b, :, n:] = float("nan"), float("nan")
    assert torch.equal(attend(q, k, v, kv_lens=lens), clean)


def test_hidden_values_that_are_not_finite() -> None:
    S = 300
    q, k, v = inputs(1, 2, 2, S, S, 64, 64, BF16)
    attend = hopper(fg.Attention(mask=masks.causal))
    clean = attend(q, k, v)
    v[:, :, 150, 3], k[:, :, 200], v[:, :, 250] = float("nan"), float("nan"), float("inf")
    out = attend(q, k, v)
    torch.testing.assert_close(out[:, :, :150], clean[:, :, :150], rtol=2e-2, atol=1e-2)
    assert torch.isfinite(out[:, :, :200, 4:]).all()
    assert out[:, :, 150:, 3].isnan().all()


@fg.attention(mask=masks.sliding_window, softcap=20.0, sinks=True)
def biased(score, h, q_idx, kv_idx, slope: fg.Tensor, bias: fg.Tensor):  # type: ignore[no-untyped-def]
    return score + slope[h] * (kv_idx - q_idx) + bias[kv_idx]


def test_score_softcap_and_sinks_in_fp16() -> None:
    """Against float64; the error is held to twice that of the masked product alone, and to the
    rounding of outputs that are larger than its own: rows that see little but one key."""
    B, H, S, window = 2, 4, 601, 150
    q, k, v = inputs(B, H, H, S, S, 64, 64, torch.float16)
    slope, bias, sinks = (torch.randn(n, device="cuda") for n in (H, S, H))
    i = torch.arange(S, device="cuda")
    distance = i[:, None] - i
    allowed = (distance >= 0) & (distance < window)
    s = q.double() @ k.double().mT / 8 - slope.double().view(-1, 1, 1) * distance + bias.double()
    s = torch.where(allowed, 20 * torch.tanh(s / 20), -torch.inf)
    lse = torch.logsumexp(
        torch.cat([s, sinks.double().view(1, H, 1, 1).expand(B, H, S, 1)], -1), -1
    )
    exact = torch.exp(s - lse[..., None]) @ v.double()
    given = {"slope": slope, "bias": bias, "sinks": sinks, "window": window}
    out, got = biased(q, k, v, backend="hopper", return_lse=True, **given)
    plain, _ = oracle(q, k, v, allowed, 1 / 8)
    rounding = exact.abs().max().item() * 2**-11
    allowance = 2 * sdpa_error(q, k, v, allowed, plain, 1 / 8) + rounding
    assert (out.double() - exact).abs().max().item() <= allowance
    torch.testing.assert_close(got.double(), lse, rtol=1e-5, atol=1e-5)


def test_runs_are_bit_equal() -> None:
    tensors = inputs(2, 8, 2, 1500, 1500, 128, 128, BF16)
    attend = hopper(fg.Attention(mask=masks.causal))
    first = attend(*tensors)
    for _ in range(100):
        assert torch.equal(attend(*tensors), first)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("is_ordered", [True, False])
def test_short_rows_one_after_the_other(head_dim: int, is_ordered: bool) -> None:
    """A program's next queries come while the ones before are read: many short row blocks, and the
    outputs of other blocks on their way."""
    B, H, S = 4, 4096 // head_dim // 2, 8192
    q, k, v = (torch.randn(B, H, S, head_dim, device="cuda", dtype=BF16) for _ in range(3))
    doc = torch.arange(S, device="cuda") // 150
    if not is_ordered:
        doc = doc ^ 1
        doc[::2] = doc[::2].flip(0)
    attend = hopper(fg.Attention(mask=masks.causal_document))
    data = {"doc": doc.expand(B, S).contiguous()}
    first, lse = attend(q, k, v, return_lse=True, **data)
    for _ in range(10):
        out, again = attend(q, k, v, return_lse=True, **data)
        assert torch.equal(out, first)
        assert torch.equal(again, lse)
    right = fg.Attention(mask=masks.causal_document)(q, k, v, backend="portable", **data)
    torch.testing.assert_close(first, right, rtol=2e-2, atol=2e-2)


@pytest.fixture
def merged(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many programs shared a row block, in each call where some did."""
    splits: list[int] = []
    merge = launch_hopper.merging.merge

    def noted(parts: torch.Tensor, *rest: Any) -> None:
        splits.append(parts.shape[-2])
        merge(parts, *rest)

    monkeypatch.setattr(launch_hopper.merging, "merge", noted)
    return splits


@pytest.mark.parametrize(
    ("shape", "is_causal"),
    [
        ((1, 4, 2, 2000, 4100, 128, 128), False),
        ((1, 2, 1, 300, 9000, 128, 128), True),
        ((2, 5, 1, 300, 4100, 256, 256), False),
        ((1, 2, 2, 500, 8000, 64, 64), True),
        # More row blocks than processors.
        ((1, 34, 2, 512, 6000, 128, 128), False),
    ],
    ids=str,
)
def test_row_blocks_that_are_shared(
    shape: Any, is_causal: bool, merged: list[int], nan_filled_empty: None
) -> None:
    tensors = inputs(*shape, BF16)
    S, T = shape[3:5]
    allowed = causal(S, T) if is_causal else torch.ones(S, T, dtype=torch.bool, device="cuda")
    attend = hopper(fg.Attention(mask=masks.causal if is_causal else None))
    check_against_sdpa(attend, tensors, allowed)
    assert merged
    first, lse = attend(*tensors, return_lse=True)
    for _ in range(50):
        out, again = attend(*tensors, return_lse=True)
        assert torch.equal(out, first)
        assert torch.equal(again, lse)


def test_sinks_and_what_is_not_finite_in_shares(merged: list[int]) -> None:
    S, T = 256, 8000
    q, k, v = inputs(1, 2, 2, S, T, 64, 64, BF16)
    sinks = torch.randn(2, device="cuda")
    attend = hopper(fg.Attention(mask=masks.causal, sinks=True))
    portable = fg.Attention(mask=masks.causal, sinks=True)
    for last in (0.0, float("inf")):
        v[:, :, T - 100, 3] = last
        found, lse = attend(q, k, v, sinks=sinks, return_lse=True)
        right, exact = portable(q, k, v, sinks=sinks, backend="portable", return_lse=True)
        torch.testing.assert_close(found, right, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse, exact, rtol=1e-5, atol=1e-5)
    assert merged


def test_batch_invariance_shares_nothing(merged: list[int]) -> None:
    q, k, v = inputs(2, 4, 4, 1000, 5000, 128, 128, BF16)
    attend = fg.Attention(mask=masks.causal)
    both = attend(q, k, v, batch_invariant=True)
    one = attend(q[:1], k[:1], v[:1], batch_invariant=True)
    assert torch.equal(both[:1], one)
    assert not merged


def test_beside_another_stream() -> None:
    """Programs that wait for one another's copies don't wait for other kernels."""
    tensors = inputs(2, 8, 2, 1500, 1500, 128, 128, BF16)
    attend = hopper(fg.Attention(mask=masks.causal))
    alone = attend(*tensors)
    other = torch.cuda.Stream()
    a = torch.randn(4096, 4096, device="cuda", dtype=BF16)
    for _ in range(30):
        with torch.cuda.stream(other):
            a @ a
            beside = attend(*tensors)
        assert torch.equal(attend(*tensors), alone)
    torch.cuda.synchronize()
    assert torch.equal(beside, alone)


def test_explain_says_why_not() -> None:
    q, k, v = inputs(1, 2, 2, 100, 100, 64, 64, torch.float32)
    attend = fg.Attention(mask=masks.causal)
    assert "Hopper's kernels take 16-bit floats, not float32" in attend.explain(q, k, v)
    assert "hopper: generated Gluon kernels" in attend.explain(*(x.half() for x in (q, k, v)))
    with pytest.raises(FlashgenError, match="16-bit"):
        attend(q, k, v, backend="hopper")


def test_cases_are_found() -> None:
    assert len(FIRST[::6]) > 4
    assert len(CASES) > len(FIRST)
