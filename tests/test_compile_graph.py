"""`torch.compile`: whole graphs, any length, gradients; schedules given, made inside, shared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import flashgen as fg
from flashgen import FlashgenError, masks

pytestmark = pytest.mark.usefixtures("fresh_graphs")
B, H, D = 2, 4, 8


@fg.attention(mask=masks.causal_document & masks.sliding_window)
def biased(score, h, q_idx, kv_idx, slope: fg.Tensor, warmth: float):
    return score * warmth + slope[h] * (kv_idx - q_idx)


class Layers(torch.nn.Module):
    """Two layers of attention over the same documents."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.ModuleList(torch.nn.Linear(D, D) for _ in range(2))
        self.slope = torch.nn.Parameter(torch.rand(H))
        self.attend = biased

    def forward(self, x: torch.Tensor, **given: Any) -> torch.Tensor:
        for project in self.project:
            x = x + self.attend(project(x), x, x, slope=self.slope, **given)
        return x


def compiled(run: Callable[..., Any], backend: str = "aot_eager") -> Callable[..., Any]:
    made: Callable[..., Any] = torch.compile(run, fullgraph=True, dynamic=True, backend=backend)
    return made


def documents(length: int) -> torch.Tensor:
    return torch.randint(0, 3, (B, length)).sort(-1).values


def agree(
    first: Callable[..., Any], second: Callable[..., Any], tensors: list[torch.Tensor], **rest: Any
) -> None:
    """Same output, same gradients, up to the order of PyTorch's own sums."""
    results = []
    torch.manual_seed(1)
    grad = None
    for run in (first, second):
        out = run(*tensors, **rest)
        grad = torch.randn_like(out) if grad is None else grad
        wanted = [x for x in tensors if x.requires_grad]
        results.append((out, *torch.autograd.grad(out, wanted, grad)))
    for mine, right in zip(*results, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-4)


