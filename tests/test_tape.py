"""Records of what a call does: played on other tensors they do the same, or they aren't made."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashgen.config import config
from flashgen.records.play import Play
from flashgen.records.tape import Tapes, recorder


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(3, 4), torch.randn(3, 4)


class Counted:
    """Work, and how often it was done by its own code."""

    def __init__(self, work: Callable[..., Any]) -> None:
        self.work, self.times = work, 0

    def run(self, tapes: Tapes, *tensors: torch.Tensor, key: Any = "k") -> Any:
        def run() -> Any:
            self.times += 1
            return self.work(*tensors)

        return tapes.run(key, (), run, tensors)


def mix(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Buffers, views, writes in place, operations of several results, and a missing one."""
    out = torch.empty_like(x)
    out.copy_(x.T.contiguous().T)
    zeros = torch.zeros(3, 4)
    zeros[1:].add_(y[1:], alpha=2.0)
    least, most = torch.aminmax(x + y, dim=1)
    return out, None, zeros, (least - most).to(torch.float64), x


def test_what_is_played_is_what_was_done() -> None:
    tapes, work = Tapes(), Counted(mix)
    for _ in range(5):
        x, y = pair()
        got = work.run(tapes, x, y)
        for mine, right in zip(got, mix(x, y), strict=True):
            assert mine is right is None or torch.equal(mine, right)
        assert got[4] is x
    assert work.times == 2


def test_other_layouts_and_keys_are_other_records() -> None:
    tapes, work = Tapes(), Counted(mix)
    for _ in range(3):
        work.run(tapes, *pair())
    assert work.times == 2
    x, y = pair()
    buffer = torch.empty(13)
    others = (
        (x.T.contiguous().T, y),
        (buffer[1:].view(3, 4).copy_(x), y),
    )
    for given in others:
        before = work.times
        for mine, right in zip(work.run(tapes, *given), mix(*given), strict=True):
            assert mine is right is None or torch.equal(mine, right)
        assert work.times == before + 1
    work.run(tapes, x, y, key="another")
    assert work.times == 5


def test_work_that_reads_no_tensor() -> None:
    """Planning a mask without data: all it takes are numbers."""
    tapes, work = Tapes(), Counted(lambda: (torch.arange(4).add_(3), torch.zeros(2)))
    for _ in range(4):
        numbers, zeros = work.run(tapes)
        assert numbers.tolist() == [3, 4, 5, 6]
        assert not zeros.any()
    assert work.times == 2


