"""What a function reads through objects, containers and helpers is seen by the next call."""

from __future__ import annotations

import functools
import os
import random
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks

import flashgen as fg
from flashgen import masks
from flashgen.trace import Function, trace
from flashgen.trace.reads import same

S = 9
AWAY = torch.arange(S)[:, None] - torch.arange(S)
CONFIG: dict[str, int] = {}
MODE, WIDTH = "", 0


def near(q_idx: Any, kv_idx: Any, width: Any = 0) -> Any:
    return (kv_idx <= q_idx) & (q_idx - kv_idx < (width or WIDTH))


def close(q_idx: Any, kv_idx: Any, *, width: Any = 3) -> Any:
    return (kv_idx <= q_idx) & (q_idx - kv_idx < width)


class Model(torch.nn.Module):
    """Everything a mask may read a width through."""

    level = 3

    def __init__(self) -> None:
        super().__init__()
        self.width, self.widths = 3, [3]
        self.inner = types.SimpleNamespace(width=3, table={"width": 3})
        self.learned = torch.nn.ParameterList([torch.nn.Parameter(torch.tensor(3.0))])

    @property
    def twice(self) -> int:
        return self.width

    def found(self) -> int:
        return int(self.inner.table["width"])

    def forward(self, q_idx: Any, kv_idx: Any) -> Any:
        return near(q_idx, kv_idx, self.width)


MODEL = Model()


def _set(path: str) -> Callable[[Model], None]:
    return lambda model: exec(f"model.{path} = 5", {"model": model})


def _learn(model: Model) -> None:
    model.learned[0] = torch.nn.Parameter(torch.tensor(5.0))


@pytest.mark.parametrize(
    ("read", "change"),
    [
        (lambda m: m.width, _set("width")),
        (lambda m: m.inner.width, _set("inner.width")),
        (lambda m: m.widths[0], _set("widths[0]")),
        (lambda m: m.widths[-1], lambda m: m.widths.append(5)),
        (lambda m: m.inner.table.get("width"), _set("inner.table['width']")),
        (lambda m: m.twice, _set("width")),
        (lambda m: m.found(), _set("inner.table['width']")),
        (lambda m: m.found(), lambda m: setattr(m, "found", lambda: 5)),
        (lambda m: m.level, _set("level")),
        (lambda m: m.learned[0], _learn),
        (lambda m: m.learned[0].item(), lambda m: m.learned[0].detach().fill_(5)),
        (lambda m: getattr(m, "wi" + "dth"), _set("width")),
        (lambda m: getattr(m, "absent", 3), _set("absent")),
        (lambda m: vars(m)["width"], _set("width")),
    ],
)
def test_through_an_object(read: Any, change: Any) -> None:
    model = Model()
    expect(lambda b, h, q_idx, kv_idx: near(q_idx, kv_idx, read(model)), lambda: change(model))


