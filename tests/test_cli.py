"""The command line: what it prints, what it writes, what it refuses, and what it loads."""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import flashgen as fg
from flashgen.cli import catalogue, main, parser

USER_CODE = """
from __future__ import annotations
import flashgen as fg
from helper import WIDTH

@fg.mask
def near(q_idx, kv_idx, reach: int = WIDTH):
    '''Keys no further than `reach`,
    on both sides.

    More words.'''
    return fg.abs(q_idx - kv_idx) <= reach

@fg.mask
def same(b, h, q_idx, kv_idx, group: fg.Tensor):
    return group[b, h, q_idx] == group[b, h, kv_idx]

def flex(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx

@fg.attention(mask=near)
def attend(score, h, q_idx, kv_idx, slope: fg.Tensor):
    return score + slope[h] * (kv_idx - q_idx)

with_sinks = fg.Attention(mask=near, sinks=True)
EXAMPLES = {"same": lambda n, generator: {"group": WIDTH * torch.ones(2, 3, n).long()}}
import torch
"""


@pytest.fixture
def user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A file of masks, in a folder that has a module of its own; leaves nothing imported."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "helper.py").write_text("WIDTH = 1\n")
    path = tmp_path / "user_code.py"
    path.write_text(USER_CODE)
    before = set(sys.modules)
    yield str(path)
    for name in {"helper", "user_code", "flashgen_user_user_code"} - before:
        sys.modules.pop(name, None)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What a command prints; it must succeed."""
    assert main(argv) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What a command says when it refuses."""
    assert main(argv) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "Traceback" not in shown.err
    return shown.err


@pytest.mark.parametrize("argv", [["--help"], ["list"], ["cache"], ["cache", "path"]])
def test_light_commands_do_not_load_torch(argv: list[str]) -> None:
    code = (
        "import sys\nfrom flashgen.cli import main\n"
        f"try:\n    main({argv})\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'triton', 'sympy', 'jinja2', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "flashgen", "list", "--names"]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "causal" in names.split()


def test_every_command_has_help() -> None:
    (commands,) = (a for a in parser()._actions if a.dest == "==SUPPRESS==" and a.choices)
    assert set(commands.choices or ()) == set(
        "list show explain source gallery cache doctor bench".split()
    )


def test_list_is_what_the_package_exports(capsys: pytest.CaptureFixture[str]) -> None:
    package = importlib.import_module("flashgen.masks")
    exported = {name: getattr(package, name) for name in package.__all__ if name != "EXAMPLES"}
    masks = {name for name, value in exported.items() if isinstance(value, fg_mask())}
    assert run(capsys, "list", "--names").split() == sorted(masks)
    lines = run(capsys, "list").splitlines()
    names = [line.partition("(")[0] for line in lines if line and line[0] != " "]
    assert {name for name in names if not name.endswith(":")} == set(exported)
    assert set(catalogue.everything()) == set(exported)


def fg_mask() -> type:
    return type(fg.mask(lambda q_idx, kv_idx: kv_idx <= q_idx))


def test_list_says_parameters_and_first_line(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, "list").splitlines()
    assert lines[lines.index("causal") + 1].startswith("    A query sees itself")
    assert "causal_document(doc: fg.Tensor)" in lines
    assert "slices(first: fg.Tensor, last: fg.Tensor, runs: fg.Const[int])" in lines
    assert "from_dense(matrix: torch.Tensor)" in lines
    assert max(map(len, lines)) <= 104
    assert not any(line.endswith((":", "=")) for line in lines if "(" in line)
    assert all(listed.doc for listed in catalogue.everything().values())


def test_makers_of_masks_are_told_from_makers_of_data() -> None:
    helpers = set(catalogue.everything()) - set(catalogue.masks()) - set(catalogue.makers())
    assert helpers == {"blocks_from_indices", "morton_order", "tile_order"}
    assert {"natten", "sliding_tile", "from_slices"} <= set(catalogue.makers())


def test_show_draws_mask_and_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "show", "causal", "--n", "4", "--block-size", "2x2")
    assert text.split("\n", 1)[1] == "\n".join(
        [
            "    kv_idx <= q_idx",
            "",
            "█···",
            "██··",
            "███·",
            "████",
            "",
            "Schedule(causal, shape=(1, 1, 4, 4), tiles 2\u00d72, planner=auto)",
            "density 75.00 %, 4 tiles: 1 full, 2 partial, 1 empty; 4 bytes",
            "(0, 0)",
            "░░··",
            "██░░",
            "",
        ]
    )


def test_show_takes_values(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "show", "document", "--n", "3", "--param", "doc=[[7, 5, 7]]")
    assert "doc: int64 [1, 3] = [[7, 5, 7]]" in text
    assert "█·█\n·█·\n█·█" in text


