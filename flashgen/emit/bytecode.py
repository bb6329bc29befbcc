"""Templates as Python's bytecode, in the cache folder: to compile them takes longer than to render
all that a call needs."""

from __future__ import annotations

import contextlib
from pathlib import Path

import jinja2
from jinja2.bccache import Bucket

from .. import __version__
from ..config import config
from ..private import make_private, write_whole


class Bytecode(jinja2.BytecodeCache):
    """Jinja's, beside the generated modules. What can't be kept is compiled each time."""

    def load_bytecode(self, bucket: Bucket) -> None:
        # Jinja compares the template's text, and its own and Python's version.
        with contextlib.suppress(OSError), _path(bucket).open("rb") as file:
            bucket.load_bytecode(file)

    def dump_bytecode(self, bucket: Bucket) -> None:
        with contextlib.suppress(OSError):
            write_whole(_path(bucket), bucket.bytecode_to_string())


def _path(bucket: Bucket) -> Path:
    """Raises OSError where the folder isn't this user's alone."""
    folder = config.cache_dir / __version__ / "templates"
    for part in (folder.parent.parent, folder.parent, folder):
        make_private(part)
    return folder / f"{bucket.key}.bin"
