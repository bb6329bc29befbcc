"""The scores of one block: indices, score function, softcap, mask."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ..differentiate import differentiate
from ..dropout import Dropout
from ..expr import Env, Expr, evaluate, leaves
from ..geometry import Geometry
from ..spec import Bound
from .blocks import Block


@dataclass(frozen=True, eq=False)
class Rules:
    """What becomes of a scaled score, and which pairs are masked."""

    bound: Bound
    geometry: Geometry
    softcap: float | None
    dtype: torch.dtype

    def change(self, raw: torch.Tensor, block: Block, env: Env | None = None) -> torch.Tensor:
        """Score function, then softcap. Returns `raw` itself where there is neither."""
        scores, score = raw, self.bound.spec.score
        if score is not None:
            env = env or self.env(score, block, dtype=self.dtype)
            env.score = raw
            scores = evaluate(score, env).expand(raw.shape)
        if self.softcap is None:
            return scores
        capped = self.softcap * torch.tanh(scores / self.softcap)
        return torch.where(scores == -torch.inf, scores, capped)

    def mask(self, scores: torch.Tensor, raw: torch.Tensor, block: Block) -> torch.Tensor:
        """-inf where a pair is masked, free to be written to; full columns cost nothing."""
        if scores is not raw:
            # Changed scores may be a view of the user's data, or be needed on the way back.
            scores = scores.detach().clone()
        mask, full = self.bound.spec.mask, block.full
        if mask is not None and full < block.shape[3]:
            env = self.env(mask, block, skip=full)
            scores[..., full:].masked_fill_(~evaluate(mask, env), -torch.inf)
        return scores

    def dropped(self, dropout: Dropout, block: Block) -> torch.Tensor:
        """Booleans [B, Hq, rows, columns]."""
        rows = self._line(2, block.rows) + _per_batch(self.geometry.offset, block)
        b, h = self._sequence(block), self._line(1, block.heads)
        return dropout.dropped(b, h, rows, self._line(3, *block.columns))

    def env(
        self, expr: Expr, block: Block, *, skip: int = 0, dtype: torch.dtype = torch.float32
    ) -> Env:
        """What `expr` reads on a block without its first `skip` columns.

        Indices are laid out as [B, Hq, rows, columns]."""
        geometry, per_batch = self.geometry, functools.partial(_per_batch, block=block)
        lens = geometry.kv_len if geometry.kv_lens is None else geometry.kv_lens
        makers: Mapping[str, Callable[[], torch.Tensor]] = {
            "b": lambda: self._sequence(block),
            "h": lambda: self._line(1, block.heads),
            "h_kv": lambda: self._line(1, block.heads) // geometry.group,
            "q_idx": lambda: self._line(2, block.rows) + per_batch(geometry.offset),
            "kv_idx": lambda: self._line(3, *block.columns)[..., skip:],
            "q_len": lambda: per_batch(geometry.q_len),
            "kv_len": lambda: per_batch(lens),
        }
        used = leaves(expr, "index") or {"q_len"}  # at least one: it knows the device
        index = {name: makers[name]() for name in used}
        return Env(index, dict(self.bound.scalars), dict(self.bound.tensors), float_dtype=dtype)

    @functools.cached_property
    def _numbers(self) -> torch.Tensor:
        geometry = self.geometry
        most = max(geometry.batch, geometry.heads, geometry.q_len, geometry.kv_len)
        return torch.arange(most, device=geometry.device)

    def _sequence(self, block: Block) -> torch.Tensor:
        return self._line(0, block.batch) + self.geometry.first

    def _line(self, dim: int, *parts: slice) -> torch.Tensor:
        view = [1, 1, 1, 1]
        view[dim] = -1
        numbers = [self._numbers[part] for part in parts]
        return (numbers[0] if len(numbers) == 1 else torch.cat(numbers)).view(view)


_derivatives = functools.lru_cache(maxsize=256)(differentiate)


class Changed:
    """Changed scores that remember how they were made, for the way back.

    `totals` are the gradients of float data that are asked for; `pull_back` adds to them.
    Derivatives are the expressions that the generated kernels have. Autograd would not do here:
    inside an operator its keys may be switched off."""

    def __init__(
        self, rules: Rules, block: Block, raw: torch.Tensor, totals: Mapping[str, torch.Tensor]
    ) -> None:
        self.raw, self._rules, self._totals = raw, rules, totals
        score = rules.bound.spec.score
        self._env = None if score is None else rules.env(score, block, dtype=rules.dtype)
        self.scores = rules.change(raw, block, self._env)

    def pull_back(self, grad: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
        """The gradient of the raw scores, from that of the changed ones.

        Pairs whose `masked` scores are -inf are selected away from every gradient: there, the
        derivative of a score function may be anything."""
        softcap, score = self._rules.softcap, self._rules.bound.spec.score
        if softcap is not None:
            grad = _select(grad * (1 - (self.scores / softcap).square()), masked)
        if score is None or self._env is None:
            return grad
        derivatives = _derivatives(score)
        for load, by in derivatives.loads:
            if load.attr in self._totals:
                share = _select(grad * evaluate(by, self._env), masked)
                _add(load, self._env, share, self._totals[load.attr])
        return _select(grad * evaluate(derivatives.score, self._env), masked)


def _add(load: Expr, env: Env, grad: torch.Tensor, total: torch.Tensor) -> None:
    """Add what the pairs of a block say of the elements that a load reads there."""
    indices = tuple(
        evaluate(position, env).clamp(0, size - 1)
        for position, size in zip(load.args, total.shape, strict=True)
    )
    if indices:
        grad = grad.sum_to_size(total[indices].shape)
        total.index_put_(indices, grad, accumulate=True)
    else:
        total.add_(grad.sum())


def _per_batch(value: int | torch.Tensor, block: Block) -> torch.Tensor:
    """A length or an offset: one number, or [B, 1, 1, 1]."""
    if isinstance(value, int):
        return torch.tensor(value, device="cpu")
    own = value[block.batch] if value.numel() > 1 else value
    return own.long().reshape(-1, 1, 1, 1)


def _select(grad: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
    """0 where scores are -inf. Finite gradients are 0 there already, as their weight is."""
    return grad if is_finite(grad) else torch.where(masked == -torch.inf, 0, grad)


def is_finite(x: torch.Tensor) -> bool:
    """False where an element is inf or NaN; also where the sum overflows."""
    return math.isfinite(x.sum().item())