def test_show_draws_fewer_queries_than_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert "███·\n████\n" in run(capsys, "show", "causal", "--n", "2x4")


def test_show_combines(capsys: pytest.CaptureFixture[str]) -> None:
    name = "causal & ~(sliding_window(window=1) | strided(dilation=2))"
    assert "····\n█···\n·█··\n█·█·" in run(capsys, "show", name, "--n", "4")


def test_show_takes_functions_that_make_masks(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "show", "natten").startswith("natten_2d: ")
    text = run(capsys, "show", "natten", "--n", "4", "--param", "extent=4", "kernel=3")
    assert "███·\n███·\n·███\n·███" in text
    made = "causal & natten(extent=4, kernel=3)"
    assert "█···\n██··\n·██·\n·███" in run(capsys, "show", made, "--n", "4")
    text = run(
        capsys, "show", "from_dense", "--n", "2", "--param", "matrix=[[True,False],[True,True]]"
    )
    assert "█·\n██" in text


def test_show_reads_a_file(capsys: pytest.CaptureFixture[str], user_file: str) -> None:
    text = run(capsys, "show", f"{user_file}:near", "--n", "3")
    assert text.startswith("near: Keys no further than `reach`, on both sides.\n")
    assert "██·\n███\n·██" in text
    assert "█··\n·█·\n··█" in run(
        capsys, "show", f"{user_file}:near", "--n", "3", "--param", "reach=0"
    )


def test_show_reads_a_module(
    capsys: pytest.CaptureFixture[str], user_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(user_file).parent)
    assert "█··\n██·\n███" in run(capsys, "show", "user_code:flex", "--n", "3")
    # An attention is drawn by its mask.
    assert "██·\n███\n·██" in run(capsys, "show", "user_code:attend", "--n", "3")


def test_show_uses_the_examples_of_a_file(
    capsys: pytest.CaptureFixture[str], user_file: str
) -> None:
    text = run(capsys, "show", f"{user_file}:same", "--n", "4")
    assert "shape=(2, 3, 4, 4)" in text
    assert "... 4 more (b, h)" in text


def test_show_writes_a_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "causal.svg"
    assert f"wrote {file}" in run(capsys, "show", "causal", "--svg", str(file))
    assert ElementTree.parse(file).getroot().get("aria-label") == "causal"


def test_a_million_positions_are_shown_without_elements(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ["--n", str(1 << 20), "--svg", str(tmp_path / "a.svg"), "--param", "window=4096"]
    text = run(capsys, "show", "sliding_window", *options)
    assert "shape=(1, 1, 1048576, 1048576)" in text
    assert "planner=bounds" in text
    assert (tmp_path / "a.svg").stat().st_size < 20_000


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["causl"], "there is no mask causl\n  instead: Did you mean `causal`?"),
        (["causal + causal"], "there is no mask causal + causal"),
        (["tile_order"], "there is no mask tile_order"),
        (["causal and"], "there is no mask causal and"),
        (["no_such_module:mask"], "there is no module no_such_module"),
        (["no_such_file.py:mask"], "there is no file no_such_file.py"),
        (["flashgen.reference:attention"], "flashgen.reference has no attention"),
        (["sliding_window", "--param", "windw=3"], "Did you mean `window`?"),
        (["natten", "--param", "kernl=3"], "Did you mean `kernel`?"),
        (["natten(extent=4)"], "natten also needs kernel"),
        (["from_xformers"], "from_xformers also needs bias"),
        (["sliding_window", "--param", "window"], "--param window isn't NAME=VALUE"),
        (["sliding_window", "--param", "window=wide"], "--param window=wide isn't NAME=VALUE"),
        (["sliding_window", "--param", "window=-1"], "window must be at least 0"),
        (["document", "--param", "doc=[[1, 2]]"], "needs a length of at least 64"),
        (["causal", "--block-size", "0x4"], "a tile of 0x4"),
        (["causal", "--heads", "3", "--kv-heads", "2"], "don't share 2 heads"),
    ],
)
def test_show_refuses(capsys: pytest.CaptureFixture[str], argv: list[str], expected: str) -> None:
    assert expected in refused(capsys, "show", *argv)


