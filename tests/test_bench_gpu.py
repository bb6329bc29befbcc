"""What `bench gpu`, `flashmask` and `scores` do, without a GPU: peers that are written here."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from flashgen import bench
from flashgen.bench import (
    compare,
    flashmask,
    flashmask_cases,
    gpu,
    peers,
    scores,
    sides,
    work,
)
from flashgen.bench.documents import Sample, read_documents
from flashgen.bench.flex import count
from flashgen.bench.measure import Times
from flashgen.bench.table import Differs, Row, rows_of
from flashgen.bench.workers import Found
from flashgen.errors import FlashgenError

CPU = torch.device("cpu")
Tensors = Sequence[torch.Tensor]


def dense(mask: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score: Any = None) -> Any:
    """Attention of a mask_mod and a score_mod, for every pair."""
    b, h, i, j = (torch.arange(n).reshape(shape) for n, shape in indices(q))
    scores = (q.float() @ k.float().mT) * q.shape[-1] ** -0.5
    if score is not None:
        scores = score(scores, b, h, i, j)
    if mask is not None:
        scores = scores.masked_fill(~mask(b, h, i, j), float("-inf"))
    return (scores.softmax(-1).nan_to_num() @ v.float()).to(q.dtype)


def indices(q: torch.Tensor) -> list[tuple[int, list[int]]]:
    batch, heads, length, _ = q.shape
    return [(batch, [-1, 1, 1, 1]), (heads, [-1, 1, 1]), (length, [-1, 1]), (length, [-1])]


def fake_flex(mask: Any, counted: Any, *, score: Any = None, backend: Any = None) -> Any:
    """Visits the tiles that were counted and no other, as a block mask makes FlexAttention do."""

    def both(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        visited = counted.tiles > 0
        visited = visited.repeat_interleave(128, -1).repeat_interleave(128, -2)
        inside: torch.Tensor = visited if mask is None else visited & mask(b, h, q, k)
        return inside

    return lambda q, k, v: dense(both, q, k, v, score)


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small works, in this process, without timing."""
    monkeypatch.setattr(work, "DEVICE", "cpu")
    for module in (gpu, flashmask, scores):
        monkeypatch.setattr(module, "flex_attention", fake_flex)
        monkeypatch.setattr(module, "in_turns", turns)
    monkeypatch.setattr(
        sides, "medians", lambda calls, rounds: {n: called(c) for n, c in calls.items()}
    )
    monkeypatch.setattr(gpu, "need_gpu", lambda name: None)
    monkeypatch.setattr(gpu, "matmul_rate", lambda: 1e12)
    monkeypatch.setattr(gpu, "machine", lambda: "here")
    monkeypatch.setattr(work, "TOKENS", 256)
    monkeypatch.setattr(flashmask, "TOKENS", 256)
    monkeypatch.setattr(flashmask, "WIDTH", 64)
    monkeypatch.setattr(flashmask, "HEAD_DIMS", (32,))
    monkeypatch.setattr(work, "SHAPES", ((16, 2),))
    monkeypatch.setattr(scores, "SHAPES", ((16, 2),))
    monkeypatch.setattr(scores, "BACKENDS", {gpu.OURS: "auto", scores.PORTABLE: "cpu"})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**9, 10**9))


def called(call: Callable[[], Any]) -> float:
    call()
    return 2.0


def turns(
    works: Sequence[Any], prepare: Any, measure: Any, rounds: int, *most: Any, **alike: Any
) -> Any:
    for one in works:
        yield Found(one, measure(prepare(one), rounds))


