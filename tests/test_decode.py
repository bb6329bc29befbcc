"""Decoding, as far as nothing has to run: which kernel, which blocks, which splits and tiles."""

from __future__ import annotations

import itertools

import pytest
import torch

import flashgen as fg
from flashgen import masks
from flashgen.decoding import choose_kernel
from flashgen.schedule import visits
from flashgen.tiling import Tiling, target_of
from flashgen.tiling.decode import WHOLE_ROWS, Blocks, choose_blocks, choose_splits, deal

H200 = target_of("cuda", 90)
BF16, FP32 = torch.bfloat16, torch.float32


def kernel(q_len: int, kv_len: int = 100, batch: int = 2, attend=None, grad=False, **options):
    attend = attend or fg.Attention(masks.causal)
    latent = attend._program.heads is not None
    q = torch.zeros(batch, 4, q_len, 48, requires_grad=grad)
    k = torch.zeros(batch, 1 if latent else 2, kv_len, 48)
    arguments = {"scale": 1.0} if latent else {}
    call = attend._check_look(q, k, None if latent else k, arguments)
    return choose_kernel(call, "portable", **options)


def test_few_queries_decode():
    assert kernel(1).decodes
    assert kernel(16).decodes
    assert not kernel(17).decodes
    assert str(kernel(3)) == "decode: Sq = 3, at most 16"
    assert not kernel(1, asked="hopper").decodes


def test_gradients_take_the_ordinary_kernel():
    assert kernel(1, grad=True).why == "gradients are asked for"
    with torch.no_grad():
        assert kernel(1, grad=True).decodes


def test_some_more_queries_decode_where_a_gpu_would_be_idle(monkeypatch):
    monkeypatch.setattr("flashgen.launch.decode.processors", lambda device: 132)
    assert kernel(40, kv_len=5000).decodes
    assert not kernel(40, kv_len=5000, batch=20).decodes
    assert not kernel(40, kv_len=5000, invariant=True).decodes
    assert not kernel(65, kv_len=5000).decodes


@pytest.mark.parametrize(
    ("most", "options", "why"),
    [
        (16, {}, "packed queries, at most 16 of a sequence"),
        (17, {}, "the queries are packed, up to 17 of a sequence"),
        (3, {"invariant": True}, "the queries are packed, and splits would depend on the batch"),
        (3, {"asked": "hopper"}, "Hopper's kernel is asked for"),
    ],
)
def test_packed_queries_decode_where_they_are_few(most, options, why):
    cu = torch.tensor([0, most, most + 1], dtype=torch.int32)
    q, k = torch.zeros(most + 1, 4, 16), torch.zeros(most + 1, 2, 16)
    given = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    found = choose_kernel(fg.Attention()._check_look(q, k, k, given), "portable", **options)
    assert found.why == why
    assert found.decodes == found.dealt == (why.startswith("packed"))


def test_latent_heads_always_decode():
    attend = fg.Attention(masks.causal, heads=fg.MLA(32, 16))
    assert kernel(100, attend=attend).decodes
    with pytest.raises(fg.FlashgenError, match="no gradient on a GPU"):
        kernel(1, attend=attend, grad=True)
    with pytest.raises(fg.FlashgenError, match="multiple of 16"):
        kernel(1, attend=fg.Attention(heads=fg.MLA(40, 8)))


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("tile_m", [16, 48, 64, 128])
def test_blocks_hold_every_row_and_lie_in_a_row_of_tiles(dtype, tile_m):
    for q_len, group in itertools.product((1, 2, 3, 5, 16, 17, 40, 100), (1, 2, 3, 6, 16, 128)):
        blocks = choose_blocks(H200, dtype, (128, 128), (q_len, group), (tile_m, 64))
        rows = blocks.tiling.block_m
        assert rows in (16, 32)
        assert rows == blocks.group * blocks.queries
        assert blocks.queries >= 1
        assert q_len <= tile_m or tile_m % blocks.queries == 0
        covered = blocks.count(q_len, group) * rows
        assert covered >= q_len * group


@pytest.mark.parametrize("arch", [80, 86, 90, 100, 120])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_stages_fit_into_shared_memory(arch, dims):
    target = target_of("cuda", arch)
    tiling = choose_blocks(target, BF16, dims, (1, 4), (64, 64)).tiling
    row = 2 * sum(256 if d == 256 else d for d in dims)
    assert tiling.stages * tiling.block_n * row + 32 * 2 * dims[0] <= target.shared


