"""The cache: files written once, whole, private, verified, imported once; and what goes wrong."""

from __future__ import annotations

import inspect
import linecache
import os
import pickle
import py_compile
import sys
from pathlib import Path

import pytest
from cached_text import BODY, PARTS, TEXT, own_folder, write

import flashgen
from flashgen import FlashgenError, cache
from flashgen.config import config


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    return own_folder(tmp_path, monkeypatch)


def rename_value(path, value):
    path.write_text(path.read_text().replace("VALUE = 7", f"VALUE = {value}"))


def test_a_file_has_the_text_and_its_key(folder):
    path = write()
    key = cache.key_of(TEXT, PARTS)
    assert path == folder / f"causal_{key[:8]}.py"
    assert path.read_text() == (
        "# causal, D=128\n# a second line\n"
        f'# key: {key}\n# made for: ["torch 2.13.0", "triton 3.7.1"]\n' + BODY
    )


def test_a_text_without_header_gets_one():
    path = write(text="VALUE = 7\n")
    assert path.read_text().startswith("# key: ")
    assert cache.load(path).VALUE == 7


def test_the_key_covers_text_and_parts_but_not_the_header():
    key = cache.key_of(TEXT, PARTS)
    assert len(key) == 64
    assert cache.key_of("# other words\n" + BODY, PARTS) == key
    assert cache.key_of(BODY, PARTS) == key
    assert cache.key_of(TEXT.replace("7", "8"), PARTS) != key
    assert cache.key_of(TEXT.replace("# why", "# because"), PARTS) != key
    assert cache.key_of(TEXT, (*PARTS, "sm_90")) != key
    assert cache.key_of(TEXT, PARTS[::-1]) != key
    assert cache.key_of(TEXT, ("a", "b")) != cache.key_of(TEXT, ("a, b",))


def test_code_behind_a_carriage_return_is_no_comment():
    assert cache.key_of("# a\rVALUE = 1\n", ()) != cache.key_of("# a\rVALUE = 2\n", ())


def test_the_same_text_is_written_once():
    path = write()
    before = path.stat()
    assert write(text="# another header\n" + BODY) == path
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert path.stat().st_ino == before.st_ino


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("causal & document (d=128)", "causal_document_d_128"),
        ("../../etc/passwd", "etc_passwd"),
        ("/tmp/x\0\n", "tmp_x"),
        ("fenêtre", "fen_tre"),
        ("", "kernel"),
        ("***", "kernel"),
        ("a" * 500, "a" * 120),
    ],
)
def test_names_are_made_safe(folder, name, stem):
    path = write(name)
    assert path.parent == folder
    assert path.name == f"{stem}_{cache.key_of(TEXT, PARTS)[:8]}.py"
    assert cache.load(path).VALUE == 7


@pytest.mark.skipif(os.name != "posix", reason="permission bits are POSIX's")
def test_only_the_user_can_read_and_write():
    before = os.umask(0)
    try:
        path = write()
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.parent.parent.stat().st_mode & 0o777 == 0o700


