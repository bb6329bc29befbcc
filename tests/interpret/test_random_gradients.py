"""Random masks and score functions with learned data: interpreted gradients beside torch's."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import given
from score_strategies import ScoreText, check_against_dense, learning_problems
from strategies import Problem, bounded
from triton.runtime.errors import InterpreterError

pytestmark = pytest.mark.usefixtures("nan_filled_empty")


def check(drawn: tuple[Problem, ScoreText], dtype: torch.dtype, tolerance: float) -> None:
    try:
        check_against_dense(*drawn, backend="interpret", dtype=dtype, tolerance=tolerance)
    except InterpreterError as error:
        # Triton 3.7 interprets a scalar comparison of floats, spread over a block, as floats.
        hypothesis.assume("bitwise_" not in str(error))
        raise


@bounded(10, shrink=False)
@given(learning_problems(most=40))
def test_in_double_precision(drawn: tuple[Problem, ScoreText]) -> None:
    check(drawn, torch.float64, 1e-9)


@bounded(5, shrink=False)
@given(learning_problems(most=40, depth=2))
def test_in_single_precision(drawn: tuple[Problem, ScoreText]) -> None:
    check(drawn, torch.float32, 2e-3)


@pytest.mark.slow
@bounded(300, shrink=False)
@given(learning_problems(most=100, depth=5))
def test_many_in_double_precision(drawn: tuple[Problem, ScoreText]) -> None:
    check(drawn, torch.float64, 1e-8)
