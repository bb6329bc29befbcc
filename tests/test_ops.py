"""Attention as PyTorch operations: operators, autograd, transforms, modes, modules."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import flashgen as fg
from flashgen import FlashgenError, masks
from flashgen.ops import form

B, H, S, D = 2, 4, 20, 8
DOC = torch.tensor([0] * 7 + [1] * 9 + [2] * 4).repeat(B, 1)


@fg.attention(mask=masks.causal_document & masks.sliding_window)
def biased(score, h, q_idx, kv_idx, slope: fg.Tensor, warmth: float):
    return score * warmth + slope[h] * (kv_idx - q_idx)


def leaves(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    shapes = ((B, H, S, D), (B, 2, S, D), (B, 2, S, D))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def call(q: Any, k: Any, v: Any, slope: torch.Tensor, **rest: Any) -> Any:
    return biased(q, k, v, doc=DOC, window=6, slope=slope, warmth=0.5, **rest)


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slope: torch.Tensor) -> Any:
    """What `call` computes, from the formula, with PyTorch's own operations."""
    i, j = torch.arange(S)[:, None], torch.arange(S)[None, :]
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = (q @ k.mT) * D**-0.5 * 0.5 + slope[:, None, None] * (j - i)
    allowed = (j <= i) & (i - j < 6) & (DOC[:, None, :, None] == DOC[:, None, None, :])
    return torch.where(allowed, scores, -torch.inf).softmax(-1) @ v