def by_config(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return near(q_idx, kv_idx, CONFIG["width"])


def by_mode(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return near(q_idx, kv_idx, 5 if MODE == "wide" else 3)


def by_helper(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return near(q_idx, kv_idx)


def by_keyword(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return close(q_idx, kv_idx)


def by_module(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return MODEL(q_idx, kv_idx)


def by_environment(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return near(q_idx, kv_idx, int(os.environ["MASK_WIDTH"]))


def by_chance(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return near(q_idx, kv_idx, random.choice([3, 3]) if MODE == "" else 5)


by_partial = functools.partial(
    lambda b, h, q_idx, kv_idx, held: near(q_idx, kv_idx, held["width"]), held=CONFIG
)


@pytest.mark.parametrize(
    ("function", "change"),
    [
        (by_config, {"CONFIG": {"width": 5}}),
        (by_mode, {"MODE": "wide"}),
        (by_helper, {"WIDTH": 5}),
        (by_helper, {"near": lambda i, j: (j <= i) & (i - j < 5)}),
        (by_module, {"MODEL": Model()}),
        (and_masks(by_mode, by_helper), {"MODE": "wide", "WIDTH": 5}),
        (by_chance, {"MODE": "wide"}),
    ],
)
def test_through_names_of_a_module(
    function: Any, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {"CONFIG": {"width": 3}, "MODE": "", "WIDTH": 3, "MODEL": Model()}
    for name, value in before.items():
        monkeypatch.setitem(globals(), name, value)
    if "MODEL" in change:
        change["MODEL"].width = 5
    expect(function, lambda: [monkeypatch.setitem(globals(), n, x) for n, x in change.items()])


def test_in_place_and_in_a_helper_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONFIG, "width", 3)
    expect(by_config, lambda: monkeypatch.setitem(CONFIG, "width", 5))
    monkeypatch.setitem(CONFIG, "width", 3)
    expect(by_partial, lambda: monkeypatch.setitem(CONFIG, "width", 5))
    monkeypatch.setattr(near, "__defaults__", (3,))
    expect(by_helper, lambda: monkeypatch.setattr(near, "__defaults__", (5,)))
    monkeypatch.setattr(close, "__kwdefaults__", {"width": 3})
    expect(by_keyword, lambda: monkeypatch.setattr(close, "__kwdefaults__", {"width": 5}))
    monkeypatch.setenv("MASK_WIDTH", "3")
    expect(by_environment, lambda: monkeypatch.setenv("MASK_WIDTH", "5"))


def test_masks_inside_masks() -> None:
    widths = [3]
    inner = fg.mask(lambda b, h, q_idx, kv_idx: near(q_idx, kv_idx, widths[0]))

    @fg.mask
    def outer(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return inner(b, h, q_idx, kv_idx)

    expect(outer, lambda: widths.__setitem__(0, 5))


def expect(function: Any, change: Callable[[], Any]) -> None:
    """A width of 3, and of 5 after the change, in calls, schedules and the dense matrix; calls in
    between are known."""
    attend, x = fg.Attention(function), torch.randn(1, 2, S, 4)
    for width in (3, 5):
        allowed = (AWAY >= 0) & (width > AWAY)
        right = torch.where(allowed, x @ x.mT / 2, -torch.inf).softmax(-1) @ x
        for _ in range(2):
            torch.testing.assert_close(attend(x, x, x), right)
            calls = attend._calls
        assert attend.schedule(x, x, x, block_size=16).to_dense().item() == 1
        assert torch.equal(attend.mask.dense(S, S)[0, 0], allowed)
        assert attend._calls is calls
        change()


def test_two_that_share_a_function() -> None:
    """Whoever is called first traces it again; the other one notices, too."""
    holder = types.SimpleNamespace(width=3, seen=torch.arange(S) // 6)
    mask = fg.mask(lambda b, h, i, j: (holder.seen[i] == holder.seen[j]) & (i - j < holder.width))
    first, second = fg.Attention(mask), fg.Attention(mask, softcap=1e6)
    x = torch.randn(1, 2, S, 4)
    for width, size in ((3, 6), (5, 6), (5, 4), (3, 4)):
        holder.width, holder.seen = width, torch.arange(S) // size
        same = holder.seen[:, None] == holder.seen
        right = torch.where(same & (width > AWAY), x @ x.mT / 2, -torch.inf).softmax(-1) @ x
        for attend in (first, second, first, second):
            torch.testing.assert_close(attend(x, x, x), right, rtol=1e-4, atol=1e-5)


def test_a_score_made_of_a_parameter_is_differentiated_each_time() -> None:
    gain, x = torch.nn.Parameter(torch.zeros(2)), torch.randn(1, 2, S, 4)
    attend = fg.Attention(None, lambda score, b, h, i, j: score * gain.exp()[h])
    for _ in range(2):
        with torch.no_grad():
            attend(x, x, x)
        out = attend(x, x, x)
        right = (x @ x.mT / 2 * gain.exp()[:, None, None]).softmax(-1) @ x
        (grad,), (wanted,) = (
            torch.autograd.grad(y.square().sum(), gain, retain_graph=True) for y in (out, right)
        )
        torch.testing.assert_close(out, right)
        torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            gain.add_(0.5)


def _read(function: Any) -> Any:
    return trace(Function.of(function, "mask"), {}, wants="mask").read


def test_what_is_compared_and_what_is_run_again() -> None:
    lists, table, data = [3], torch.arange(S), torch.rand(2).numpy()
    closed = _read(lambda b, h, i, j: (i - j < lists[0]) & (table[i] <= table[j]))
    assert closed.complete
    assert len(closed.checks) < 9
    table.add_(1)
    assert closed.are_current()
    doubled = _read(lambda b, h, i, j: (table * 2)[i] <= j)
    assert doubled.complete
    assert doubled.are_current()
    table.add_(1)
    assert not doubled.are_current()
    assert not _read(lambda b, h, i, j: i < data[0]).complete
    assert not _read(lambda b, h, i, j: i - j < int(random.random() + 3)).complete
    assert _read(masks.causal.__wrapped__).checks == ()


def test_what_a_function_cannot_tell_apart() -> None:
    assert same(1000, int("1000"))
    assert same(float("nan"), float("nan"))
    assert same((1, "a"), (1, "a"))
    assert not same(0.0, -0.0)
    assert not same(1, True)
    assert not same([1], [1])
