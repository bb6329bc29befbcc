"""The masks of the FlashMask paper's kernel test, each twice: FlexAttention's way, and ours."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .documents import Sample

# Names of the paper's twelve (table 3 and on); its figure has a thirteenth that it doesn't measure.
CASES = (
    "full",
    "causal",
    "sliding window",
    "causal document",
    "document",
    "shared question",
    "global + sliding window",
    "causal blockwise",
    "prefix LM document",
    "prefix LM causal",
    "QK-sparse",
    "random eviction",
)
# As parts of the length; and how many keys are global.
_WINDOW, _PREFIX, _EVICTED, GLOBALS = 16, 2, 2, 16
# Answers of a document's question: as many at least, and fewer.
_ANSWERS = (2, 7)
# A mask_mod of FlexAttention, and a mask of flashgen; neither where everything attends.
Case = tuple[Callable[..., torch.Tensor] | None, Any]


def case(
    name: str, samples: Sequence[Sample], heads: int, length: int, device: torch.device
) -> Case:
    """A mask at a length; batch element b has the documents of `samples[b]`.

    Of random eviction each head of each element has its own pattern."""
    masks: Any = importlib.import_module("flashgen.masks")
    window = length // _WINDOW
    if name == "full":
        return None, None
    if name == "causal":
        return lambda b, h, q, k: q >= k, masks.causal
    if name == "sliding window":
        ours = masks.sliding_window(window=window)
        return lambda b, h, q, k: (q >= k) & (q - k < window), ours
    if name == "global + sliding window":
        ours = masks.global_local(left=window, right=window, globals=GLOBALS)
        return (
            lambda b, h, q, k: (
                ((q - k <= window) & (k - q <= window)) | (k < GLOBALS) | (q < GLOBALS)
            ),
            ours,
        )
    if name == "prefix LM causal":
        prefix = length // _PREFIX
        return lambda b, h, q, k: (q >= k) | (k < prefix), masks.prefix_lm(prefix=prefix)
    if name == "random eviction":
        evicted = evictions(len(samples), heads, length, device)
        return lambda b, h, q, k: (q >= k) & (q < evicted[b, h, k]), masks.random_eviction(
            evicted_at=evicted
        )
    return _documents(name, samples, masks, device)


def _documents(name: str, samples: Sequence[Sample], masks: Any, device: torch.device) -> Case:
    doc = _rows(samples, lambda s: s.spread(range(len(s.lengths)))).to(device)
    if name == "causal document":
        ours = masks.causal_document(doc=doc)
        return lambda b, h, q, k: (q >= k) & (doc[b, q] == doc[b, k]), ours
    if name == "document":
        return lambda b, h, q, k: doc[b, q] == doc[b, k], masks.document(doc=doc)
    if name == "causal blockwise":
        last = torch.tensor([len(s.lengths) - 1 for s in samples]).int().to(device)
        ours = masks.causal_blockwise(doc=doc, test_doc=last)
        return (
            lambda b, h, q, k: (q >= k) & ((doc[b, q] == doc[b, k]) | (doc[b, q] == last[b])),
            ours,
        )
    if name == "prefix LM document":
        end = _rows(samples, _prefix_ends).to(device)
        ours = masks.prefix_document(doc=doc, prefix_end=end)
        return lambda b, h, q, k: (doc[b, q] == doc[b, k]) & ((q >= k) | (k < end[b, k])), ours
    if name == "QK-sparse":
        segment = _rows(samples, _segments).to(device)
        ours = masks.qk_sparse(segment=segment)
        return (
            lambda b, h, q, k: (
                (q >= k) & ~((segment[b, q] == segment[b, k]) & (segment[b, k] >= 0))
            ),
            ours,
        )
    answer = _rows(samples, _answers).to(device)
    ours = masks.shared_question(doc=doc, answer=answer)
    return (
        lambda b, h, q, k: (
            (q >= k)
            & (doc[b, q] == doc[b, k])
            & ((answer[b, k] == 0) | (answer[b, q] == answer[b, k]))
        ),
        ours,
    )


def _rows(samples: Sequence[Sample], of: Callable[[Sample], torch.Tensor]) -> torch.Tensor:
    return torch.stack([of(sample) for sample in samples])


def _prefix_ends(sample: Sample) -> torch.Tensor:
    ends = [start + n for start, n in zip(sample.starts, sample.prefixes, strict=False)]
    return sample.spread(ends)


def _segments(sample: Sample) -> torch.Tensor:
    return sample.spread([n if dropped else -1 for n, dropped in enumerate(sample.dropped)])


def _answers(sample: Sample) -> torch.Tensor:
    """[S], int32: 0 in a document's question, then 1, 2, ...: parts of equal length, as many as a
    generator says that is the same each time."""
    generator = torch.Generator().manual_seed(len(sample.lengths))
    counts = torch.randint(*_ANSWERS, (len(sample.lengths),), generator=generator)
    return torch.cat(
        [
            torch.arange(length) * (int(count) + 1) // length
            for length, count in zip(sample.lengths, counts, strict=True)
        ]
    ).int()


def evictions(batch: int, heads: int, length: int, device: torch.device) -> torch.Tensor:
    """[B, H, S], int32: a position of the second half, after the key's own, at which it goes."""
    generator = torch.Generator(device).manual_seed(0)
    first = (torch.arange(length, device=device) + 1).clamp(min=length // _EVICTED)
    uniform = torch.rand(batch, heads, length, generator=generator, device=device)
    return (first + (uniform * (length - first + 1)).int()).int()
