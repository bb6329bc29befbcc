"""What users call, from outside: names, forms of declaration, laziness, what can be looked at."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import dense
import pytest
import torch

import flashgen as fg
from flashgen import masks

Q = torch.randn(2, 4, 30, 8)
K, V = torch.randn(2, 2, 30, 8), torch.randn(2, 2, 30, 5)
CAUSAL = torch.ones(30, 30, dtype=torch.bool).tril()


@fg.attention(mask=masks.causal)
def alibi(score, h, q_idx, kv_idx, slope: fg.Tensor):
    """Annotations are strings here, as this module asks for."""
    return score + slope[h] * (kv_idx - q_idx)


@fg.attention
def everywhere(score):
    return score * 2


def test_forms_of_a_declaration() -> None:
    forms = [
        fg.Attention(masks.causal),
        fg.Attention(mask=lambda q_idx, kv_idx: kv_idx <= q_idx),
        fg.Attention(mask=lambda b, h, q, k: q >= k),
        fg.attention(mask=masks.causal)(lambda score: score),
    ]
    right = dense.attention(Q, K, V, CAUSAL)[0]
    for attend in forms:
        torch.testing.assert_close(attend(Q, K, V).double(), right, rtol=0, atol=1e-5)
    twice = dense.attention(Q, K, V, score=lambda s: s * 2)[0]
    torch.testing.assert_close(everywhere(Q, K, V).double(), twice, rtol=0, atol=1e-5)


def test_a_decorated_function() -> None:
    slope = torch.rand(4)
    away = (torch.arange(30) - torch.arange(30)[:, None]).numpy()
    right, right_lse = dense.attention(
        Q, K, V, CAUSAL, score=lambda s: s + slope.double().numpy()[:, None, None] * away
    )
    out, lse = alibi(Q, K, V, slope=slope, return_lse=True)
    assert (out.shape, lse.shape, lse.dtype) == ((2, 4, 30, 5), (2, 4, 30), torch.float32)
    torch.testing.assert_close(out.double(), right, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), right_lse, rtol=0, atol=1e-5)


def test_it_prints_what_it_asks_for() -> None:
    assert repr(alibi) == "Attention(causal + alibi, slope: fg.Tensor)"
    assert repr(fg.Attention(masks.sliding_window)) == "Attention(sliding_window, window: int)"
    assert repr(masks.sliding_window(window=3)) == "Mask(sliding_window)"


def test_every_public_name_has_a_docstring() -> None:
    for name in fg.__all__:
        value = getattr(fg, name)
        assert isinstance(value, str) or inspect.getdoc(value), name
    for name, member in inspect.getmembers(fg.Attention):
        assert name.startswith("_") or not callable(member) or inspect.getdoc(member), name


def test_what_can_be_looked_at() -> None:
    slope = torch.rand(4)
    told = alibi.explain(Q, K, V, slope=slope)
    for word in ("spec causal + alibi", "may attend", "Schedule(", "cpu: the tensors are on"):
        assert word in told
    source = alibi.source(Q, K, V, slope=slope)
    assert "tl.load(slope_ptr" in source
    assert "def attention_forward(" in source
    schedule = alibi.schedule(Q, K, V)
    assert torch.equal(alibi(Q, K, V, slope=slope, schedule=schedule), alibi(Q, K, V, slope=slope))


@pytest.mark.parametrize("looks", ["explain", "source"])
def test_looking_takes_what_the_call_takes(looks: str) -> None:
    more: dict[str, Any] = {"scale": 0.1, "q_offset": 3, "backend": "cpu", "return_lse": True}
    assert getattr(alibi, looks)(Q, K, V, slope=torch.rand(4), **more)
    with pytest.raises(fg.FlashgenError, match="also needs slope"):
        getattr(alibi, looks)(Q, K, V)


def test_values_are_never_part_of_a_kernel() -> None:
    """Lengths, scalars, data and a closure made anew give the same text."""

    def text(n: int, window: int) -> str:
        doc = torch.arange(n) // window
        attend = fg.Attention(masks.sliding_window & (lambda b, h, q, k: doc[q] == doc[k]))
        q = torch.zeros(1, 2, n, 16)
        return attend.source(q, q, q, window=window, q_offset=0)

    assert text(20, 3) == text(777, 100)


def test_importing_loads_nothing_heavy() -> None:
    program = (
        "import sys, flashgen;"
        "print([m for m in ('torch', 'triton', 'jinja2') if m in sys.modules]);"
        "flashgen.Attention; print('triton' in sys.modules, 'jinja2' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    first, second = result.stdout.splitlines()
    assert first == "[]"
    assert second.startswith("False")


def test_an_attention_in_a_module_is_no_parameter() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = alibi
            self.slope = torch.nn.Parameter(torch.rand(4))

        def forward(self, q: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.attend(q, K, V, slope=self.slope)
            return out

    layer = Layer()
    assert list(layer.state_dict()) == ["slope"]
    layer(Q).sum().backward()
    assert layer.slope.grad is not None


def test_nothing_of_the_users_is_changed() -> None:
    slope = torch.rand(4)
    before = [x.clone() for x in (Q, K, V, slope)]
    alibi(Q, K, V, slope=slope, scale=-0.5)
    for mine, kept in zip((Q, K, V, slope), before, strict=True):
        assert torch.equal(mine, kept)
