"""Starting a generated kernel: by its binary, or by Triton, which compiles it first."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from .. import ahead, binaries
from ..config import config
from ..errors import FlashgenError
from ..records import direct, tape
from ..records.play import on_device
from ..tiling import Tiling
from .interpreted import interpreted, interpreting


def launch(
    kernel: Any,
    names: tuple[str, ...],
    values: Mapping[str, Any],
    constants: Mapping[str, Any],
    tiling: Tiling,
    programs: int,
) -> None:
    """Run a generated kernel on the device of its tensors."""
    if programs >= 2**31:
        raise FlashgenError(
            f"{programs} programs are more than a grid holds (2^31 - 1)",
            write="fewer queries, heads or batch elements in one call",
        )
    arguments = [values[name] for name in names]
    device = next(x.device for x in arguments if isinstance(x, torch.Tensor))
    options = {"num_warps": tiling.warps, "num_stages": tiling.stages}
    asked = binaries.wanted(kernel, names, arguments, constants, options, device)
    with on_device(device):
        if ahead.is_gathering():
            if binaries.find(asked) is None:
                keep = functools.partial(binaries.keep, asked)
                ahead.begin(kernel, arguments, {**constants, **options}, keep)
            return
        ahead.wait(kernel)
        found = None if direct.is_watched() else binaries.find(asked)
        if found is None or not _run(found, asked, arguments, len(constants), programs):
            given = {**constants, **options}
            _compile_and_run(kernel, names, arguments, given, programs, asked, device)
    if config.debug and device.type == "cuda":
        torch.cuda.synchronize(device)


def _run(
    binary: binaries.Binary,
    asked: binaries.Wanted | None,
    arguments: Sequence[Any],
    constants: int,
    programs: int,
) -> bool:
    """Run a binary, unless that is left to Triton."""
    ordered = (*arguments, *[None] * constants)
    recorder = tape.recorder()
    try:
        if recorder is not None:
            again = binary.direct(programs, ordered)
        stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
        binary.launch(programs, ordered, stream)
    except direct.Unknown:
        binaries.refuse(asked)
        return False
    if recorder is not None:
        recorder.launched(binary.launch, ordered, direct=again)
    return True


def _compile_and_run(
    kernel: Any,
    names: Sequence[str],
    arguments: Sequence[Any],
    constants: Mapping[str, Any],
    programs: int,
    asked: binaries.Wanted | None,
    device: torch.device,
) -> None:
    again: Callable[..., Any] = functools.partial(kernel[(programs,)], **constants)
    if device.type == "cpu" and interpreting():
        again = interpreted(kernel, again)
    recorder = tape.recorder()
    with nullcontext() if recorder is None else recorder.launching():
        compiled = again(*arguments)
    binaries.keep(asked, compiled)
    if recorder is not None and hasattr(compiled, "packed_metadata"):
        # What was compiled takes all arguments in order, and looks at none of them.
        given = {**dict(zip(names, arguments, strict=True)), **constants}
        ordered = [given[name] for name in kernel.arg_names]
        try:
            found = direct.DirectLaunch(compiled, programs, ordered)
        except direct.Unknown:
            found = None
        run = compiled[(programs, 1, 1)]
        recorder.launched(run, ordered, takes_stream=True, direct=found)
    elif recorder is not None:
        recorder.launched(again, arguments)