@pytest.fixture
def flash_attention_4(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module of its names and layouts, [B, S, H, D] and [T, H, D]."""

    def mask_of(causal: bool, window_size: Any) -> Callable[..., Any]:
        left = 10**9 if window_size[0] is None else window_size[0]
        return lambda b, h, q, k: (k <= q if causal else k >= 0) & (q - k <= left)

    def func(
        q: Any, k: Any, v: Any, *, causal: bool = False, window_size: Any = (None, None)
    ) -> Any:
        heads = [x.transpose(1, 2) for x in (q, k, v)]
        return dense(mask_of(causal, window_size), *heads).transpose(1, 2), None

    def varlen(q: Any, k: Any, v: Any, *, causal: bool, **given: Any) -> Any:
        ends = given["cu_seqlens_q"].tolist()
        assert given["max_seqlen_k"] == max(b - a for a, b in pairwise(ends))
        parts = [
            func(*(x[None, a:b] for x in (q, k, v)), causal=causal)[0][0] for a, b in pairwise(ends)
        ]
        return torch.cat(parts), None

    module = types.ModuleType("flash_attn.cute")
    module.flash_attn_func, module.flash_attn_varlen_func = func, varlen  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    return module


@pytest.mark.usefixtures("on_a_cpu", "flash_attention_4")
def test_masks_beside_all_peers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every peer's results agree with those of the others, in its own layout."""
    monkeypatch.setattr(work, "WINDOW", 50)
    monkeypatch.setattr(peers, "WINDOW", 50)
    cpu = lambda name, causal, *qkv: dense(  # noqa: E731
        (lambda b, h, q, k: q >= k) if causal else None, *qkv
    )
    monkeypatch.setattr(peers, "sdpa", cpu)
    only = ["--only", "full", "sliding", "causal document", "LM"]
    assert bench.main(["gpu", "--rounds", "1", "--lengths", "128", *only]) == 0
    out = capsys.readouterr().out
    assert "Not installed: FlashAttention 3 (no module fa3_fwd_interface)." in out
    assert "D=16 S=128 beside FlexAttention FLASH, 3 sparse masks: forward 1.000" in out
    lines = [line.strip("| ").split(" | ") for line in out.splitlines() if line.startswith("| ")]
    header = lines[0][1:-3]
    shown = {
        mask: {name for name, ms in zip(header, line[1:], strict=False) if ms == "2.000"}
        for mask in only
        for line in lines
        if mask in line[0]
    }
    assert len(shown["full"]) == 6
    assert shown["LM"] == {"FlexAttention", "FlexAttention FLASH", "flashgen"}
    assert shown["sliding"] == {*shown["LM"], "FlashAttention 4"}
    assert shown["causal document"] == shown["sliding"]


@pytest.mark.usefixtures("on_a_cpu")
def test_a_peer_that_fails_and_one_that_differs(
    flash_attention_4: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    flash_attention_4.flash_attn_func = lambda q, k, v, **given: (q + k + v, None)
    flash_attention_4.flash_attn_varlen_func = None
    only = ["--only", "sliding window", "6 S=128 document"]
    assert bench.main(["gpu", "--rounds", "1", "--lengths", "128", *only]) == 1
    told = capsys.readouterr()
    assert "document: FlashAttention 4 fails: TypeError: 'NoneType'" in told.err
    assert "sliding window: out of FlashAttention 4 differs: by" in told.err
    # What was measured is shown all the same.
    row = next(line for line in told.out.splitlines() if line.startswith("| D=16 S=128 sliding"))
    assert row.count("| 2.000") == 4


def test_differences_are_found() -> None:
    """A hundredth is rounding; another row, another mask and a NaN are not."""
    tensors = [torch.randn(1, 2, 128, 16) for _ in range(3)]
    grad = torch.randn(1, 2, 128, 16)

    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k

    right = sides.Side(partial(dense, causal))

    def changed(change: Callable[[torch.Tensor], torch.Tensor]) -> list[str]:
        other = sides.Side(lambda q, k, v: change(dense(causal, q, k, v)), trains=False)
        return sides.differences({"right": right, "other": other}, tensors, grad)

    assert changed(lambda out: out * 1.01) == []
    assert "by 1.000" in changed(lambda out: out * 2)[0]
    assert "a row" in changed(lambda out: out + 0.05 * (torch.arange(128)[:, None] == 5))[0]
    assert "not finite" in changed(lambda out: out / 0)[0]
    less = sides.Side(partial(dense, lambda b, h, q, k: (q >= k) & (k != 3)))
    found = sides.differences({"right": right, "other": less}, tensors, grad)
    assert {line.split()[0] for line in found} == {"out", "dq", "dk", "dv"}


def test_pairs_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As create_block_mask finds them, whatever of b and h a mask reads, in strips or in one."""
    from torch.nn.attention.flex_attention import create_block_mask

    ends = torch.tensor([[100, 300, 384], [0, 384, 128]])
    reading = {
        "both": lambda b, h, q, k: (q >= k) & (q < ends[b, h] + k // 2),
        "neither": lambda b, h, q, k: (q - k).abs() < 150,
        "keys": lambda b, h, q, k: k < ends[b, 0],
    }
    for mask in reading.values():
        counted = count(mask, 2, 3, 384, CPU)
        monkeypatch.setattr("flashgen.bench.flex._STRIP", 1)
        assert torch.equal(count(mask, 2, 3, 384, CPU).tiles, counted.tiles)
        monkeypatch.undo()
        i = torch.arange(384)
        pairs = sum(
            int(mask(torch.tensor(b), torch.tensor(h), i[:, None], i).expand(384, 384).sum())
            for b in range(2)
            for h in range(3)
        )
        assert counted.pairs * 6 == pairs
        right = create_block_mask(mask, 2, 3, 384, 384, device="cpu")
        mine = counted.block_mask(mask)
        for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
            assert torch.equal(getattr(mine, name).expand(2, 3, 3), getattr(right, name))
        assert torch.equal(mine.to_dense().expand(2, 3, 3, 3), right.to_dense())
    assert count(None, 2, 3, 256, CPU).pairs == 256 * 256


def test_who_can_do_what(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(peers.names("full")) == 6
    assert peers.names("document") == [peers.TRITON, peers.FLASH, peers.FA3, peers.FA4]
    assert peers.names("random eviction") == [peers.TRITON, peers.FLASH]
    assert set(peers.absent()) == {peers.FA3, peers.FA4, peers.FLASH}
    with pytest.raises(ImportError, match="FlashAttention 4: no module flash_attn"):
        peers.hand_written(peers.FA4, work.Work(64, 2, 256, "full"))
    monkeypatch.setitem(
        sys.modules, "flash_attn_interface", types.ModuleType("flash_attn_interface")
    )
    assert set(peers.absent()) == {peers.FA4, peers.FLASH}


def test_everybody_side_by_side() -> None:
    """A peer that has no time counts for nothing, work that flashgen hasn't done has no ratio."""
    ms = {("a", "Flex"): 8.0, ("a", "mine"): 4.0, ("a", "other"): None, ("b", "Flex"): 1.0}
    header, lines = compare.matrix(ms, "mine", "Flex", {"a": "5"})
    assert header[:4] == ["work", "Flex", "other", "mine"]
    assert header[4:] == ["TFLOP/s (of matmul)", "x Flex", "x the best peer"]
    assert lines == [
        ["a", "8.000", "", "4.000", "5", "2.000", "2.000"],
        ["b", "1.000", "", "", "", "", ""],
    ]
    ms = {("a", "Flex"): 8.0, ("a", "mine"): 4.0}
    assert compare.matrix(ms, "mine", "Flex", {})[1] == [["a", "8.000", "4.000", "", "2.000"]]


def test_geometric_means() -> None:
    times = {"FlexAttention": Times(8.0, 40.0), "flashgen": Times(4.0, 10.0)}
    rows = rows_of("D=64 S=8 causal", times) + rows_of("D=64 S=8 odd one", {"flashgen": Times(1.0)})
    rows += rows_of("D=64 S=8 b", {"FlexAttention": Times(2.0, 8.0), "flashgen": Times(4.0, 2.0)})
    means = compare.geometric_means(rows, "flashgen", "FlexAttention")
    assert [line.removeprefix("D=64 S=8 beside FlexAttention, ") for line in means] == [
        "2 masks: forward 1.000, least 0.500; backward 4.000, least 4.000",
        "1 sparse masks: forward 0.500, least 0.500; backward 4.000, least 4.000",
    ]


DOCUMENTS = """
Total length: 256, Document count range: (2, 6)
Sample 1, num_docs 3: [(20, 99), (8, 100), (0, 57)]# [1, 0, 1]
Sample 2, num_docs 1: [(200, 256)]# [0]
"""


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    file = tmp_path / "documents.txt"
    file.write_text(DOCUMENTS)
    return file


def test_documents_are_read(documents: Path, tmp_path: Path) -> None:
    first, second = read_documents(documents)[256]
    assert first == Sample((99, 100, 57), (20, 8, 0), (True, False, True))
    assert second.starts == (0, 256)
    published = read_documents()
    assert [len(published[length]) for length in flashmask.LENGTHS] == [5, 5, 5]
    assert all(sum(s.lengths) == n for n, found in published.items() for s in found)
    documents.write_text(DOCUMENTS.replace("57", "58"))
    with pytest.raises(FlashgenError, match="don't fill a row of 256"):
        read_documents(documents)
    documents.write_text("nothing")
    with pytest.raises(FlashgenError, match="no samples"):
        read_documents(documents)
    with pytest.raises(FlashgenError, match="can't be read"):
        read_documents(tmp_path / "missing")


@pytest.mark.parametrize("name", flashmask_cases.CASES[1:])
def test_cases_are_the_same_mask(name: str, documents: Path) -> None:
    samples = read_documents(documents)[256]
    function, ours = flashmask_cases.case(name, samples, 2, 256, CPU)
    b, h, i, j = (torch.arange(n).reshape(s) for n, s in indices(torch.empty(2, 2, 256, 1)))
    right = function(b, h, i, j).expand(2, 2, 256, 256)
    mine = ours.dense(256, 256, batch=2, heads=2)
    assert torch.equal(mine.expand(2, 2, 256, 256), right)
    # Not all of what causal allows, nor nothing.
    assert 0 < float(right.float().mean()) < 0.8


@pytest.mark.slow
def test_densities_are_the_papers() -> None:
    """Tiles of 128 x 128 that are empty, as the paper's tables have them (8K). Where it drew lots
    (how many answers a question has), others were drawn here."""
    length = 8192
    published = [0, 0.49, 0.92, 0.86, 0.74, 0.91, 0.84, 0.67, 0.86, 0.37, 0.52, 0.49]
    samples = read_documents()[length]
    for name, empty in zip(flashmask_cases.CASES, published, strict=True):
        function, _ = flashmask_cases.case(name, samples, 1, length, CPU)
        found = 1 - count(function, len(samples), 1, length, CPU).density
        assert found == pytest.approx(empty, abs=0.0075), name


@pytest.mark.usefixtures("on_a_cpu")
def test_the_papers_masks(documents: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["flashmask", "--rounds", "1", "--documents", str(documents)]
    assert bench.main([*given, "--lengths", "256", "--only", "full", "QK", "eviction"]) == 0
    out = capsys.readouterr().out
    assert out.count("| 2.000 | 2.000 |") == 6
    assert "S=256, 3 works beside FlexAttention: forward 1.000, least 1.000;" in out
    with pytest.raises(FlashgenError, match="no documents of 512 positions"):
        bench.main([*given, "--lengths", "512"])


@pytest.mark.usefixtures("on_a_cpu")
def test_score_functions(capsys: pytest.CaptureFixture[str]) -> None:
    """They agree with FlexAttention's, gradients of the bias included; plain is measured too."""
    only = ["--only", "ALiBi", "bias", "softcap"]
    assert bench.main(["scores", "--rounds", "1", "--lengths", "128", *only]) == 0
    out = capsys.readouterr().out
    assert "D=16 S=128 ALiBi over plain: +0.0 %, +0.0 % (within 10 %)" in out
    assert out.count("| flashgen, portable | 2.000 | 1.000 | 1.00 |") == 4


@pytest.mark.usefixtures("on_a_cpu")
def test_a_failure_of_flashgen_is_no_peers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scores, "BACKENDS", {gpu.OURS: "auto", scores.PORTABLE: "portable"})
    assert bench.main(["scores", "--rounds", "1", "--lengths", "128", "--only", "plain"]) == 1
    told = capsys.readouterr()
    assert "plain: flashgen, portable fails: FlashgenError" in told.err.splitlines()[-1]
    assert "| flashgen | 2.000 |" in told.out


def test_overheads() -> None:
    rows = [
        *rows_of("D=64 S=8 plain", {"FlexAttention": Times(4.0, 8.0), "flashgen": Times(2.0, 4.0)}),
        *rows_of("D=64 S=8 ALiBi", {"FlexAttention": Times(6.0, 8.0), "flashgen": Times(2.1, 5.0)}),
        *rows_of("D=32 S=8 ALiBi", {"flashgen": Times(1.0)}),
        *rows_of("D=64 S=8 cap", {"flashgen": Times(3.0), scores.BESIDE: Times(2.5)}),
    ]
    found = scores.with_overheads(list(gpu.rows_with_rates(rows, 1.0, 1.0)))
    over = [(row.forward_over, row.backward_over) for row in found]  # type: ignore[union-attr]
    assert over == [(1, 1), (1, 1), (1.5, 1), (1.05, 1.25), (None, None), (1.2, None), (None, None)]
    text = scores.summary(found)  # type: ignore[arg-type]
    assert "D=64 S=8 ALiBi over plain: +5.0 %, +25.0 % (beyond 10 %)" in text


def test_the_paper_summary() -> None:
    rows: list[Row] = []
    for work_name, ms in (("D=64 S=8 a", 2.0), ("D=64 S=8 b", 4.0), ("D=64 S=16 a", 8.0)):
        times = {"FlexAttention": Times(ms, 10.0), "flashgen": Times(2.0, 5.0)}
        rows += rows_of(work_name, times)
    lines = flashmask.summary(rows).splitlines()
    assert lines[0].endswith(
        "forward 1.414, least 1.000; backward 2.000, least 2.000; both 1.852, least 1.714 "
        "(D=64 S=8 a)"
    )
    assert lines[-1].startswith("all, 3 works beside FlexAttention: forward 2.000, least 1.000")


def test_what_goes_wrong_is_kept_for_the_end() -> None:
    assert asdict(Found("a", problem="crashed"))["value"] is None

    def found() -> Iterator[tuple[str, Any, str]]:
        yield "a", None, "crashed"
        yield "b", gpu.Measured({"flashgen": Times(1.0)}, 1.0, ["x fails"], []), ""

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gpu, "matmul_rate", lambda: 1.0)
        with pytest.raises(Differs, match="a: crashed") as caught:
            gpu.gather(found())
    assert [row.work for row in caught.value.rows] == ["b"]
