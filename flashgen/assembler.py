"""Which of Triton's assemblers spills the fewer registers of Hopper's kernels."""

from __future__ import annotations

# What sets the one that Triton 3.9 takes from sm_90 on, whatever its name says.
VARIABLE = "TRITON_PTXAS_BLACKWELL_PATH"
# Releases of CUDA; 12.9 spills little, 13.4 up to thousands of bytes of the same text.
_SPILLS_FROM = 13


def better_for_hopper() -> str | None:
    """The path of an assembler that comes with Triton and suits sm_90 better than the one it takes.

    None where it takes that one already, as before Triton 3.9. Setting `VARIABLE` to the path
    makes Triton take it. Imports Triton."""
    from triton import knobs
    from triton.backends.nvidia.compiler import get_ptxas

    older = knobs.nvidia.ptxas
    if _release(get_ptxas(90).version) < _SPILLS_FROM or _release(older.version) >= _SPILLS_FROM:
        return None
    return str(older.path)


def _release(version: str) -> int:
    return int(version.partition(".")[0])
