"""Examples run, and pages that show code or settings are true."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from types import ModuleType

import pytest
import torch

import flashgen as fg
from flashgen import masks

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
TRAINING = ("gpt", "dpo", "encoder", "prefix_lm")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):
    """Import an example as if it were run from its folder."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module
    for name in NAMES:
        sys.modules.pop(name, None)


def test_each_example_is_run_here():
    programs = {name for name in NAMES if "__main__" in (EXAMPLES / f"{name}.py").read_text()}
    training = {f"train_{what}" for what in TRAINING}
    assert programs - training == {
        "causal_documents", "first_mask", "flex_functions", "generate_paged", "latent_layer",
        "share_schedule", "speculative_tree",
    }  # fmt: skip
    assert training <= programs


@pytest.mark.parametrize("what", TRAINING)
def test_training_agrees_with_dense_attention(what: str, load, capsys: pytest.CaptureFixture[str]):
    runs = load(f"train_{what}").main(["--device", "cpu", "--steps", "3"])
    ours, theirs = runs["flashgen"].losses, runs["SDPA"].losses
    assert len(ours) == 3
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert len(set(ours)) == 3, "the weights never changed"
    assert re.search(r"^flashgen [\d,]+ tokens/s, SDPA [\d,]+ tokens/s$",
                     capsys.readouterr().out, re.MULTILINE)  # fmt: skip


def test_two_answers_in_one_row_are_two_rows(load):
    """What `train_dpo` computes at once is what the question with each answer gives."""
    dpo, small = load("train_dpo"), load("small_transformer")
    sizes = small.Sizes.parse(None, ["--device", "cpu"])
    batch = next(dpo.batches(sizes))
    model = small.Transformer(sizes)
    together = model(batch, small.Shared(dpo.attend, batch.data))
    causal = fg.Attention(masks.causal)
    for number in (1, 2):
        seen = (batch.data["answer"][0] == 0) | (batch.data["answer"][0] == number)
        own = (batch.tokens[:, seen], batch.positions[:, seen], batch.targets[:, seen])
        alone = model(small.Batch(*own, {}, batch.mask), causal)
        torch.testing.assert_close(together[:, seen], alone, rtol=1e-4, atol=1e-4)


def test_decoding(load, capsys: pytest.CaptureFixture[str]):
    """Both compare what they decode with recomputation, and fail where it differs."""
    load("speculative_tree").main()
    load("latent_layer").main()
    printed = capsys.readouterr().out
    assert "each equals decoding its path token by token" in printed
    assert "3 tokens decoded; each equals attention on expanded keys and values" in printed


def test_causal_documents(load, capfd: pytest.CaptureFixture[str]):
    assert load("causal_documents").main(["--length", "700"]) == 0
    printed = capfd.readouterr().out
    assert "  mask    (kv_idx <= q_idx) & (doc[" in printed
    assert re.search(r"^ *131072 .* 16,384 MiB", printed, re.MULTILINE)
    assert re.search(r"^/.*causal_document_d64_fwd_[0-9a-f]{8}\.py$", printed, re.MULTILINE)
    checks = r"^(cpu backend|Triton's interpreter), .* ok$"
    assert len(re.findall(checks, printed, re.MULTILINE)) == 3


def test_causal_documents_fails_for_a_large_error(load, monkeypatch, capfd):
    demo: ModuleType = load("causal_documents")
    monkeypatch.setattr(demo, "interpreted", lambda *_: [])
    monkeypatch.setattr(demo, "LENGTHS", ())
    monkeypatch.setitem(demo.ALLOWED, torch.float32, (1e-12, 1e-12))
    assert demo.main(["--length", "320"]) == 1
    assert "TOO LARGE" in capfd.readouterr().out


def test_a_nan_does_not_pass(load):
    reference = load("float64_reference")
    assert not reference.Check("", float("nan"), 0.0, (1.0, 1.0)).passes
    doc = torch.zeros(1, 600, dtype=torch.int32)
    tensors = reference.inputs(600, 1, 1, 16)
    out, lse = fg.Attention(mask=load("causal_documents").causal_document)(
        *tensors, doc=doc, return_lse=True
    )
    out[0, 0, 550, 3] = float("nan")
    assert reference.errors(tensors, doc, out, lse)[0] != pytest.approx(0, abs=1e9)


@pytest.mark.parametrize("name", ["first_mask", "flex_functions"])
def test_small_examples(name: str, load, capsys: pytest.CaptureFixture[str]):
    load(name).main()
    assert capsys.readouterr().out


def test_share_schedule(load, capsys: pytest.CaptureFixture[str]):
    load("share_schedule").main(length=512)
    assert "the schedule was made for Sq = 512, and this call has 511" in capsys.readouterr().out


def test_document_lists(load):
    lists = load("document_lists")
    for length, most in ((8192, 7), (32768, 14), (131072, 15)):
        samples = lists.read(length)
        assert [len(documents) for documents in samples] == list(range(most - 4, most + 1))
        for documents in samples:
            assert sum(document.length for document in documents) == length
            assert all(0 < document.prefix < document.length for document in documents)
            assert any(document.sparse for document in documents)
    first = lists.read(8192)[0]
    assert first[:2] == [lists.Document(885, 3145, False), lists.Document(296, 2203, True)]
    runs = [(number, len(list(run))) for number, run in groupby(lists.ids(first)[0].tolist())]
    assert runs == [(0, 3145), (1, 2203), (2, 2844)]


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_readme_python_runs_as_written():
    """All blocks, in one process and in order, as a reader would paste them."""
    code = "\n".join(blocks("README.md", "python"))
    assert "@fg.attention" in code
    done = subprocess.run([sys.executable, "-W", "error", "-"], input=code, text=True, timeout=300)
    assert done.returncode == 0


def test_readme_commands_exist():
    from flashgen.cli import parser

    makefile = (ROOT / "Makefile").read_text()
    lines = [line for block in blocks("README.md", "sh") for line in block.splitlines()]
    for words in (shlex.split(line, comments=True) for line in lines):
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), words
        elif words[:3] == ["python", "-m", "flashgen"]:
            parser().parse_args(words[3:])
        else:
            assert words[0] in ("pip", "git", "cd"), words


def links(page: Path) -> list[str]:
    found = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    return [link for link in found if "://" not in link]


@pytest.mark.parametrize("page", ["README.md", "DESIGN.md", "docs/environment.md"])
def test_links_lead_somewhere(page: str):
    for link in links(ROOT / page):
        assert (ROOT / page).parent.joinpath(link).exists(), link


def test_every_setting_is_documented():
    """docs/environment.md names each variable of `flashgen.config`, and no other."""
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(FLASHGEN_\w+)` \|", page, re.MULTILINE)
    settings = [setting.variable for setting in fg.config.settings()]
    assert [row for row in rows if not row.startswith("FLASHGEN_TEST_")] == settings


def test_generation_agrees_with_the_model_run_from_scratch(load):
    """Chunks of prompts and single tokens in one call; windows give their pages back."""
    worst, caches = load("generate_paged").main(["--device", "cpu", "--steps", "8"])
    assert worst < 2e-4
    whole, windowed = (sum(map(len, caches[i].held)) for i in (0, 1))
    assert windowed < whole
    assert all(cache.k.isnan().any() for cache in caches), "unused slots are NaN, and stay behind"
