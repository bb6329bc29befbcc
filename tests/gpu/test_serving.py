"""Steps of decoding as servers take them: captured with pages, merged, in large pools."""

from __future__ import annotations

from typing import Any

import pytest
import stored
import torch
from dense_checks import oracle
from graphs import captured

import flashgen as fg
from flashgen import masks

pytestmark = [
    pytest.mark.gpu,
    # Hopper's kernel for latent heads has barriers.
    pytest.mark.timeout(60, method="thread"),
]
MLA, SCALE = fg.MLA(rank=512, rope=64), 192**-0.5
# A rounding of the weights and one of the result, of averages of values of about 1.
TOLERANCE = 1.6e-2


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("size", [16, 64])
def test_a_graph_serves_other_lengths_and_pages(latent: bool, size: int) -> None:
    """Longer, shorter and no sequences, in pages that lie elsewhere, up to the table's width."""
    B, T, queries = 3, 4096, 2
    pages = torch.empty(B, T // size, dtype=torch.int32, device="cuda")
    lens = torch.tensor([100, 3000, T], device="cuda", dtype=torch.int32)
    width, heads = (576, 1) if latent else (128, 2)
    pools = [randn(B * T // size, size, heads, width) for _ in range(1 if latent else 2)]
    q = randn(B, 16, queries, width)
    attend = fg.Attention(masks.causal, heads=MLA if latent else None)

    def shuffle() -> None:
        pages.copy_(torch.randperm(B * T // size).reshape(B, -1))

    def step() -> Any:
        return attend(q, *pools, page_table=pages, kv_lens=lens, scale=SCALE, return_lse=True)

    shuffle()
    graph, (out, lse) = captured(step)
    for now in ([T, 0, 1], [5, T, 2049], [0, 0, 0], [100, 3000, T]):
        shuffle()
        lens.copy_(torch.tensor(now, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        k, v = (x[pages.long()].flatten(1, 2).transpose(1, 2) for x in (pools[0], pools[-1]))
        i = torch.arange(queries, device="cuda")[None, :, None] + (lens - queries)[:, None, None]
        j = torch.arange(T, device="cuda")
        allowed = ((j <= i) & (j < lens[:, None, None]))[:, None]
        right, right_lse = oracle(q, k, v[..., :512], allowed, SCALE)
        torch.testing.assert_close(out.double(), right, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(lse.double(), right_lse, rtol=1e-5, atol=2e-5)
        assert (out[right_lse == -torch.inf] == 0).all()


PHASES = {
    "prefill": ((16, 300, 64), (4, 1000, 64), None),
    "decode": ((16, 1, 128), (4, 1000, 128), None),
    "latent": ((16, 2, 576), (1, 1000, 576), MLA),
}


@pytest.mark.parametrize("backend", ["portable", "auto"])
@pytest.mark.parametrize("phase", PHASES)
def test_parts_make_the_whole(phase: str, backend: str) -> None:
    """The LSE of every kernel is the natural one, which merging weighs by."""
    queries, keys, heads = PHASES[phase]
    q, tensors = randn(2, *queries), [randn(2, *keys) for _ in range(1 if heads else 2)]
    attend = fg.Attention(heads=heads)
    options: dict[str, Any] = {"scale": SCALE, "return_lse": True, "backend": backend}
    whole = attend(q, *tensors, **options)
    parts = [
        state
        for piece in (slice(0, 0), slice(0, 333), slice(333, None))
        for state in attend(q, *(x[:, :, piece].contiguous() for x in tensors), **options)
    ]
    out, lse = fg.merge(*parts)
    torch.testing.assert_close(out, whole[0], rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(lse, whole[1], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("backend", ["portable", "auto"])
def test_pools_of_latent_rows_beyond_2_to_the_31(backend: str) -> None:
    """A sequence in the last pages, NaN everywhere else: with q = 0, the mean of its rows."""
    size, length = 64, 200
    count, used = 2**31 // (size * 576) + 20, -(-length // size)
    pool = torch.full((count, size, 1, 576), stored.NAN, dtype=torch.bfloat16, device="cuda")
    pool[-used:] = torch.arange(used * size, device="cuda").reshape(used, size, 1, 1).bfloat16()
    table = torch.arange(count - used, count, dtype=torch.int32, device="cuda")[None]
    lens = torch.tensor([length], dtype=torch.int32, device="cuda")
    q = torch.zeros(1, 16, 1, 576, dtype=torch.bfloat16, device="cuda")
    attend = fg.Attention(heads=MLA)
    out = attend(q, pool, page_table=table, kv_lens=lens, scale=SCALE, backend=backend)
    torch.testing.assert_close(out.float(), torch.full_like(out, (length - 1) / 2).float())


@pytest.mark.parametrize("heads", [(6, 1), (12, 4), (7, 1)], ids=str)
@pytest.mark.parametrize("queries", [1, 3])
def test_groups_that_are_no_power_of_two(heads: tuple[int, int], queries: int) -> None:
    q, (k, v) = randn(2, heads[0], queries, 64), (randn(2, heads[1], 2000, 64) for _ in "kv")
    out, lse = fg.Attention(masks.causal)(q, k, v, return_lse=True)
    i, j = torch.arange(queries, device="cuda")[:, None], torch.arange(2000, device="cuda")
    right, right_lse = oracle(q, k, v, j <= i + 2000 - queries, 64**-0.5)
    torch.testing.assert_close(out.double(), right, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(lse.double(), right_lse, rtol=1e-5, atol=2e-5)
