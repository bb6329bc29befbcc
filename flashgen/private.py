"""Folders for one user alone: what is read from them is run."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def make_private(folder: Path) -> None:
    """Create a folder for this user only. Raises PermissionError for one where others could put
    their code."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(folder)


def check_private(folder: Path) -> None:
    """Raises PermissionError for a folder where others could put their code."""
    status = folder.stat()
    # Windows has neither user ids nor these mode bits.
    user = os.geteuid() if hasattr(os, "geteuid") else status.st_uid
    if status.st_uid not in (user, 0):
        raise PermissionError(f"{folder} belongs to another user")
    if status.st_mode & stat.S_IWOTH and os.name == "posix":
        raise PermissionError(f"{folder} can be written by everyone")


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that appears whole or not at all, readable by this user alone."""
    # mkstemp makes it so.
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
