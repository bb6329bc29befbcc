"""The cpu backend against a dense float64 oracle written by hand."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen import FlashgenError
from flashgen.cpu.blocks import split
from flashgen.geometry import Geometry
from flashgen.ops import attention, engine
from flashgen.schedule import Schedule
from flashgen.schedule.make import make_schedule
from flashgen.spec import Program, mask
from flashgen.spec.data import fit_data
from flashgen.spec.leaf import Leaf
from flashgen.trace import Tensor

CPU = torch.device("cpu")
INF = math.inf


@mask
def causal(q_idx, kv_idx):
    return kv_idx <= q_idx


@mask
def window(q_idx, kv_idx, width: int):
    return (kv_idx <= q_idx) & (q_idx - kv_idx < width)


@mask
def causal_document(b, q_idx, kv_idx, doc: Tensor):
    return (kv_idx <= q_idx) & (doc[b, q_idx] == doc[b, kv_idx])


@mask
def head_window(h, q_idx, kv_idx):
    return (kv_idx <= q_idx) & (q_idx - kv_idx <= 3 * h)


@mask
def key_head_parity(h_kv, q_idx, kv_idx):
    return (q_idx + kv_idx + h_kv) % 2 == 0


@mask
def checkers(q_idx, kv_idx):
    return (q_idx // 5 + kv_idx // 7) % 2 == 0


@mask
def every_other_query(q_idx, kv_idx):
    return (q_idx % 2 == 0) & (kv_idx % 3 != 1)


@mask
def nothing(q_idx, kv_idx):
    return kv_idx < 0 * q_idx


# Name: the mask, its formula on tensors i, j, h, and whether it needs documents.
MASKS: dict[str, tuple[Any, Callable[..., torch.Tensor]]] = {
    "full": (None, lambda i, j, h, hk: (i == i) & (j == j)),
    "causal": (causal, lambda i, j, h, hk: j <= i),
    "window": (window(width=9), lambda i, j, h, hk: (j <= i) & (j > i - 9)),
    "head_window": (head_window, lambda i, j, h, hk: (j <= i) & (i - j <= 3 * h)),
    "key_head_parity": (key_head_parity, lambda i, j, h, hk: (i + j + hk) % 2 == 0),
    "checkers": (checkers, lambda i, j, h, hk: (i // 5 + j // 7) % 2 == 0),
    "rows_without_keys": (every_other_query, lambda i, j, h, hk: (i % 2 == 0) & (j % 3 != 1)),
    "nothing": (nothing, lambda i, j, h, hk: (j < 0) & (i < 0)),
}


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: Any = None,
    *,
    score: Any = None,
    data: dict[str, Any] | None = None,
    block_size: tuple[int, int] = (16, 16),
    planner: Any = "auto",
    q_offset: Any = None,
    kv_lens: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = None if score is None else Leaf.of(score, "score")
    program = Program(pattern, leaf, softcap, sinks is not None)
    geometry = Geometry(
        q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], CPU, q_offset, kv_lens
    )
    bound = fit_data(program.bind(data or {}, "test"), geometry.extents, CPU, "test")
    made = engine(
        "cpu",
        bound,
        geometry=geometry,
        schedule=make_schedule(bound, geometry, block_size, planner, "test"),
        scale=q.shape[3] ** -0.5 if scale is None else scale,
        softcap=softcap,
    )
    return attention(made, q, k, v, sinks, [bound.tensors[t.name] for t in bound.spec.tensors])


def oracle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    allowed: torch.Tensor,
    *,
    score: Callable[[torch.Tensor], torch.Tensor] | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense, in float64. `allowed` broadcasts to [B, Hq, Sq, Skv]."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = torch.einsum("bhid,bhjd->bhij", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    if score is not None:
        s = score(s)
    if softcap is not None:
        s = torch.where(s == -INF, s, softcap * torch.tanh(s / softcap))
    s = s.masked_fill(~allowed, -INF)
    most = s.detach().amax(-1)
    if sinks is not None:
        most = torch.maximum(most, sinks.detach().double().reshape(1, -1, 1))
    most = torch.where(most == -INF, 0.0, most)
    weights = torch.exp(s - most[..., None])
    total = weights.sum(-1)
    if sinks is not None:
        total = total + torch.exp(sinks.double().reshape(1, -1, 1) - most)
    some = total > 0
    out = torch.einsum("bhij,bhjd->bhid", weights, v) / torch.where(some, total, 1.0)[..., None]
    lse = torch.where(some, torch.log(torch.where(some, total, 1.0)) + most, -INF)
    return out, lse


def positions(heads: int, kv_heads: int, q_len: int, kv_len: int, offset: int | None = None) -> Any:
    """i, j, h and h_kv, to broadcast to [1, H, Sq, Skv]."""
    i = torch.arange(q_len)[:, None] + (kv_len - q_len if offset is None else offset)
    h = torch.arange(heads)[:, None, None]
    return i, torch.arange(kv_len), h, h // (heads // kv_heads)


def inputs(
    batch: int = 2,
    heads: int = 2,
    kv_heads: int = 2,
    q_len: int = 50,
    kv_len: int = 50,
    dim: int = 8,
    v_dim: int = 8,
    dtype: torch.dtype = torch.float64,
) -> list[torch.Tensor]:
    shapes = (heads, q_len, dim), (kv_heads, kv_len, dim), (kv_heads, kv_len, v_dim)
    return [torch.randn(batch, *shape, dtype=dtype, requires_grad=True) for shape in shapes]


def gradients(outputs: Any, leaves: Any) -> tuple[torch.Tensor, ...]:
    """Of a loss that weighs every output, and the LSE where it is finite."""
    out, lse = outputs
    generator = torch.Generator().manual_seed(1)
    loss = (out.double() * torch.randn(out.shape, generator=generator)).sum()
    weights = torch.randn(lse.shape, generator=generator)
    loss = loss + (torch.where(lse == -INF, 0, lse).double() * weights).sum()
    return torch.autograd.grad(loss, leaves)


def assert_same(ours: Any, theirs: Any, leaves: Any, tolerance: float = 1e-10) -> None:
    for mine, right in zip(
        (*ours, *gradients(ours, leaves)), (*theirs, *gradients(theirs, leaves)), strict=True
    ):
        torch.testing.assert_close(
            mine.double(), right.double(), rtol=tolerance, atol=tolerance, check_stride=False
        )


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(
    ("q_len", "kv_len", "block_size"),
    [
        (50, 50, (16, 16)),
        (33, 70, (16, 32)),
        (70, 33, (32, 16)),
        (1, 65, (16, 16)),
        (65, 1, (8, 8)),
    ],
)
def test_equals_the_oracle(name: str, q_len: int, kv_len: int, block_size: Any) -> None:
    pattern, formula = MASKS[name]
    heads, kv_heads = 6, 2
    leaves = inputs(2, heads, kv_heads, q_len, kv_len, dim=5, v_dim=3)
    allowed = formula(*positions(heads, kv_heads, q_len, kv_len))
    assert_same(run(*leaves, pattern, block_size=block_size), oracle(*leaves, allowed), leaves)


@pytest.mark.parametrize("planner", ["auto", "bounds", "exact"])
def test_documents_differ_by_sequence(planner: str) -> None:
    leaves = inputs(3, 4, 2, 90, 90)
    doc = torch.randint(0, 2, (3, 90)).cumsum(1) // 12
    doc[1] = torch.randint(0, 3, (90,))
    i, j, *_ = positions(4, 2, 90, 90)
    allowed = ((doc[:, :, None] == doc[:, None]) & (j <= i))[:, None]
    ours = run(*leaves, causal_document, data={"doc": doc}, planner=planner)
    assert_same(ours, oracle(*leaves, allowed), leaves)


@pytest.mark.parametrize("group", [1, 3, 5, 7])
@pytest.mark.parametrize(("dim", "v_dim"), [(1, 1), (72, 40), (16, 128)])
def test_groups_and_head_dimensions(group: int, dim: int, v_dim: int) -> None:
    leaves = inputs(1, 2 * group, 2, 20, 24, dim, v_dim)
    allowed = MASKS["causal"][1](*positions(2 * group, 2, 20, 24))
    assert_same(run(*leaves, causal), oracle(*leaves, allowed), leaves)


def test_many_blocks_of_one_row_of_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that doesn't fit is cut by sequences, heads and rows."""
    leaves = inputs(3, 4, 2, 60, 60)
    allowed = MASKS["causal"][1](*positions(4, 2, 60, 60))
    for elements in (1 << 10, 300, 7):
        monkeypatch.setattr("flashgen.cpu.blocks._ELEMENTS", elements)
        assert_same(run(*leaves, causal), oracle(*leaves, allowed), leaves)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_error_beside_sdpa(dtype: torch.dtype) -> None:
    leaves = inputs(1, 4, 4, 257, 257, 64, 64, dtype)
    i, j, *_ = positions(4, 4, 257, 257)
    theirs = F.scaled_dot_product_attention(*leaves, attn_mask=j <= i)
    ours, lse = run(*leaves, causal)
    exact, exact_lse = oracle(*leaves, j <= i)
    assert ours.dtype == dtype
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
    seed = torch.randn(ours.shape)
    results = [
        (out, *torch.autograd.grad(out, leaves, seed.to(out.dtype)))
        for out in (ours, theirs, exact)
    ]
    for mine, other, right in zip(*results, strict=True):
        worst = (other.double() - right.double()).abs().max()
        assert (mine.double() - right.double()).abs().max() <= 2 * worst


