"""Gradients of the generated kernels, interpreted, against a dense float64 oracle by autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import CASES, Case
from dense_gradients import CAUSAL, INF, Problem, causal, check

import flashgen as fg
from flashgen import FlashgenError, masks

# Every fourth mask by default: the families' variants lie side by side.
EVERY_MASK = [
    pytest.param(case, id=case.id, marks=[pytest.mark.slow] if turn % 6 else [])
    for turn, case in enumerate(CASES)
]


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("case", EVERY_MASK)
def test_every_mask(case: Case) -> None:
    generator = torch.Generator().manual_seed(1)
    heads = 2 if "h" in case.varies else 1
    data = case.build(1, heads, 70, 70, generator)
    mask = case.expected(1, heads, 70, 70, data)
    check(fg.Attention(mask=case.bound(data)), Problem(heads=heads, kv_heads=heads), mask)


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize(
    ("q_len", "kv_len"), [(1, 1), (1, 130), (130, 1), (5, 2), (64, 64), (129, 67), (67, 129)]
)
@pytest.mark.parametrize("masked", [True, False])
def test_lengths(q_len: int, kv_len: int, masked: bool) -> None:
    problem = Problem(q_len=q_len, kv_len=kv_len)
    if masked:
        check(CAUSAL, problem, causal(q_len, kv_len))
    else:
        check(fg.Attention(), problem)


@pytest.mark.parametrize("shape", [(0, 7), (7, 0), (0, 0)])
def test_lengths_of_zero(shape: tuple[int, int]) -> None:
    for grad in check(CAUSAL, Problem(q_len=shape[0], kv_len=shape[1])):
        assert (grad == 0).all()


@pytest.mark.parametrize(("batch", "heads"), [(0, 2), (1, 0)])
def test_no_heads(batch: int, heads: int) -> None:
    check(CAUSAL, Problem(batch=batch, heads=heads, kv_heads=heads), causal(70, 70))


@pytest.mark.parametrize("kv_heads", [1, pytest.param(2, marks=pytest.mark.slow), 6])
def test_grouped_heads(kv_heads: int) -> None:
    check(CAUSAL, Problem(batch=2, heads=6, kv_heads=kv_heads, q_len=40, kv_len=66), causal(40, 66))


def test_a_mask_for_each_head_of_a_group() -> None:
    @fg.mask
    def reach(h, q_idx, kv_idx):
        return (kv_idx <= q_idx) & (q_idx - kv_idx <= 20 * h)

    distance = torch.arange(140).reshape(-1, 1) - torch.arange(140)
    h = torch.arange(4).reshape(-1, 1, 1)
    mask = (distance >= 0) & (distance <= 20 * h)
    check(fg.Attention(mask=reach), Problem(heads=4, kv_heads=2, q_len=140, kv_len=140), mask)


@pytest.mark.parametrize(("dim", "v_dim"), [(40, 72), (192, 128), (8, 100), (80, 16)])
def test_head_dimensions(dim: int, v_dim: int) -> None:
    check(CAUSAL, Problem(q_len=33, kv_len=33, dim=dim, v_dim=v_dim), causal(33, 33))


@pytest.mark.parametrize(
    "block_size", [pytest.param(16, marks=pytest.mark.slow), (64, 32), 128, (48, 80)]
)
def test_block_sizes(block_size: Any) -> None:
    problem = Problem(heads=1, kv_heads=1, q_len=150, kv_len=170)
    schedule = CAUSAL.schedule(*problem.inputs, block_size=block_size)
    check(CAUSAL, problem, causal(150, 170), schedule=schedule)


@pytest.mark.parametrize("offset", [0, -3, 40, torch.tensor([3, -80])])
def test_offsets(offset: Any) -> None:
    problem = Problem(batch=2, q_len=70, kv_len=90)
    starts = [offset] * 2 if isinstance(offset, int) else offset.tolist()
    mask = torch.stack([causal(70, 90, start) for start in starts]).unsqueeze(1)
    check(CAUSAL, problem, mask, q_offset=offset)


@pytest.mark.usefixtures("nan_filled_empty")
def test_padded_keys_get_zeros() -> None:
    lens = torch.tensor([0, 33, 64, 90])
    problem = Problem(batch=4, q_len=40, kv_len=90)
    mask = torch.stack([causal(40, 90, n - 40) & (torch.arange(90) < n) for n in lens.tolist()])
    _, k, v = check(CAUSAL, problem, mask.unsqueeze(1), kv_lens=lens)
    for b, n in enumerate(lens.tolist()):
        assert (k[b, :, n:] == 0).all()
        assert (v[b, :, n:] == 0).all()


@pytest.mark.parametrize("scale", [0.0, -0.3, 2.0])
def test_scales(scale: float) -> None:
    check(CAUSAL, Problem(), causal(70, 70), scale=scale, tolerance=2e-4)


@pytest.mark.parametrize("of_out", [True, False])
def test_the_lse_has_a_gradient(of_out: bool) -> None:
    check(CAUSAL, Problem(q_len=80, kv_len=70), causal(80, 70), of_out=of_out, of_lse=True)


@pytest.mark.parametrize("of_lse", [True, False])
@pytest.mark.parametrize("size", [0.0, 30.0, -30.0, -INF])
def test_sinks(size: float, of_lse: bool) -> None:
    """Rows without keys too, where the sink has all of the weight."""
    attention = fg.Attention(mask=masks.causal, sinks=True)
    sinks = torch.tensor([size, 0.5])
    problem = Problem(q_len=80, kv_len=70)
    check(attention, problem, causal(80, 70), sinks=sinks, of_lse=of_lse)


@pytest.mark.parametrize("cap", [1.0, 50.0])
def test_softcap(cap: float) -> None:
    """Scores far beyond a small cap have no slope left."""
    check(fg.Attention(mask=masks.causal, softcap=cap), Problem(), causal(70, 70),
          softcap=cap, scale=3.0, tolerance=5e-4)  # fmt: skip


def test_only_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that nobody wants launches no kernel, and the others don't change."""
    from flashgen.launch.backward_run import Run

    problem = Problem(q_len=20, kv_len=20)
    expected = check(CAUSAL, problem, causal(20, 20))
    ran: list[str] = []
    for name in ("by_query", "by_key"):
        method = getattr(Run, name)

        def spy(self: Any, grads: Any, name: str = name, method: Any = method) -> None:
            ran.append(name)
            method(self, grads)

        monkeypatch.setattr(Run, name, spy)
    kernels = {"q": ["by_query"], "k": ["by_key"], "v": ["by_key"]}
    for subset in ("q", "k", "v", "qk", "qv", "kv"):
        ran.clear()
        inputs = [
            x.detach().requires_grad_(name in subset)
            for name, x in zip("qkv", problem.inputs, strict=True)
        ]
        (CAUSAL(*inputs, backend="interpret") * problem.grad_out).sum().backward()
        assert ran == sorted({k for name in subset for k in kernels[name]}, reverse=True)
        for name, x, grad in zip("qkv", inputs, expected, strict=True):
            if name in subset:
                torch.testing.assert_close(x.grad, grad)
            else:
                assert x.grad is None


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_hidden_values_reach_no_gradient() -> None:
    """NaN and inf in keys, values, queries and gradients, of pairs that don't attend."""
    sizes = {"heads": 1, "kv_heads": 1, "q_len": 40, "kv_len": 40}
    problem, clean = Problem(**sizes), Problem(**sizes)
    mask = causal(40, 40).clone()
    mask[:, 6:12] = False
    mask[20:28] = False
    for k_like in clean.inputs[1:]:
        k_like[:, :, 6:12] = 0
    for q_like in (clean.inputs[0], clean.grad_out):
        q_like[:, :, 20:28] = 0
    hidden = fg.Attention(mask=masks.from_dense(mask))
    # Tiles that are cut, empty and at the end: what is hidden meets all of them.
    schedule = hidden.schedule(*clean.inputs, block_size=16)
    expected = check(hidden, clean, mask, schedule=schedule)
    problem.inputs[1][:, :, 6:12] = torch.nan
    problem.inputs[2][:, :, 6:9], problem.inputs[2][:, :, 9:12] = INF, torch.nan
    problem.inputs[0][:, :, 20:28] = torch.nan
    problem.grad_out[:, :, 20:24], problem.grad_out[:, :, 24:28] = -INF, torch.nan
    mine = problem.leaves()
    out = hidden(*mine, backend="interpret", schedule=schedule)
    grads = torch.autograd.grad(out, mine, problem.grad_out)
    for actual, wanted in zip(grads, expected, strict=True):
        torch.testing.assert_close(actual, wanted)


