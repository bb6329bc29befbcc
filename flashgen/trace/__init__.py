"""Running a user's function on symbols, to get its expression."""

from __future__ import annotations

from .functions import PUBLIC
from .run import TensorType, Traced, trace
from .signature import Const, Function, Tensor
from .symbol import Symbol

__all__ = ["PUBLIC", "Const", "Function", "Symbol", "Tensor", "TensorType", "Traced", "trace"]
