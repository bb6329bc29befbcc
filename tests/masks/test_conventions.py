"""Whose window counts what: the rows of the table in docs/masks.md, by counting keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen import masks

N = 40
MIDDLE = 20


def counts(mask: Any, n: int = N) -> list[int]:
    """How many keys each query sees."""
    return mask.dense(n, n)[0, 0].sum(1).tolist()


def seen(mask: Any, i: int = MIDDLE) -> list[int]:
    """The keys of one query."""
    return mask.dense(N, N)[0, 0, i].nonzero().flatten().tolist()


# What the other library writes, the same here, and how far the query sees to each side.
SAME: list[tuple[str, Any, int, int]] = [
    ("sliding_window(window=5)", masks.sliding_window(window=5), 4, 0),
    ("HF sliding_window=5", masks.sliding_window(window=5), 4, 0),
    ("FA window_size=(4, 0), causal", masks.sliding_window(window=4 + 1), 4, 0),
    ("FA window_size=(4, 2)", masks.local(left=4, right=2), 4, 2),
    ("Paddle window_size=4, causal", masks.sliding_window(window=4 + 1), 4, 0),
    ("Paddle window_size=4, both ways", masks.local(left=4, right=4), 4, 4),
    ("FlashMask generator window_size=5", masks.sliding_window(window=5), 4, 0),
    ("attention-gym sliding_window(4)", masks.sliding_window(window=4 + 1), 4, 0),
    ("xFormers _window_size=5", masks.from_seqlens([N], window=5), 4, 0),
    ("xFormers (window_left, window_right)=(4, 2)", masks.from_seqlens([N], window=(4, 2)), 4, 2),
    ("Magi window_size=(4, 2)", masks.local(left=4, right=2), 4, 2),
    ("NATTEN kernel_size=5", masks.natten(N, 5), 2, 2),
    ("NATTEN kernel_size=6", masks.natten(N, 6), 3, 2),
    ("NATTEN kernel_size=5, is_causal", masks.natten(N, 5, causal=True), 4, 0),
]


@pytest.mark.parametrize(("mask", "left", "right"), [s[1:] for s in SAME], ids=[s[0] for s in SAME])
def test_reach_of_a_window(mask: Any, left: int, right: int) -> None:
    assert seen(mask) == list(range(MIDDLE - left, MIDDLE + right + 1))


def test_edges_cut_windows_and_move_neighborhoods() -> None:
    assert counts(masks.sliding_window(window=5))[:6] == [1, 2, 3, 4, 5, 5]
    assert counts(masks.local(left=2, right=1))[:3] == [2, 3, 4]
    assert counts(masks.local(left=2, right=1))[-1] == 3
    for kernel in (1, 2, 5, 6, N):
        assert counts(masks.natten(N, kernel)) == [kernel] * N
    assert counts(masks.natten(N, 5, causal=True))[:6] == [1, 2, 3, 4, 5, 5]


@pytest.mark.parametrize("window", [1, 2, 127, 128, 129])
def test_window_beside_a_tile(window: int) -> None:
    """CASES: transformers#39408 and others, windows off by one; counted at tile boundaries."""
    n = 300
    expected = [min(i + 1, window) for i in range(n)]
    assert counts(masks.sliding_window(window=window), n) == expected
    assert counts(masks.from_seqlens([n], window=window), n) == expected
    eye = torch.eye(n)[None, None]
    zero = torch.zeros(1, 1, n, 16)
    out = fg.Attention(mask=masks.sliding_window(window=window))(zero, zero, eye[..., :256])
    reached = (out[0, 0, :256] > 0).sum(1).tolist()
    assert reached == expected[:256]


@pytest.mark.parametrize("width", [1, 3, 64])
def test_both_sides_of_local(width: int) -> None:
    """CASES: transformers#40700: each side's half width is given by itself."""
    dense = masks.local(left=width, right=width).dense(200, 200)[0, 0]
    assert dense[100].sum() == 2 * width + 1
    assert torch.equal(dense, dense.T)


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 9), (3, 9), (5, 129), (9, 3), (129, 127)])
def test_windows_move_with_the_bottom_right_diagonal(q_len: int, kv_len: int) -> None:
    """CASES: TE#1197, zml#763: the window of the last query ends at the last key."""
    reaches = (
        (masks.causal, kv_len + q_len, 0),
        (masks.sliding_window(window=4), 3, 0),
        (masks.local(left=3, right=1), 3, 1),
    )
    for mask, left, right in reaches:
        dense = mask.dense(q_len, kv_len)[0, 0]
        for row in range(q_len):
            diagonal = row + kv_len - q_len
            keys = set(range(diagonal - left, diagonal + right + 1)) & set(range(kv_len))
            assert set(dense[row].nonzero().flatten().tolist()) == keys


