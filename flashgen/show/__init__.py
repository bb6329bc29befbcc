"""Masks, schedules and explanations, as text for a terminal and as SVG for a page."""

from __future__ import annotations

from .svg import mask_svg, schedule_svg
from .text import explain_text, mask_text, schedule_text

__all__ = ["explain_text", "mask_svg", "mask_text", "schedule_svg", "schedule_text"]
