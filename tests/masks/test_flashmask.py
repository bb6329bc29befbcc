"""FlashMask: the paper's golden vectors, its tile example, and what must be refused."""

from __future__ import annotations

import pytest
import torch

import flashgen as fg
from flashgen import masks

# Figure 1(b) of arXiv 2410.01359, N = 10: the vectors of each mask. LTS, LTE, UTS, UTE.
TEN = [10] * 10
GOLDEN: dict[str, tuple[bool, list[list[int]]]] = {
    "causal": (True, [TEN]),
    "sliding_window": (True, [[3, 4, 5, 6, 7, 8, 9, 10, 10, 10]]),
    "causal_document": (True, [[4, 4, 4, 4, 7, 7, 7, 10, 10, 10]]),
    "document": (
        False,
        [[4, 4, 4, 4, 7, 7, 7, 10, 10, 10], [0, 0, 0, 0, 4, 4, 4, 7, 7, 7]],
    ),
    "shared_question": (True, [[10, 10, 10, 10, 7, 7, 7, 10, 10, 10]]),
    "global_local": (
        False,
        [
            [10, 10, 4, 5, 6, 7, 8, 9, 10, 10],
            TEN,
            [0, 0, 0, 0, 2, 2, 2, 2, 2, 2],
            [0, 0, 0, 0, 3, 4, 5, 6, 7, 8],
        ],
    ),
    "causal_blockwise": (
        True,
        [[4, 4, 4, 4, 10, 10, 10, 10, 10, 10], [7, 7, 7, 7, 10, 10, 10, 10, 10, 10]],
    ),
    "prefix_document": (
        False,
        [[3, 3, 3, 5, 5, 10, 10, 10, 10, 10], [0, 0, 2, 3, 3, 5, 5, 7, 8, 9]],
    ),
    "prefix_lm": (False, [TEN, [0, 0, 0, 0, 0, 5, 6, 7, 8, 9]]),
    "qk_sparse": (
        True,
        [[10, 10, 2, 3, 4, 5, 6, 7, 10, 10], [10, 10, 5, 5, 5, 8, 8, 8, 10, 10]],
    ),
    "hash_sparse": (
        False,
        [[2, 2, 4, 5, 5, 8, 8, 9, 10, 10], [0, 0, 1, 3, 4, 4, 5, 7, 8, 9]],
    ),
    "random_eviction": (True, [[10, 4, 8, 6, 10, 7, 10, 9, 10, 10]]),
}
DOC = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2, 2]])

# The same twelve masks by their formulas here, as figure 1(a) draws them.
BY_FORMULA = {
    "causal": masks.causal,
    "sliding_window": masks.sliding_window(window=3),
    "causal_document": masks.causal_document(doc=DOC),
    "document": masks.document(doc=DOC),
    "shared_question": masks.shared_question(doc=torch.zeros(1, 10).long(), answer=DOC),
    "global_local": masks.global_local(left=1, right=1, globals=2),
    "causal_blockwise": masks.causal_blockwise(doc=DOC, test_doc=2),
    "prefix_document": masks.prefix_document(
        doc=torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2, 2]]),
        prefix_end=torch.tensor([[2, 2, 2, 5, 5, 7, 7, 7, 7, 7]]),
    ),
    "prefix_lm": masks.prefix_lm(prefix=5),
    "qk_sparse": masks.qk_sparse(segment=torch.tensor([[-1, -1, 0, 0, 0, 1, 1, 1, -1, -1]])),
    "hash_sparse": masks.hash_sparse(
        first_query=torch.tensor([[[0, 0, 1, 3, 4, 4, 5, 7, 8, 9]]]),
        end_query=torch.tensor([[[2, 2, 4, 5, 5, 8, 8, 9, 10, 10]]]),
    ),
    "random_eviction": masks.random_eviction(
        evicted_at=torch.tensor([[[10, 4, 8, 6, 10, 7, 10, 9, 10, 10]]])
    ),
}


def columns(vectors: list[list[int]]) -> torch.Tensor:
    """[1, 1, S, C] int32."""
    return torch.tensor(vectors, dtype=torch.int32).T[None, None].contiguous()


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_vectors(name: str) -> None:
    causal, vectors = GOLDEN[name]
    formula = BY_FORMULA[name].dense(10, 10)
    given = masks.from_flashmask(columns(vectors), causal=causal)
    assert torch.equal(given.dense(10, 10), formula)
    by_position = masks.flashmask.dense(
        10, 10, columns=columns(vectors), causal=causal, vectors=len(vectors)
    )
    assert torch.equal(by_position, formula)


# Figure 1(c): N = 16, tiles of 4 x 4, causal with two vectors. . skipped, P partial, F full.
LTS = [13, 5, 5, 5, 6, 6, 9, 9, 9, 12, 12, 12, 16, 16, 16, 16]
LTE = [15, 14, 14, 15, 12, 12, 11, 11, 16, 16, 16, 16, 16, 16, 16, 16]
TILES = ["P...", "PP..", "PPP.", "PF.P"]


def test_tile_example() -> None:
    dense = masks.from_flashmask(columns([LTS, LTE]), causal=True).dense(16, 16)[0, 0]
    tiles = dense.reshape(4, 4, 4, 4).transpose(1, 2).flatten(2)
    kinds = ["".join("F" if t.all() else "P" if t.any() else "." for t in row) for row in tiles]
    assert kinds == TILES


