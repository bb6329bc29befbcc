"""Blocks that are searched for on a GPU: found once, kept, and right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import flashgen as fg
from flashgen import config, masks, tune

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("effort", ["quick", "full"])
def test_training(effort: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "_used", {})
    monkeypatch.setattr(tune, "_WARPS", (4,))
    monkeypatch.setattr(tune, "_STAGES", (1, 2))
    monkeypatch.setattr(tune, "_BLOCKS", (64,))
    attend = fg.Attention(mask=masks.causal)
    shape = (1, 2, 300, 64)
    given = [
        torch.randn(shape, device="cuda", dtype=torch.float16, requires_grad=True) for _ in range(3)
    ]
    grad = torch.randn_like(given[0])

    def run() -> list[torch.Tensor]:
        out = attend(*given, backend="portable")
        return [out.detach(), *torch.autograd.grad(out, given, grad)]

    right = run()
    with config.override(cache_dir=tmp_path, tune=effort):  # type: ignore[arg-type]
        for _ in range(3):
            for one, other in zip(run(), right, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=5e-3)
        found = tune.winners()
    assert len(found) == 3 + (effort == "full")
    monkeypatch.setattr(tune, "_used", {})
    with config.override(cache_dir=tmp_path):
        assert tune.winners() == found
