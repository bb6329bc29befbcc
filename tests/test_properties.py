"""Random masks: the compiler's matrix and schedules against NumPy and brute force."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from strategies import Problem, bounded, problems, shapes, tile_sizes

import flashgen as fg
from flashgen.expr import evaluate
from flashgen.reference import dense_env
from flashgen.spec import Program
from flashgen.spec.data import fit_data

CPU = torch.device("cpu")


def matrix(problem: Problem) -> np.ndarray:
    """The mask as flashgen evaluates it, [B, Hq, Sq, Skv]."""
    shape = problem.shape
    bound = Program(fg.mask(problem.function)).bind(problem.data, "test")
    extents = {"b": shape.batch, "h": shape.heads, "h_kv": shape.kv_heads}
    bound = fit_data(bound, {**extents, "q_idx": None, "kv_idx": shape.kv_len}, CPU, "test")
    lengths = (shape.batch, shape.heads, shape.kv_heads, shape.q_len, shape.kv_len)
    env = dense_env(bound, lengths, torch.as_tensor(shape.offsets), CPU)
    env.index["kv_len"] = torch.as_tensor(shape.lens).reshape(-1, 1, 1, 1)
    mask = bound.spec.mask
    value = torch.tensor(True) if mask is None else evaluate(mask, env)
    return value.expand(shape.batch, shape.heads, shape.q_len, shape.kv_len).numpy()


def brute_force(allowed: np.ndarray, valid: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """0 empty, 1 partial, 2 full for each tile; pairs outside the lengths decide nothing."""
    valid = np.broadcast_to(valid, allowed.shape)
    rows, columns = (range(0, n, size) for n, size in zip(allowed.shape[2:], block, strict=True))
    states = np.zeros((*allowed.shape[:2], len(rows), len(columns)), dtype=np.int8)
    for r, row in enumerate(rows):
        for c, column in enumerate(columns):
            tile = np.s_[:, :, row : row + block[0], column : column + block[1]]
            some = allowed[tile].any((2, 3))
            states[:, :, r, c] = np.where((allowed[tile] | ~valid[tile]).all((2, 3)), 2, 1) * some
    return states


def check_schedules(problem: Problem, block: tuple[int, int]) -> None:
    shape = problem.shape
    attend = fg.Attention(mask=problem.function)
    q = torch.zeros(shape.batch, shape.heads, shape.q_len, 1)
    k = torch.zeros(shape.batch, shape.kv_heads, shape.kv_len, 1)
    options: dict[str, Any] = {"q_offset": shape.q_offset, "kv_lens": shape.kv_lens}
    options |= {"block_size": block, **problem.data}
    right = brute_force(problem.allowed, shape.valid, block)
    found = {
        planner: attend.schedule(q, k, planner=planner, **options)
        .to_dense()
        .expand(right.shape)
        .numpy()
        for planner in ("exact", "auto", "bounds")
    }
    assert (found["exact"] == right).all()
    assert (found["auto"] == right).all()
    decided = found["bounds"] != 1
    assert (found["bounds"][decided] == right[decided]).all()


@bounded(300)
@given(problems(shapes(most=40)))
def test_the_matrix_equals_numpys(problem: Problem) -> None:
    assert (matrix(problem) == problem.expected).all()


@bounded(150)
@given(problems(), tile_sizes)
def test_schedules_equal_brute_force(problem: Problem, block: tuple[int, int]) -> None:
    check_schedules(problem, block)


@pytest.mark.slow
@bounded(3000)
@given(problems(depth=6), tile_sizes)
def test_many_schedules_equal_brute_force(problem: Problem, block: tuple[int, int]) -> None:
    check_schedules(problem, block)