def test_float32_is_float32() -> None:
    leaves = inputs(1, 2, 2, 300, 300, 64, 64, torch.float32)
    i, j, *_ = positions(2, 2, 300, 300)
    out, lse = run(*leaves, causal)
    exact = oracle(*leaves, j <= i)
    assert (out - exact[0]).abs().max() < 1e-5
    assert (lse - exact[1]).abs().max() < 1e-5


def test_autocast_changes_nothing() -> None:
    leaves = inputs(1, 2, 2, 40, 40, dtype=torch.float32)
    plain = run(*leaves, causal)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = run(*leaves, causal)
        assert cast[0].dtype == torch.float32
        for mine, right in zip(gradients(cast, leaves), gradients(plain, leaves), strict=True):
            torch.testing.assert_close(mine, right, rtol=0, atol=0)
    torch.testing.assert_close(cast, plain, rtol=0, atol=0)


def test_any_strides() -> None:
    packed = torch.randn(2, 40, 3, 4, 8, dtype=torch.float64, requires_grad=True)
    shared = torch.randn(1, 1, 40, 8, dtype=torch.float64, requires_grad=True)
    q = packed[:, :, 0].transpose(1, 2)
    k = packed[:, :, 1].transpose(1, 2)[..., ::2].mT.contiguous().mT.repeat(1, 1, 1, 2)
    v = shared.expand(2, 4, 40, 8)
    i, j, *_ = positions(4, 4, 40, 40)
    ours, theirs = run(q, k, v, causal), oracle(q, k, v, j <= i)
    assert_same(ours, theirs, (packed, shared))


