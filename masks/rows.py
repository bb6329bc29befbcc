"""Rows of the queries given, for forms that count rows and not positions."""

from __future__ import annotations

from typing import Any


def row_of(q_idx: Any, q_len: Any, kv_len: Any) -> Any:
    """The row of a query in the tensor of queries: 0 for the first one given.

    Other libraries' forms (column vectors, slices, dense matrices, packed sequences) count rows.
    Positions are the same numbers where Sq = Skv; where they differ this undoes the default
    `q_offset`, so such a mask wants the default."""
    return q_idx - (kv_len - q_len)
