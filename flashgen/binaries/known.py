"""Which binary a launch runs: one of this process, or of one before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..config import log
from . import store
from .binary import Binary, describe, load
from .kernel import Kernel
from .surroundings import doubt, surroundings

_log = log("cache")
_UNASKED = object()
# Stands for a launch that is left to Triton.
_REFUSED = "Triton's"
_NUMBERS = frozenset((int, float, bool))
Constants = Mapping[str, Any]


class Wanted:
    """What a launch asks of a kernel, all that Triton would look at: kinds of arguments,
    compile-time values, warps and stages, and the device. It holds no tensor."""

    def __init__(
        self,
        kernel: Kernel,
        names: Sequence[str],
        arguments: Sequence[Any],
        constants: Constants,
        options: Mapping[str, int],
        index: int,
    ) -> None:
        self.kernel, self.names, self.constants, self.index = kernel, names, constants, index
        kinds = tuple(map(_kind_of, arguments))
        self.key = (kinds, tuple(constants.items()), tuple(options.items()), index)

    def text(self) -> str:
        """The same for other processes; empty where Triton must be asked."""
        around, reason = surroundings(self.index), doubt()
        if not around or reason:
            _log.debug("%s is left to Triton: %s", self.kernel.name, reason or "an unknown one")
            return ""
        kinds, constants, options, _ = self.key
        return "\n".join(map(str, (*self.kernel.key, kinds, constants, options, around)))


def wanted(
    kernel: Any,
    names: Sequence[str],
    arguments: Sequence[Any],
    constants: Constants,
    options: Mapping[str, int],
    device: torch.device,
) -> Wanted | None:
    """What such a launch asks for; None where no binaries are kept."""
    if device.type != "cuda" or device.index is None or not isinstance(kernel, Kernel):
        return None
    return Wanted(kernel, names, arguments, constants, options, device.index)


def _kind_of(x: Any) -> Any:
    """What Triton looks at in an argument. Kernels opt out of what it would look at in numbers."""
    if x.__class__ in _NUMBERS:
        return "number"
    if isinstance(x, torch.Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if (base := getattr(x, "base", None)) is not None:
        return x.kind, base.dtype, base.data_ptr() % 16 == 0
    return None if x is None else "number"


def find(asked: Wanted | None) -> Binary | None:
    """The binary that such a launch runs; None where Triton compiles, or launches."""
    if asked is None:
        return None
    known = asked.kernel.known
    found: Any = known.get(asked.key, _UNASKED)
    if found is _UNASKED:
        found = known[asked.key] = _read(asked)
    return found if isinstance(found, Binary) else None


def _read(asked: Wanted) -> Binary | None:
    text = asked.text()
    kept = store.read(text) if text else None
    if kept is None:
        return None
    try:
        return load(*kept, asked.index)
    except (RuntimeError, KeyError, TypeError, AttributeError) as error:
        _log.info("%s isn't loaded from its binary: %s", asked.kernel.name, error)
        return None


def keep(asked: Wanted | None, compiled: Any) -> bool:
    """Keep what Triton has compiled for such a launch, for this process and later ones; unless it
    is of a kind that only Triton launches, which is said."""
    if asked is None:
        return False
    if asked.kernel.known.get(asked.key) is None:
        asked.kernel.known[asked.key] = _kept(asked, compiled) or _REFUSED
    return isinstance(asked.kernel.known[asked.key], Binary)


def refuse(asked: Wanted | None) -> None:
    """Leave such launches to Triton."""
    if asked is not None:
        asked.kernel.known[asked.key] = _REFUSED


def _kept(asked: Wanted, compiled: Any) -> Binary | None:
    text = asked.text()
    if not text or not _is_plain(asked):
        return None
    try:
        about, binary = describe(compiled), compiled.asm["cubin"]
        made = load(about, binary, asked.index)
    except (RuntimeError, KeyError, TypeError, AttributeError) as error:
        _log.info("%s is left to Triton: %s", asked.kernel.name, error)
        return None
    store.write(text, about, binary)
    return made


def _is_plain(asked: Wanted) -> bool:
    """Whether the kernel's arguments come first, as they are named, and no number's value makes
    another binary of it."""
    params, count = asked.kernel.jit.params, len(asked.names)
    if [p.name for p in params[:count]] != list(asked.names):
        return False
    if {p.name for p in params[count:]} != set(asked.constants):
        return False
    numbers = (p for p, kind in zip(params, asked.key[0], strict=False) if kind == "number")
    return all(p.do_not_specialize and p.annotation_type for p in numbers)