def test_later_values_reach_no_earlier_gradient() -> None:
    """Under a causal mask, a NaN that later queries see stays with them."""
    problem = Problem(heads=1, kv_heads=1, q_len=40, kv_len=40)
    schedule = CAUSAL.schedule(*problem.inputs, block_size=16)
    plain = check(CAUSAL, problem, causal(40, 40), schedule=schedule)
    problem.inputs[2][:, :, 30] = torch.nan
    mine = problem.leaves()
    grad_out = problem.grad_out.clone()
    grad_out[:, :, 30:] = 0
    out = CAUSAL(*mine, backend="interpret", schedule=schedule)
    (q,) = torch.autograd.grad(out, mine[:1], grad_out)
    torch.testing.assert_close(q[:, :, :30], plain[0][:, :, :30])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_an_infinity_that_is_seen_beside_a_nan_that_is_not() -> None:
    """Each key's gradient is the sum over the queries that see it: inf, -inf, NaN or finite."""
    problem = Problem(heads=1, kv_heads=1, q_len=40, kv_len=40)
    grad_out = problem.grad_out
    grad_out[..., 30, 3], grad_out[..., 5, 3] = INF, torch.nan
    grad_out[..., 30, 7], grad_out[..., 5, 7] = -INF, INF
    schedule = CAUSAL.schedule(*problem.inputs, block_size=16)
    mine = problem.leaves()
    out = CAUSAL(*mine, backend="interpret", schedule=schedule)
    (v,) = torch.autograd.grad(out, mine[2:], grad_out)
    q, k, _ = problem.leaves(torch.float64)
    scores = torch.where(causal(40, 40), q @ k.mT / 4, -INF)
    terms = scores.softmax(-1).detach()[..., None] * grad_out[..., None, :]
    expected = torch.where(causal(40, 40)[..., None], terms, 0.0).sum(-3)
    torch.testing.assert_close(v.double(), expected, rtol=1e-4, atol=1e-4, equal_nan=True)
    assert (expected[0, 0, 6:31, 3] == INF).all()
    assert (expected[0, 0, 6:31, 7] == -INF).all()


