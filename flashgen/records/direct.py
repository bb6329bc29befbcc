"""Launching what was compiled, by CUDA's driver alone: pointers are filled in, the rest stands.

Triton's own way looks at every argument each time. Here a kernel's arguments lie in memory as the
driver reads them (CUDA driver API, `cuLaunchKernelEx`; for descriptors `cuTensorMapEncodeTiled`).
Pointers are read from a table of addresses, which all kernels of a record share, so that each
address is written once. What isn't known to be laid out so is left to Triton."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, MutableSequence, Sequence
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
# Bits of an address that are flipped, to see where in a descriptor it stands.
_OTHER_PLACE = 2**40 + 2**20 + 16
_INVALID_CONTEXT = 201

# Launches on a stream.
Launcher = Callable[[Any], None]


class Unknown(Exception):
    """A kernel whose arguments aren't known to lie as they are written here."""


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z")),
        *((name, ctypes.c_uint) for name in ("block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


class DirectLaunch:
    """A compiled kernel, its grid and its arguments, but for the addresses of tensors.

    `arguments`: all that its signature has, in order. Raises Unknown."""

    def __init__(self, compiled: Any, programs: int, arguments: Sequence[Any]) -> None:
        meta = compiled.metadata
        _check_kind(meta)
        self._driver = _driver()
        self._compiled = compiled
        self._how = (programs, 1, 1, 32 * meta.num_warps, 1, 1, meta.shared)
        # Places among the arguments, of what follows from an address.
        self._addresses: dict[int, int] = {}
        self._maps: dict[int, tuple[int, bytes, Mapping[str, Any]]] = {}
        self._numbers: dict[int, int] = {}
        storages = self._lay_out(compiled, arguments)
        # Scratch memory that no kernel here has: global, and for profiles.
        storages += [ctypes.c_uint64(0), ctypes.c_uint64(0)]
        if (count := _parameters(compiled)) != len(storages):
            raise Unknown(f"{count} parameters")
        _check_sizes(self._driver, compiled.function, storages)
        self._storages = storages

    def __str__(self) -> str:
        return str(getattr(self._compiled.metadata, "name", "a kernel"))

    def _lay_out(self, compiled: Any, arguments: Sequence[Any]) -> list[Any]:
        """A place in memory for each parameter."""
        storages: list[Any] = []
        described = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        kinds = list(compiled.src.signature.values())
        for place, (kind, value) in enumerate(zip(kinds, arguments, strict=True)):
            if kind == "constexpr":
                continue
            if not isinstance(kind, str):
                raise Unknown(kind)
            if kind.startswith("*"):
                self._addresses[place] = len(storages)
                storages.append(ctypes.c_uint64(0))
            elif kind.startswith("tensordesc"):
                meta = next(described, None)
                encoded = _encoded(self._driver, value, meta)
                self._maps[place] = len(storages), encoded, meta or {}
                storages.append((ctypes.c_char * _MAP_BYTES)())
                storages += [ctypes.c_int32(n) for n in value.shape]
                storages += [ctypes.c_int64(n) for n in value.strides]
            elif kind in _SCALARS:
                self._numbers[place] = len(storages)
                storages.append(_SCALARS[kind](value))
            else:
                raise Unknown(kind)
        return storages

    def reading(self, addresses: Any, fills: Sequence[tuple[int, int]]) -> Launcher:
        """What launches with the addresses that then stand in a table of them (an array of
        `c_uint64`); `fills`: (place among the arguments, place in the table) of each tensor."""
        params = [ctypes.addressof(storage) for storage in self._storages]
        maps: list[tuple[MutableSequence[int], int]] = []
        for place, slot in fills:
            if place in self._addresses:
                params[self._addresses[place]] = ctypes.addressof(addresses) + 8 * slot
            else:
                number, encoded, _ = self._maps[place]
                words = _words(encoded)
                params[number] = ctypes.addressof(words)
                maps.append((words, slot))
        return self._launcher(addresses, (ctypes.c_void_p * len(params))(*params), maps)

    def frame(self) -> Frame:
        """The same with arguments that are written anew for each launch. It takes the memory."""
        storages = self._storages
        params = [ctypes.addressof(storage) for storage in storages]
        maps = []
        for place, (number, encoded, meta) in self._maps.items():
            words = _words(encoded)
            params[number] = ctypes.addressof(words)
            maps.append(_Map(self._driver, place, meta, words, storages[number + 1 :]))
        config, run = self._runner((ctypes.c_void_p * len(params))(*params))
        numbers, pointers = (
            [(place, storages[number]) for place, number in places.items()]
            for places in (self._numbers, self._addresses)
        )
        return Frame(str(self), config, run, numbers, pointers, maps)

    def _runner(self, params: Any) -> tuple[Any, Callable[[], int]]:
        """How it is launched, and what launches it with these parameters."""
        config = _Config(*self._how, None, None, 0)
        function = ctypes.c_void_p(self._compiled.function)
        given = (ctypes.byref(config), function, ctypes.byref(params), None)
        return config, functools.partial(self._driver.cuLaunchKernelEx, *given)

    def _launcher(self, addresses: Any, params: Any, maps: Sequence[Any]) -> Launcher:
        config, run = self._runner(params)

        def launch(stream: Any) -> None:
            for words, slot in maps:
                words[0] = addresses[slot]
            config.stream = stream
            if code := run():
                # What else is here, and the kernel, lives as long as this does.
                _again(code, run, f"{self} can't be launched")

        return launch


class _Map:
    """A descriptor among the arguments; behind it are its shape and strides."""

    def __init__(
        self, driver: Any, place: int, meta: Mapping[str, Any], words: Any, behind: Sequence[Any]
    ) -> None:
        self._driver, self._meta, self._words, self._behind = driver, meta, words, behind
        self.place = place
        self._known: Any = None

    def write(self, value: Any) -> None:
        """Describe this tensor. Raises Unknown of one that can't be described."""
        place, how = value.base.data_ptr(), (*value.shape, *value.strides)
        if how != self._known:
            encoded = _encode(self._driver, value, self._meta, place)
            ctypes.memmove(self._words, encoded, _MAP_BYTES)
            for storage, number in zip(self._behind, how, strict=False):
                storage.value = number
            self._known = how
        self._words[0] = place


# Places among the arguments, and where in memory they stand.
_Places = Sequence[tuple[int, Any]]


class Frame:
    """A kernel's arguments in memory; for one launch at a time."""

    def __init__(
        self,
        name: str,
        config: Any,
        run: Callable[[], int],
        numbers: _Places,
        pointers: _Places,
        maps: Sequence[_Map],
    ) -> None:
        self._name, self._config, self._run = name, config, run
        self._numbers, self._pointers, self._maps = numbers, pointers, maps

    def launch(self, programs: int, arguments: Sequence[Any], stream: Any) -> None:
        """Run the kernel with other arguments of the same kinds."""
        for place, storage in self._numbers:
            storage.value = arguments[place]
        for place, storage in self._pointers:
            storage.value = arguments[place].data_ptr()
        for one in self._maps:
            one.write(arguments[one.place])
        self._config.grid_x, self._config.stream = programs, stream
        if code := self._run():
            _again(code, self._run, f"{self._name} can't be launched")


def _words(encoded: bytes) -> Any:
    """A descriptor where the driver wants it; its first word is the address."""
    room = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
    start = -ctypes.addressof(room) % _MAP_ALIGNMENT
    words = (ctypes.c_uint64 * (_MAP_BYTES // 8)).from_buffer(room, start)
    ctypes.memmove(words, encoded, _MAP_BYTES)
    return words


def _encoded(driver: Any, value: Any, meta: Mapping[str, Any] | None) -> bytes:
    """A descriptor as CUDA writes it. Raises Unknown, also where its first word isn't the address
    and all that follows from it."""
    if meta is None or set(meta) != _META or meta["fp4_padded"]:
        raise Unknown("descriptor")
    if getattr(value, "round_f32_to_tf32", False) or value.padding != "zero":
        raise Unknown("descriptor")
    place = value.base.data_ptr()
    here, there = (_encode(driver, value, meta, at) for at in (place, place ^ _OTHER_PLACE))
    for encoded, at in ((here, place), (there, place ^ _OTHER_PLACE)):
        if int.from_bytes(encoded[:8], "little") != at or encoded[8:] != here[8:]:
            raise Unknown("descriptor")
    return here


def _encode(driver: Any, value: Any, meta: Mapping[str, Any], address: int) -> bytes:
    """Innermost dimension first; strides in bytes, but for the innermost."""
    words = _words(bytes(_MAP_BYTES))
    size, rank = meta["elem_size"], len(value.shape)
    shape = (ctypes.c_uint64 * rank)(*reversed(value.shape))
    strides = (ctypes.c_uint64 * rank)(*(size * n for n in reversed(value.strides[:-1])))
    box = (ctypes.c_uint32 * rank)(*reversed(meta["block_size"]))
    steps = (ctypes.c_uint32 * rank)(*[1] * rank)
    if value.base.dtype not in _DATA_TYPES:
        raise Unknown(value.base.dtype)
    kind, swizzle = _DATA_TYPES[value.base.dtype], meta["swizzle"]
    code = driver.cuTensorMapEncodeTiled(
        *(ctypes.byref(words), kind, rank, ctypes.c_void_p(address), shape, strides, box, steps),
        *(0, swizzle, _L2_PROMOTION_128B, 0),
    )
    if code:
        raise Unknown(_text_of(driver, code))
    return bytes(words)


def driver_version() -> int:
    """CUDA's, as its driver says. Raises Unknown."""
    version = ctypes.c_int()
    if code := _driver().cuDriverGetVersion(ctypes.byref(version)):
        raise Unknown(_text_of(_driver(), code))
    return version.value


def clear(address: int, count: int, stream: Any) -> None:
    """Zero so many bytes of a GPU's memory, in a stream's order."""
    run = functools.partial(_driver().cuMemsetD8Async, address, 0, count, stream)
    if code := run():
        _again(code, run, "memory can't be cleared")


def _again(code: int, run: Callable[[], int], problem: str) -> None:
    """Call the driver once more where it said that a thread hasn't used the device yet. Raises
    RuntimeError for every other code."""
    if code == _INVALID_CONTEXT:
        torch.cuda.set_device(torch.cuda.current_device())
        code = run()
    if code:
        raise _failed(problem, code)


@functools.cache
def _driver() -> Any:
    """CUDA's driver, whose calls keep the interpreter's lock. Raises Unknown."""
    try:
        driver = ctypes.PyDLL("libcuda.so.1")
        pointer = ctypes.c_void_p
        # Its arguments are made once, as C has them.
        driver.cuLaunchKernelEx  # noqa: B018
        sized = ctypes.POINTER(ctypes.c_size_t)
        driver.cuFuncGetParamInfo.argtypes = [pointer, ctypes.c_size_t, sized, sized]
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


def count_parameters(ptx: str) -> int:
    """How many parameters the only kernel of a module has, by the PTX it was made from."""
    _, _, behind = ptx.partition(".entry ")
    return behind.partition(")")[0].count(".param ")


def _parameters(compiled: Any) -> int:
    """The same of Triton's `CompiledKernel`, or of one that knows it."""
    known = getattr(compiled, "parameters", None)
    return count_parameters(compiled.asm["ptx"]) if known is None else int(known)


def _check_sizes(driver: Any, function: int, storages: Sequence[Any]) -> None:
    """Whether the kernel's parameters are of these sizes, by what the driver knows of it. It isn't
    asked for one behind the last: its answer is an error, which compute-sanitizer shows."""
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    for i, storage in enumerate(storages):
        code = driver.cuFuncGetParamInfo(function, i, ctypes.byref(offset), ctypes.byref(size))
        if code or size.value != ctypes.sizeof(storage):
            raise Unknown(f"parameter {i}")


def _failed(what: str, code: int) -> RuntimeError:
    return RuntimeError(f"CUDA: {what}: {_text_of(_driver(), code)}")


def _text_of(driver: Any, code: int) -> str:
    text = ctypes.c_char_p()
    driver.cuGetErrorString(code, ctypes.byref(text))
    return (text.value or b"").decode() or f"error {code}"


def is_watched() -> bool:
    """Whether a profiler wants to see Triton's launches."""
    hook = _settings().launch_enter_hook
    return bool(getattr(hook, "calls", hook))


@functools.cache
def _settings() -> Any:
    """Triton's, of launches."""
    from triton import knobs

    return knobs.runtime
