"""A compiled kernel without Triton's objects around it: loaded, and launched by the driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from ..records.direct import DirectLaunch, Frame, count_parameters

# What of Triton's description of a kernel its launches depend on.
_ABOUT = (
    "name", "num_warps", "num_ctas", "shared", "launch_cooperative_grid", "launch_pdl",
    "global_scratch_size", "profile_scratch_size", "tensordesc_meta",
)  # fmt: skip


class Binary:
    """A kernel on a device. Its attributes are those of Triton's `CompiledKernel` that a direct
    launch reads, and how many parameters it has."""

    def __init__(self, about: Mapping[str, Any], function: int) -> None:
        self.about = about
        target = SimpleNamespace(backend="cuda")
        self.metadata = SimpleNamespace(target=target, **{name: about[name] for name in _ABOUT})
        self.src = SimpleNamespace(signature=dict(enumerate(about["kinds"])))
        self.parameters = about["parameters"]
        self.function = function
        # As many as there are launches at a time.
        self._frames: list[Frame] = []

    def launch(self, programs: int, arguments: Sequence[Any], stream: Any) -> None:
        """Run it on a stream. Raises Unknown of what only Triton can launch."""
        try:
            frame = self._frames.pop()
        except IndexError:
            frame = self.direct(programs, arguments).frame()
        frame.launch(programs, arguments, stream)
        self._frames.append(frame)

    def direct(self, programs: int, arguments: Sequence[Any]) -> DirectLaunch:
        """The same as a part of a record. Raises Unknown."""
        return DirectLaunch(self, programs, arguments)


def describe(compiled: Any) -> dict[str, Any]:
    """What `Binary` wants to know of Triton's `CompiledKernel`. Raises AttributeError where this
    Triton calls things otherwise."""
    found = {name: getattr(compiled.metadata, name) for name in _ABOUT if name != "tensordesc_meta"}
    meta = getattr(compiled.metadata, "tensordesc_meta", None)
    found["tensordesc_meta"] = None if meta is None else [dict(one) for one in meta]
    kinds, parameters = list(compiled.src.signature.values()), count_parameters(compiled.asm["ptx"])
    return found | {"kinds": kinds, "parameters": parameters}


def load(about: Mapping[str, Any], binary: bytes, index: int) -> Binary:
    """The kernel on a device, which is the current one. Raises RuntimeError if it can't be there,
    or can't run."""
    from triton.runtime import driver

    utils = driver.active.utils
    if about["shared"] > utils.get_device_properties(index)["max_shared_mem"]:
        raise RuntimeError("too little shared memory")
    _, function, *_, threads = utils.load_binary(about["name"], binary, about["shared"], index)
    if 32 * about["num_warps"] > threads:
        raise RuntimeError("too few registers")
    return Binary(about, function)
