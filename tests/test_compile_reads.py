"""What functions read besides their arguments, in graphs of `torch.compile`: looked at before each
run, as eager calls do."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import flashgen as fg
from flashgen import FlashgenError

pytestmark = pytest.mark.usefixtures("fresh_graphs")
S = 48


class Reading(torch.nn.Module):
    """A mask of documents and a window, and a score function, which read their module."""

    def __init__(self) -> None:
        super().__init__()
        self.documents = torch.arange(S) // 16
        self.window = 9
        self.slope = torch.nn.Parameter(torch.rand(2))
        self.attend = fg.Attention(self.mask, self.score)

    def mask(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        is_near = (q_idx >= kv_idx) & (q_idx - kv_idx < self.window)
        return (self.documents[q_idx] == self.documents[kv_idx]) & is_near

    def score(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + self.slope[h] * (kv_idx - q_idx)

    def forward(self, x: torch.Tensor, **replaced: Any) -> torch.Tensor:
        for name, value in replaced.items():
            setattr(self, name, value)
        return self.attend(x, x, x)  # type: ignore[no-any-return]

    def right(self, x: torch.Tensor) -> torch.Tensor:
        """By PyTorch alone."""
        away = torch.arange(S)[:, None] - torch.arange(S)
        allowed = (self.documents[:, None] == self.documents) & (away >= 0) & (away < self.window)
        scores = x @ x.mT / x.shape[-1] ** 0.5 - self.slope[:, None, None] * away
        return torch.where(allowed, scores, -torch.inf).softmax(-1) @ x


def agree(run: Callable[..., torch.Tensor], module: Reading) -> None:
    """Output and gradients, twice, and those of an eager call."""
    x = torch.randn(1, 2, S, 4, requires_grad=True)
    wanted = [x, module.slope]
    right = module.right(x)
    grads = torch.autograd.grad(right.square().sum(), wanted)
    for call in (run, run, module):
        out = call(x)
        torch.testing.assert_close(out, right)
        mine = torch.autograd.grad(out.square().sum(), wanted)
        torch.testing.assert_close(mine, grads, rtol=1e-4, atol=1e-4)


CHANGES: dict[str, tuple[Callable[[Reading], Any], int]] = {
    "another tensor": (lambda m: setattr(m, "documents", torch.arange(S) // 7), 0),
    "a tensor in place": (lambda m: m.documents.copy_(torch.arange(S) // 5), 0),
    "another parameter": (lambda m: setattr(m, "slope", torch.nn.Parameter(torch.rand(2))), 0),
    "parameters loaded": (lambda m: m.load_state_dict({"slope": torch.rand(2)}, assign=True), 0),
    "another dtype": (lambda m: setattr(m, "documents", (torch.arange(S) // 7).int()), 1),
    "a number": (lambda m: setattr(m, "window", 4), 1),
    "another mask": (lambda m: setattr(m, "attend", fg.Attention(m.mask, m.score)), 1),
}


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_calls(change: str, fullgraph: bool) -> None:
    """New tensors of the same kind need no new graph."""
    how, graphs = CHANGES[change]
    module, counter = Reading(), CompileCounter()
    run = torch.compile(module, fullgraph=fullgraph, backend=counter)
    agree(run, module)
    how(module)
    agree(run, module)
    assert counter.frame_count == 1 + graphs


def test_tensors_that_change_in_every_call() -> None:
    module, counter = Reading(), CompileCounter()
    run = torch.compile(module, fullgraph=True, backend=counter)
    for size in range(3, 23):
        module.documents = torch.arange(S) // size
        agree(run, module)
    assert counter.frame_count == 1


def test_what_is_replaced_is_dropped() -> None:
    """And so is a module whose graph PyTorch keeps."""
    module, x = Reading(), torch.randn(1, 2, S, 4)
    run = torch.compile(module, fullgraph=True, backend="eager")
    run(x)
    before = weakref.ref(module.documents)
    module.documents = torch.arange(S) // 7
    torch.testing.assert_close(run(x), module.right(x))
    gc.collect()
    assert before() is None
    before = weakref.ref(module.attend._program)
    del module, run
    gc.collect()
    assert before() is None


def test_inductor_and_variables_of_a_closure() -> None:
    documents, window = torch.arange(S) // 16, 9

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (documents[q_idx] == documents[kv_idx]) & ((q_idx - kv_idx).abs() < window)

    attend, x = fg.Attention(mask), torch.randn(1, 2, S, 4)
    run = torch.compile(lambda x: attend(x, x, x) + 1, fullgraph=True)
    for size, width in ((16, 9), (7, 9), (7, 4)):
        documents, window = torch.arange(S) // size, width
        torch.testing.assert_close(run(x), attend(x, x, x) + 1)
        allowed = mask(0, 0, torch.arange(S)[:, None], torch.arange(S))
        right = torch.where(allowed, x @ x.mT / 2, -torch.inf).softmax(-1) @ x
        torch.testing.assert_close(run(x), right + 1)


def test_two_graphs_of_one_declaration() -> None:
    """Each is compared with what it was made with."""
    module = Reading()
    runs = [
        torch.compile(lambda x, n=n: module(x) * n, fullgraph=True, backend="eager") for n in (1, 2)
    ]
    for window in (9, 4, 9, 5):
        module.window = window
        x = torch.randn(1, 2, S, 4)
        for n, run in enumerate(runs, 1):
            torch.testing.assert_close(run(x), n * module.right(x))


def test_a_score_made_of_a_parameter() -> None:
    """It is computed for each run: its own graph serves one backward."""
    gain, x = torch.nn.Parameter(torch.zeros(2)), torch.randn(1, 2, S, 4)
    attend = fg.Attention(None, lambda score, b, h, i, j: score * gain.exp()[h])
    run = torch.compile(lambda x: attend(x, x, x), fullgraph=True, backend="aot_eager")
    for value in (0.0, 0.5, 1.0):
        with torch.no_grad():
            gain.fill_(value)
        right = (x @ x.mT / 2 * gain.exp()[:, None, None]).softmax(-1) @ x
        (wanted,) = torch.autograd.grad(right.square().sum(), gain)
        out = run(x)
        torch.testing.assert_close(out, right)
        (grad,) = torch.autograd.grad(out.square().sum(), gain)
        torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-4)


def test_parameters_replaced_around_a_compiled_module() -> None:
    module, x = Reading(), torch.randn(1, 2, S, 4)
    module.compile(fullgraph=True, backend="eager")
    for _ in range(3):
        given = torch.rand(2)
        out = torch.func.functional_call(module, {"slope": given}, (x,))
        own, module.slope = module.slope, torch.nn.Parameter(given)
        torch.testing.assert_close(out, module.right(x))
        module.slope = own
        torch.testing.assert_close(module(x), module.right(x))


def test_what_the_compiled_function_sets_itself_is_refused() -> None:
    """PyTorch sets it behind the graph. The same number as before is no change."""
    module, x = Reading(), torch.randn(1, 2, S, 4)
    run = torch.compile(module, fullgraph=True, backend="eager")
    torch.testing.assert_close(run(x, window=9), module.right(x))
    for replaced in ({"window": 4}, {"documents": torch.arange(S) // 7}):
        with pytest.raises(FlashgenError, match=f"sets '{next(iter(replaced))}', which the decl"):
            run(x, **replaced)

    def swapped(slope: torch.Tensor) -> Any:
        return torch.func.functional_call(module, {"slope": slope}, (x,))

    with pytest.raises(FlashgenError, match="sets 'slope', which the declaration reads"):
        torch.compile(swapped, fullgraph=True, backend="eager")(torch.rand(2))
    torch.testing.assert_close(run(x), module.right(x))


def test_what_was_refused_is_looked_at_again() -> None:
    module, x = Reading(), torch.randn(1, 2, S, 4)
    module(x)
    right, module.documents = module.documents, torch.zeros(S, 2, dtype=torch.int64)
    run = torch.compile(module, fullgraph=True, backend="eager")
    with pytest.raises(FlashgenError):
        run(x)
    module.documents = right
    torch.testing.assert_close(run(x), module.right(x))


def test_an_exported_program_keeps_what_was_there() -> None:
    module, x = Reading(), torch.randn(1, 2, S, 4)
    program = torch.export.export(module, (x,)).module()
    right = module.right(x)
    module.documents, module.window = torch.arange(S) // 7, 4
    torch.testing.assert_close(program(x), right)