ELSEWHERE = torch.ones(3, 4)
UNSOUND: dict[str, Callable[..., Any]] = {
    "the host reads": lambda x, y: (x + x.sum().item(),),
    "a shape depends on values": lambda x, y: (x.nonzero(),),
    "a tensor from elsewhere": lambda x, y: (x + ELSEWHERE,),
    "a list of tensors": lambda x, y: (torch.cat([x, y]),),
    "a result from elsewhere": lambda x, y: (ELSEWHERE,),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_what_might_differ_is_not_played(name: str) -> None:
    tapes, work = Tapes(), Counted(UNSOUND[name])
    for _ in range(4):
        x, y = pair()
        torch.testing.assert_close(work.run(tapes, x, y), UNSOUND[name](x, y))
    assert work.times == 4


def test_twins_are_not_recorded_and_not_confused() -> None:
    tapes, work = Tapes(), Counted(lambda x, y: (x - 2 * y,))
    x, _ = pair()
    for _ in range(4):
        assert torch.equal(work.run(tapes, x, x)[0], x - 2 * x)
    assert work.times == 4
    for _ in range(3):
        x, y = pair()
        assert torch.equal(work.run(tapes, x, y)[0], x - 2 * y)
    assert torch.equal(work.run(tapes, x, x)[0], x - 2 * x)
    assert work.times == 5


def test_nothing_is_held_and_nobody_listens_afterwards() -> None:
    tapes, work = Tapes(), Counted(mix)
    for _ in range(2):
        work.run(tapes, *pair())
    assert recorder() is None
    play = next(x for x in tapes._plays.values() if isinstance(x, Play))
    ((_, steps),) = play._ready or [play._prepare()]
    for step in steps:
        cells = [cell.cell_contents for cell in step.__closure__ or ()]
        lists = [x for cell in cells if isinstance(cell, (list, tuple)) for x in cell]
        assert not any(isinstance(x, torch.Tensor) for x in (*cells, *lists))


def test_an_error_while_recording_leaves_no_record() -> None:
    tapes, fails = Tapes(), [False, True, False, False, False]

    def work(x: torch.Tensor, y: torch.Tensor) -> Any:
        if fails.pop(0):
            raise ZeroDivisionError
        return (x + y,)

    counted = Counted(work)
    x, y = pair()
    counted.run(tapes, x, y)
    with pytest.raises(ZeroDivisionError):
        counted.run(tapes, x, y)
    assert recorder() is None
    for _ in range(3):
        assert torch.equal(counted.run(tapes, x, y)[0], x + y)
    assert counted.times == 3


def test_a_record_inside_a_record_is_a_part_of_it() -> None:
    tapes, inner = Tapes(), Tapes()

    def nested(x: torch.Tensor, y: torch.Tensor) -> Any:
        (doubled,) = inner.run("inner", (), lambda: (2 * x,), (x,))
        return (doubled + y, doubled)

    work = Counted(nested)
    for _ in range(3):
        # So that the inner one is recorded, or played, at each turn of the outer one.
        x, y = pair()
        inner.run("inner", (), lambda x=x: (2 * x,), (x,))
        got = work.run(tapes, x, y)
        assert torch.equal(got[0], 2 * x + y)
        assert torch.equal(got[1], 2 * x)
    assert work.times == 2


def test_debugging_records_nothing() -> None:
    tapes, work = Tapes(), Counted(mix)
    with config.override(debug=True):
        for _ in range(4):
            work.run(tapes, *pair())
    assert work.times == 4


class Adding:
    """A kernel by addresses: out = x + y, of so many floats; anything of `out` is added to."""

    def __init__(self, count: int) -> None:
        self.count, self.launches = count, 0

    def __call__(self, x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
        out.view(-1)[: self.count] += x.reshape(-1) + y.reshape(-1)

    def reading(self, addresses: Any, fills: Any) -> Any:
        def launch(stream: Any) -> None:
            self.added(*(addresses[slot] for _, slot in fills))

        return launch

    def added(self, *addresses: int) -> None:
        self.launches += 1
        x, y, out = ((ctypes.c_float * self.count).from_address(at) for at in addresses)
        for i in range(self.count):
            out[i] += x[i] + y[i]


def launched(kernel: Adding, *tensors: torch.Tensor) -> None:
    """As `launch.launch` does."""
    told = recorder()
    if told is None:
        kernel(*tensors)
        return
    with told.launching():
        kernel(*tensors)
    told.launched(kernel, tensors, direct=kernel)  # type: ignore[arg-type]


def test_what_only_kernels_see_is_one_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros are cleared each time, views are addresses, and what is returned is a tensor."""
    cleared: list[int] = []

    def clear(address: int, count: int, _: Any) -> None:
        ctypes.memset(address, 0, count)
        cleared.append(count)

    monkeypatch.setattr("flashgen.records.play.clear", clear)
    kernel = Adding(12)

    def work(x: torch.Tensor, y: torch.Tensor) -> Any:
        hidden, out = torch.zeros(3, 4), torch.zeros(3, 4)
        long, scratch = torch.zeros(24), torch.empty(1000)
        scratch.zero_()
        launched(kernel, x, y, hidden)
        launched(kernel, hidden, y, long[12:])
        launched(kernel, long[12:], hidden, out)
        return out, scratch.sum()

    tapes, counted = Tapes(), Counted(work)
    for turn in range(5):
        x, y = pair()
        out, rest = counted.run(tapes, x, y)
        torch.testing.assert_close(out, 2 * x + 3 * y)
        assert not rest
        assert len(cleared) == max(0, turn - 1)
    assert counted.times == 2
    assert kernel.launches == 9
    # hidden and long, each from a boundary on.
    assert set(cleared) == {1024}


def test_views_of_what_an_operation_made_are_located_after_it() -> None:
    """Their addresses are known then only; a kernel may follow an operation that follows one."""
    kernel = Adding(4)

    def work(x: torch.Tensor, y: torch.Tensor) -> Any:
        first, out = torch.zeros(8), torch.zeros(4)
        launched(kernel, x[1:2], y[1:2], first[4:])
        made = first * 3
        launched(kernel, made[4:], x[2:], out)
        return (out,)

    tapes, counted = Tapes(), Counted(work)
    for _ in range(5):
        x, y = pair()
        (out,) = counted.run(tapes, x, y)
        torch.testing.assert_close(out, 3 * (x[1] + y[1]) + x[2])
    assert counted.times == 2


def test_a_record_may_be_played_while_it_is_played() -> None:
    """Another thread's addresses are its own."""
    kernel, tapes = Adding(12), Tapes()
    inner: list[torch.Tensor] = []

    def work(x: torch.Tensor, y: torch.Tensor) -> Any:
        out = torch.zeros(3, 4)
        launched(kernel, x, y, out)
        return (out,)

    counted = Counted(work)
    for _ in range(3):
        counted.run(tapes, *pair())
    add = kernel.added

    def interrupted(*addresses: int) -> None:
        if not inner:
            inner.append(torch.zeros(()))
            given = pair()
            inner[0] = counted.run(tapes, *given)[0] - sum(given)
        add(*addresses)

    kernel.added = interrupted  # type: ignore[method-assign]
    x, y = pair()
    torch.testing.assert_close(counted.run(tapes, x, y)[0], x + y)
    torch.testing.assert_close(inner[0], torch.zeros(3, 4))
    assert counted.times == 2
