"""Generated modules as files: written once, verified before import, imported once per process.

A file is named `<name>_<8 hex of its key>.py`. The key covers the text below the header and the
versions and flags that change its meaning; both are in the file, so a file verifies itself. The
header is the run of lines that start with `#` at the top, up to the first blank line.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import json
import linecache
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from filelock import FileLock

from . import __version__
from .config import config, log
from .errors import FlashgenError
from .private import make_private, write_whole

PACKAGE = "flashgen_generated"
# The folder, beside them, of what generated files were compiled to.
BINARIES = "binaries"

_HEADER = re.compile(r"\A(?:#[^\r\n]*\n)*")
_FILE_NAME = re.compile(r"(?P<name>\w+)_(?P<short>[0-9a-f]{8})\.py")
_LONGEST_NAME = 120
# Some versions of filelock raise the second where a file system has no locks.
_UNUSABLE = (OSError, NotImplementedError)
_LOCK_SECONDS = 60

_lock = threading.RLock()
_modules: dict[tuple[Path, str], ModuleType] = {}
_private_folders: dict[Path, Path] = {}


class DamagedFileError(FlashgenError):
    """A generated file isn't what was written: cut short, edited, or of another kernel."""


@dataclass(frozen=True)
class Entry:
    """A generated module on disk; `size` in bytes, `mtime` in seconds since the epoch."""

    path: Path
    name: str
    key: str
    version: str
    size: int
    mtime: float


def module(name: str, text: str, key_parts: tuple[str, ...]) -> ModuleType:
    """The module of this text, written first where it isn't in the cache."""
    key = key_of(text, key_parts)
    for _ in range(3):
        path = write(name, text, key_parts)
        try:
            return _load(path, key)
        except (DamagedFileError, FileNotFoundError):
            # Another process cleared the cache or changed the file since: write it once more.
            continue
    raise FlashgenError(
        f"{path} changes or vanishes faster than it can be read",
        write="FLASHGEN_CACHE_DIR=<a folder that nothing else writes to>",
    )


def write(name: str, text: str, key_parts: tuple[str, ...]) -> Path:
    """Make sure that the cache holds this text, and return its file.

    The header gets two lines, the key and the parts of it that aren't text. Where the cache folder
    can't be used, a private temporary folder takes its place until the process ends.
    """
    key = key_of(text, key_parts)
    header, body = _split(text)
    stamped = f"{header}# key: {key}\n# made for: {json.dumps(key_parts)}\n{body}"
    file = _file(name, key)
    folder = config.cache_dir / __version__
    try:
        return _publish(folder / file, stamped, key)
    except _UNUSABLE as error:
        return _publish_privately(folder, error, file, stamped, key)


def file_of(name: str, text: str, key_parts: tuple[str, ...]) -> str:
    """The name of the file that `write` makes of this text."""
    return _file(name, key_of(text, key_parts))


def load(path: Path) -> ModuleType:
    """Import a file of the cache, once per process; raises DamagedFileError if it was changed."""
    path = path.absolute()
    return _load(path, _verified_key(path, _read(path)))


def _file(name: str, key: str) -> str:
    return f"{_sanitise(name)}_{key[:8]}.py"


def key_of(text: str, key_parts: tuple[str, ...]) -> str:
    """64 hex digits that change with the text below the header and with each part."""
    return _digest(_split(text)[1], json.dumps(key_parts))


def entries() -> list[Entry]:
    """What the cache folder holds, of every version of flashgen."""
    return sorted(_entries(config.cache_dir), key=lambda entry: entry.path)


def clear() -> int:
    """Delete the generated files, and what they were compiled to, from the cache folder (and
    nothing else); how many files were generated.

    Modules that a process has imported stay usable."""
    found = entries()
    for path in (*(entry.path for entry in found), *config.cache_dir.glob(f"*/{BINARIES}/*.bin")):
        path.unlink(missing_ok=True)
    return len(found)


def _split(text: str) -> tuple[str, str]:
    # A carriage return ends a line for Python: code behind one is body, whatever stands before.
    header = "".join(_HEADER.findall(text))
    return header, text[len(header) :]


def _digest(body: str, parts: str) -> str:
    return hashlib.sha256(f"{parts}\n{body}".encode()).hexdigest()


def _sanitise(name: str) -> str:
    return re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_")[:_LONGEST_NAME] or "kernel"


def _header_value(header: str, label: str) -> str:
    found = re.findall(rf"^# {label}: (.*)$", header, flags=re.MULTILINE)
    return str(found[-1]) if found else ""


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise _damaged(path) from error


