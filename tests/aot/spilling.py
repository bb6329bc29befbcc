"""How much a kernel may spill, which hangs on the assembler that comes with Triton."""

from __future__ import annotations

import triton

# The assembler of 3.9 spills more of the same text: bytes outside loops, instructions in them.
_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
IS_EARLY, IS_LATE = _VERSION < (3, 7), _VERSION >= (3, 9)


def at_most(limit: int, late: int) -> int:
    """The limit of this Triton: `late` from 3.9 on."""
    return late if IS_LATE else limit
