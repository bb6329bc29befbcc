"""A text that the tests of the cache write."""

from __future__ import annotations

import flashgen
from flashgen import cache

TEXT = """\
# causal, D=128
# a second line

VALUE = 7


def double(x):
    # why
    return x * 2
"""
BODY = TEXT[TEXT.index("\n\n") + 1 :]
PARTS = ("torch 2.13.0", "triton 3.7.1")


def own_folder(tmp_path, monkeypatch):
    """An own cache folder for a test; gives the folder that files are written to."""
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(cache, "_private_folders", {})
    return tmp_path / "kernels" / flashgen.__version__


def write(name="causal", text=TEXT, parts=PARTS):
    return cache.write(name, text, parts)