def module_call(module: torch.nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
    """With the parameters as arguments that `agree` differentiates by."""
    return lambda x, *parameters, **given: run(x, **given)


@pytest.mark.parametrize("schedule", ["given", "made inside"])
def test_twenty_lengths_are_one_graph(schedule: str) -> None:
    module = Layers()
    run = compiled(module)
    for length in range(90, 290, 10) if schedule == "given" else range(20, 220, 10):
        x = torch.randn(B, H, length, D, requires_grad=True)
        given = {"doc": documents(length), "window": length // 2, "warmth": 20 / length}
        if schedule == "given":
            # PyTorch sets sizes of 1 apart, and takes sizes that are equal at first for one: so it
            # has more tiles than there are heads.
            mask_data = {n: given[n] for n in ("doc", "window")}
            given["schedule"] = biased.schedule(x, x, x, block_size=16, **mask_data)
        if length % 50:
            run(x, **given).sum().backward()
            continue
        tensors = [x, *module.parameters()]
        agree(module_call(module, run), module_call(module, module), tensors, **given)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["recompiles"]
    assert not counters["graph_break"]


@pytest.mark.slow
def test_inductor() -> None:
    module = Layers()
    run = compiled(module, "inductor")
    for length in (20, 40, 90):
        x = torch.randn(B, H, length, D, requires_grad=True)
        given = {"doc": documents(length), "window": length // 2, "warmth": 20 / length}
        tensors = [x, *module.parameters()]
        agree(module_call(module, run), module_call(module, module), tensors, **given)
    assert counters["stats"]["unique_graphs"] == 1


def test_layers_share_a_schedule_made_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashgen.ops import library

    made = []
    make = library.make_schedule

    def count(*arguments: Any) -> Any:
        made.append(arguments)
        return make(*arguments)

    monkeypatch.setattr(library, "make_schedule", count)
    module, x = Layers(), torch.randn(B, H, 30, D)
    compiled(module)(x, doc=documents(30), window=9, warmth=1.0).sum().backward()
    assert len(made) == 1


def test_a_schedule_is_no_value_of_a_graph() -> None:
    x, doc = torch.randn(B, H, 30, D), documents(30)
    run = compiled(lambda x, doc: biased.schedule(x, x, x, doc=doc, window=9).states)
    with pytest.raises(Exception, match="a schedule isn't a graph's value"):
        run(x, doc)


def test_captured_and_early_bound_tensors_have_gradients() -> None:
    slope, doc = torch.rand(H, requires_grad=True), documents(24)
    table = torch.nn.Parameter(torch.rand(24))

    def bias(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + slope[h] * (k - q) + table[k]

    attend = fg.Attention(mask=masks.causal_document(doc=doc), score=bias)
    x = torch.randn(B, H, 24, D, requires_grad=True)
    tensors = [x, slope, table]
    agree(compiled(lambda x, *_: attend(x, x, x)), lambda x, *_: attend(x, x, x), tensors)


def test_every_argument_of_a_call() -> None:
    attend = fg.Attention(mask=masks.causal, softcap=20.0, sinks=True)

    def run(q: Any, k: Any, v: Any, sinks: Any, lens: Any, offset: Any) -> Any:
        out, lse = attend(
            q, k, v, sinks=sinks, kv_lens=lens, q_offset=offset, scale=0.3, return_lse=True
        )
        return torch.cat([out, lse[..., None]], -1)

    lens = torch.tensor([9, 30])
    for offset in (0, 7, torch.tensor([3, 5])):
        q = torch.randn(B, H, 12, D, requires_grad=True)
        k, v = (torch.randn(B, 2, 30, D, requires_grad=True) for _ in range(2))
        tensors = [q, k, v, torch.rand(H, requires_grad=True)]
        agree(
            compiled(lambda *x, offset=offset: run(*x, lens, offset)),
            lambda *x, offset=offset: run(*x, lens, offset),
            tensors,
        )


def test_autocast_inside() -> None:
    attend = fg.Attention(mask=masks.causal)
    x = torch.randn(B, H, 16, D)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = compiled(lambda x: attend(x, x, x))(x)
    assert out.dtype == torch.bfloat16
    y = x.bfloat16()
    torch.testing.assert_close(out, attend(y, y, y))


def test_constants_are_part_of_the_graph() -> None:
    @fg.mask
    def strided(q_idx: Any, kv_idx: Any, step: fg.Const[int]) -> Any:
        return (kv_idx <= q_idx) & ((q_idx - kv_idx) % step == 0)

    attend = fg.Attention(mask=strided)
    run = compiled(lambda x, step: attend(x, x, x, step=step))
    x = torch.randn(B, H, 16, D)
    for step in (2, 3):
        torch.testing.assert_close(run(x, step), attend(x, x, x, step=step))


def test_what_does_not_fit_is_refused_when_the_graph_runs() -> None:
    attend = fg.Attention(mask=masks.causal_document)
    run = compiled(lambda x, doc: attend(x, x, x, doc=doc))
    x = torch.randn(B, H, 16, D)
    with pytest.raises(FlashgenError, match="needs a length of at least 16"):
        run(x, documents(9))
    windowed = compiled(lambda x, w: fg_window(x, x, x, window=w))
    with pytest.raises(FlashgenError, match="window must be at least 0"):
        windowed(x, -3)
    longer = torch.randn(B, H, 20, D)
    schedule = attend.schedule(longer, longer, longer, doc=documents(20))
    with pytest.raises(FlashgenError, match="the schedule was made for Sq = 20"):
        compiled(lambda x, doc, s: attend(x, x, x, doc=doc, schedule=s))(x, documents(16), schedule)


fg_window = fg.Attention(mask=masks.sliding_window)


class Exported(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope = torch.nn.Parameter(torch.rand(H))

    def forward(self, x: torch.Tensor, doc: torch.Tensor) -> Any:
        return biased(x, x, x, doc=doc, window=9, warmth=1.0, slope=self.slope)


def test_export() -> None:
    module, x = Exported(), torch.randn(B, H, 24, D)
    length = torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(
        module, (x, documents(24)), dynamic_shapes=({2: length}, {1: length})
    )
    longer = torch.randn(B, H, 90, D), documents(90)
    torch.testing.assert_close(program.module()(*longer), module(*longer))


def test_export_of_a_scale_that_follows_from_a_length() -> None:
    """It is a constant of the program, so other lengths aren't its."""

    class Scaled(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return fg.Attention(masks.causal)(x, x, x, scale=1 / x.shape[2])

    length, x = torch.export.Dim("length", min=2, max=4096), torch.randn(B, H, 24, D)
    with pytest.raises(torch._dynamo.exc.UserError, match="Constraints violated"):
        torch.export.export(Scaled(), (x,), dynamic_shapes=({2: length},), strict=False)


class Plain(torch.nn.Module):
    """A mask without data, and a parameter that a score function captures."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(H))
        self.attend = fg.Attention(masks.causal, self.weighted)

    def weighted(self, score: Any, h: Any) -> Any:
        return score * self.weight[h]

    def forward(self, x: torch.Tensor) -> Any:
        return self.attend(x, x, x)


@pytest.mark.parametrize("strict", [False, True])
def test_export_of_what_is_looked_at_on_the_host(strict: bool) -> None:
    module, x = Plain(), torch.randn(B, H, 24, D)
    program = torch.export.export(module, (x,), strict=strict)
    torch.testing.assert_close(program.module()(x), module(x))


def test_packed_sequences_and_dropout() -> None:
    attend = fg.Attention(mask=masks.causal)
    cu = torch.tensor([0, 10, 30], dtype=torch.int32)
    packed = [torch.randn(30, H, D, requires_grad=True) for _ in range(3)]
    dense = [torch.randn(B, H, 20, D, requires_grad=True) for _ in range(3)]

    def of_packed(*x: torch.Tensor) -> Any:
        return attend(*x, cu_seqlens_q=cu, cu_seqlens_kv=cu)

    def dropped(*x: torch.Tensor) -> Any:
        return attend(*x, dropout_p=0.3, seed=4)

    agree(compiled(of_packed), of_packed, packed)
    agree(compiled(dropped), dropped, dense)
