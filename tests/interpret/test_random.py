"""Random masks and score functions in the interpreted kernels, against NumPy."""

from __future__ import annotations

from typing import Any

import dense
import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_scores import Score, scored_problems
from strategies import Problem, Shape, bounded, shapes, tile_sizes
from triton.runtime.errors import InterpreterError

import flashgen as fg

pytestmark = pytest.mark.usefixtures("nan_filled_empty")

head_dims = st.sampled_from([(16, 16), (8, 24), (40, 16), (1, 1), (16, 48), (64, 5)])
softcaps = st.sampled_from([None, None, 1.5])
sink_values = st.sampled_from([None, None, 0.0, 30.0, -30.0, -dense.INF])


def tensors(shape: Shape, dims: tuple[int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    sizes = (
        (shape.heads, shape.q_len, dims[0]),
        (shape.kv_heads, shape.kv_len, dims[0]),
        (shape.kv_heads, shape.kv_len, dims[1]),
    )
    return [torch.randn(shape.batch, *size).to(dtype) for size in sizes]


def check_forward(
    problem: Problem,
    score: Score,
    tile: Any,
    dims: tuple[int, int],
    softcap: float | None,
    sink: float | None,
    dtype: torch.dtype = torch.float32,
    tolerance: float = 1e-5,
) -> None:
    shape = problem.shape
    q, k, v = tensors(shape, dims, dtype)
    sinks = None if sink is None else torch.full((shape.heads,), sink)
    options: dict[str, Any] = {"q_offset": shape.q_offset, "kv_lens": shape.kv_lens}
    attend = fg.Attention(
        mask=problem.function,
        score=score.function(problem),
        softcap=softcap,
        sinks=sinks is not None,
    )
    schedule = None
    if tile is not None:
        schedule = attend.schedule(q, k, v, block_size=tile, **options, **problem.data)
    arguments = {**options, **problem.data, "schedule": schedule, "sinks": sinks}
    try:
        out, lse = attend(q, k, v, return_lse=True, backend="interpret", **arguments)
    except InterpreterError as error:
        # Triton 3.7 interprets a scalar comparison of floats, spread over a block, as floats.
        hypothesis.assume("bitwise_" not in str(error))
        raise
    right, right_lse = dense.attention(
        q, k, v, problem.allowed, score=lambda s: score.value(s, problem), softcap=softcap,
        sinks=sinks,
    )  # fmt: skip
    assert out.dtype == dtype
    empty = right_lse == -dense.INF
    assert (out[empty] == 0).all()
    assert torch.equal(lse == -dense.INF, empty)
    torch.testing.assert_close(lse.double(), right_lse, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(out.double(), right, rtol=tolerance, atol=tolerance)


small = shapes(most=100, batch=2, groups=(1, 2, 3))
tiles = st.one_of(st.none(), tile_sizes)


@bounded(14, shrink=False)
@given(scored_problems(small), tiles, head_dims, softcaps, sink_values)
def test_random_masks_and_scores(
    drawn: tuple[Problem, Score], tile: Any, dims: Any, softcap: Any, sink: Any
) -> None:
    check_forward(*drawn, tile, dims, softcap, sink)


@bounded(8, shrink=False)
@given(scored_problems(small), tiles, head_dims, softcaps, sink_values)
def test_in_half_precision(
    drawn: tuple[Problem, Score], tile: Any, dims: Any, softcap: Any, sink: Any
) -> None:
    check_forward(*drawn, tile, dims, softcap, sink, torch.float16, 4e-3)


@pytest.mark.slow
@bounded(400, shrink=False)
@given(
    scored_problems(shapes(groups=(1, 2, 3, 5, 7)), depth=6),
    tiles,
    head_dims,
    softcaps,
    sink_values,
)
def test_many_random_masks_and_scores(
    drawn: tuple[Problem, Score], tile: Any, dims: Any, softcap: Any, sink: Any
) -> None:
    check_forward(*drawn, tile, dims, softcap, sink)