class Seen(TorchDispatchMode):
    """The operators of this package that are called, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "flashgen":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))

    @property
    def names(self) -> list[str]:
        return [func.name().removeprefix("flashgen::") for func, _ in self.calls]


def test_operators_pass_opcheck() -> None:
    slope = torch.rand(H, requires_grad=True)
    with Seen() as seen:
        out, lse = call(*leaves(), slope, return_lse=True)
        ((out * torch.randn_like(out)).sum() + lse.sum()).backward()
    assert seen.names == ["schedule", "attention", "attention_backward"]
    for func, args in seen.calls:
        # The gradient itself has none: its arguments are those of a backward without a graph.
        if "backward" in func.name():
            args = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, args)
        assert set(torch.library.opcheck(func, args).values()) == {"SUCCESS"}


@pytest.mark.parametrize("as_operators", [False, True])
def test_both_ways_compute_the_same(as_operators: bool) -> None:
    inputs = [*leaves(), torch.rand(H, requires_grad=True)]
    grad = torch.randn(B, H, S, D)
    if as_operators:
        with Seen() as seen:
            out = call(*inputs)
            got = torch.autograd.grad(out, inputs, grad)
        assert "attention_backward" in seen.names
    else:
        out = call(*inputs)
        got = torch.autograd.grad(out, inputs, grad)
    right = reference(*inputs)
    torch.testing.assert_close(out, right)
    for mine, wanted in zip(got, torch.autograd.grad(right, inputs, grad), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5)


def test_gradcheck() -> None:
    @fg.attention(mask=masks.causal, softcap=3.0, sinks=True)
    def attend(score, q_idx, kv_idx, table: fg.Tensor):
        return score + table[q_idx - kv_idx] * score

    shapes = ((1, 2, 5, 3), (1, 1, 6, 3), (1, 1, 6, 2), (2,), (6,))
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]

    def run(q: Any, k: Any, v: Any, sinks: Any, table: Any) -> Any:
        return attend(q, k, v, sinks=sinks, table=table, return_lse=True)

    assert torch.autograd.gradcheck(run, inputs)


def test_functional_gradients() -> None:
    q, k, v = (x.detach() for x in leaves())
    slope = torch.rand(H)
    got = torch.func.grad(lambda q, s: call(q, k, v, s).square().sum(), argnums=(0, 1))(q, slope)
    wanted = torch.func.grad(lambda q, s: reference(q, k, v, s).square().sum(), argnums=(0, 1))(
        q, slope
    )
    for mine, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-4)


def _twice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    first = torch.autograd.grad(call(q, k, v, torch.rand(H)).sum(), q, create_graph=True)[0]
    return torch.autograd.grad(first.sum(), q)


def _functional_twice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    once = torch.func.grad(lambda q: call(q, k, v, torch.ones(H)).sum())
    return torch.func.grad(lambda q: once(q).sum())(q.detach())


def _operator_twice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    with Seen():
        return _twice(q, k, v)


def _mapped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return torch.vmap(lambda s: call(q, k, v, s))(torch.rand(3, H))


def _forward_mode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    q = q.detach()
    return torch.func.jvp(lambda q: call(q, k, v, torch.ones(H)), (q,), (q,))


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (_twice, "differentiated again"),
        (_functional_twice, "differentiated again"),
        (_operator_twice, "differentiated again"),
        (_mapped, "torch.vmap"),
        (_forward_mode, "forward-mode"),
    ],
)
def test_what_there_is_no_rule_for_says_so(run: Callable[..., Any], says: str) -> None:
    with pytest.raises(FlashgenError, match=says):
        run(*leaves())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_sdpa_does(dtype: torch.dtype) -> None:
    inputs = leaves()
    slope = torch.rand(H, requires_grad=True)
    with torch.autocast("cpu", dtype=dtype):
        out = call(*inputs, slope)
        peer = torch.nn.functional.scaled_dot_product_attention(*inputs, enable_gqa=True)
    assert out.dtype == peer.dtype == dtype
    torch.testing.assert_close(out, call(*(x.to(dtype) for x in inputs), slope))
    out.sum().backward()
    assert all(x.grad.dtype == torch.float32 for x in (*inputs, slope))
    with torch.autocast("cpu", dtype=dtype):
        assert call(*leaves(torch.float64), slope).dtype == torch.float64
        mixed = [x.to(kind) for x, kind in zip(inputs, (dtype, torch.float32, dtype), strict=True)]
        assert call(*mixed, slope).dtype == dtype


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    inputs = [*leaves(), torch.rand(H, requires_grad=True)]
    grad = torch.randn(B, H, S, D)
    plain = torch.autograd.grad(call(*inputs), inputs, grad)
    checkpoint(call, *inputs, use_reentrant=reentrant).backward(grad)
    assert all(torch.equal(x.grad, right) for x, right in zip(inputs, plain, strict=True))


def test_operators_have_their_names_before_a_call() -> None:
    """A policy of selective checkpointing asks for them."""
    names = "import torch, flashgen; flashgen.Attention; torch.ops.flashgen.attention.default"
    subprocess.run([sys.executable, "-c", names], check=True)


@pytest.mark.parametrize("saved", [True, False])
def test_selective_checkpointing(saved: bool) -> None:
    inputs = [*leaves(), torch.rand(H, requires_grad=True)]
    grad = torch.randn(B, H, S, D)
    plain = torch.autograd.grad(call(*inputs).sin(), inputs, grad)

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        mine = saved and op == torch.ops.flashgen.attention.default
        return CheckpointPolicy.MUST_SAVE if mine else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(policy)

    with Seen() as seen:
        out = checkpoint(
            lambda *x: call(*x).sin(), *inputs, use_reentrant=False, context_fn=contexts
        )
        got = torch.autograd.grad(out, inputs, grad)
    assert all(torch.equal(mine, right) for mine, right in zip(got, plain, strict=True))
    assert seen.names.count("attention") == (1 if saved else 2)


def test_gradients_of_any_strides() -> None:
    inputs = [*leaves(), torch.rand(H, requires_grad=True)]
    for grad in (
        torch.ones(()).expand(B, H, S, D),
        torch.randn(B, S, H, D).transpose(1, 2),
        torch.randn(B, H, D, S).mT,
        torch.randn(B, H, S, 2 * D)[..., ::2],
    ):
        got = torch.autograd.grad(call(*inputs), inputs, grad)
        right = torch.autograd.grad(reference(*inputs), inputs, grad)
        for mine, wanted in zip(got, right, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("which", range(4))
def test_only_gradients_asked_for_are_computed(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashgen import cpu

    asked = []
    backward = cpu.Walk.backward

    def spy(self: Any, saved: Any, sinks: Any, data: Any, needed: Any) -> Any:
        asked.append(tuple(needed))
        return backward(self, saved, sinks, data, needed)

    monkeypatch.setattr(cpu.Walk, "backward", spy)
    inputs = [x.requires_grad_(at == which) for at, x in enumerate((*leaves(), torch.rand(H)))]
    call(*inputs).sum().backward()
    assert [x.grad is not None for x in inputs] == [at == which for at in range(4)]
    q, k, v, slope = (at == which for at in range(4))
    assert asked == [(q, k, v, False, False, slope)]


def test_no_gradient_no_graph() -> None:
    inputs = [x.detach() for x in leaves()]
    assert call(*inputs, torch.rand(H)).grad_fn is None
    with torch.no_grad():
        assert call(*leaves(), torch.rand(H)).grad_fn is None
    with torch.inference_mode():
        out, lse = call(*leaves(), torch.ones(H), return_lse=True)
        assert out.is_inference()
        assert lse.is_inference()


@pytest.mark.parametrize("which", ["q", "slope", "out", "doc"])
def test_tensors_edited_before_the_backward(which: str) -> None:
    q, k, v = leaves()
    slope, doc = torch.rand(H, requires_grad=True), DOC.clone()
    own = q * 1.0
    loose = slope * 1.0
    out = biased(own, k, v, doc=doc, window=6, slope=loose, warmth=0.5)
    {"q": own, "slope": loose, "out": out, "doc": doc}[which].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("which", ["q_offset", "cu_seqlens_q"])
def test_places_edited_before_the_backward(which: str) -> None:
    """The kernels would read and write elsewhere."""
    attend, x = fg.Attention(masks.causal), torch.randn(B, H, S, D, requires_grad=True)
    starts = torch.tensor([0, 5, S], dtype=torch.int32)
    if which == "q_offset":
        offset = torch.tensor([0, 3])
        out, edited = attend(x, x, x, q_offset=offset), offset
    else:
        rows = x[0].transpose(0, 1)
        out = attend(rows, rows, rows, cu_seqlens_q=starts, cu_seqlens_kv=starts)
        edited = starts[1]
    edited.add_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_shapes_without_computing() -> None:
    with torch._subclasses.FakeTensorMode():
        q, k, v = leaves()
        doc = torch.zeros(B, S, dtype=torch.int64)
        out, lse = biased(
            q, k, v, doc=doc, window=6, slope=torch.rand(H), warmth=0.5, return_lse=True
        )
        assert (out.shape, lse.shape) == ((B, H, S, D), (B, H, S))
        out.sum().backward()
        assert q.grad.shape == q.shape


def test_an_operator_of_another_process() -> None:
    q = torch.randn(1, 1, 4, 4)
    with pytest.raises(FlashgenError, match="no declaration 'nobody'"):
        torch.ops.flashgen.attention(q, q, q, [], [], "nobody")


def test_the_registry_holds_no_tensor_and_one_form_for_equal_declarations() -> None:
    q = torch.randn(1, 1, 16, 4)

    def attend() -> weakref.ref[torch.Tensor]:
        table = torch.rand(16) < 0.5
        own = fg.Attention(mask=lambda b, h, q, k: table[k] | (q >= k))
        with Seen():
            own(q, q, q)
        return weakref.ref(table)

    first = attend()
    known = set(form._forms)
    second = attend()
    gc.collect()
    assert first() is None
    assert second() is None
    assert set(form._forms) == known


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(D, D)
        self.slope = torch.nn.Parameter(torch.rand(H))
        self.attend = biased

    def forward(self, x: torch.Tensor) -> Any:
        return call(self.project(x), x, x, self.slope)


def test_modules_copy_and_pickle() -> None:
    block, x = Block(), torch.randn(B, H, S, D)
    for twin in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert torch.equal(twin(x), block(x))
    assert set(block.state_dict()) == {"project.weight", "project.bias", "slope"}


class Methods(torch.nn.Module):
    """An attention that is made of the module's own methods."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.width = torch.nn.Parameter(torch.rand(H)), 5
        self.attend = fg.Attention(self.near, self.weighted)

    def near(self, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx <= q_idx) & (q_idx - kv_idx < self.width)

    def weighted(self, score: Any, h: Any) -> Any:
        return score * self.weight[h]