def test_strides() -> None:
    """Packed projections, transposed heads, expanded keys, a gradient that isn't contiguous."""
    problem = Problem(batch=2, heads=2, kv_heads=2)
    packed = torch.stack(problem.inputs, dim=3).transpose(1, 2).contiguous()
    packed.requires_grad_()
    q, k, v = (packed[:, :, :, i].transpose(1, 2) for i in range(3))
    grad_out = problem.grad_out.mT.contiguous().mT
    CAUSAL(q, k, v, backend="interpret").backward(grad_out)
    expected = check(CAUSAL, problem, causal(70, 70))
    assert packed.grad is not None
    for i, grad in enumerate(expected):
        torch.testing.assert_close(packed.grad[:, :, :, i].transpose(1, 2), grad)


def test_expanded_keys_and_gradients() -> None:
    problem = Problem(kv_heads=1)
    q, k, v = problem.leaves()
    out = CAUSAL(q, k.expand(1, 2, 70, 16), v.expand(1, 2, 70, 16), backend="interpret")
    problem.grad_out = torch.ones(1, 2, 70, 16)
    out.sum().backward()
    for x, expected in zip((q, k, v), check(CAUSAL, problem, causal(70, 70)), strict=True):
        torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-4)


def test_half_precision() -> None:
    problem = Problem(dtype=torch.float16)
    check(CAUSAL, problem, causal(70, 70), tolerance=5e-3)


def test_a_second_derivative_is_refused() -> None:
    q, k, v = Problem().leaves()
    (grad,) = torch.autograd.grad(
        CAUSAL(q, k, v, backend="interpret").square().sum(), q, create_graph=True
    )
    with pytest.raises(FlashgenError, match="differentiated again"):
        grad.sum().backward()


def test_edited_inputs_are_refused() -> None:
    q, k, v = Problem().leaves()
    out = CAUSAL(q, k, v, backend="interpret")
    with torch.no_grad():
        k.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_runs_are_equal_bit_by_bit() -> None:
    problem = Problem(heads=2, kv_heads=1, q_len=70, kv_len=90)
    first = check(CAUSAL, problem, causal(70, 90))
    for a, b in zip(first, check(CAUSAL, problem, causal(70, 90)), strict=True):
        assert torch.equal(a, b)


def test_autocast_rounds_the_inputs_and_nothing_else() -> None:
    mine, halves = Problem().leaves(), Problem().leaves()
    with torch.autocast("cpu", torch.float16):
        out = CAUSAL(*mine, backend="interpret")
    right = CAUSAL(*(x.half() for x in halves), backend="interpret")
    assert out.dtype == torch.float16
    assert torch.equal(out, right)
    grad = Problem().grad_out.half()
    grads = torch.autograd.grad(out, mine, grad)
    for x, y in zip(grads, torch.autograd.grad(right, halves, grad), strict=True):
        assert x.dtype == torch.float32
        assert torch.equal(x, y)


def test_autocast_that_is_off_changes_nothing() -> None:
    mine = Problem().leaves()
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        out = CAUSAL(*mine, backend="interpret")
    grads = torch.autograd.grad(out, mine, Problem().grad_out)
    for grad, expected in zip(grads, check(CAUSAL, Problem(), causal(70, 70)), strict=True):
        assert torch.equal(grad, expected)
