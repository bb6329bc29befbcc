"""What every test runs in: its own cache folder, no settings of the caller's, a printed seed."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import zlib
from collections.abc import Iterator

import hypothesis
import pytest
import torch

SEED_VARIABLE = "FLASHGEN_TEST_SEED"


# The first call of anything in torch or Triton is slow, so an example has no deadline.
hypothesis.settings.register_profile("flashgen", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("flashgen")


class TorchRandom:
    """Lets hypothesis seed torch before each example, so that a failing one fails again."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


# Hypothesis holds it weakly.
TORCH_RANDOM = TorchRandom()
hypothesis.register_random(TORCH_RANDOM)


def pytest_configure(config: pytest.Config) -> None:
    """Runs before tests are collected, as kernels may be generated while they are."""
    if hasattr(config, "workerinput"):
        # A worker of pytest-xdist has its parent's environment: one cache for all of them.
        torch.set_num_threads(1)
        return
    seed = os.environ.get(SEED_VARIABLE, "0")
    for variable in [name for name in os.environ if name.startswith("FLASHGEN_")]:
        del os.environ[variable]
    os.environ[SEED_VARIABLE] = seed
    os.environ["FLASHGEN_CACHE_DIR"] = tempfile.mkdtemp(prefix="flashgen-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ["FLASHGEN_CACHE_DIR"], ignore_errors=True)


def pytest_report_header() -> str:
    return f"seed: {os.environ[SEED_VARIABLE]} (set {SEED_VARIABLE} to change it)"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("torch sees no GPU here")


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seeds random and torch; each test has its own seed, whatever runs before it."""
    base = int(os.environ[SEED_VARIABLE])
    value = zlib.crc32(f"{base} {request.node.nodeid}".encode())
    random.seed(value)
    torch.manual_seed(value)
    return value


@pytest.fixture
def fresh_graphs() -> Iterator[None]:
    """`torch.compile` knows no graph before the test, has counted none, and keeps none after it."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def nan_filled_empty() -> Iterator[None]:
    """`torch.empty` returns NaN (integers: their maximum), so that an unwritten output shows."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
