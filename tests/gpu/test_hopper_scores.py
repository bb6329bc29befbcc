"""Score functions in Hopper's kernels, and gradients of their data, against dense float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import sm_90
import torch

import flashgen as fg
from flashgen import masks

pytestmark = [*sm_90.marks(300), pytest.mark.usefixtures("on_hopper")]

B, H, HKV = 2, 4, 2


@fg.attention(mask=masks.causal)
def alibi(score: Any, h: Any, q_idx: Any, kv_idx: Any, slope: fg.Tensor) -> Any:
    return score + slope[h] * (kv_idx - q_idx)


@fg.attention(mask=masks.causal)
def steeper(score: Any, h: Any, q_idx: Any, kv_idx: Any, slope: fg.Tensor) -> Any:
    return score + (slope[h] + 0.25) * (kv_idx - q_idx)


@fg.attention(mask=masks.causal)
def gate(score: Any, h: Any, slope: fg.Tensor) -> Any:
    return score * fg.tanh(score * slope[h])


@fg.attention(mask=masks.causal, softcap=20.0)
def warm(score: Any, h: Any, q_idx: Any, kv_idx: Any, slope: fg.Tensor, heat: fg.Tensor) -> Any:
    return heat * (score + slope[h] * (kv_idx - q_idx)) + score * slope[0]


@fg.attention(mask=masks.causal)
def biased(score: Any, h: Any, q_idx: Any, kv_idx: Any, table: fg.Tensor) -> Any:
    """One number far from the diagonal."""
    return score + table[h, fg.minimum(q_idx - kv_idx, 70)]


@fg.attention(mask=masks.causal)
def braked(score: Any, h: Any, q_idx: Any, kv_idx: Any, table: fg.Tensor, brake: fg.Tensor) -> Any:
    """That times what is fixed for a head."""
    return score + brake[h] * table[h, fg.minimum(q_idx - kv_idx, 70)]


Change = Callable[[Any, Any, dict[str, Any]], Any]
DENSE: dict[Any, Change] = {
    alibi: lambda s, away, d: s - d["slope"][:, None, None] * away,
    steeper: lambda s, away, d: s - (d["slope"][:, None, None] + 0.25) * away,
    biased: lambda s, away, d: s + d["table"][:, away.clamp(0, 70)],
    braked: lambda s, away, d: (
        s + d["brake"][:, None, None] * d["table"][:, away.clamp(0, 70)]
    ),
    gate: lambda s, away, d: s * torch.tanh(s * d["slope"][:, None, None]),
    warm: lambda s, away, d: 20.0 * torch.tanh(
        (d["heat"] * (s - d["slope"][:, None, None] * away) + s * d["slope"][0]) / 20.0
    ),
}  # fmt: skip


def dense_scores(attend: Any, q: Any, k: Any, data: dict[str, Any], offset: int) -> Any:
    k = k.repeat_interleave(H // HKV, 1)
    rows = torch.arange(q.shape[2], device=q.device)[:, None] + offset
    away = rows - torch.arange(k.shape[2], device=q.device)
    scores = DENSE[attend](q @ k.mT * q.shape[-1] ** -0.5, away, data)
    return torch.where(away >= 0, scores, -math.inf)


def dense(attend: Any, q: Any, k: Any, v: Any, data: dict[str, Any], offset: int) -> Any:
    scores = dense_scores(attend, q, k, data, offset)
    return torch.softmax(scores, -1) @ v.repeat_interleave(H // HKV, 1)


def spread(
    attend: Any, q: Any, k: Any, data: dict[str, Any], offset: int, out: Any, grad: Any, u: float
) -> float:
    """Standard deviation of the gradient of `heat`, one number, by what rounds the output.

    The backward takes a row's sum of out * grad, delta, from each pair's gradient, so an error of
    it costs `heat` that times the derivative of the row's LSE by `heat`. An output rounded to
    within `u` of itself is off evenly between both ends: u / sqrt(3) of it, each by itself."""
    rows = data["heat"].detach().expand(*q.shape[:3], 1).clone().requires_grad_()
    lse = dense_scores(attend, q, k, data | {"heat": rows}, offset).logsumexp(-1)
    (by_row,) = torch.autograd.grad(lse.sum(), rows)
    deltas = (u * out * grad).square().sum(-1, keepdim=True) / 3
    return float((by_row.square() * deltas).sum().sqrt())


def inputs(attend: Any, S: int, T: int, D: int, dtype: Any) -> tuple[list[Any], dict[str, Any]]:
    shapes = ((B, H, S, D), (B, HKV, T, D), (B, HKV, T, D))
    tensors = [torch.randn(s, device="cuda").to(dtype).requires_grad_() for s in shapes]
    # Steep: distances that have weight multiply what rounding a row's output costs its slope.
    data = {"slope": torch.tensor([0.5, 0.3, 0.2, 0.1], device="cuda").requires_grad_()}
    if attend in (biased, braked):
        data = {"table": torch.randn(H, 71, device="cuda", requires_grad=True)}
    if attend is braked:
        data["brake"] = torch.tensor([0.5, -1.0, 2.0, 0.0], device="cuda")
    if attend is warm:
        data["heat"] = torch.tensor(1.3, device="cuda").requires_grad_()
    return tensors, data


def check(
    attend: Any,
    D: int,
    dtype: Any,
    deterministic: bool = False,
    unseen: int = 0,
    learns: bool = True,
) -> None:
    """Errors are at most twice those of PyTorch's operations in the dtype. `unseen`: keys that
    nobody sees, which hold NaN; `learns`: data has gradients."""
    S, T = 333, 391
    offset = 0 if unseen else T - S
    T = S + unseen if unseen else T
    tensors, data = inputs(attend, S, T, D, dtype)
    given = [x.detach().clone() for x in tensors]
    for x in given[1:] if unseen else ():
        x[:, :, S:] = math.nan
    for x in data.values() if not learns else ():
        x.requires_grad_(False)
    own = [name for name, x in data.items() if x.requires_grad]
    every = [*(x.requires_grad_() for x in given), *(data[name] for name in own)]
    options = {"backend": "hopper", "deterministic": deterministic, "q_offset": offset}
    out = attend(*given, **data, **options)
    grad = torch.randn_like(out)
    got = (out, *torch.autograd.grad(out, every, grad))

    def right(kind: Any) -> list[Any]:
        exact = [x.detach().to(kind).requires_grad_() for x in (*tensors, *data.values())]
        named = dict(zip(data, exact[3:], strict=True))
        result = dense(attend, *exact[:3], named, offset)
        wanted = [*exact[:3], *(named[name] for name in own)]
        return [result, *torch.autograd.grad(result, wanted, grad.to(kind))]

    names = ("out", "q", "k", "v", *own)
    everything = right(torch.float64)
    for name, mine, exact, eager in zip(names, got, everything, right(dtype), strict=True):
        error, theirs = ((x.double() - exact).norm() for x in (mine, eager))
        if exact.ndim == 0:  # PyTorch's own error of a single number may be 0 by luck.
            q, k, _ = (x.detach().double() for x in tensors)
            named = {name: x.detach().double() for name, x in data.items()}
            given = (everything[0].detach(), grad.double(), torch.finfo(dtype).eps / 2)
            theirs = 3 * spread(attend, q, k, named, offset, *given)
        assert error <= 1.3 * theirs + 1e-4 * exact.norm(), f"{name}: {error} > {theirs}"


@pytest.mark.parametrize("D", [128, 64])
@pytest.mark.parametrize(
    "attend", [alibi, biased, braked, gate, warm], ids=("alibi", "biased", "braked", "gate", "warm")
)
def test_gradients(attend: Any, D: int) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        check(attend, D, dtype)
    check(attend, D, torch.bfloat16, deterministic=True)


@pytest.mark.parametrize("D", [128, 64])
@pytest.mark.parametrize("attend", [alibi, steeper], ids=("alibi", "steeper"))
def test_slopes_that_are_fixed(attend: Any, D: int) -> None:
    """Scores then rise along with the LSE."""
    for dtype in (torch.bfloat16, torch.float16):
        check(attend, D, dtype, learns=False)
    check(attend, D, torch.bfloat16, deterministic=True, learns=False)
    check(attend, D, torch.bfloat16, unseen=70, learns=False)


@pytest.mark.parametrize("D", [128, 64])
@pytest.mark.parametrize("attend", [alibi, biased, gate], ids=("alibi", "biased", "gate"))
def test_keys_that_nobody_sees(attend: Any, D: int) -> None:
    check(attend, D, torch.bfloat16, unseen=70)


@pytest.mark.parametrize("attend", [alibi, biased, gate], ids=("alibi", "biased", "gate"))
def test_the_same_bits_each_time(attend: Any) -> None:
    tensors, data = inputs(attend, 600, 600, 128, torch.bfloat16)
    every = [*tensors, *data.values()]
    grad = torch.randn(B, H, 600, 128, device="cuda", dtype=torch.bfloat16)
    first = None
    for _ in range(10):
        out = attend(*tensors, **data, backend="hopper", deterministic=True)
        grads = torch.autograd.grad(out, every, grad)
        first = first or grads
        assert all(torch.equal(x, y) for x, y in zip(first, grads, strict=True))