def test_show_asks_for_data(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "no_examples.py"
    file.write_text(
        USER_CODE.partition("EXAMPLES")[0].replace("from helper import WIDTH", "WIDTH=1")
    )
    assert "same also needs group: fg.Tensor" in refused(capsys, "show", f"{file}:same")


def test_errors_of_user_code_keep_their_traceback(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("import no_such_package\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        main(["show", f"{file}:mask"])


@pytest.mark.parametrize("text", ["1x2x3", "a", "-1", ""])
def test_lengths_are_numbers(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["show", "causal", f"--n={text}"])
    assert "is neither a number nor like 16x32" in capsys.readouterr().err


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(
        capsys, "explain", "causal_document", "--n", "128", "--heads", "4", "--kv-heads", "2"
    )
    for words in ("── spec ──", "── tile rule ──", "── schedule ──", "Schedule(causal_document"):
        assert words in text


def test_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert "@triton.jit" in run(capsys, "source", "causal", "--head-dim", "16", "--dtype", "fp32")


def test_explain_of_an_attention(capsys: pytest.CaptureFixture[str], user_file: str) -> None:
    options = ["--heads", "2", "--param", "slope=[0.5, 0.25]", "--n", "16"]
    text = run(capsys, "explain", f"{user_file}:attend", *options)
    assert "score + slope[h]" in text
    assert "attend also needs slope" in refused(capsys, "explain", f"{user_file}:attend").replace(
        "near + attend", "attend"
    )


def test_explain_of_an_attention_with_sinks(
    capsys: pytest.CaptureFixture[str], user_file: str
) -> None:
    options = [f"{user_file}:with_sinks", "--heads", "2", "--n", "16"]
    assert "── spec ──" in run(capsys, "explain", *options, "--param", "sinks=[0.5, 0.25]")
    assert "no sinks are given" in refused(capsys, "explain", *options)


def test_cache(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    from flashgen import cache

    assert run(capsys, "cache", "path") == f"{tmp_path}\n"
    path = cache.write("causal_fwd", "# kernel\n\nX = 1\n", ("test",))
    assert str(path) in run(capsys, "cache", "list")
    assert run(capsys, "cache", "clear") == f"deleted 1 file from {tmp_path}\n"
    assert not path.exists()
    assert run(capsys, "cache") == f"0 files, 0 bytes in {tmp_path}\n"


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    rows = doctor_rows(run(capsys, "doctor"))
    assert rows["torch"] == importlib.metadata.version("torch")
    assert rows["cpu"] == "usable"
    assert rows["ok"].startswith("causal, 64 positions, backend cpu: largest error")


def test_doctor_looks_at_the_cache_folder_as_calls_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    assert "can be written, 0" in run(capsys, "doctor")
    tmp_path.chmod(0o777)
    found = run(capsys, "doctor")
    assert "can NOT be used" in found
    assert "can be written by everyone" in found


def test_doctor_reports_a_setting_that_calls_refuse(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHGEN_DEBUG", "maybe")
    assert main(["doctor"]) == 1
    rows = doctor_rows(capsys.readouterr().out)
    assert rows["FLASHGEN_DEBUG"].startswith("invalid: ")
    assert "FLASHGEN_DEBUG=maybe" in rows["FAILED"]


def test_doctor_advises_another_assembler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler = pytest.importorskip("triton.backends.nvidia.compiler")
    variable, older = "TRITON_PTXAS_BLACKWELL_PATH", compiler.get_ptxas(80)
    assert variable not in doctor_rows(run(capsys, "doctor"))
    newer = types.SimpleNamespace(path="/triton/bin/ptxas-blackwell", version="13.4")
    monkeypatch.setattr(compiler, "get_ptxas", lambda arch: newer)
    assert f"{older.path} on sm_90" in doctor_rows(run(capsys, "doctor"))[variable]


def doctor_rows(text: str) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in text.splitlines() if line.startswith("  "))


def test_doctor_fails_if_the_numbers_are_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    doctor = importlib.import_module("flashgen.cli.doctor")
    monkeypatch.setattr(
        doctor, "attention_reference", lambda q, k, v, mask: (torch.zeros_like(v), None)
    )
    assert main(["doctor"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_bench_gets_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Bench:
        main = staticmethod(seen.append)

    monkeypatch.setitem(sys.modules, "flashgen.bench", Bench)
    assert main(["bench", "--help", "x"]) == 0
    assert seen == [["--help", "x"]]


def test_gallery(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run(capsys, "gallery", str(tmp_path / "new"))
    names = set(catalogue.masks())
    files = {path.name: path for path in (tmp_path / "new").iterdir()}
    assert set(files) == {f"{name}.svg" for name in names} | {"index.md", "index.html"}
    for path in files.values():
        assert path.stat().st_size < 60_000
    page, index = (files[name].read_text() for name in ("index.html", "index.md"))
    for name in names:
        assert f'id="{name}"' in page
        assert f'src="{name}.svg"' in page
        assert f"({name}.svg)" in index
    assert "href=" not in page


def test_the_checked_in_gallery_is_complete() -> None:
    folder = Path(__file__).parent.parent / "docs" / "gallery"
    assert {path.stem for path in folder.glob("*.svg")} == set(catalogue.masks())
    assert all(path.stat().st_size < 60_000 for path in folder.iterdir())
    index = (folder / "index.md").read_text()
    assert all(f"## {name}\n" in index for name in catalogue.masks())
    from flashgen.cli.gallery import picture

    assert (folder / "causal.svg").read_text() == picture("causal")
