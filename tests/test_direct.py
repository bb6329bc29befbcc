"""Launches by addresses, with a driver that only looks: what it is given is what was asked for."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashgen.records import direct

KINDS = {
    "a": "*bf16",
    "n": "i32",
    "wide": "i64",
    "scale": "fp32",
    "TILE": "constexpr",
    "b": "*fp32",
}
TYPES = [ctypes.c_uint64, ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_uint64]


class Driver:
    """CUDA's driver as far as it is used: kernels have parameters of these types."""

    def __init__(self, types: list[Any]) -> None:
        # Scratch for a kernel, and for profiles, are behind.
        self.types = [*types, ctypes.c_uint64, ctypes.c_uint64]
        self.launched: list[tuple[tuple[int, ...], Any, list[Any]]] = []
        self.codes: list[int] = []

    def cuFuncGetParamInfo(self, function: int, i: int, offset: Any, size: Any) -> int:
        # An answer that is an error is shown by compute-sanitizer.
        assert i < len(self.types)
        size._obj.value = ctypes.sizeof(self.types[i])
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, params: Any, extra: Any) -> int:
        *how, stream, attributes, count = (
            getattr(config._obj, name) for name, _ in config._obj._fields_
        )
        assert function.value == 77
        assert (attributes, count, extra) == (None, 0, None)
        params = params._obj
        values = [kind.from_address(at).value for kind, at in zip(self.types, params, strict=True)]
        self.launched.append((tuple(how), stream, values))
        return self.codes.pop(0) if self.codes else 0

    def cuGetErrorString(self, code: int, text: Any) -> int:
        text._obj.value = b"no such thing"
        return 0


def compiled(kinds: dict[str, str], parameters: int | None = None, **changes: Any) -> Any:
    """`parameters`: how many a kernel of these kinds has, unless it is given."""
    meta = {
        "name": "attend",
        "target": SimpleNamespace(backend="cuda"), "num_warps": 4, "num_ctas": 1, "shared": 1000,
        "launch_cooperative_grid": False, "launch_pdl": False, "global_scratch_size": 0,
        "profile_scratch_size": 0, "tensordesc_meta": None,
    }  # fmt: skip
    if parameters is None:
        # A descriptor of two dimensions is a map, two lengths and two strides.
        sizes = [5 if "tensordesc" in kind else kind != "constexpr" for kind in kinds.values()]
        parameters = sum(sizes) + 2
    return SimpleNamespace(
        parameters=parameters,
        metadata=SimpleNamespace(**{**meta, **changes}),
        src=SimpleNamespace(signature=kinds),
        function=77,
    )


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver(TYPES)
    monkeypatch.setattr(direct, "_driver", lambda: made)
    return made


def arguments() -> list[Any]:
    return [torch.zeros(2), -5, 2**40, 0.25, 64, torch.zeros(2)]


def table(*addresses: int) -> Any:
    return (ctypes.c_uint64 * len(addresses))(*addresses)


def reading(addresses: Any, *fills: tuple[int, int]) -> direct.Launcher:
    return direct.DirectLaunch(compiled(KINDS), 9, arguments()).reading(addresses, fills)


def test_scalars_stand_and_addresses_are_read_from_a_table(driver: Driver) -> None:
    """Also after everything else that had to do with the kernel is gone."""
    addresses = table(111, 222, 333)
    launch = reading(addresses, (5, 0), (0, 2))
    gc.collect()
    noise = [ctypes.c_int64(-1) for _ in range(1000)]
    launch(5)
    addresses[:] = [444, 555, 2**47]
    launch(6)
    how = (9, 1, 1, 128, 1, 1, 1000)
    assert driver.launched == [
        (how, 5, [333, -5, 2**40, 0.25, 111, 0, 0]),
        (how, 6, [2**47, -5, 2**40, 0.25, 444, 0, 0]),
    ]
    del noise


def test_a_frame_takes_other_numbers_and_tensors(driver: Driver) -> None:
    first = arguments()
    frame = direct.DirectLaunch(compiled(KINDS), 9, first).frame()
    gc.collect()
    frame.launch(9, first, 5)
    other = [torch.ones(3), 7, -(2**50), 0.5, None, torch.ones(3)]
    frame.launch(4, other, 6)
    places = [[x.data_ptr() for x in (given[0], given[5])] for given in (first, other)]
    assert [how[0] for how, *_ in driver.launched] == [9, 4]
    assert [(stream, values) for _, stream, values in driver.launched] == [
        (5, [places[0][0], -5, 2**40, 0.25, places[0][1], 0, 0]),
        (6, [places[1][0], 7, -(2**50), 0.5, places[1][1], 0, 0]),
    ]
    driver.codes = [700]
    with pytest.raises(RuntimeError, match="attend can't be launched: no such thing"):
        frame.launch(4, other, 6)


class Describing(Driver):
    """A driver that makes descriptors: an address, and what else there is, `rest(address)`."""

    def __init__(self, rest: Callable[[int], bytes]) -> None:
        super().__init__(
            [ctypes.c_char * 128, *[ctypes.c_int32] * 2, *[ctypes.c_int64] * 2, ctypes.c_int32]
        )
        self.rest, self.made = rest, []
        self.seen: list[tuple[int, bytes]] = []

    def cuTensorMapEncodeTiled(self, at: Any, kind: int, rank: int, address: Any, *how: Any) -> int:
        made = address.value.to_bytes(8, "little") + self.rest(address.value).ljust(120, b"\1")
        ctypes.memmove(at, made, 128)
        self.made.append((kind, rank, *map(list, how[:4]), *how[4:]))
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, params: Any, extra: Any) -> int:
        at = params._obj[0]
        assert at % 64 == 0
        found = ctypes.string_at(at, 128)
        self.seen.append((int.from_bytes(found[:8], "little"), found[8:]))
        return 0


