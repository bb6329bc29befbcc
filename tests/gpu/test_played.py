"""Calls played from records give what calls give that are worked out, whatever changes between."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen import masks
from flashgen.records.play import Play

pytestmark = pytest.mark.gpu
LATENT = fg.MLA(rank=512, rope=64)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def documents(length: int = 200) -> torch.Tensor:
    return torch.randint(0, 4, (2, length), device="cuda").sort(-1).values.int()


def lengths(most: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    # Longer than the cache, and less than nothing, too: they are cut.
    return torch.randint(-2, most + 5, (2,), device="cuda", dtype=dtype)


def dense(**more: Any) -> dict[str, Any]:
    q, k, v = (rand(2, heads, 200, 64) for heads in (4, 2, 2))
    return {"q": q, "k": k, "v": v, **more}


def token(**more: Any) -> dict[str, Any]:
    q, k, v = (rand(2, *shape, 64) for shape in ((8, 1), (2, 300), (2, 300)))
    return {"q": q, "k": k, "v": v, **more}


def paged() -> dict[str, Any]:
    table = torch.randperm(40, device="cuda")[:38].view(2, 19).int()
    return {
        "q": rand(2, 8, 1, 64), "k": rand(40, 16, 2, 64), "v": rand(40, 16, 2, 64),
        "page_table": table, "kv_lens": torch.randint(1, 300, (2,), device="cuda").int(),
    }  # fmt: skip


def packed() -> dict[str, Any]:
    cut = int(torch.randint(0, 200, ()))
    starts = torch.tensor([0, cut, 200], device="cuda", dtype=torch.int32)
    return {
        "q": rand(200, 4, 64), "k": rand(200, 2, 64), "v": rand(200, 2, 64),
        "cu_seqlens_q": starts, "cu_seqlens_kv": starts,
    }  # fmt: skip


def latent() -> dict[str, Any]:
    return {
        "q": rand(2, 16, 1, 576), "k": rand(2, 1, 300, 576), "v": None, "scale": 0.1,
        "kv_lens": lengths(300),
    }  # fmt: skip


CASES: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]], bool]] = {
    "schedule kept": ({"mask": masks.causal}, dense, False),
    "schedule given": ({"mask": masks.causal_document}, lambda: dense(doc=documents()), True),
    "schedule made": ({"mask": masks.causal_document}, lambda: dense(doc=documents()), False),
    "token": ({}, token, False),
    "token, lengths": ({}, lambda: token(kv_lens=lengths(300)), False),
    "token, long lengths": ({}, lambda: token(kv_lens=lengths(300, torch.int64)), False),
    "token, planned": ({"mask": masks.causal}, lambda: token(kv_lens=lengths(300)), False),
    "token, given": ({"mask": masks.causal}, lambda: token(kv_lens=lengths(300)), True),
    "pages": ({"mask": masks.causal}, paged, False),
    "packed": ({"mask": masks.causal}, packed, False),
    "latent": ({"mask": masks.causal, "heads": LATENT}, latent, False),
}


@pytest.fixture
def plays(monkeypatch: pytest.MonkeyPatch) -> list[Play]:
    """Records that were played, by any call."""
    found: list[Play] = []
    play = Play.__call__

    def counted(self: Play, tensors: Any) -> Any:
        found.append(self)
        return play(self, tensors)

    monkeypatch.setattr(Play, "__call__", counted)
    return found


def schedule_of(attend: fg.Attention, given: dict[str, Any]) -> Any:
    tensors = {name: given[name] for name in ("k", "v", "kv_lens", "doc") if name in given}
    return attend.schedule(given["q"], **tensors)


@pytest.mark.parametrize("name", CASES)
def test_without_gradients(name: str, plays: list[Play]) -> None:
    """From the fourth call on, one record is all of a call."""
    declared, make, is_given = CASES[name]
    attend = fg.Attention(**declared)
    for turn in range(6):
        given = make()
        if is_given:
            given["schedule"] = schedule_of(attend, given)
        plays.clear()
        out, lse = attend(**given, return_lse=True)
        # Of another schedule, the visited tiles or the ranges of data are found once.
        assert turn < 3 or len(plays) == 1 + is_given
        right, right_lse = fg.Attention(**declared)(**given, return_lse=True)
        assert torch.equal(out, right)
        assert torch.equal(lse, right_lse)
        assert torch.equal(attend(**given), right)


@pytest.mark.parametrize("name", ["schedule kept", "schedule given", "schedule made", "packed"])
def test_with_gradients(name: str, plays: list[Play]) -> None:
    declared, make, is_given = CASES[name]
    attend = fg.Attention(**declared)
    for turn in range(5):
        given = make()
        leaves = [given[x].requires_grad_() for x in "qkv"]
        if is_given:
            given["schedule"] = schedule_of(attend, given)
        grad = torch.randn_like(given["q"])
        plays.clear()
        out = attend(**given)
        got = torch.autograd.grad(out, leaves, grad)
        # Packed sequences are planned apart; of another schedule, runs along the keys and ranges of
        # data are found once.
        if name != "packed":
            assert turn < 3 or len(plays) == (4 if is_given else 2)
        right = fg.Attention(**declared)(**given)
        assert torch.equal(out, right)
        for mine, wanted in zip(got, torch.autograd.grad(right, leaves, grad), strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-2, atol=1e-2)


def test_one_schedule_for_many_calls(plays: list[Play]) -> None:
    """As layers share it: forward and backward are a record each, and nothing else is done."""
    attend, doc = fg.Attention(masks.causal_document), documents()
    schedule = schedule_of(attend, dense(doc=doc))
    for turn in range(6):
        given = dense(doc=doc)
        right = fg.Attention(masks.causal_document)(**given)
        plays.clear()
        assert torch.equal(attend(**given, schedule=schedule), right)
        assert turn < 3 or len(plays) == 1
        leaves = [given[x].requires_grad_() for x in "qkv"]
        plays.clear()
        out = attend(**given, schedule=schedule)
        torch.autograd.grad(out.sum(), leaves)
        assert torch.equal(out, right)
        assert turn < 3 or len(plays) == 2


def test_another_schedule_than_the_one_that_was_given() -> None:
    """Of the same tiles, it is read; of another mask, it is refused as ever."""
    attend, other = fg.Attention(masks.causal_document), fg.Attention(masks.document)
    for _ in range(5):
        given = dense(doc=documents())
        out = attend(**given, schedule=schedule_of(attend, given))
        assert torch.equal(out, fg.Attention(masks.causal_document)(**given))
    with pytest.raises(fg.FlashgenError, match="another one"):
        attend(**given, schedule=schedule_of(other, given))
    with pytest.raises(fg.FlashgenError, match="schedule is a str"):
        attend(**given, schedule="made")


def test_in_many_threads_on_streams_of_their_own() -> None:
    attend, problems = fg.Attention(masks.causal), []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(30):
                given = dense()
                leaves = [given[x].requires_grad_() for x in "qkv"]
                grad = torch.randn_like(given["q"])
                out = attend(**given)
                got = (out, *torch.autograd.grad(out, leaves, grad))
                right = attend(**given, backend="portable")
                wanted = (right, *torch.autograd.grad(right, leaves, grad))
                for mine, other in zip(got, wanted, strict=True):
                    if not torch.allclose(mine, other, rtol=2e-2, atol=2e-2):
                        problems.append((mine - other).abs().max().item())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert not problems


def test_edits_of_what_was_saved_are_seen() -> None:
    attend = fg.Attention(masks.causal)
    for _ in range(4):
        given = dense()
        leaves = [given[x].requires_grad_() for x in "qkv"]
        attend(**given).sum().backward()
    out = attend(**given)
    with torch.no_grad():
        leaves[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
