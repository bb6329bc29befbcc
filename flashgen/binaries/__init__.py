"""What kernels were compiled to, kept beside their texts: later processes need no compiler.

Triton's own cache is asked with a hash of Triton's whole library and of the parsed source of each
kernel, which takes as long as all else of a first call. Here the question is cheap: the text (its
digest names its file), the launch (kinds of arguments, compile-time values, warps, stages), and all
around them that decides what comes of it (`surroundings.py`). Where any of these isn't as it was,
or a file isn't whole, Triton compiles."""

from __future__ import annotations

from .binary import Binary
from .kernel import Kernel, Kernels
from .known import Wanted, find, keep, refuse, wanted

__all__ = ["Binary", "Kernel", "Kernels", "Wanted", "find", "keep", "refuse", "wanted"]