def described(base: torch.Tensor) -> Any:
    """A launch whose first argument is a descriptor of tiles [64, 32] of it."""
    kinds = {"x": "tensordesc<bf16[64, 32]>", "n": "i32"}
    meta = {
        "swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 32], "fp4_padded": False
    }  # fmt: skip
    value = SimpleNamespace(base=base, shape=[128, 96], strides=[96, 1], padding="zero")
    return direct.DirectLaunch(compiled(kinds, tensordesc_meta=[meta]), 9, [value, 7])


def test_descriptors_are_moved_by_their_first_word(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Describing(lambda _: b"rest")
    monkeypatch.setattr(direct, "_driver", lambda: driver)
    made = described(torch.zeros(128, 96, dtype=torch.bfloat16))
    # Sizes from the last dimension on, strides in bytes.
    assert driver.made[0] == (9, 2, [96, 128], [192, 0], [32, 64], [1, 1], 0, 3, 2, 0)
    first, second = table(1 << 40, 5), table(7, 1 << 41)
    launches = made.reading(first, [(0, 0)]), made.reading(second, [(0, 1)])
    for launch in launches:
        launch(0)
    first[0] = 1 << 42
    launches[0](0)
    rest = b"rest".ljust(120, b"\1")
    assert driver.seen == [(1 << 40, rest), (1 << 41, rest), (1 << 42, rest)]


def test_a_frame_describes_other_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Again only where they lie otherwise."""
    driver = Describing(lambda _: b"rest")
    monkeypatch.setattr(direct, "_driver", lambda: driver)
    bases = [torch.zeros(128, 96, dtype=torch.bfloat16) for _ in range(3)]
    frame = described(bases[0]).frame()
    count = len(driver.made)
    for base, length in zip(bases, (128, 128, 64), strict=True):
        shape = [length, 96]
        value = SimpleNamespace(base=base, shape=shape, strides=[96, 1], padding="zero")
        frame.launch(1, [value, 7], 0)
    assert [place for place, _ in driver.seen] == [base.data_ptr() for base in bases]
    assert [made[2] for made in driver.made[count:]] == [[96, 128], [96, 64]]


def test_a_descriptor_with_more_of_its_address_is_left_to_triton(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Describing(lambda address: address.to_bytes(8, "big"))
    monkeypatch.setattr(direct, "_driver", lambda: driver)
    with pytest.raises(direct.Unknown):
        described(torch.zeros(128, 96, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    "change",
    [
        {"num_ctas": 2},
        {"launch_pdl": True},
        {"launch_cooperative_grid": True},
        {"global_scratch_size": 4},
        {"profile_scratch_size": 4},
        {"target": SimpleNamespace(backend="hip")},
    ],
    ids=str,
)
def test_launches_of_another_kind_are_left_to_triton(driver: Driver, change: Any) -> None:
    with pytest.raises(direct.Unknown):
        direct.DirectLaunch(compiled(KINDS, **change), 9, arguments())


@pytest.mark.parametrize(
    "types",
    [TYPES[:-1], [*TYPES, ctypes.c_int32], [ctypes.c_uint64, ctypes.c_int64, *TYPES[2:]]],
    ids=["fewer", "more", "wider"],
)
def test_parameters_that_lie_otherwise_are_left_to_triton(driver: Driver, types: Any) -> None:
    driver.types = Driver(types).types
    with pytest.raises(direct.Unknown):
        direct.DirectLaunch(compiled(KINDS, len(driver.types)), 9, arguments())


def test_how_many_parameters_triton_s_own_kernel_has_is_read_from_its_ptx(driver: Driver) -> None:
    made = compiled(KINDS)
    del made.parameters
    listed = ", ".join(f".param .u64 attend_param_{i}" for i in range(len(TYPES) + 2))
    made.asm = {"ptx": f".func (.param .b32 x) f() {{}} .visible .entry attend({listed}) {{}}"}
    direct.DirectLaunch(made, 9, arguments())
    made.asm = {"ptx": made.asm["ptx"].replace("attend(", "attend(.param .u64 more, ")}
    with pytest.raises(direct.Unknown, match="8 parameters"):
        direct.DirectLaunch(made, 9, arguments())


def test_kinds_that_are_not_known_are_left_to_triton(driver: Driver) -> None:
    for kind in ("fp8e4nv", ("i32", "i32"), "tensordesc<bf16[64, 64]>"):
        with pytest.raises(direct.Unknown):
            direct.DirectLaunch(compiled({**KINDS, "n": kind}), 9, arguments())  # type: ignore[dict-item]


def test_a_failure_says_what_the_driver_says(driver: Driver) -> None:
    launch = reading(table(1), (0, 0), (5, 0))
    driver.codes = [700]
    with pytest.raises(RuntimeError, match="attend can't be launched: no such thing"):
        launch(0)


def test_a_thread_without_a_context_gets_one(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    launch = reading(table(1), (0, 0), (5, 0))
    driver.codes = [201, 0]
    launch(0)
    assert chosen == [3]
    assert len(driver.launched) == 2