@pytest.mark.parametrize(
    ("batch", "heads", "q_len", "kv_len"),
    [(0, 2, 5, 5), (2, 0, 5, 5), (2, 2, 0, 5), (2, 2, 5, 0), (2, 2, 0, 0)],
)
@pytest.mark.parametrize("pattern", [None, causal, head_window])
def test_lengths_of_zero(pattern: Any, batch: int, heads: int, q_len: int, kv_len: int) -> None:
    leaves = inputs(batch, heads, heads, q_len, kv_len)
    out, lse = run(*leaves, pattern)
    assert out.shape == (batch, heads, q_len, 8)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full((batch, heads, q_len), -INF, dtype=torch.float64))
    for leaf, grad in zip(leaves, gradients((out, lse), leaves), strict=True):
        assert torch.equal(grad, torch.zeros_like(leaf))


@pytest.mark.usefixtures("nan_filled_empty")
def test_rows_without_keys_and_keys_without_queries() -> None:
    leaves = inputs()
    out, lse = run(*leaves, every_other_query)
    grads = torch.autograd.grad((out * out).sum() + lse[:, :, ::2].sum(), leaves)
    assert torch.equal(out[:, :, 1::2], torch.zeros_like(out[:, :, 1::2]))
    assert (lse[:, :, 1::2] == -INF).all()
    assert torch.equal(grads[0][:, :, 1::2], torch.zeros_like(out[:, :, 1::2]))
    for grad in grads[1:]:
        assert torch.equal(grad[:, :, 1::3], torch.zeros_like(grad[:, :, 1::3]))
        assert (grad[:, :, 0::3] != 0).all()


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("name", MASKS)
def test_everything_is_written(name: str) -> None:
    leaves = inputs(2, 2, 2, 40, 60)
    outputs = run(*leaves, MASKS[name][0])
    for result in (*outputs, *gradients(outputs, leaves)):
        assert not result.isnan().any()


