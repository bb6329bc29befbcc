"""Dropout: Philox's own numbers, statistics, the same pairs everywhere, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flashgen as fg
from flashgen import FlashgenError, masks
from flashgen.dropout import Dropout, philox
from flashgen.reference import attention_reference

CAUSAL = fg.Attention(masks.causal)


def known(*words: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(word) for word in words)


@pytest.mark.parametrize(
    ("counter", "key", "numbers"),
    [
        ((0,) * 4, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((-1,) * 4, -1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_numbers(counter: Any, key: int, numbers: Any) -> None:
    """The known answers that come with Random123."""
    assert tuple(x.item() for x in philox(key, known(*counter))) == numbers


def inputs(
    B: int = 2, H: int = 4, Hkv: int = 2, S: int = 37, T: int = 37, D: int = 8
) -> list[torch.Tensor]:
    shapes = ((B, H, S, D), (B, Hkv, T, D), (B, Hkv, T, D))
    return [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]


def weights(attend: Any, q: torch.Tensor, k: torch.Tensor, **options: Any) -> torch.Tensor:
    """[B, H, Sq, Skv]: values that are unit vectors show each weight."""
    v = torch.eye(k.shape[2], dtype=k.dtype).expand(*k.shape[:3], -1)
    found: torch.Tensor = attend(q, k, v, **options)
    return found


def test_what_is_kept_is_scaled_and_how_often() -> None:
    q, k, _ = inputs(B=2, H=4, Hkv=4, S=160, T=160)
    whole = weights(fg.Attention(), q, k)
    for p in (0.1, 0.5, 0.9):
        left = weights(fg.Attention(), q, k, dropout_p=p, seed=11)
        kept = left != 0
        torch.testing.assert_close(left[kept], (whole / (1 - p))[kept])
        # Five standard deviations of a binomial's mean.
        slack = 5 * (p * (1 - p) / kept.numel()) ** 0.5
        assert abs(kept.double().mean().item() - (1 - p)) < slack
        for dim in range(4):
            others = [d for d in range(4) if d != dim]
            share = kept.double().mean(others)
            count = kept.numel() / kept.shape[dim]
            assert (share - (1 - p)).abs().max() < 6 * (p * (1 - p) / count) ** 0.5


def test_pairs_are_independent() -> None:
    """Neighbours along each index, which share a draw or differ in one word of its counter."""
    dropout = Dropout(0.5, 3)
    lines = [torch.arange(n).view([-1 if d == i else 1 for d in range(4)])
             for i, n in enumerate((4, 4, 128, 128))]  # fmt: skip
    signs = dropout.dropped(*lines).double() * 2 - 1
    for dim in range(4):
        for step in (1, 2, 3):
            ahead = signs.narrow(dim, step, signs.shape[dim] - step)
            behind = signs.narrow(dim, 0, signs.shape[dim] - step)
            assert (ahead * behind).mean().abs() < 5 / ahead.numel() ** 0.5


def test_other_seeds_drop_other_pairs() -> None:
    q, k, _ = inputs()
    first = weights(CAUSAL, q, k, dropout_p=0.5, seed=1) != 0
    assert torch.equal(first, weights(CAUSAL, q, k, dropout_p=0.5, seed=1) != 0)
    for seed in (2, -1, 1 + 2**32, 2**62):
        assert (first != (weights(CAUSAL, q, k, dropout_p=0.5, seed=seed) != 0)).any()


@pytest.mark.parametrize("offset", [None, 0, -3, torch.tensor([5, 11])])
@pytest.mark.parametrize("block_size", [16, (64, 48), 128])
def test_tiles_and_schedules_change_nothing(block_size: Any, offset: Any) -> None:
    q, k, v = inputs(S=70, T=101)
    options: dict[str, Any] = {"q_offset": offset}
    schedule = CAUSAL.schedule(q, k, v, block_size=block_size, **options)
    given = {**options, "schedule": schedule, "dropout_p": 0.3, "seed": 7}
    out, lse = CAUSAL(q, k, v, return_lse=True, **given)
    allowed = masks.causal.dense(70, 101, batch=2, **options)
    right = attention_reference(q, k, v, mask=allowed, dropout_p=0.3, seed=7, **options)
    torch.testing.assert_close((out, lse), right)
    assert torch.equal(lse, CAUSAL(q, k, v, return_lse=True, **options)[1])


def test_a_part_of_the_queries_drops_the_same_pairs() -> None:
    """What is drawn follows from positions, so that prefill in chunks equals the whole."""
    q, k, v = inputs()
    whole = CAUSAL(q, k, v, dropout_p=0.4, seed=5)
    chunk = CAUSAL(q[:, :, 20:30], k[:, :, :30], v[:, :, :30], dropout_p=0.4, seed=5)
    torch.testing.assert_close(chunk, whole[:, :, 20:30])


def test_gradients() -> None:
    @fg.attention(mask=masks.causal, softcap=5.0, sinks=True)
    def attend(score, h, q_idx, kv_idx, slope: fg.Tensor):
        return score + slope[h] * (kv_idx - q_idx)

    leaves = inputs(S=20, T=23)
    slope, sinks = (torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    options = {"dropout_p": 0.35, "seed": 9, "sinks": sinks}
    out, lse = attend(*leaves, slope=slope, return_lse=True, **options)
    away = torch.arange(23) - (torch.arange(20)[:, None] + 3)
    exact = attention_reference(
        *leaves, mask=away <= 0, softcap=5.0, **options,
        score=lambda s: s + slope[:, None, None] * away,
    )  # fmt: skip
    grads = torch.randn_like(out), torch.randn_like(lse)
    every = (*leaves, slope, sinks)
    ours = torch.autograd.grad((out, lse), every, grads)
    theirs = torch.autograd.grad(exact, every, grads)
    torch.testing.assert_close((out, lse), exact)
    torch.testing.assert_close(ours, theirs)


def test_gradcheck() -> None:
    def run(q: Any, k: Any, v: Any) -> Any:
        return CAUSAL(q, k, v, dropout_p=0.4, seed=1, return_lse=True)

    assert torch.autograd.gradcheck(run, inputs(1, 2, 1, 5, 6, 2))


def test_nothing_and_everything() -> None:
    q, k, v = inputs()
    plain = CAUSAL(q, k, v)
    assert torch.equal(CAUSAL(q, k, v, dropout_p=0.0), plain)
    assert torch.equal(CAUSAL(q, k, v, dropout_p=0, seed=3), plain)
    out, lse = CAUSAL(q, k, v, dropout_p=1.0, seed=3, return_lse=True)
    assert (out == 0).all()
    assert torch.equal(lse, CAUSAL(q, k, v, return_lse=True)[1])
    for grad in torch.autograd.grad(out.sum(), (q, k, v)):
        assert (grad == 0).all()
    nearly = CAUSAL(q, k, v, dropout_p=1 - 1e-6, seed=3)
    assert nearly.isfinite().all()
    torch.testing.assert_close(CAUSAL(q, k, v, dropout_p=1e-12, seed=3), plain)


def test_a_dropped_value_is_not_seen() -> None:
    q, k, v = (x.detach() for x in inputs(H=2))
    dropped = weights(CAUSAL, q, k, dropout_p=0.5, seed=2) == 0
    v[:, :, 10] = torch.inf
    out = CAUSAL(q, k, v, dropout_p=0.5, seed=2)
    assert torch.equal(out.isfinite().all(-1), dropped[..., 10])


def test_checkpointing_recomputes_the_same() -> None:
    q, k, v = inputs()

    def block(q: Any, k: Any, v: Any) -> Any:
        return CAUSAL(q, k, v, dropout_p=0.3, seed=17).square()

    plain = torch.autograd.grad(block(q, k, v).sum(), (q, k, v))
    again = checkpoint(block, q, k, v, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(again.sum(), (q, k, v)), plain, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout_p": 0.1}, "no seed says"),
        ({"dropout_p": 1.5, "seed": 1}, "dropout_p is 1.5"),
        ({"dropout_p": -0.1, "seed": 1}, "dropout_p is -0.1"),
        ({"dropout_p": float("nan"), "seed": 1}, "dropout_p is nan"),
        ({"dropout_p": True, "seed": 1}, "dropout_p is True"),
        ({"dropout_p": torch.tensor(0.1), "seed": 1}, r"dropout_p is \[\] fp32"),
        ({"dropout_p": 0.1, "seed": 0.5}, "the seed is 0.5"),
        ({"dropout_p": 0.1, "seed": 2**63}, "the seed is 9223372036854775808"),
        ({"dropout_p": 0.1, "seed": torch.tensor(1)}, r"the seed is \[\] int64"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(FlashgenError, match=message):
        CAUSAL(*inputs(), **options)


def test_source_and_explain_take_it() -> None:
    tensors = inputs()
    assert "tl.philox" in CAUSAL.source(*tensors, dropout_p=0.1, seed=1)
    assert "philox" not in CAUSAL.source(*tensors)
    assert "dropout" in CAUSAL.explain(*tensors, dropout_p=0.1, seed=1)
