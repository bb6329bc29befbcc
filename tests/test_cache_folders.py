"""The cache where folders can't be used, and for many processes and threads at once."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from cached_text import PARTS, TEXT, own_folder, write

from flashgen import FlashgenError, cache
from flashgen.config import config


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    return own_folder(tmp_path, monkeypatch)


def assert_falls_back(caplog, refused, reason=""):
    """Two kernels load from one private folder, with one warning that says why and what to do."""
    paths = [
        Path(cache.module(name, TEXT, PARTS).__file__) for name in ("causal", "window", "causal")
    ]
    assert not any(path.is_relative_to(refused) for path in paths)
    assert len({path.parent for path in paths}) == 1
    assert paths[0].parent.parent.stat().st_mode & 0o777 == 0o700
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    for part in (str(refused), reason, str(paths[0].parent.parent), "FLASHGEN_CACHE_DIR"):
        assert part in record.getMessage()


NUMBERS = (
    errno.ENOSPC,
    errno.EROFS,
    errno.EDQUOT,
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.ESTALE,
    errno.ENOLCK,
)


@pytest.mark.parametrize("number", NUMBERS, ids=errno.errorcode.get)
@pytest.mark.parametrize("where", ["mkdir", "replace", "open"])
def test_an_error_of_the_disk_falls_back(where, number, folder, monkeypatch, caplog):
    def fails_inside(original):
        def operation(path, *args, **kwargs):
            if str(path).startswith(str(folder)):
                raise OSError(number, os.strerror(number), str(path))
            return original(path, *args, **kwargs)

        return operation

    if where == "open":
        # Below tempfile and filelock both.
        monkeypatch.setattr(os, "open", fails_inside(os.open))
    else:
        monkeypatch.setattr(Path, where, fails_inside(getattr(Path, where)))
    assert_falls_back(caplog, folder, os.strerror(number))


def test_a_full_disk_leaves_no_temporary_file(folder, monkeypatch):
    def fail(self, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        with pytest.raises(FlashgenError, match="neither"):
            write()
    assert not list(folder.glob("*.tmp"))


def test_a_file_in_place_of_the_folder_falls_back(folder, caplog):
    folder.parent.write_text("in the way")
    assert_falls_back(caplog, folder)
    assert folder.parent.read_text() == "in the way"


def test_a_folder_in_place_of_the_file_falls_back(folder, caplog):
    path = folder / f"causal_{cache.key_of(TEXT, PARTS)[:8]}.py"
    path.mkdir(parents=True)
    made = cache.module("causal", TEXT, PARTS)
    assert not Path(made.__file__).is_relative_to(folder)
    assert len(caplog.records) == 1


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc")
def test_a_folder_that_nobody_can_make_falls_back(monkeypatch, caplog):
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", "/proc/flashgen")
    assert_falls_back(caplog, Path("/proc/flashgen"))


@pytest.mark.parametrize("level", ["parent", "itself"])
def test_a_folder_that_everyone_can_write_falls_back(level, folder, caplog):
    folder.mkdir(parents=True)
    (folder.parent if level == "parent" else folder).chmod(0o777)
    assert_falls_back(caplog, folder, "can be written by everyone")


@pytest.mark.parametrize("level", ["parent", "itself"])
def test_a_folder_of_another_user_falls_back(level, folder, monkeypatch, caplog):
    folder.mkdir(parents=True, mode=0o700)
    theirs = folder.parent if level == "parent" else folder
    stat = Path.stat

    def owned_by_another(self, **kwargs):
        status = list(stat(self, **kwargs))
        if self == theirs:
            status[4] = os.geteuid() + 1234
        return os.stat_result(status)

    monkeypatch.setattr(Path, "stat", owned_by_another)
    assert_falls_back(caplog, folder, "belongs to another user")


def test_a_file_in_a_folder_that_became_read_only_is_used(folder, monkeypatch, caplog):
    path = write()

    def read_only(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(cache, "FileLock", read_only)
    assert cache.module("causal", TEXT, PARTS).__file__ == str(path)
    assert caplog.text == ""


def test_a_file_system_without_locks_falls_back(folder, monkeypatch, caplog):
    lock = cache.FileLock

    def no_locks(path, **kwargs):
        if Path(path).is_relative_to(folder):
            raise NotImplementedError("no flock here")
        return lock(path, **kwargs)

    monkeypatch.setattr(cache, "FileLock", no_locks)
    assert_falls_back(caplog, folder, "no flock here")


def test_nowhere_to_write_is_an_error_that_names_both_reasons(monkeypatch):
    def fail(self, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(FlashgenError, match=r"(?s)No space.*No space.*FLASHGEN_CACHE_DIR"):
        write()


WRITE_PRIVATELY = f"""
from flashgen import cache
made = cache.module("causal", {TEXT!r}, {PARTS!r})
print(made.__file__, made.VALUE)
"""


def test_the_private_folder_goes_with_the_process(tmp_path):
    (tmp_path / "kernels").write_text("in the way")
    done = subprocess.run(
        [sys.executable, "-c", WRITE_PRIVATELY], capture_output=True, text=True, check=True
    )
    file, value = done.stdout.split()
    assert value == "7"
    assert not Path(file).parent.parent.exists()
    assert done.stderr.count("can't be used") == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_leaves_the_private_folder_to_its_parent(tmp_path):
    (tmp_path / "kernels").write_text("in the way")
    code = WRITE_PRIVATELY + "import os, sys\nif not os.fork(): sys.exit()\n"
    code += "os.wait()\nassert os.path.exists(made.__file__)\n"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


TOGETHER = f"""
import sys, time
from flashgen import cache
time.sleep(max(0.0, float(sys.argv[1]) - time.time()))
for turn in range(3):
    made = cache.module(f"causal_{{turn}}", {TEXT!r}, {PARTS!r})
    print(made.__file__, made.VALUE)
