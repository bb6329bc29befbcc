"""What `fg.Attention` is declared with, beside functions."""

from __future__ import annotations

from typing import Any

from ..errors import FlashgenError, show
from .heads import MLA


def check_declared(softcap: Any, sinks: Any, heads: Any) -> None:
    """Raises FlashgenError for what makes no sense."""
    is_number = isinstance(softcap, (int, float)) and not isinstance(softcap, bool)
    if softcap is not None and not (is_number and 0 < softcap < float("inf")):
        raise FlashgenError(
            f"softcap is {show(softcap)}",
            call=f"fg.Attention(softcap={show(softcap)})",
            write="a positive number, or None for no cap",
        )
    if hasattr(sinks, "shape"):
        raise FlashgenError(
            f"sinks is {show(sinks)}",
            call=f"fg.Attention(sinks={show(sinks)})",
            write="fg.Attention(sinks=True), and the tensor [Hq] in calls: sinks=...",
        )
    if heads is not None and not isinstance(heads, MLA):
        raise FlashgenError(
            f"heads is {show(heads)}",
            call=f"fg.Attention(heads={show(heads)})",
            write="fg.MLA(rank=512, rope=64), or nothing: other head counts are in the shapes",
        )
