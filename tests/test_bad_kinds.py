"""Tensors that attention doesn't take, and lengths that are none: one error each, with advice."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen import masks

CAUSAL, DOCUMENT = fg.Attention(masks.causal), fg.Attention(masks.document)
LATENT = fg.Attention(masks.causal, heads=fg.MLA(rank=6, rope=2))
Q = torch.randn(1, 2, 12, 8)
META = Q.to("meta")
JAGGED = torch.nested.nested_tensor([torch.ones(5, 2, 8), torch.ones(7, 2, 8)], layout=torch.jagged)
COMPLEX = torch.ones(4, dtype=torch.complex64)


class Model(torch.nn.Module):
    def forward(self, q: torch.Tensor) -> Any:
        return CAUSAL(q, q, q)


def beyond(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i < 2**63


def scaled(score: Any, h: Any) -> Any:
    return score * COMPLEX[h]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("work", "problem", "write"),
    [
        (lambda: CAUSAL(*[JAGGED.transpose(1, 2)] * 3), "q is a nested", "cu_seqlens_q"),
        (lambda: CAUSAL(*[torch.nested.nested_tensor([Q[0]])] * 3), "q is a nested", "packed"),
        (lambda: LATENT(Q, torch.nested.nested_tensor([Q[0]]), scale=1.0), "kv is a n", "packed"),
        (lambda: CAUSAL(Q, Q.to_sparse(), Q), "k is sparse", "k.to_dense()"),
        (lambda: CAUSAL(Q.numpy(), Q, Q), "q is a NumPy array", "torch.from_numpy(q)"),
        (lambda: CAUSAL(Q, Q.tolist(), Q), "k is a list", "a tensor as k"),
        (lambda: CAUSAL(Q, None, Q), "k is None", "a tensor as k"),
        (lambda: CAUSAL(Q.cfloat(), Q, Q), "q has dtype torch.complex64", "float64 on the CPU"),
        (lambda: CAUSAL(Q, META, Q), "k is on meta", "on one device"),
        (lambda: CAUSAL.schedule(META, META, META), "no elements to plan for", "on the device"),
        (lambda: CAUSAL.explain(META, META, META), "no elements to plan for", "on the device"),
        (lambda: torch.fx.symbolic_trace(Model()), "q is a Proxy", "torch.export.export"),
        (lambda: torch.jit.trace(Model(), (Q,)), "torch.jit.trace keeps", "torch.compile"),
        (lambda: DOCUMENT(Q, Q, Q, doc=JAGGED), "doc is a nested tensor", "a dense tensor"),
        (lambda: fg.Attention(beyond)(Q, Q, Q), "9223372036854775808 is beyond 64", "2**62"),
        (lambda: fg.Attention(None, scaled)(Q, Q, Q), "torch.complex64 is read", "a dense tensor"),
    ],
)
def test_kinds_of_tensors(work: Any, problem: str, write: str) -> None:
    with pytest.raises(fg.FlashgenError) as caught:
        work()
    message = str(caught.value)
    assert problem in message, message
    assert write in message.split("instead: ")[1], message
    assert "(q=" in message or "(k=" in message, message
    assert len(message) < 900


def test_meta_tensors_give_shapes_and_gradients() -> None:
    x = [META.clone().requires_grad_() for _ in range(3)]
    out, lse = CAUSAL(*x, return_lse=True)
    assert (out.shape, lse.shape, out.device.type) == (Q.shape, Q.shape[:3], "meta")
    assert [g.shape for g in torch.autograd.grad(out.sum() + lse.sum(), x)] == [Q.shape] * 3
    doc = torch.zeros(1, 12, dtype=torch.int32)
    with pytest.raises(fg.FlashgenError, match="doc is on cpu, and the queries are on meta"):
        DOCUMENT(META, META, META, doc=doc)
    assert DOCUMENT(META, META, META, doc=doc.to("meta")).shape == Q.shape
    assert LATENT(META, META[:, :1], scale=1.0).shape == (1, 2, 12, 6)


@pytest.mark.parametrize("function", [int, max, torch.where, "causal", Q[0, 0] > 0])
def test_what_is_no_function(function: Any) -> None:
    with pytest.raises(fg.FlashgenError) as caught:
        fg.mask(function)
    assert "instead: " in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_mask_is_no_attention() -> None:
    for mask, write in ((masks.causal, "v)"), (masks.document, "v, doc=...)")):
        with pytest.raises(fg.FlashgenError) as caught:
            mask(Q, Q, Q)
        lines = str(caught.value).splitlines()
        assert lines[0].startswith(f"{mask.name}([1, 2, 12, 8] fp32, [1, 2, 12, 8] fp32, [1, ")
        assert lines[1].endswith(f"fg.Attention(masks.{mask.name})(q, k, {write}")


@pytest.mark.parametrize(
    ("lengths", "options", "problem"),
    [
        ((-1, 4), {}, "q_len is -1"),
        ((4.0, 4), {}, "q_len is 4.0"),
        ((4, "x"), {}, "kv_len is 'x'"),
        ((4, torch.ones(2)), {}, "kv_len is [2] fp32"),
        ((torch.tensor([3, 4]), torch.tensor([3])), {}, "q_len has 2 lengths, and kv_len 1"),
        ((4, 4), {"batch": -1}, "batch is -1"),
        ((4, 4), {"heads": 2.0}, "heads is 2.0"),
        ((4, 4), {"q_offset": 0.5}, "q_offset is 0.5"),
    ],
)
def test_lengths_of_dense_masks(lengths: Any, options: Any, problem: str) -> None:
    with pytest.raises(fg.FlashgenError) as caught:
        masks.causal.dense(*lengths, **options)
    assert f"causal.dense({fg.errors.show(lengths[0])}, " in str(caught.value)
    assert problem in str(caught.value)
