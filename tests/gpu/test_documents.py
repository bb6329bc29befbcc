"""Documents that lie together have tiles of their own in Hopper's forward; others their ids."""

from __future__ import annotations

from typing import Any

import pytest
import sm_90
import torch
from dense_checks import check_against_sdpa, inputs

import flashgen as fg
from flashgen import masks
from flashgen.schedule import documents

pytestmark = sm_90.marks()
B, S = 3, 1300
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def at_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "ROWS", 1)


def ids(lie: str) -> torch.Tensor:
    """[B, S]: documents of all lengths, one of them a whole element."""
    cuts = torch.tensor([[1, 130, 258, 900, 901], [2 * S] * 5, [400, 401, 402, 1153, S - 1]])
    doc = (torch.arange(S) >= cuts[..., None]).sum(1)
    if lie == "apart":
        doc[1] = torch.randint(0, 2, (S,))
    if lie == "too many":
        doc[2] = torch.arange(S) // 40
    return doc.int().cuda()


def seen(doc: torch.Tensor, name: str) -> torch.Tensor:
    i, j = torch.arange(S, device="cuda")[:, None], torch.arange(S, device="cuda")
    same = (doc[:, :, None] == doc[:, None])[:, None]
    return {"document": same, "causal": same & (j <= i), "window": same & (j <= i) & (i - j < 200)}[
        name
    ]


MASKS = {
    "document": masks.document,
    "causal": masks.causal_document,
    "window": masks.causal_document & masks.sliding_window(window=200),
}


@pytest.mark.parametrize("lie", ["together", "apart", "too many"])
@pytest.mark.parametrize(
    ("name", "dims", "dtype"),
    [
        ("causal", (128, 128), BF16),
        ("document", (128, 128), torch.float16),
        ("causal", (64, 64), torch.float16),
        ("document", (40, 40), BF16),
        ("window", (192, 128), BF16),
        ("causal", (256, 256), BF16),
    ],
    ids=str,
)
def test_outputs(
    name: str, dims: tuple[int, int], dtype: Any, lie: str, nan_filled_empty: None
) -> None:
    doc = ids(lie)
    tensors = inputs(B, 4, 2, S, S, *dims, dtype)
    attend = fg.Attention(mask=MASKS[name])
    schedule = attend.schedule(*tensors, doc=doc)
    # Worked out, recorded, played.
    for _ in range(5):
        check_against_sdpa(
            lambda *given, **more: attend(*given, backend="hopper", schedule=schedule, **more),
            tensors, seen(doc, name), doc=doc,
        )  # fmt: skip
    made = [x for key, x in vars(schedule).items() if key.startswith("documents")]
    assert [int(x.holds) for x in made] == [int(lie == "together")]
    assert bool(made[0].queue[0, 0] > 0) == (lie == "together")


def test_other_documents_each_call(nan_filled_empty: None) -> None:
    """Planned anew, in order and not, recorded or not."""
    attend = fg.Attention(mask=masks.causal_document)
    for lie in ("together", "apart", "together", "too many", "together", "apart", "together"):
        doc, tensors = ids(lie), inputs(B, 4, 2, S, S, 128, 128, BF16)
        schedule = attend.schedule(*tensors, doc=doc)
        for _ in range(2):
            check_against_sdpa(
                lambda *given, **more: attend(*given, backend="hopper", **more),
                tensors, seen(doc, "causal"), doc=doc, schedule=schedule,
            )  # fmt: skip


def test_in_a_graph(nan_filled_empty: None) -> None:
    attend, doc = fg.Attention(mask=masks.document), ids("together")
    tensors = inputs(B, 4, 2, S, S, 128, 128, BF16)

    def call() -> Any:
        schedule = attend.schedule(*tensors, doc=doc)
        return attend(*tensors, doc=doc, schedule=schedule, backend="hopper", return_lse=True)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = call()
    for lie in ("together", "apart", "too many", "together"):
        doc.copy_(ids(lie))
        graph.replay()
        check_against_sdpa(lambda *_, **__: made, tensors, seen(doc, "document"))


def test_what_is_not_finite_stays_in_its_document(nan_filled_empty: None) -> None:
    doc, (q, k, v) = ids("together"), inputs(B, 4, 2, S, S, 128, 128, BF16)
    attend = fg.Attention(mask=masks.causal_document)
    how = {"doc": doc, "backend": "hopper", "schedule": attend.schedule(q, k, v, doc=doc)}
    clean = attend(q, k, v, **how)
    bad = (doc == 2)[:, None, :, None]
    spoilt = [x.masked_fill(bad, torch.nan) for x in (k, v)]
    out = attend(q, *spoilt, **how)
    torch.testing.assert_close(
        out.masked_fill(bad, 0.0), clean.masked_fill(bad, 0.0), rtol=1e-2, atol=1e-2
    )
    assert out.isnan().any(-1, keepdim=True).eq(bad).all()


def test_gradients() -> None:
    """The backward has the whole schedule, and gets the LSE."""
    doc, tensors = ids("together"), inputs(B, 4, 2, S, S, 128, 128, BF16)
    attend = fg.Attention(mask=masks.causal_document)
    found = []
    for backend in ("hopper", "portable"):
        given = [x.detach().requires_grad_() for x in tensors]
        tile = (128, 128) if backend == "hopper" else (64, 64)
        schedule = attend.schedule(*tensors, doc=doc, block_size=tile)
        for _ in range(3):
            out = attend(*given, doc=doc, schedule=schedule, backend=backend)
            grads = torch.autograd.grad(out.float().square().sum(), given)
        found.append([out, *grads])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=5e-2, atol=5e-2)
