"""From expressions to statements of Triton: placement, widths, spelling."""

from __future__ import annotations

from .distance import AHEAD as AHEAD
from .distance import with_distances
from .isolate import fewest, isolate
from .statements import Lowered, Stage, lower
from .widths import Widths

__all__ = ["AHEAD", "Lowered", "Stage", "Widths", "fewest", "isolate", "lower", "with_distances"]
