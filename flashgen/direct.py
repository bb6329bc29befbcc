"""Launching what was compiled, by CUDA's driver alone: pointers are filled in, the rest stands.

Triton's own way looks at every argument each time. Here a kernel's arguments lie in memory as the
driver reads them (CUDA driver API, `cuLaunchKernel`; for descriptors `cuTensorMapEncodeTiled`), and
a launch writes only the addresses of its tensors. What isn't known to be laid out so is left to
Triton."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_SCALARS: Mapping[str, Any] = {
    "i1": ctypes.c_int8, "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32,
    "i64": ctypes.c_int64, "u8": ctypes.c_uint8, "u16": ctypes.c_uint16, "u32": ctypes.c_uint32,
    "u64": ctypes.c_uint64, "fp32": ctypes.c_float, "fp64": ctypes.c_double,
}  # fmt: skip
# CUtensorMapDataType, and the size of a CUtensorMap and where it must start.
_DATA_TYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
_MAP_BYTES, _MAP_ALIGNMENT = 128, 128
# What a descriptor is made of (Triton's metadata); others would mean what is not known here.
_META = {"swizzle", "elem_size", "elem_type", "block_size", "fp4_padded"}
_L2_PROMOTION_128B = 2
_INVALID_CONTEXT = 201


class Unknown(Exception):
    """A kernel whose arguments aren't known to lie as they are written here."""


class DirectLaunch:
    """A compiled kernel, its grid and its arguments, but for the addresses of tensors.

    `arguments`: all that its signature has, in order. Raises Unknown."""

    def __init__(self, compiled: Any, programs: int, arguments: Sequence[Any]) -> None:
        meta = compiled.metadata
        _check_kind(meta)
        self._driver = _driver()
        self._compiled = compiled
        self._how = (programs, 1, 1, 32 * meta.num_warps, 1, 1, meta.shared)
        self._places: dict[int, _Address | _Map] = {}
        self._lock = threading.Lock()
        storages = self._lay_out(compiled, arguments)
        # Scratch memory that no kernel here has: global, and for profiles.
        storages += [ctypes.c_uint64(0), ctypes.c_uint64(0)]
        _check_sizes(self._driver, compiled.function, storages)
        self._storages = storages
        self._params = (ctypes.c_void_p * len(storages))(*map(ctypes.addressof, storages))

    def _lay_out(self, compiled: Any, arguments: Sequence[Any]) -> list[Any]:
        storages: list[Any] = []
        described = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        kinds = list(compiled.src.signature.values())
        for place, (kind, value) in enumerate(zip(kinds, arguments, strict=True)):
            if kind == "constexpr":
                continue
            if not isinstance(kind, str):
                raise Unknown(kind)
            if kind.startswith("*"):
                address = _Address()
                self._places[place] = address
                storages.append(address.storage)
            elif kind.startswith("tensordesc"):
                made = _Map(self._driver, value, next(described, None))
                self._places[place] = made
                storages.append(made.storage)
                storages += [ctypes.c_int32(n) for n in value.shape]
                storages += [ctypes.c_int64(n) for n in value.strides]
            elif kind in _SCALARS:
                storages.append(_SCALARS[kind](value))
            else:
                raise Unknown(kind)
        return storages

    def filled(self, fills: Sequence[tuple[int, int]]) -> Callable[[Sequence[int], Any], None]:
        """What launches with addresses and on a stream; `fills`: (place among the arguments, place
        in the list of addresses) of each tensor."""
        sources = [(self._places[place], slot) for place, slot in fills]
        plain = [(x.storage, slot) for x, slot in sources if isinstance(x, _Address)]
        maps = [(x, slot) for x, slot in sources if isinstance(x, _Map)]

        def launch(addresses: Sequence[int], stream: Any) -> None:
            with self._lock:
                for storage, slot in plain:
                    storage.value = addresses[slot]
                for one, slot in maps:
                    one.write(addresses[slot])
                _run(lambda: self._launch(stream), "a kernel can't be launched")

        return launch

    def _launch(self, stream: Any) -> int:
        function, params = self._compiled.function, self._params
        code: int = self._driver.cuLaunchKernel(function, *self._how, stream, params, None)
        return code


class _Address:
    """A pointer among the arguments."""

    def __init__(self) -> None:
        self.storage = ctypes.c_uint64(0)


