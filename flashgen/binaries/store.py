"""Files of binaries: a digest, what they are made for, and what the driver loads."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from .. import __version__
from ..cache import BINARIES
from ..config import config, log
from ..private import make_private, write_whole

_log = log("cache")


def read(key: str) -> tuple[dict[str, Any], bytes] | None:
    """What was written for a key: its description, and the binary; None if there is nothing, or it
    isn't whole, or was made for something else."""
    path = _path(key)
    try:
        _make_folder(path)
        digest, _, rest = path.read_bytes().partition(b"\n")
        if hashlib.sha256(rest).hexdigest().encode() != digest:
            raise ValueError("cut short or edited")
        line, _, binary = rest.partition(b"\n")
        found = json.loads(line)
        if found["key"] != key:
            raise ValueError("made for something else")
        return found["about"], binary
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.info("%s is not read (%s): its kernel is compiled again", path, error)
        return None


def write(key: str, about: dict[str, Any], binary: bytes) -> None:
    """Keep a binary; where that can't be done, later processes compile."""
    path = _path(key)
    rest = json.dumps({"key": key, "about": about}).encode() + b"\n" + binary
    try:
        _make_folder(path)
        write_whole(path, hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest)
    except OSError as error:
        _log.info("%s can't be written (%s)", path, error)


def _path(key: str) -> Path:
    digest = hashlib.sha256(key.encode()).hexdigest()
    return config.cache_dir / __version__ / BINARIES / f"{digest}.bin"


def _make_folder(path: Path) -> None:
    for folder in reversed(path.parents[:3]):
        make_private(folder)