def test_a_failed_write_leaves_no_file(folder, monkeypatch):
    def fail(self, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        write()
    assert [path.name for path in folder.iterdir()] in ([], [".lock"])


def test_a_module_is_imported_once():
    first = cache.module("causal", TEXT, PARTS)
    assert first.double(first.VALUE) == 14
    assert cache.module("causal", TEXT, PARTS) is first
    assert cache.load(write()) is first


def test_a_module_can_be_found_inspected_and_pickled():
    made = cache.module("causal", TEXT, PARTS)
    assert made.__name__ == f"flashgen_generated.{Path(made.__file__).stem}"
    assert sys.modules[made.__name__] is made
    assert inspect.getsource(made.double) == TEXT[TEXT.index("def double") :]
    assert inspect.getsourcefile(made.double) == made.__file__
    assert inspect.getsource(made) == Path(made.__file__).read_text()
    assert pickle.loads(pickle.dumps(made.double)) is made.double


def test_the_source_outlives_the_file():
    made = cache.module("causal", TEXT, PARTS)
    rename_value(Path(made.__file__), "7\n\n\n")
    assert inspect.getsource(made.double).startswith("def double")
    Path(made.__file__).unlink()
    assert inspect.getsource(made.double).startswith("def double")
    linecache.clearcache()
    assert inspect.getsource(made.double).startswith("def double")


def test_triton_takes_a_kernel_of_the_module():
    text = (
        "import triton\nimport triton.language as tl\n\n\n"
        "@triton.jit\ndef store_one(target):\n    tl.store(target, 1)\n"
    )
    made = cache.module("store", text, PARTS)
    assert "tl.store(target, 1)" in made.store_one.src


def test_bytecode_is_neither_left_nor_taken(folder, monkeypatch):
    """It would be taken by the time and size of the file, which an edit can keep."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = write()
    whole, status = path.read_bytes(), path.stat()
    rename_value(path, 8)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    py_compile.compile(str(path), doraise=True)
    (planted,) = folder.rglob("*.pyc")
    path.write_bytes(whole)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert cache.module("causal", TEXT, PARTS).VALUE == 7
    planted.unlink()
    cache.module("window", TEXT, PARTS)
    assert not list(folder.rglob("*.pyc"))


def test_a_path_may_be_relative(folder, monkeypatch):
    path = write()
    monkeypatch.chdir(folder)
    assert cache.load(Path(path.name)) is cache.load(path)


def test_a_key_in_the_given_header_is_not_taken_for_the_files():
    path = write(text="# key: 0123\n# made for: []\n" + TEXT)
    assert cache.load(path).VALUE == 7
    assert cache.entries()[0].key == cache.key_of(TEXT, PARTS)


def test_code_that_fails_is_not_left_half_imported():
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            cache.module("broken", "1 / 0\n", PARTS)
    assert not [name for name in sys.modules if name.startswith("flashgen_generated.broken")]


def test_print_code_prints_what_is_loaded_once(monkeypatch, capsys):
    monkeypatch.setenv("FLASHGEN_PRINT_CODE", "1")
    made = cache.module("causal", TEXT, PARTS)
    cache.module("causal", TEXT, PARTS)
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"# {made.__file__}\n{Path(made.__file__).read_text()}\n"


def test_nothing_is_printed_unasked(capsys):
    cache.module("causal", TEXT, PARTS)
    assert capsys.readouterr() == ("", "")


def test_an_override_of_the_folder_holds(tmp_path):
    with config.override(cache_dir=tmp_path / "elsewhere"):
        made = cache.module("causal", TEXT, PARTS)
    assert Path(made.__file__).is_relative_to(tmp_path / "elsewhere")


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-9])


def empty(path):
    path.write_bytes(b"")


def edit(path):
    rename_value(path, 8)


def edit_keeping_time_and_size(path):
    status = path.stat()
    rename_value(path, 8)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def make_binary(path):
    path.write_bytes(b"\xff\xfe\x00")


def forge_the_parts(path):
    path.write_text(path.read_text().replace("2.13.0", "2.14.0"))


DAMAGES = [cut_short, empty, edit, edit_keeping_time_and_size, make_binary, forge_the_parts]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_written_again(damage, caplog):
    path = write()
    whole = path.read_bytes()
    damage(path)
    assert cache.module("causal", TEXT, PARTS).VALUE == 7
    assert path.read_bytes() == whole
    assert "written again" in caplog.text
    assert str(path) in caplog.text


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_not_loaded(damage):
    path = write()
    damage(path)
    with pytest.raises(FlashgenError, match="cut short or edited"):
        cache.load(path)


def test_a_file_of_another_kernel_under_this_name_is_not_taken(caplog):
    """As it would be if two keys agreed in the eight digits that file names have."""
    other = write(text=TEXT.replace("7", "8"))
    other.rename(write())
    assert cache.module("causal", TEXT, PARTS).VALUE == 7
    assert "written again" in caplog.text


def test_an_intact_file_is_not_reported(caplog):
    write()
    cache.module("causal", TEXT, PARTS)
    assert caplog.text == ""


def test_a_header_can_be_annotated():
    path = write()
    path.write_text("# a note of mine\n" + path.read_text())
    cache.module("causal", TEXT, PARTS)
    assert path.read_text().startswith("# a note of mine\n")


def put_another_in_its_place(path):
    write(text=TEXT.replace("7", "8")).replace(path)


@pytest.mark.parametrize("interfere", [Path.unlink, edit, put_another_in_its_place])
def test_a_file_that_changes_between_writing_and_loading_is_written_again(interfere, monkeypatch):
    load, changed = cache._load, []

    def interfere_once(path, key):
        if not changed:
            changed.append(path)
            interfere(path)
        return load(path, key)

    monkeypatch.setattr(cache, "_load", interfere_once)
    assert cache.module("causal", TEXT, PARTS).VALUE == 7
    assert changed


def test_a_file_that_always_vanishes_is_an_error(monkeypatch):
    load = cache._load

    def clear(path, key):
        path.unlink()
        return load(path, key)

    monkeypatch.setattr(cache, "_load", clear)
    with pytest.raises(FlashgenError, match="FLASHGEN_CACHE_DIR"):
        cache.module("causal", TEXT, PARTS)


def test_entries_are_the_files_of_the_cache(folder):
    paths = sorted([write("causal"), write("window"), write("causal", "VALUE = 1\n")])
    found = cache.entries()
    assert [entry.path for entry in found] == paths
    entry = next(entry for entry in found if entry.path == write("window"))
    assert (entry.name, entry.version) == ("window", flashgen.__version__)
    assert entry.key == cache.key_of(TEXT, PARTS)
    assert entry.size == entry.path.stat().st_size
    assert entry.mtime == entry.path.stat().st_mtime


def test_an_empty_or_missing_cache_has_no_entries(folder):
    assert cache.entries() == []
    assert cache.clear() == 0
    assert not folder.parent.exists()


def test_clear_deletes_what_it_generated_and_nothing_else(folder):
    damaged = write("damaged")
    edit(damaged)
    old = folder.parent / "0.0.1" / write("old").name
    old.parent.mkdir()
    write("old").rename(old)
    strangers = [folder / "notes.py", folder / "mine_01234567.py", folder.parent / "x.py"]
    for stranger in strangers:
        stranger.write_text("VALUE = 1\n")
    write("causal")
    assert cache.clear() == 3
    assert cache.entries() == []
    assert all(stranger.exists() for stranger in strangers)


def test_a_module_is_written_again_after_clear():
    first = cache.module("causal", TEXT, PARTS)
    assert cache.clear() == 1
    assert first.double(2) == 4
    again = cache.module("causal", TEXT, PARTS)
    assert again is first
    assert Path(again.__file__).exists()