@pytest.mark.parametrize(("q_len", "kv_len"), [(3, 8), (8, 3), (130, 129), (7, 7)])
def test_alignments(q_len: int, kv_len: int) -> None:
    """CASES: xformers#931: both alignments, said explicitly."""
    ones = torch.ones(q_len, kv_len, dtype=torch.bool)
    assert torch.equal(masks.top_left.dense(q_len, kv_len)[0, 0], ones.tril())
    assert torch.equal(masks.causal.dense(q_len, kv_len, q_offset=0)[0, 0], ones.tril())
    lower = ones.tril(kv_len - q_len)
    assert torch.equal(masks.bottom_right.dense(q_len, kv_len)[0, 0], lower)
    assert torch.equal(masks.causal.dense(q_len, kv_len)[0, 0], lower)


def test_offsets_per_batch() -> None:
    offsets = torch.tensor([0, 3, -2])
    dense = masks.sliding_window(window=2).dense(3, 6, batch=3, q_offset=offsets)[:, 0]
    for batch, offset in enumerate(offsets.tolist()):
        for row in range(3):
            keys = [k for k in (row + offset - 1, row + offset) if 0 <= k < 6]
            assert dense[batch, row].nonzero().flatten().tolist() == keys


def test_prefix_is_a_length() -> None:
    """PyTorch's blog writes k <= P; here and in attention-gym position P is outside."""
    assert seen(masks.prefix_lm(prefix=30)) == list(range(30))
    assert torch.equal(masks.prefix_lm(prefix=0).dense(9, 9), masks.causal.dense(9, 9))
    assert masks.prefix_lm(prefix=9).dense(9, 9).all()


def test_dilated_windows() -> None:
    assert seen(masks.dilated_window(window=3, dilation=4)) == [12, 16, 20]
    gym = masks.local(left=8, right=8) & masks.strided(dilation=4)
    assert seen(gym) == [12, 16, 20, 24, 28]
    one = masks.dilated_window(window=7, dilation=1)
    assert torch.equal(one.dense(N, N), masks.sliding_window(window=7).dense(N, N))


def test_global_windows() -> None:
    assert seen(masks.global_window(window=3, globals=2)) == [0, 1, 18, 19, 20]
    assert seen(masks.global_local(left=1, right=1, globals=2)) == [0, 1, 19, 20, 21]
    assert seen(masks.global_local(left=1, right=1, globals=2), 1) == list(range(N))


def test_magi_global_rule() -> None:
    """Magi's query i sees global keys [0, min(G, i + r + 1)): no key after its window."""
    left, right, many = 2, 1, 6
    mask = masks.local(left=left, right=right) | (masks.local(left=N, right=right) & first(many))
    dense = mask.dense(N, N)[0, 0]
    for i in range(N):
        reach = [*range(min(many, i + right + 1)), *range(max(0, i - left), min(N, i + right + 1))]
        assert dense[i].nonzero().flatten().tolist() == sorted(set(reach))


def first(count: int) -> Any:
    return masks.padding(kv_valid=count, q_valid=N)


def test_chunks() -> None:
    assert seen(masks.chunked(chunk=8)) == [16, 17, 18, 19, 20]
    assert counts(masks.chunked(chunk=8))[:9] == [1, 2, 3, 4, 5, 6, 7, 8, 1]
    both_ways = masks.document(doc=torch.arange(N)[None] // 8)
    assert seen(both_ways) == list(range(16, 24))


def test_spatial_head_rounds_as_sparse_videogen_does() -> None:
    width, frame = 2, 150
    reach = width * frame // 128 * 128
    mask = masks.spatial_head(prompt=0, reach=reach, sink=0)
    dense = mask.dense(800, 800)[0, 0]
    assert dense[400].nonzero().flatten().tolist() == list(range(400 - 255, 400 + 256))
