"""flashgen: an attention compiler. A mask is a line of Python; the kernel is made for it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# `config` is the object, not its module, whichever of the two is asked for first.
from .config import config
from .errors import FlashgenError

if TYPE_CHECKING:
    from .api import Attention as Attention
    from .api import attention as attention
    from .functions import abs as abs
    from .functions import ceil as ceil
    from .functions import cos as cos
    from .functions import erf as erf
    from .functions import exp as exp
    from .functions import exp2 as exp2
    from .functions import floor as floor
    from .functions import isnan as isnan
    from .functions import log as log
    from .functions import log2 as log2
    from .functions import maximum as maximum
    from .functions import minimum as minimum
    from .functions import rsqrt as rsqrt
    from .functions import sigmoid as sigmoid
    from .functions import sin as sin
    from .functions import sqrt as sqrt
    from .functions import tanh as tanh
    from .functions import where as where
    from .shared_prefix import shared_prefix_attention as shared_prefix_attention
    from .spec import MLA as MLA
    from .spec import mask as mask
    from .states import merge as merge
    from .trace import Const as Const
    from .trace import Tensor as Tensor

__version__ = "0.1.0"

# The names above, loaded on first use: `import flashgen` doesn't load torch, SymPy or Triton.
_HOME = {
    **dict.fromkeys(("Attention", "attention"), "api"),
    **dict.fromkeys(("MLA", "mask"), "spec"),
    **dict.fromkeys(("Const", "Tensor"), "trace"),
    "merge": "states",
    "shared_prefix_attention": "shared_prefix",
    **dict.fromkeys(
        "abs ceil cos erf exp exp2 floor isnan log log2 maximum minimum rsqrt sigmoid sin sqrt "
        "tanh where".split(),
        "functions",
    ),
}

__all__ = ["FlashgenError", "__version__", "config", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