class _Map:
    """A descriptor among the arguments."""

    def __init__(self, driver: Any, value: Any, meta: Mapping[str, Any] | None) -> None:
        if meta is None or set(meta) != _META or meta["fp4_padded"]:
            raise Unknown("descriptor")
        if getattr(value, "round_f32_to_tf32", False) or value.padding != "zero":
            raise Unknown("descriptor")
        self._driver = driver
        self._bytes = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
        start = -ctypes.addressof(self._bytes) % _MAP_ALIGNMENT
        self.storage = (ctypes.c_char * _MAP_BYTES).from_buffer(self._bytes, start)
        self._at = ctypes.c_void_p(ctypes.addressof(self.storage))
        self._address = value.base.data_ptr()
        self._encode(value, meta)

    def _encode(self, value: Any, meta: Mapping[str, Any]) -> None:
        """Innermost dimension first; strides in bytes, but for the innermost."""
        size, rank = meta["elem_size"], len(value.shape)
        shape = (ctypes.c_uint64 * rank)(*reversed(value.shape))
        strides = (ctypes.c_uint64 * rank)(*(size * n for n in reversed(value.strides[:-1])))
        box = (ctypes.c_uint32 * rank)(*reversed(meta["block_size"]))
        steps = (ctypes.c_uint32 * rank)(*[1] * rank)
        if value.base.dtype not in _DATA_TYPES:
            raise Unknown(value.base.dtype)
        kind, swizzle = _DATA_TYPES[value.base.dtype], meta["swizzle"]
        address = ctypes.c_void_p(self._address)
        code = self._driver.cuTensorMapEncodeTiled(
            *(self._at, kind, rank, address, shape, strides, box, steps),
            *(0, swizzle, _L2_PROMOTION_128B, 0),
        )
        if code:
            raise Unknown(_text_of(self._driver, code))

    def write(self, address: int) -> None:
        if address != self._address:
            code = self._driver.cuTensorMapReplaceAddress(self._at, ctypes.c_void_p(address))
            if code:
                raise _failed("a descriptor can't be moved", code)
            self._address = address


def clear(address: int, count: int, stream: Any) -> None:
    """Zero so many bytes of a GPU's memory, in a stream's order."""
    driver = _driver()
    _run(lambda: driver.cuMemsetD8Async(address, 0, count, stream), "memory can't be cleared")


def _run(work: Callable[[], int], problem: str) -> None:
    """Call the driver. Raises RuntimeError for a code that isn't 0."""
    code = work()
    if code == _INVALID_CONTEXT:
        # A thread in which nothing has used the device.
        torch.cuda.set_device(torch.cuda.current_device())
        code = work()
    if code:
        raise _failed(problem, code)


@functools.cache
def _driver() -> Any:
    """CUDA's driver, whose calls keep the interpreter's lock. Raises Unknown."""
    try:
        driver = ctypes.PyDLL("libcuda.so.1")
        number, pointer = ctypes.c_uint, ctypes.c_void_p
        driver.cuLaunchKernel.argtypes = [pointer, *[number] * 7, pointer, pointer, pointer]
        sized = ctypes.POINTER(ctypes.c_size_t)
        driver.cuFuncGetParamInfo.argtypes = [pointer, ctypes.c_size_t, sized, sized]
        driver.cuTensorMapReplaceAddress.argtypes = [pointer, pointer]
        memory = (ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t, pointer)
        driver.cuMemsetD8Async.argtypes = memory
    except (OSError, AttributeError) as error:
        raise Unknown(str(error)) from error
    return driver


def _check_kind(meta: Any) -> None:
    """Refuse what a plain launch can't do."""
    needs = ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")
    if meta.target.backend != "cuda" or meta.num_ctas != 1 or any(getattr(meta, n) for n in needs):
        raise Unknown("launch")


def _check_sizes(driver: Any, function: int, storages: Sequence[Any]) -> None:
    """Whether the kernel has just these parameters, by what the driver knows of it."""
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    for i, storage in enumerate(storages):
        code = driver.cuFuncGetParamInfo(function, i, ctypes.byref(offset), ctypes.byref(size))
        if code or size.value != ctypes.sizeof(storage):
            raise Unknown(f"parameter {i}")
    count = len(storages)
    if not driver.cuFuncGetParamInfo(function, count, ctypes.byref(offset), ctypes.byref(size)):
        raise Unknown("more parameters")


def _failed(what: str, code: int) -> RuntimeError:
    return RuntimeError(f"CUDA: {what}: {_text_of(_driver(), code)}")


def _text_of(driver: Any, code: int) -> str:
    text = ctypes.c_char_p()
    driver.cuGetErrorString(code, ctypes.byref(text))
    return (text.value or b"").decode() or f"error {code}"


def is_watched() -> bool:
    """Whether a profiler wants to see Triton's launches."""
    from triton import knobs

    hook = knobs.runtime.launch_enter_hook
    return bool(getattr(hook, "calls", hook))
