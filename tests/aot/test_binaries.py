"""What kernels were compiled to is kept, and found again only where nothing has changed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashgen import binaries, cache, launch
from flashgen.aot import compiling_for
from flashgen.binaries import known, surroundings
from flashgen.binaries.binary import Binary
from flashgen.records import direct

TEXT = """# Adds a number.

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n"])
def add(x_ptr, n: tl.int32, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x_ptr + i, tl.load(x_ptr + i, mask=i < n) + 1, mask=i < n)
"""
X = torch.zeros(64)
OPTIONS = {"num_warps": 4, "num_stages": 1}


def kernels(text: str = TEXT) -> binaries.Kernels:
    """As in a process that hasn't seen it."""
    return binaries.Kernels("add", text, launch.key_parts())


def asked(
    made: binaries.Kernels | None = None,
    x: Any = X,
    block: int = 16,
    index: int = 0,
    **options: int,
) -> binaries.Wanted:
    device = torch.device("cuda", index)
    how = {"BLOCK": block}, {**OPTIONS, **options}, device
    found = binaries.wanted((made or kernels()).add, ("x_ptr", "n"), [x, 8], *how)
    assert found is not None
    return found


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, a known GPU, and a driver that loads anything."""
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(known, "surroundings", lambda index: "here")
    monkeypatch.setattr(known, "load", lambda about, binary, index: Binary(about, len(binary)))
    return tmp_path


@pytest.fixture
def kept(folder: Path) -> Path:
    """The file of a binary that another process has made."""
    one = asked()
    with compiling_for("sm_90"):
        compiled = one.kernel.warmup(X, 8, BLOCK=16, grid=(1,), **OPTIONS)
    assert binaries.keep(one, compiled)
    (path,) = folder.glob(f"*/{cache.BINARIES}/*")
    return path


def test_a_later_process_needs_neither_module_nor_compiler(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "module", lambda *_: pytest.fail("imported"))
    one = asked()
    found = binaries.find(one)
    assert found is not None
    assert found.metadata.name == "add"
    assert found.metadata.num_warps == 4
    assert found.parameters == 4, "with scratch of two kinds"
    assert list(found.src.signature.values()) == ["*fp32", "i32", "constexpr"]
    assert binaries.find(one) is found
    assert kept.stat().st_mode & 0o077 == 0


CHANGES: dict[str, Callable[[], binaries.Wanted]] = {
    "text": lambda: asked(kernels(TEXT.replace("+ 1", "+ 2"))),
    "dtype": lambda: asked(x=X.half()),
    "alignment": lambda: asked(x=X[1:]),
    "none": lambda: asked(x=None),
    "constant": lambda: asked(block=32),
    "warps": lambda: asked(num_warps=8),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_launches_are_compiled(kept: Path, change: str) -> None:
    assert binaries.find(CHANGES[change]()) is None
    assert binaries.find(asked()) is not None


def test_another_gpu_or_version(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("there", ""):
        monkeypatch.setattr(known, "surroundings", lambda index, text=text: text)
        assert binaries.find(asked()) is None


@pytest.mark.parametrize(
    ("variable", "value"),
    [("TRITON_DEFAULT_FP_FUSION", "0"), ("DISABLE_PTXAS_OPT", "1"), ("LLVM_IR_ENABLE_DUMP", "1")],
)
def test_an_environment_that_changes_compiling(
    kept: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert binaries.find(asked()) is None


def test_settings_and_hooks_of_triton(kept: Path) -> None:
    from triton import knobs

    with knobs.compilation.scope(), knobs.nvidia.scope():
        knobs.nvidia.ptxas_options = "-O1"
        assert binaries.find(asked()) is None
    with knobs.runtime.scope():
        knobs.runtime.jit_post_compile_hook = print
        assert binaries.find(asked()) is None
    assert binaries.find(asked()) is not None


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda whole: b"",
    "cut": lambda whole: whole[:-1],
    "edited": lambda whole: whole[:-9] + b"x" + whole[-8:],
    "no file of ours": lambda whole: b"\xff\x00" * 40,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_compiled_again_without_a_word(
    kept: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole = kept.read_bytes()
    kept.write_bytes(DAMAGES[damage](whole))
    one = asked()
    with caplog.at_level(logging.WARNING):
        assert binaries.find(one) is None
        with compiling_for("sm_90"):
            compiled = one.kernel.warmup(X, 8, BLOCK=16, grid=(1,), **OPTIONS)
        assert binaries.keep(one, compiled)
    assert not caplog.records
    assert kept.read_bytes() == whole


def test_a_file_of_another_binary(kept: Path, folder: Path) -> None:
    """Its digest is right, and it isn't what its name says."""
    other = kept.with_name("0" * 64 + ".bin")
    kept.rename(other)
    assert binaries.find(asked()) is None
    other.rename(kept)
    kept.write_bytes(kept.read_bytes())
    assert binaries.find(asked()) is not None


def test_what_the_driver_refuses_is_compiled(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(about: Any, binary: bytes, index: int) -> Binary:
        raise RuntimeError("Triton Error [CUDA]: device kernel image is invalid")

    monkeypatch.setattr(known, "load", load)
    assert binaries.find(asked()) is None


def test_kernels_that_look_at_numbers_are_triton_s(folder: Path) -> None:
    one = asked(kernels(TEXT.replace('(do_not_specialize=["n"])', "").replace(": tl.int32", "")))
    with compiling_for("sm_90"):
        compiled = one.kernel.warmup(X, 8, BLOCK=16, grid=(1,), **OPTIONS)
    assert not binaries.keep(one, compiled)
    assert binaries.find(one) is None
    assert not list(folder.glob(f"*/{cache.BINARIES}/*"))


def test_clearing_the_cache(kept: Path) -> None:
    cache.clear()
    assert not kept.exists()
    assert binaries.find(asked()) is None


def test_each_file_of_triton_counts(tmp_path: Path) -> None:
    for part in surroundings._PARTS:
        (tmp_path / part / "deep").mkdir(parents=True)
        (tmp_path / part / "deep" / "one.py").write_text("1")
    before = surroundings._digest_of(tmp_path)
    assert surroundings._digest_of(tmp_path) == before
    (tmp_path / "language" / "deep" / "one.py").write_text("22")
    assert surroundings._digest_of(tmp_path) != before


def test_surroundings_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SimpleNamespace(cuDriverGetVersion=lambda at: setattr(at._obj, "value", 13000))
    monkeypatch.setattr(direct, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"NVIDIA H{200 + index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    find = surroundings.surroundings.__wrapped__
    found = find(0)
    assert "\ngpu NVIDIA H200 (9, 0)\ndriver 13000" in found
    assert "\n".join(find(1).splitlines()) == found.replace("H200", "H201")
    monkeypatch.setattr(surroundings, "_PARTS", ("nowhere",))
    assert find(0) == ""


def test_no_binaries_are_kept_of_what_is_interpreted_or_not_generated() -> None:
    how = ("x_ptr", "n"), [X, 8], {"BLOCK": 16}, OPTIONS
    assert binaries.wanted(kernels().add, *how, torch.device("cpu")) is None
    assert binaries.wanted(SimpleNamespace(), *how, torch.device("cuda", 0)) is None
    assert binaries.find(None) is None
