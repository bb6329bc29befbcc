"""Blocks that are searched for on a GPU: found once, kept, and right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import flashgen as fg
from flashgen import config, masks, tune
from flashgen.tiling import hopper as hopper_tiling

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


def test_hopper_training(
    on_hopper: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "_used", {})
    monkeypatch.setattr(hopper_tiling, "_SIDES", (1, 4))
    monkeypatch.setattr(hopper_tiling, "_SAVINGS", (5,))
    monkeypatch.setattr(hopper_tiling, "_TRIED_MEBIBYTES", (1, 16))
    attend = fg.Attention(mask=masks.causal)
    given = [
        torch.randn(1, 4, 700, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    grad = torch.randn_like(given[0])

    def run() -> list[torch.Tensor]:
        out = attend(*given)
        return [out.detach(), *torch.autograd.grad(out, given, grad)]

    right = run()
    with config.override(cache_dir=tmp_path, tune="quick"):
        for _ in range(3):
            for one, other in zip(run(), right, strict=True):
                torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
        found = tune.winners()
    assert sorted(map(len, found.values())) == [3, 4]
    (steps,) = (key for key, numbers in found.items() if len(numbers) == 3)
    monkeypatch.setattr(tune, "_used", {steps: (2, 9, 1)})
    with config.override(cache_dir=tmp_path):
        page = attend.explain(*given)
        assert "backward: hopper, Steps(stages=2, mebibytes=9, order=1) (tuned)" in page


def test_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "_used", {})
    attend = fg.Attention()
    q = torch.randn(2, 8, 1, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(2, 2, 3000, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    right = attend(q, k, v)
    with config.override(cache_dir=tmp_path, tune="quick"):
        for _ in range(3):
            torch.testing.assert_close(attend(q, k, v), right, rtol=2e-2, atol=2e-2)
        (found,) = tune.winners().values()
    assert len(found) == 4
    monkeypatch.setattr(tune, "_used", {})
    with config.override(cache_dir=tmp_path):
        torch.testing.assert_close(attend(q, k, v), right, rtol=2e-2, atol=2e-2)