"""


def run_together(count, wait):
    """Start `count` processes that all write the same three kernels at the same moment."""
    start = str(time.time() + wait)
    command = [sys.executable, "-c", TOGETHER, start]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(command, **options) for _ in range(count)]
    return [(*process.communicate(timeout=300), process.returncode) for process in running]


@pytest.mark.parametrize(
    ("count", "wait"), [(16, 3.0), pytest.param(100, 20.0, marks=pytest.mark.slow)]
)
def test_processes_write_at_once(count, wait, folder):
    outcomes = run_together(count, wait)
    assert len(outcomes) == count
    assert {(err, code) for _, err, code in outcomes} == {("", 0)}
    files = sorted(folder.glob("causal_*.py"))
    assert len(files) == 3
    assert {out for out, _, _ in outcomes} == {"".join(f"{path} 7\n" for path in files)}
    assert {path.name for path in folder.iterdir()} == {".lock", *(path.name for path in files)}


def test_a_writer_that_waited_for_the_lock_keeps_the_file_it_then_finds(
    folder, tmp_path, monkeypatch
):
    with config.override(cache_dir=tmp_path / "winner"):
        whole = write().read_bytes()
    path = folder / f"causal_{cache.key_of(TEXT, PARTS)[:8]}.py"
    folder.mkdir(parents=True)
    waiting, lock = threading.Event(), cache.FileLock

    def announced(*args, **kwargs):
        waiting.set()
        return lock(*args, **kwargs)

    monkeypatch.setattr(cache, "FileLock", announced)
    writer = threading.Thread(target=write)
    with lock(folder / ".lock"):
        writer.start()
        assert waiting.wait(10)
        path.write_bytes(whole)
        inode = path.stat().st_ino
    writer.join(10)
    assert not writer.is_alive()
    assert path.stat().st_ino == inode


def test_threads_get_one_module(monkeypatch):
    count, barrier, made = 16, threading.Barrier(16), []
    imports, original = [], cache._import

    def counted(path, text):
        imports.append(path)
        return original(path, text)

    monkeypatch.setattr(cache, "_import", counted)

    def generate():
        barrier.wait()
        made.append(cache.module("causal", TEXT, PARTS))

    threads = [threading.Thread(target=generate) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == count
    assert len(set(map(id, made))) == 1
    assert len(imports) == 1
