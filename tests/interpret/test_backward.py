"""Gradients of the generated kernels, interpreted, against a dense float64 oracle by autograd."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen import FlashgenError, masks

sys.path.insert(0, str(Path(__file__).parents[1] / "masks"))
from cases import CASES, Case

Score = Callable[[torch.Tensor], torch.Tensor]
INF = math.inf


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    score: Score | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and LSE by their definition; differentiable, rows without keys included."""
    group = q.shape[1] // max(1, k.shape[1])
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if score is None else score(scores)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    allowed = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask
    scores = torch.where(allowed, scores, -INF)
    most = torch.nn.functional.pad(scores.detach(), (0, 1), value=-INF).amax(-1, keepdim=True)
    if sinks is not None:
        most = torch.maximum(most, sinks.detach().reshape(1, -1, 1, 1))
    most = torch.where(most == -INF, 0.0, most)
    weights = torch.where(allowed, torch.exp(scores - most), 0.0)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.reshape(1, -1, 1, 1) - most)
    divisor = torch.where(total == 0, 1.0, total)
    lse = torch.where(total == 0, -INF, most + torch.log(divisor))
    return weights @ v / divisor, lse[..., 0]


class Problem:
    """Random inputs in float32, the same in float64, and random gradients of the results."""

    def __init__(
        self,
        batch: int = 1,
        heads: int = 2,
        kv_heads: int = 2,
        q_len: int = 70,
        kv_len: int = 70,
        dim: int = 16,
        v_dim: int = 16,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        shapes = (
            (batch, heads, q_len, dim), (batch, kv_heads, kv_len, dim),
            (batch, kv_heads, kv_len, v_dim), (batch, heads, q_len, v_dim), (batch, heads, q_len),
        )  # fmt: skip
        made = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        self.inputs, (self.grad_out, self.grad_lse) = made[:3], made[3:]

    def leaves(self, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        return [x.detach().to(dtype or x.dtype).requires_grad_() for x in self.inputs]


def loss(
    problem: Problem, out: torch.Tensor, lse: torch.Tensor, of_out: bool, of_lse: bool
) -> torch.Tensor:
    """A linear function of what has a gradient; rows without keys have no LSE to speak of."""
    total = out.new_zeros(())
    if of_out:
        total = total + (out * problem.grad_out.to(out.dtype)).sum()
    if of_lse:
        total = total + torch.where(lse == -INF, 0.0, lse * problem.grad_lse.to(lse.dtype)).sum()
    return total


def check(
    attention: Any,
    problem: Problem,
    mask: torch.Tensor | None = None,
    score: Callable[..., torch.Tensor] | None = None,
    learned: dict[str, torch.Tensor] | None = None,
    of_out: bool = True,
    of_lse: bool = False,
    tolerance: float = 1e-4,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    **given: Any,
) -> list[torch.Tensor]:
    """Compare gradients of q, k, v, learned data and sinks; returns ours.

    `score(scores, **learned)` is the score function, by hand."""
    mine, exact = problem.leaves(), problem.leaves(torch.float64)
    parameters = {**(learned or {}), **({} if sinks is None else {"sinks": sinks})}
    own = {n: t.detach().clone().requires_grad_() for n, t in parameters.items()}
    wide = {n: t.detach().double().requires_grad_() for n, t in parameters.items()}
    out, lse = attention(*mine, return_lse=True, backend="interpret", scale=scale, **own, **given)
    expected_sinks = wide.get("sinks")
    data = {n: t for n, t in wide.items() if n != "sinks"}
    by_hand = None if score is None else (lambda scores: score(scores, **data))
    exact_out, exact_lse = dense(
        *exact, mask=mask, score=by_hand, softcap=softcap, sinks=expected_sinks, scale=scale
    )
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-4, atol=1e-4)
    ours = torch.autograd.grad(
        loss(problem, out, lse, of_out, of_lse), [*mine, *own.values()], allow_unused=True
    )
    theirs = torch.autograd.grad(
        loss(problem, exact_out, exact_lse, of_out, of_lse),
        [*exact, *wide.values()],
        allow_unused=True,
    )
    names = ["q", "k", "v", *own]
    results = []
    for name, leaf, actual, expected in zip(
        names, [*mine, *own.values()], ours, theirs, strict=True
    ):
        actual = torch.zeros_like(leaf) if actual is None else actual
        expected = torch.zeros_like(leaf).double() if expected is None else expected
        assert actual.dtype == leaf.dtype
        assert actual.shape == leaf.shape
        atol = tolerance * max(1.0, float(expected.abs().max()) if expected.numel() else 0.0)
        torch.testing.assert_close(
            actual.double(), expected, rtol=0, atol=atol, msg=lambda m, n=name: f"grad of {n}: {m}"
        )
        results.append(actual)
    if mask is not None:
        check_unseen(mask, *results[:3])
    return results


def check_unseen(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Rows without keys and keys that no query of their heads sees have exactly 0."""
    seen = mask.expand(*q.shape[:3], k.shape[2])
    if not seen.numel():
        return
    assert (q[~seen.any(-1)] == 0).all()
    by_head = seen.any(-2).reshape(*k.shape[:2], -1, k.shape[2])
    hidden = ~by_head.any(2)
    assert (k[hidden] == 0).all()
    assert (v[hidden] == 0).all()


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


def causal(q_len: int, kv_len: int, offset: int | None = None) -> torch.Tensor:
    offset = kv_len - q_len if offset is None else offset
    return torch.arange(kv_len) <= torch.arange(q_len).reshape(-1, 1) + offset


CAUSAL = fg.Attention(mask=masks.causal)


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


N = 70
POSITIONS = torch.arange(N)
BACK = (POSITIONS - POSITIONS.reshape(-1, 1)).float()


@fg.attention(mask=masks.causal)
def alibi(score, h, q_idx, kv_idx, slope: fg.Tensor):
    return score + slope[h] * (kv_idx - q_idx)


@fg.attention(mask=masks.causal)
def biased(score, b, h, q_idx, kv_idx, bias: fg.Tensor):
    return score + bias[b, h, q_idx, kv_idx]


@fg.attention(mask=masks.causal)
def by_head(score, h, bias: fg.Tensor):
    return score * bias[h] + bias[h]


@fg.attention(mask=masks.causal)
def relative(score, q_idx, kv_idx, table: fg.Tensor):
    return score + table[q_idx - kv_idx + 70]


@fg.attention(mask=masks.causal)
def clipped(score, q_idx, kv_idx, table: fg.Tensor):
    return score + table[q_idx - kv_idx]


@fg.attention(mask=masks.causal)
def tempered(score, t: fg.Tensor):
    return score * t


@fg.attention(mask=masks.causal)
def twice(score, q_idx, kv_idx, x: fg.Tensor):
    return score + x[q_idx] * x[kv_idx]


@fg.attention(mask=masks.causal)
def gated(score, h, q_idx, kv_idx, gate: fg.Tensor, bias: fg.Tensor):
    return score + fg.sigmoid(gate[h, q_idx]) * bias[kv_idx]


@fg.attention(mask=masks.causal)
def piecewise(score, h, q_idx, kv_idx, knee: fg.Tensor):
    bent = fg.where(score > knee[h], score * 0.5, fg.minimum(score, 0.3))
    return bent + fg.abs(score) * 0.1 + fg.maximum(score, knee[h])


@fg.attention(mask=masks.causal)
def by_bucket(score, q_idx, kv_idx, bucket: fg.Tensor, bias: fg.Tensor):
    return score + bias[bucket[q_idx - kv_idx]]


# The declaration, the shapes of what it learns, and the score function by hand.
LEARNED: dict[str, tuple[Any, dict[str, tuple[int, ...]], Callable[..., torch.Tensor]]] = {
    "alibi": (alibi, {"slope": (2,)}, lambda s, slope: s + slope.reshape(-1, 1, 1) * BACK),
    "bias": (biased, {"bias": (2, 2, N, N)}, lambda s, bias: s + bias),
    "bias of one batch element": (biased, {"bias": (1, 2, N, N)}, lambda s, bias: s + bias),
    "bias by head": (
        by_head, {"bias": (2,)}, lambda s, bias: (s + 1) * bias.reshape(-1, 1, 1),
    ),
    "relative": (
        relative, {"table": (2 * N,)}, lambda s, table: s + table[N - BACK.long()],
    ),
    "clamped index": (
        clipped, {"table": (9,)}, lambda s, table: s + table[(-BACK.long()).clamp(0, 8)],
    ),
    "temperature": (tempered, {"t": ()}, lambda s, t: s * t),
    "twice": (twice, {"x": (N,)}, lambda s, x: s + x.reshape(-1, 1) * x),
    "gated": (
        gated, {"gate": (2, N), "bias": (N,)},
        lambda s, gate, bias: s + torch.sigmoid(gate).unsqueeze(-1) * bias,
    ),
    "piecewise": (
        piecewise, {"knee": (2,)},
        lambda s, knee: torch.where(s > knee.reshape(-1, 1, 1), s * 0.5, s.clamp(max=0.3))
        + s.abs() * 0.1 + torch.maximum(s, knee.reshape(-1, 1, 1)),
    ),
}  # fmt: skip


# Sums in integers are the same code whatever is read: a few stand for the others.
IN_ORDER = [
    pytest.param(name, True, marks=[] if number % 4 == 0 else [pytest.mark.slow])
    for number, name in enumerate(LEARNED)
]


@pytest.mark.parametrize(
    ("name", "deterministic"), [*((name, False) for name in LEARNED), *IN_ORDER]
)
def test_learned_data(name: str, deterministic: bool) -> None:
    attention, shapes, score = LEARNED[name]
    generator = torch.Generator().manual_seed(3)
    learned = {n: torch.randn(shape, generator=generator) for n, shape in shapes.items()}
    check(
        attention, Problem(batch=2), causal(N, N), score, learned, of_lse=True,
        deterministic=deterministic,
    )  # fmt: skip


@pytest.mark.parametrize("offset", [-5, torch.tensor([3, -4])])
def test_rows_before_the_first_position_share_a_bias(offset: Any) -> None:
    """Their index is clamped to 0, so their gradients add up."""
    attention = fg.Attention(score=biased.__wrapped__)
    rows = torch.arange(N) + torch.as_tensor(offset).reshape(-1, 1)
    rows = rows.expand(2, N).clamp(0, N - 1)

    def score(s: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return s + torch.stack([bias[b][:, rows[b]] for b in range(2)])

    check(attention, Problem(batch=2), None, score, {"bias": torch.randn(2, 2, N, N)},
          q_offset=offset)  # fmt: skip


def test_a_bias_is_stored_in_its_own_dtype() -> None:
    """Where no two pairs read the same element, nothing is added up, and no fp32 copy is made."""
    q, k, v = Problem(dtype=torch.float16).leaves()
    bias = torch.randn(1, 2, N, N, dtype=torch.float16, requires_grad=True)
    wide = bias.detach().float().requires_grad_()
    grads = [
        torch.autograd.grad(biased(q, k, v, bias=x, backend="interpret").sum(), x)[0]
        for x in (bias, wide)
    ]
    assert torch.equal(grads[0], grads[1].half())
    assert grads[0].dtype == torch.float16


def test_learned_data_with_softcap_and_groups() -> None:
    attention = fg.Attention(mask=masks.causal, score=alibi.__wrapped__, softcap=2.0)
    check(attention, Problem(heads=4, kv_heads=2), causal(N, N),
          lambda s, slope: s + slope.reshape(-1, 1, 1) * BACK,
          {"slope": torch.tensor([0.3, 0.1, -0.2, 0.01])}, softcap=2.0)  # fmt: skip


def test_learned_data_read_through_an_index_tensor() -> None:
    bucket = torch.arange(N) // 9
    check(by_bucket, Problem(), causal(N, N),
          lambda s, bias: s + bias[bucket[(-BACK.long()).clamp(0)]],
          {"bias": torch.randn(8)}, bucket=bucket)  # fmt: skip


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("heads", [2, 4])
def test_a_score_function_that_ignores_the_score(heads: int) -> None:
    @fg.attention(mask=masks.causal)
    def fixed(score, q_idx, kv_idx, bias: fg.Tensor):
        return bias[q_idx, kv_idx]

    q, k, _, _ = check(
        fixed, Problem(heads=heads), causal(N, N), lambda s, bias: bias + 0 * s,
        {"bias": torch.randn(N, N)},
    )  # fmt: skip
    assert (q == 0).all()
    assert (k == 0).all()


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


def test_poisoned_data_of_masked_pairs() -> None:
    learned = {"bias": torch.randn(1, 2, N, N)}
    clean = check(biased, Problem(), causal(N, N), lambda s, bias: s + bias, learned)
    learned["bias"] = torch.where(causal(N, N), learned["bias"], torch.nan).requires_grad_()
    mine = Problem().leaves()
    out = biased(*mine, backend="interpret", **learned)
    inputs = [*mine, learned["bias"]]
    grads = torch.autograd.grad(out, inputs, Problem().grad_out)
    for actual, expected in zip(grads, clean, strict=True):
        torch.testing.assert_close(actual, expected)


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


def test_gradcheck_of_a_score_function_and_sinks() -> None:
    attention = fg.Attention(mask=masks.causal, score=twice.__wrapped__, softcap=3.0, sinks=True)
    q, k, v = Problem(heads=2, kv_heads=1, q_len=3, kv_len=3, dim=2, v_dim=1).leaves(torch.float64)
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)

    def run(q: Any, k: Any, v: Any, x: Any, sinks: Any) -> Any:
        return attention(
            q, k, v, x=x, sinks=sinks, q_offset=0, return_lse=True, backend="interpret"
        )

    # The cpu backend's gradients, from the same expressions, are checked number by number.
    assert torch.autograd.gradcheck(run, (q, k, v, x, sinks), atol=1e-4, fast_mode=True)


def test_gradcheck_of_a_window_with_a_table() -> None:
    attention = fg.Attention(mask=masks.sliding_window(window=3), score=clipped.__wrapped__)
    inputs = Problem(heads=1, kv_heads=1, q_len=3, kv_len=5, dim=2, v_dim=1).leaves(torch.float64)
    table = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def run(q: Any, k: Any, v: Any, table: Any) -> Any:
        return attention(q, k, v, table=table, backend="interpret")

    assert torch.autograd.gradcheck(run, (*inputs, table), atol=1e-4, fast_mode=True)


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
