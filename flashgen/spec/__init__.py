"""What the user declared: masks, score functions, their parameters, and the traced Spec."""

from __future__ import annotations

from .heads import MLA
from .mask import Mask, as_mask, mask
from .program import Program
from .spec import Bound, ScalarParam, Spec, TensorParam

__all__ = [
    "MLA",
    "Bound",
    "Mask",
    "Program",
    "ScalarParam",
    "Spec",
    "TensorParam",
    "as_mask",
    "mask",
]