def _verified_key(path: Path, text: str) -> str:
    header, body = _split(text)
    key = _header_value(header, "key")
    if _digest(body, _header_value(header, "made for")) != key:
        raise _damaged(path)
    return key


def _damaged(path: Path) -> DamagedFileError:
    return DamagedFileError(
        f"{path} is not as it was generated: cut short or edited",
        write="`python -m flashgen cache clear` empties the cache.",
    )


def _holds(path: Path, key: str) -> bool:
    try:
        return _verified_key(path, _read(path)) == key
    except (FileNotFoundError, DamagedFileError):
        return False


def _publish(path: Path, text: str, key: str) -> Path:
    """Look, lock, look again, write: the file appears whole or not at all."""
    for folder in (path.parent.parent, path.parent):
        make_private(folder)
    if _holds(path, key):
        return path
    with FileLock(path.parent / ".lock", timeout=_LOCK_SECONDS, mode=0o600):
        if not _holds(path, key):
            if path.exists():
                log("cache").warning("%s was cut short or edited; it is written again", path)
            write_whole(path, text.encode())
            log("cache").info("wrote %s", path)
    return path


def _publish_privately(folder: Path, error: Exception, file: str, text: str, key: str) -> Path:
    try:
        return _publish(_private_folder(folder, error) / __version__ / file, text, key)
    except _UNUSABLE as second:
        raise FlashgenError(
            f"generated kernels can be written neither to {folder} ({error}) "
            f"nor to a temporary folder ({second})",
            write="FLASHGEN_CACHE_DIR=<a folder that you can write to>",
        ) from second


def _private_folder(folder: Path, error: Exception) -> Path:
    """This process's stand-in for `folder`; made, and told about, once."""
    with _lock:
        if folder not in _private_folders:
            made = Path(tempfile.mkdtemp(prefix="flashgen-"))
            _private_folders[folder] = made
            atexit.register(_remove, made, os.getpid())
            log("cache").warning(
                "the cache folder %s can't be used (%s); this process writes its kernels to %s. "
                "Set FLASHGEN_CACHE_DIR to a folder of your own.",
                *(folder, error, made),
            )
        return _private_folders[folder]


def _remove(folder: Path, owner: int) -> None:
    # A forked child runs the exit handlers of its parent too.
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def _load(path: Path, key: str) -> ModuleType:
    with _lock:
        if (path, key) not in _modules:
            text = _read(path)
            if _verified_key(path, text) != key:
                raise _damaged(path)
            _modules[path, key] = _import(path, text)
        return _modules[path, key]


class _VerifiedText(SourceFileLoader):
    """Runs the text that was verified: neither a later state of the file, nor a .pyc beside it."""

    def __init__(self, name: str, path: Path, text: str) -> None:
        super().__init__(name, str(path))
        self.text = text

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.text, self.path, "exec", dont_inherit=True)

    def get_source(self, fullname: str) -> str:
        return self.text


def _import(path: Path, text: str) -> ModuleType:
    name = f"{PACKAGE}.{path.stem}"
    loader = _VerifiedText(name, path, text)
    spec = ModuleSpec(name, loader, origin=str(path))
    spec.has_location = True
    made = importlib.util.module_from_spec(spec)
    # Pickle and inspect look modules up by name, and their parent with them.
    sys.modules.setdefault(PACKAGE, ModuleType(PACKAGE, "Modules that flashgen generated."))
    sys.modules[name] = made
    # Triton reads a kernel through `inspect`; without a time stamp this entry is never re-read.
    linecache.cache[str(path)] = (len(text), None, text.splitlines(keepends=True), str(path))
    if config.print_code:
        print(f"# {path}\n{text}", file=sys.stderr)
    try:
        loader.exec_module(made)
    except BaseException:
        del sys.modules[name]
        raise
    log("cache").debug("loaded %s", path)
    return made


def _entries(root: Path) -> Iterator[Entry]:
    for path in root.glob("*/*.py"):
        named = _FILE_NAME.fullmatch(path.name)
        if named is None:
            continue
        try:
            status = path.stat()
            header, _ = _split(path.read_text(errors="replace"))
        except FileNotFoundError:
            # Another process cleared the cache meanwhile.
            continue
        key = _header_value(header, "key")
        if key.startswith(named["short"]):
            version = path.parent.name
            yield Entry(path, named["name"], key, version, status.st_size, status.st_mtime)
