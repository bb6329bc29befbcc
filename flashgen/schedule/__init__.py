"""The block-sparse schedule: which tiles are empty, cut or full, as a value made once."""

from __future__ import annotations

from .classify import Planner, classify
from .runs import Runs, Visits, compact, visits
from .value import Schedule

__all__ = ["Planner", "Runs", "Schedule", "Visits", "classify", "compact", "visits"]
