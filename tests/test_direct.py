"""Launches by addresses, with a driver that only looks: what it is given is what was asked for."""

from __future__ import annotations

import ctypes
import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashgen import direct

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
        if i >= len(self.types):
            return 1
        size._obj.value = ctypes.sizeof(self.types[i])
        return 0

    def cuLaunchKernel(self, function: int, *given: Any) -> int:
        *how, stream, params, extra = given
        assert extra is None
        values = [kind.from_address(at).value for kind, at in zip(self.types, params, strict=True)]
        self.launched.append((tuple(how), stream, values))
        return self.codes.pop(0) if self.codes else 0

    def cuGetErrorString(self, code: int, text: Any) -> int:
        text._obj.value = b"no such thing"
        return 0


def compiled(kinds: dict[str, str], **changes: Any) -> Any:
    meta = {
        "target": SimpleNamespace(backend="cuda"), "num_warps": 4, "num_ctas": 1, "shared": 1000,
        "launch_cooperative_grid": False, "launch_pdl": False, "global_scratch_size": 0,
        "profile_scratch_size": 0, "tensordesc_meta": None,
    }  # fmt: skip
    return SimpleNamespace(
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


def test_scalars_stand_and_addresses_are_filled_in(driver: Driver) -> None:
    """Also after everything else that had to do with the kernel is gone."""
    launch = direct.DirectLaunch(compiled(KINDS), 9, arguments()).filled([(5, 0), (0, 2)])
    gc.collect()
    noise = [ctypes.c_int64(-1) for _ in range(1000)]
    launch([111, 222, 333], 5)
    launch([444, 555, 2**47], 6)
    how = (9, 1, 1, 128, 1, 1, 1000)
    assert driver.launched == [
        (how, 5, [333, -5, 2**40, 0.25, 111, 0, 0]),
        (how, 6, [2**47, -5, 2**40, 0.25, 444, 0, 0]),
    ]
    del noise


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
        direct.DirectLaunch(compiled(KINDS), 9, arguments())


def test_kinds_that_are_not_known_are_left_to_triton(driver: Driver) -> None:
    for kind in ("fp8e4nv", ("i32", "i32"), "tensordesc<bf16[64, 64]>"):
        with pytest.raises(direct.Unknown):
            direct.DirectLaunch(compiled({**KINDS, "n": kind}), 9, arguments())  # type: ignore[dict-item]


def test_a_failure_says_what_the_driver_says(driver: Driver) -> None:
    launch = direct.DirectLaunch(compiled(KINDS), 9, arguments()).filled([(0, 0), (5, 0)])
    driver.codes = [700]
    with pytest.raises(RuntimeError, match="no such thing"):
        launch([1], 0)


def test_a_thread_without_a_context_gets_one(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    launch = direct.DirectLaunch(compiled(KINDS), 9, arguments()).filled([(0, 0), (5, 0)])
    driver.codes = [201, 0]
    launch([1], 0)
    assert chosen == [3]
    assert len(driver.launched) == 2