@pytest.mark.parametrize("planner", ["auto", "bounds", "exact"])
def test_tile_example_scheduled(planner: str) -> None:
    # Four times as large: the smallest tiles are 16 x 16.
    vectors = columns([[4 * row for row in v for _ in range(4)] for v in (LTS, LTE)])
    attend = fg.Attention(mask=masks.from_flashmask(vectors, causal=True))
    q = torch.zeros(1, 1, 64, 16)
    schedule = attend.schedule(q, q, q, block_size=(16, 16), planner=planner)
    states = schedule.to_dense()[0, 0].tolist()
    kinds = ["".join(".PF"[state] for state in row) for row in states]
    if planner == "bounds":
        # Bounds may say partial where a tile is empty or full, never anything else.
        pairs = zip("".join(kinds), "".join(TILES), strict=True)
        assert all(said in (truth, "P") for said, truth in pairs)
    else:
        assert kinds == TILES


def test_diagonal_of_a_dropped_segment() -> None:
    """CASES: PaddlePaddle/flash-attention#48: the cell (j, j) obeys LTS <= j."""
    n = 130
    start, end = torch.full((n,), n), torch.full((n,), n)
    start[60:70], end[60:70] = torch.arange(60, 70), 70
    mask = masks.from_flashmask(columns([start.tolist(), end.tolist()]), causal=True)
    diagonal = mask.dense(n, n)[0, 0].diagonal()
    assert diagonal.nonzero().flatten().tolist() == [*range(60), *range(70, n)]


def test_two_columns_depend_on_causal() -> None:
    vectors = columns([[2, 2, 4, 4], [3, 3, 1, 4]])
    causal = masks.from_flashmask(vectors, causal=True).dense(4, 4)[0, 0].int().tolist()
    both_ways = masks.from_flashmask(vectors, causal=False).dense(4, 4)[0, 0].int().tolist()
    assert causal == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [1, 1, 1, 1]]
    assert both_ways == [[0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 1, 0], [0, 0, 1, 0]]


@pytest.mark.parametrize("bounds", [(0, 0), (3, 3), (7, 2), (-5, 0), (8, 99)])
def test_empty_ranges_hide_nothing(bounds: tuple[int, int]) -> None:
    start, end = bounds
    mask = masks.from_flashmask(columns([[start] * 8, [end] * 8]), causal=True)
    assert torch.equal(mask.dense(8, 8), masks.causal.dense(8, 8))


def test_rows_and_positions() -> None:
    """FlashMask counts rows of the queries given; `flashmask` counts positions."""
    vectors = columns([[2] * 6])
    by_row = masks.from_flashmask(vectors, causal=True).dense(4, 6)[0, 0].sum(1).tolist()
    by_position = masks.flashmask.dense(4, 6, columns=vectors, causal=True, vectors=1)
    assert by_row == [3, 4, 0, 0]
    assert by_position[0, 0].sum(1).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("shape", "dtype", "causal", "problem"),
    [
        ((1, 1, 8, 4), torch.int32, True, "1 or 2 vectors, not 4"),
        ((1, 1, 8, 3), torch.int32, True, "1 or 2 vectors, not 3"),
        ((1, 1, 8, 1), torch.int32, False, "2 or 4 vectors, not 1"),
        ((1, 1, 8, 3), torch.int32, False, "2 or 4 vectors, not 3"),
        ((1, 1, 8, 0), torch.int32, True, "vectors, not 0"),
        ((1, 8, 1), torch.int32, True, r"\[B, Hm, Skv, C\]"),
        ((8,), torch.int32, True, r"\[B, Hm, Skv, C\]"),
        ((1, 1, 8, 1), torch.int64, True, "int32"),
        ((1, 1, 8, 1), torch.float32, True, "int32"),
    ],
)
def test_refused(shape, dtype, causal: bool, problem: str) -> None:
    with pytest.raises(fg.FlashgenError, match=problem):
        masks.from_flashmask(torch.zeros(shape, dtype=dtype), causal=causal)


def test_wrong_lengths_are_refused_at_the_call() -> None:
    too_short = masks.from_flashmask(torch.zeros(1, 1, 7, 1, dtype=torch.int32), causal=True)
    with pytest.raises(fg.FlashgenError, match="vectors of 7 keys"):
        too_short.dense(8, 8)
    three_heads = masks.from_flashmask(torch.zeros(1, 3, 8, 1, dtype=torch.int32), causal=True)
    with pytest.raises(fg.FlashgenError, match="h_kv"):
        three_heads.dense(8, 8, heads=2)
    with pytest.raises(fg.FlashgenError, match="last dimension of columns is 1"):
        masks.flashmask.dense(8, 8, columns=torch.zeros(1, 1, 8, 1).int(), causal=True, vectors=2)


@pytest.mark.parametrize("heads", ["shared", "key", "query"])
def test_heads_under_gqa(heads: str, seed: int) -> None:
    """CASES: Paddle#77466: a mask per query head, different inside a group."""
    n, q_heads, kv_heads = 40, 6, 2
    count = {"shared": 1, "key": kv_heads, "query": q_heads}[heads]
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randint(0, n, (1, count, n, 1), generator=generator, dtype=torch.int32)
    mask = masks.from_flashmask(vectors, causal=True, per_query_head=heads == "query")
    q = torch.randn(1, q_heads, n, 16, generator=generator)
    k = torch.randn(1, kv_heads, n, 16, generator=generator)
    out = fg.Attention(mask=mask)(q, k, k, backend="cpu")
    start = vectors.repeat_interleave(q_heads // count, dim=1)[..., 0].unsqueeze(2)
    row = torch.arange(n)[:, None]
    allowed = (torch.arange(n) <= row) & (row < start)
    keys = k.repeat_interleave(q_heads // kv_heads, dim=1)
    scores = (q @ keys.mT / 4).masked_fill(~allowed, -torch.inf)
    expected = torch.softmax(scores, -1).nan_to_num(0.0) @ keys
    torch.testing.assert_close(out, expected)