def blocks() -> Blocks:
    return choose_blocks(H200, BF16, (128, 128), (1, 4), WHOLE_ROWS)


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize(("programs", "capacity"), [(8, 131072), (128, 8192), (512, 8192)])
def test_splits_fill_a_gpu(programs, capacity, even):
    found = choose_splits(blocks(), programs, capacity, 132, even=even)
    rounds = found.count * programs / (132 * blocks().resident)
    assert rounds / -(-rounds // 1) > 0.9
    assert capacity / found.count >= 256


def test_sequences_of_different_lengths_have_more_splits():
    assert choose_splits(blocks(), 512, 32768, 132, even=True).count == 1
    assert choose_splits(blocks(), 512, 32768, 132).count == 4


def test_a_multiprocessor_has_one_large_block_where_it_has_room():
    assert blocks().tiling == Tiling(16, 128, 4, 3)
    assert blocks().resident == 1
    usual = {"target": H200, "dtype": BF16, "dims": (128, 128), "rows": (1, 4), "tile": WHOLE_ROWS}
    assert choose_blocks(**usual, page_size=256) == blocks()
    eight_warps = Tiling(16, 128, 8, 3)
    assert choose_blocks(**usual, page_size=16).tiling == eight_warps
    assert choose_blocks(**usual, page_size=64) == Blocks(Tiling(16, 64, 4, 5), 16, 1)
    assert choose_blocks(**usual, plain=False).tiling == eight_warps
    others = {
        "dtype": FP32,
        "tile": (64, 64),
        "target": target_of("cuda", 80),
        "dims": (256, 128),
        "rows": (2, 16),
    }
    for name, value in others.items():
        assert choose_blocks(**{**usual, name: value}).tiling.block_n < 128


@pytest.mark.parametrize(("lines", "batch"), [(8, 16), (8, 64), (8, 3), (1, 16), (200, 5)])
def test_dealt_tiles_fill_a_gpu(lines, batch):
    """Whole sequences to a program, or whole programs to a sequence, where that fills it too."""
    found = deal(blocks(), lines, batch, 8192, 132)
    rounds = found.count * lines / (132 * blocks().resident)
    assert rounds / -(-rounds // 1) > 0.9
    if batch in (16, 64):
        assert found.count % batch == 0 or batch % found.count == 0
    assert str(found) == f"the tiles of all sequences dealt to {found.count} programs"


def test_few_keys_are_dealt_to_few_programs():
    assert deal(blocks(), 8, 2, 512, 132).count == 4
    assert deal(blocks(), 8, 0, 0, 132).count == 1


def test_short_rows_are_not_split():
    assert choose_splits(blocks(), 4, 200, 132).count == 1
    assert choose_splits(blocks(), 4, 0, 132).count == 1


@pytest.mark.parametrize("capacity", [1, 2048, 2049, 100_000])
def test_invariant_splits_depend_on_the_capacity_alone(capacity):
    found = {choose_splits(blocks(), n, capacity, sm, invariant=True) for n, sm in ((1, 8), (9, 1))}
    (splits,) = found
    assert splits.count >= 2
    assert splits.count * splits.tiles * blocks().tiling.block_n >= capacity
    assert "16 tiles each" in str(splits)


def test_visits_of_groups():
    """By brute force: a tile is visited if any head of the group visits it."""
    states = torch.randint(0, 3, (2, 6, 2, 40)).to(torch.int8)
    states[0, :, 0] = 0
    found = visits(states, 3)
    for b, h, row in itertools.product(range(2), range(2), range(2)):
        expected = (states[b, 3 * h : 3 * h + 3, row] != 0).any(0).nonzero().flatten().tolist()
        runs = found.runs[b, h, row].tolist()
        assert [tile for first, past in runs for tile in range(first, past)] == expected
        assert int(found.counts[b, h, row]) == len(expected)


def test_explain_says_how():
    q, k = torch.zeros(1, 4, 2, 32), torch.zeros(1, 2, 300, 32)
    text = fg.Attention(masks.causal).source(q, k, k)
    assert "def attention_decode(" in text
    assert "def merge(" in text
    assert "def visit(" in text
    assert "def attention_forward(" not in text
