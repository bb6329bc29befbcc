"""What `torch.compile` makes of mistakes, and of what is no operator: breaks that give reasons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.exc import Unsupported

import flashgen as fg
from flashgen import FlashgenError, masks

pytestmark = pytest.mark.usefixtures("fresh_graphs")
attend = fg.Attention(masks.document)
Q = torch.randn(1, 2, 24, 8)
DOC = torch.zeros(1, 24, dtype=torch.int32)


def compiled(run: Callable[..., Any], fullgraph: bool = False) -> Any:
    torch._dynamo.reset()
    return torch.compile(run, fullgraph=fullgraph, backend="aot_eager")(Q, DOC)


@pytest.mark.parametrize(
    ("run", "problem"),
    [
        (lambda q, d: attend(q, q, q), "document also needs doc"),
        (lambda q, d: attend(q, q, q, docs=d), "nothing here is called docs"),
        (lambda q, d: attend(q, q, q, doc="x"), "doc must be a tensor, and is a str"),
        (lambda q, d: attend(q, q, q, doc=d, scale="x"), "scale is a str"),
    ],
)
def test_mistakes_are_ours_and_restate_the_call(run: Callable[..., Any], problem: str) -> None:
    x = Q.clone().requires_grad_()
    for given in (Q, x):
        with pytest.raises(FlashgenError) as caught:
            torch.compile(run, fullgraph=True, backend="aot_eager")(given, DOC)
        assert str(caught.value).startswith("document(q=[1, 2, 24, 8] fp32, k=")
        assert problem in str(caught.value)


@pytest.mark.parametrize("strict", [False, True])
def test_export_refuses_at_once(strict: bool) -> None:
    class Model(torch.nn.Module):
        def forward(self, q: torch.Tensor) -> Any:
            return attend(q, q, q)

    # Dynamo makes an error of its own of what it meets.
    with pytest.raises(Exception if strict else FlashgenError, match="document also needs doc"):
        torch.export.export(Model(), (Q,), strict=strict)


def _schedules(q: torch.Tensor, doc: torch.Tensor) -> Any:
    schedule = attend.schedule(q, q, q, doc=doc)
    return attend(q + 1, q, q, doc=doc, schedule=schedule) + 1


def _declares(q: torch.Tensor, doc: torch.Tensor) -> Any:
    return fg.Attention(masks.causal & masks.sliding_window(window=5))(q, q, q) + 1


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (_schedules, "a schedule isn't a graph's value"),
        (_declares, "before the compiled function"),
        (lambda q, d: q * len(attend.explain(q, q, q, doc=d)), "the explanation of a call"),
        (lambda q, d: q.sum() + masks.causal.dense(4, 9).float(), "a mask's dense matrix"),
    ],
)
def test_what_is_no_graph_breaks_it(run: Callable[..., Any], reason: str) -> None:
    torch.testing.assert_close(compiled(run), run(Q, DOC))
    with pytest.raises(Unsupported, match=reason):
        compiled(run, fullgraph=True)


def test_latent_heads_break_the_graph() -> None:
    attend = fg.Attention(masks.causal, heads=fg.MLA(rank=6, rope=2))

    def run(q: torch.Tensor, _: torch.Tensor) -> Any:
        return attend(q + 1, q[:, :1], scale=0.3) * 2

    torch.testing.assert_close(compiled(run), run(Q, DOC))
    with pytest.raises(Unsupported, match="latent heads"):
        compiled(run, fullgraph=True)


def test_states_that_do_not_fit_together() -> None:
    with pytest.raises(Unsupported, match="states that don't fit together"):
        compiled(lambda q, _: fg.merge(q, q), fullgraph=True)
    with pytest.raises(FlashgenError, match=r"fg.merge\(\[1, 2, 24, 8\] fp32, \[1, 2, 24, 8\] fp"):
        compiled(lambda q, _: fg.merge(q, q))
