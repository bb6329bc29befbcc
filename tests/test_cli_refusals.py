"""Arguments of the command line that can't be followed: one line, what to write, and status 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashgen.cli import main

OWN = """
import flashgen as fg

@fg.mask
def mine(q_idx, kv_idx, w: int, doc: fg.Tensor):
    return (q_idx - kv_idx < w) & (doc[q_idx] == doc[kv_idx])
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "own_masks.py"
    path.write_text(OWN)
    return f"{path}:mine"


@pytest.mark.parametrize(
    ("argv", "problem", "write"),
    [
        (["explain", "causal", "--device", "foo"], "--device foo: Expected one of", "--device cpu"),
        (["explain", "causal", "--device", "meta"], "meta tensors have no", "on the device"),
        (["gallery", "/dev/null"], "/dev/null/index.md can't be written", "a path"),
        (["show", "causal", "--svg", "/dev/null/x/y.svg"], "y.svg can't be written", "a path"),
        (
            ["explain", "causal", "--n", "900000000", "--batch", "1000000"],
            "there isn't enough memory",
            "a smaller --n",
        ),
    ],
)
def test_one_line_and_advice(
    capsys: pytest.CaptureFixture[str], argv: list[str], problem: str, write: str
) -> None:
    assert main(argv) == 2
    text = capsys.readouterr().err
    assert problem in text
    assert write in text.split("instead: ")[1]


@pytest.mark.parametrize("command", ["show", "explain", "source"])
def test_missing_data_is_asked_for_as_it_is_given(
    capsys: pytest.CaptureFixture[str], own: str, command: str
) -> None:
    assert main([command, own]) == 2
    text = capsys.readouterr().err
    assert "mine also needs w: int, doc: fg.Tensor\n  instead: --param w=... doc=...\n" in text


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--heads", "-1"], "'-1' isn't a number from 1"),
        (["--batch", "0"], "'0' isn't a number from 1"),
        (["--kv-heads", "1.5"], "'1.5' isn't a number from 1"),
        (["--head-dim", "x"], "'x' isn't a number from 1"),
        (["--n", "99999999999"], "positions go up to 2^30 - 1"),
    ],
)
def test_counts_are_counts(
    capsys: pytest.CaptureFixture[str], argv: list[str], problem: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["explain", "causal", *argv])
    assert problem in capsys.readouterr().err
