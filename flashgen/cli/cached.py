"""`flashgen cache`: the generated kernels on disk."""

from __future__ import annotations

import argparse
from datetime import datetime

from .. import cache as kernels
from ..config import config


def cache(given: argparse.Namespace) -> None:
    """List the generated modules, delete them, or print where they are."""
    if given.action == "path":
        print(config.cache_dir)
    elif given.action == "clear":
        count = kernels.clear()
        print(f"deleted {count} {_files(count)} from {config.cache_dir}")
    else:
        _print_entries()


def _print_entries() -> None:
    entries = kernels.entries()
    for entry in entries:
        when = datetime.fromtimestamp(entry.mtime).strftime("%Y-%m-%d %H:%M")
        print(f"{when}  {entry.size:>8,}  {entry.path}")
    total = sum(entry.size for entry in entries)
    print(f"{len(entries)} {_files(len(entries))}, {total:,} bytes in {config.cache_dir}")


def _files(count: int) -> str:
    return "file" if count == 1 else "files"