@pytest.mark.parametrize("offset", [0, 7, -20, 100])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_offsets(offset: int, as_tensor: bool) -> None:
    leaves = inputs(2, 2, 2, 30, 64)
    i, j, *_ = positions(2, 2, 30, 64, offset)
    given_ = torch.tensor([offset], dtype=torch.int32) if as_tensor else offset
    ours = run(*leaves, window(width=9), q_offset=given_)
    assert_same(ours, oracle(*leaves, (j <= i) & (j > i - 9)), leaves)


@pytest.mark.parametrize("pattern", [causal, None])
def test_offsets_and_lengths_of_each_sequence(pattern: Any) -> None:
    leaves = inputs(4, 2, 2, 20, 64)
    offsets = torch.tensor([0, 44, -5, 10])
    lens = torch.tensor([64, 1, 0, 37], dtype=torch.int32)
    i, j, *_ = positions(2, 2, 20, 64, 0)
    seen = j < lens[:, None, None]
    for q_offset, start in ((offsets, offsets), (None, lens - 20)):
        allowed = (
            (j <= i + start[:, None, None]) & seen if pattern is causal else seen.expand(4, 20, 64)
        )
        ours = run(*leaves, pattern, q_offset=q_offset, kv_lens=lens)
        assert_same(ours, oracle(*leaves, allowed[:, None]), leaves)


def test_a_schedule_shared_by_sequences_of_different_lengths() -> None:
    leaves = inputs(3, 2, 2, 20, 40)
    lens = torch.tensor([40, 3, 17])
    geometry = Geometry(3, 2, 2, 20, 40, CPU, 0, lens)
    states = torch.full((1, 1, 2, 3), 2, dtype=torch.int8)
    bound = Program().bind({}, "test")
    schedule = Schedule(states, (16, 16), 20, 40, 0, lens, "full", "", "auto")
    made = engine("cpu", bound, geometry=geometry, schedule=schedule, scale=8**-0.5)
    ours = attention(made, *leaves, None, [])
    allowed = (torch.arange(40) < lens[:, None]).reshape(3, 1, 1, 40)
    assert_same(ours, oracle(*leaves, allowed), leaves)


