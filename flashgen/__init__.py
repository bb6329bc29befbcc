"""flashgen: an attention compiler. A mask is a line of Python; the kernel is made for it."""

from __future__ import annotations

__version__ = "0.1.0"