def test_methods_of_modules_pickle_with_their_module() -> None:
    module, x = Methods(), [torch.randn(B, H, S, D)] * 3
    twin = pickle.loads(pickle.dumps(module))
    assert torch.equal(twin.attend(*x), module.attend(*x))
    assert torch.equal(pickle.loads(pickle.dumps(module.attend))(*x), module.attend(*x))
    with torch.no_grad():
        twin.weight.mul_(2)
    assert not torch.equal(twin.attend(*x), module.attend(*x))


def test_deterministic_algorithms_fill_what_is_unwritten() -> None:
    inputs = [*leaves(), torch.rand(H, requires_grad=True)]
    plain = torch.autograd.grad(call(*inputs).sum(), inputs)
    torch.use_deterministic_algorithms(True)
    try:
        poisoned = torch.autograd.grad(call(*inputs).sum(), inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(x, y) for x, y in zip(plain, poisoned, strict=True))


def test_lists_of_a_schedule_have_lengths_that_are_symbols() -> None:
    """What an operator says of its results on a GPU, in a graph of any length."""
    from torch.fx.experimental.proxy_tensor import make_fx

    import flashgen.ops.library  # noqa: F401  (registers the operators)

    def transpose(states: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = torch.ops.flashgen.transpose(states, None, 1000, [128, 128])
        assert isinstance(made.shape[0], torch.SymInt)
        return made

    make_fx(transpose, tracing_mode="symbolic")(torch.empty(2, 4, 6, 8, dtype=torch.int8))


@pytest.mark.parametrize("is_compiled", [False, True])
def test_data_made_in_inference_mode(is_compiled: bool) -> None:
    """Autograd saves none of it; a mask's ids may come from there all the same."""
    attend, x = fg.Attention(masks.document), torch.randn(1, 2, 8, 16)
    with torch.inference_mode():
        doc = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    run = torch.compile(attend, backend="eager") if is_compiled else attend
    found = []
    for call, ids in ((run, doc), (attend, doc.clone())):
        q = x.clone().requires_grad_()
        call(q, x, x, doc=ids).sum().backward()
        found.append(q.grad)
    assert torch.equal(*found)