def test_lengths_as_symbols() -> None:
    @mask
    def second_half(q_idx, kv_idx, q_len, kv_len):
        return (kv_idx >= kv_len // 2) & (q_idx >= kv_len - q_len)

    leaves = inputs(2, 2, 2, 20, 40)
    lens = torch.tensor([40, 21])
    j = torch.arange(40)
    allowed = ((j >= lens[:, None] // 2) & (j < lens[:, None]))[:, None, None].expand(2, 1, 20, 40)
    assert_same(run(*leaves, second_half, kv_lens=lens), oracle(*leaves, allowed), leaves)


def alibi(score, h, q_idx, kv_idx, slope: Tensor):
    return score + slope[h] * (kv_idx - q_idx)


def test_score_function_and_the_gradient_of_its_data() -> None:
    leaves = inputs(2, 4, 2)
    slope = torch.rand(4, dtype=torch.float64, requires_grad=True)
    i, j, h, _ = positions(4, 2, 50, 50)
    ours = run(*leaves, causal, score=alibi, data={"slope": slope})
    theirs = oracle(*leaves, j <= i, score=lambda s: s + slope[h] * (j - i))
    assert_same(ours, theirs, (*leaves, slope))


def test_a_bias_for_each_distance_is_clamped_at_the_ends() -> None:
    def relative(score, b, h, q_idx, kv_idx, bias: Tensor, gate: Tensor):
        return score * gate + bias[b, h, q_idx - kv_idx + 5]

    leaves = inputs(2, 2, 2)
    bias = torch.randn(2, 2, 11, dtype=torch.float64, requires_grad=True)
    gate = torch.randn((), dtype=torch.float64, requires_grad=True)
    i, j, h, _ = positions(2, 2, 50, 50)
    b = torch.arange(2)[:, None, None, None]
    distance = (i - j + 5).clamp(0, 10)
    ours = run(*leaves, causal, score=relative, data={"bias": bias, "gate": gate})
    theirs = oracle(*leaves, j <= i, score=lambda s: s * gate + bias[b, h, distance])
    assert_same(ours, theirs, (*leaves, bias, gate))


def test_data_in_half_precision_sums_in_float32() -> None:
    leaves = inputs(1, 2, 2, 200, 200, dtype=torch.float32)
    slope = torch.tensor([0.1, 0.2], dtype=torch.bfloat16, requires_grad=True)
    i, j, h, _ = positions(2, 2, 200, 200)
    ours = run(*leaves, causal, score=alibi, data={"slope": slope}, block_size=(16, 16))
    theirs = oracle(*leaves, j <= i, score=lambda s: s + slope.double()[h] * (j - i))
    (mine,), (right,) = gradients(ours, (slope,)), gradients(theirs, (slope,))
    assert mine.dtype == torch.bfloat16
    torch.testing.assert_close(mine, right, rtol=1e-2, atol=1e-2)


def test_a_score_function_that_ignores_the_score() -> None:
    def only_bias(score, kv_idx, bias: Tensor):
        return bias[kv_idx]

    def nearest(score, q_idx, kv_idx):
        return (kv_idx - q_idx) / 8

    leaves = inputs()
    bias = torch.randn(50, dtype=torch.float64, requires_grad=True)
    i, j, *_ = positions(2, 2, 50, 50)
    ours = run(*leaves, causal, score=only_bias, data={"bias": bias})
    theirs = oracle(*leaves, j <= i, score=lambda s: 0 * s + bias)
    assert_same(ours, theirs, (*leaves, bias))
    ours = run(*leaves, causal, score=nearest)
    assert_same(ours, oracle(*leaves, j <= i, score=lambda s: 0 * s + (j - i) / 8), leaves)


def test_data_of_the_user_is_not_written_to() -> None:
    def constant(score, bias: Tensor):
        return bias

    leaves = inputs(1, 1, 1, 1, 1)
    bias = torch.tensor(3.0, dtype=torch.float64)
    run(*leaves, causal, score=constant, data={"bias": bias})
    assert bias == 3


@pytest.mark.parametrize("name", ["causal", "rows_without_keys"])
def test_softcap_and_sinks(name: str) -> None:
    pattern, formula = MASKS[name]
    leaves = inputs(2, 4, 2, 30, 30)
    sinks = torch.tensor([0.5, -INF, 30.0, -30.0], dtype=torch.float64, requires_grad=True)
    allowed = formula(*positions(4, 2, 30, 30))
    ours = run(*leaves, pattern, softcap=1.5, sinks=sinks, scale=3.0)
    theirs = oracle(*leaves, allowed, softcap=1.5, sinks=sinks, scale=3.0)
    assert_same(ours, theirs, (*leaves, sinks))


def test_the_lse_of_a_row_without_keys_is_the_sink() -> None:
    leaves = inputs()
    sinks = torch.tensor([0.25, -7.0], dtype=torch.float64, requires_grad=True)
    out, lse = run(*leaves, every_other_query, sinks=sinks)
    assert torch.equal(lse[:, :, 1::2], sinks[:, None].expand(2, 2, 25))
    assert torch.equal(out[:, :, 1::2], torch.zeros(2, 2, 25, 8, dtype=torch.float64))
    (grad,) = torch.autograd.grad(lse[:, :, 1::2].sum(), sinks)
    assert torch.equal(grad, torch.full((2,), 50.0, dtype=torch.float64))


def test_minus_infinity_stays_through_the_softcap() -> None:
    def every_third(score, kv_idx, bias: Tensor):
        return score + bias[kv_idx]

    leaves = inputs()
    bias = torch.zeros(50, dtype=torch.float64)
    bias[::3] = -INF
    ours = run(*leaves, causal, score=every_third, data={"bias": bias}, softcap=2.0)
    i, j, *_ = positions(2, 2, 50, 50)
    allowed = (j <= i) & (j % 3 != 0)
    assert_same(ours, oracle(*leaves, allowed, softcap=2.0), leaves)
    assert (ours[1][:, :, 0] == -INF).all()


def test_gradcheck() -> None:
    leaves = inputs(1, 2, 1, 9, 11, 3, 2)
    slope = torch.rand(2, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def function(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slope: torch.Tensor, sinks: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        data = {"slope": slope, "width": 4}
        return run(
            q, k, v, window, score=alibi, data=data, softcap=2.0, sinks=sinks, block_size=(8, 8)
        )

    assert torch.autograd.gradcheck(function, (*leaves, slope, sinks))


def test_only_some_inputs_ask_for_gradients() -> None:
    q, k, v = inputs(dtype=torch.float32)
    slope = torch.rand(2)
    out, _ = run(q.detach(), k, v.detach(), causal, score=alibi, data={"slope": slope})
    (grad,) = torch.autograd.grad(out.sum(), k)
    assert grad.isfinite().all()
    out, lse = run(q.detach(), k.detach(), v.detach(), causal)
    assert not out.requires_grad
    assert not lse.requires_grad


def test_a_second_derivative_is_one_clear_error() -> None:
    q, k, v = inputs()
    out, _ = run(q, k, v, causal)
    (grad,) = torch.autograd.grad((out * out).sum(), q, create_graph=True)
    with pytest.raises(FlashgenError, match="differentiated again"):
        grad.sum().backward()


def test_a_change_between_forward_and_backward_is_noticed() -> None:
    leaves = inputs()
    doc = torch.zeros(2, 50, dtype=torch.int64)
    out, _ = run(*leaves, causal_document, data={"doc": doc})
    doc += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("garbage", [math.nan, INF, -INF])
@pytest.mark.parametrize("block_size", [(16, 16), (64, 64)])
def test_garbage_behind_a_mask(garbage: float, block_size: tuple[int, int]) -> None:
    """Whatever a key, a value or a query holds, it reaches only the pairs that see it."""
    dirty = 20
    for which in range(3):
        clean = inputs()
        spoiled = [x.detach().clone() for x in clean]
        spoiled[which][:, :, dirty] = garbage
        spoiled = [x.requires_grad_() for x in spoiled]
        rows, keys = torch.arange(50), torch.arange(50)
        if which == 0:
            untouched, unseen = rows != dirty, keys > dirty
        else:
            untouched, unseen = rows < dirty, keys < 0
        results = []
        for leaves in (clean, spoiled):
            out, lse = run(*leaves, causal, block_size=block_size)
            grads = torch.autograd.grad(
                out[:, :, untouched].sum() + lse[:, :, untouched].sum(), leaves
            )
            whole = torch.autograd.grad(run(*leaves, causal)[0].sum(), leaves)
            results.append(
                [x[:, :, untouched] for x in (out, lse, grads[0])]
                + [x[:, :, keys[unseen]] for x in whole[1:]]
            )
        for mine, right in zip(*results[::-1], strict=True):
            assert torch.equal(mine, right)


def test_an_infinity_that_is_seen_beside_a_nan_that_is_not() -> None:
    """In one channel of one block, so that one product holds both."""
    q, k, v = (x.detach() for x in inputs())
    v[:, :, 5, 0], v[:, :, 9, 0], v[:, :, 30, 0] = INF, -INF, math.nan
    out, _ = run(q, k, v, causal)
    assert out[..., :5, 0].isfinite().all()
    assert (out[..., 5:9, 0] == INF).all()
    assert out[..., 9:, 0].isnan().all()
    assert out[..., 1:].isfinite().all()


@pytest.mark.parametrize("garbage", [math.nan, INF])
def test_garbage_beyond_a_length(garbage: float) -> None:
    clean = inputs(2, 2, 1, 20, 64)
    lens = torch.tensor([37, 0])
    spoiled = [x.detach().clone() for x in clean]
    for x in spoiled[1:]:
        x[0, :, 37:] = garbage
        x[1] = garbage
    spoiled = [x.requires_grad_() for x in spoiled]
    results = []
    for leaves in (clean, spoiled):
        outputs = run(*leaves, causal, kv_lens=lens)
        results.append((*outputs, *gradients(outputs, leaves)))
    for right, mine in zip(*results, strict=True):
        assert torch.equal(mine, right)


@pytest.mark.parametrize("garbage", [math.nan, INF])
def test_garbage_in_the_gradient_of_a_row_without_keys(garbage: float) -> None:
    sinks = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    leaves = inputs()
    results = []
    for value in (0.0, garbage):
        out, lse = run(*leaves, every_other_query, sinks=sinks)
        grad_out, grad_lse = torch.ones_like(out), torch.ones_like(lse)
        grad_out[:, :, 1::2] = value
        results.append(torch.autograd.grad((out, lse), (*leaves, sinks), (grad_out, grad_lse)))
    for right, mine in zip(*results, strict=True):
        assert torch.equal(mine, right)


def test_garbage_from_the_derivative_of_a_score_function() -> None:
    """Behind the mask the score function may have no value, and no derivative."""

    def logarithm(score, q_idx, kv_idx, table: Tensor):
        return score * (q_idx - kv_idx + 1) ** 0.5 + table[q_idx - kv_idx].log()

    leaves = inputs()
    table = torch.rand(50, dtype=torch.float64)
    table[7] = 0  # log 0 = -inf: such a pair takes no part
    table.requires_grad_()
    ours = run(*leaves, causal, score=logarithm, data={"table": table})
    i, j, *_ = positions(2, 2, 50, 50)
    distance = (i - j).clamp(0)
    kept = (j <= i) & (distance != 7)
    safe = torch.where(kept, table[distance], 1.0)
    theirs = oracle(*leaves, kept, score=lambda s: s * (distance + 1).double() ** 0.5 + safe.log())
    assert_same(ours, theirs, (*leaves, table))


def test_mean_of_the_allowed_keys() -> None:
    q = torch.zeros(1, 1, 128, 4, dtype=torch.float64)
    k = torch.randn(1, 1, 128, 4, dtype=torch.float64)
    v = torch.arange(128, dtype=torch.float64)[:, None].expand(1, 1, 128, 4)
    i = torch.arange(128, dtype=torch.float64)
    out, lse = run(q, k, v, causal)
    torch.testing.assert_close(out[0, 0, :, 0], i / 2)
    torch.testing.assert_close(lse[0, 0], torch.log(i + 1))
    out, lse = run(q, k, v, window(width=11))
    torch.testing.assert_close(out[0, 0, :, 0], ((i - 10).clamp(0) + i) / 2)
    torch.testing.assert_close(lse[0, 0], torch.log((i + 1).clamp(max=11)))


@settings(max_examples=60)
@given(st.data())
def test_blocks_cover_the_schedule(data: st.DataObject) -> None:
    """Each visited pair is in one block, and full columns are full for every row."""
    rows, columns = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 7))
    batch, heads = data.draw(st.sampled_from([1, 2])), data.draw(st.sampled_from([1, 4]))
    states = torch.randint(0, 3, (batch, heads, rows, columns), dtype=torch.int8)
    q_len, kv_len = (
        rows * 8 - data.draw(st.integers(0, 7)),
        columns * 4 - data.draw(st.integers(0, 3)),
    )
    schedule = Schedule(states, (8, 4), q_len, kv_len, None, None, "random", "", "auto")
    geometry = Geometry(2, 4, 2, q_len, kv_len, CPU)
    dense = states.repeat_interleave(8, 2).repeat_interleave(4, 3)[:, :, :q_len, :kv_len]
    dense = dense.expand(2, 4, -1, -1)
    seen = torch.zeros(2, 4, q_len, kv_len, dtype=torch.int64)
    for block in split(schedule, geometry):
        wanted = range(block.heads.start // 2, (block.heads.stop - 1) // 2 + 1)
        assert range(block.kv_heads.start, block.kv_heads.stop) == wanted
        place = torch.cat([torch.arange(c.start, c.stop) for c in block.columns])
        tile = dense[block.queries][..., place]
        assert (tile[..., : block.full] == 2).all()
        part = seen[block.queries]
        part[..., place] += 1
    assert seen.max() <= 1
    assert (seen[dense != 0] == 1).all()


def test_full_tiles_pay_for_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashgen.cpu import scores

    masked = 0

    def count(expr: Any, env: Any) -> torch.Tensor:
        nonlocal masked
        values = scores_evaluate(expr, env)
        masked += values.numel()
        return values

    scores_evaluate = scores.evaluate
    monkeypatch.setattr(scores, "evaluate", count)
    monkeypatch.setattr("flashgen.cpu.blocks._OVERHEAD", 0)
    run(*inputs(2, 2, 2, 128, 128, dtype=torch.float32), causal)
    assert masked == 8 * 16 * 16


MEMORY = """
import resource, torch
from flashgen.geometry import Geometry
from flashgen.ops import attention, engine
from flashgen.schedule.make import make_schedule
from flashgen.spec import Program, mask

@mask
def causal(q_idx, kv_idx):
    return kv_idx <= q_idx

def peak(length):
    bound = Program(causal).bind({}, "test")
    geometry = Geometry(1, 1, 1, length, length, torch.device("cpu"))
    schedule = make_schedule(bound, geometry, (128, 128), "auto", "test")
    q, k, v = (torch.randn(1, 1, length, 16, requires_grad=True) for _ in range(3))
    made = engine("cpu", bound, geometry=geometry, schedule=schedule, scale=0.25)
    out, lse = attention(made, q, k, v, None, [])
    (out.sum() + lse.sum()).backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

before = peak(256)
print(peak(10240) - before)
"""


def test_memory_is_linear() -> None:
    """10240 squared floats are 400 MiB; what is held is a few MB and the blocks at hand."""
    result = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True
    )
    assert int(result.stdout) < 128
