"""The block-sparse schedule: which tiles are empty, cut or full, as a value made once."""

from __future__ import annotations

from .classify import Planner, classify
from .runs import Runs, compact
from .value import Schedule

__all__ = ["Planner", "Runs", "Schedule", "classify", "compact"]
