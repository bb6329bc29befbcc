"""The benchmarks run, compare what they time, and write what they show."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from flashgen import api, bench, masks
from flashgen.bench import cpu, decode, gpu, mask_functions, planning, table
from flashgen.bench.measure import Times, check_equal
from flashgen.bench.picture import picture
from flashgen.errors import CallText, FlashgenError
from flashgen.expr import walk
from flashgen.spec import Mask

MASKS = [name for name in masks.EXAMPLES if isinstance(getattr(masks, name), Mask)]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LENGTH": 256, "DIM": 16, "HEADS": 2, "WINDOW": 32}.items():
        monkeypatch.setattr(cpu, name, value)


@pytest.mark.usefixtures("small")
def test_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    assert bench.main(["cpu", "--rounds", "1", "--json", str(file)]) == 0
    document = json.loads(file.read_text())
    rows = [table.Row(**row) for row in document["rows"]]
    backends = ["sdpa, dense mask", "flashgen cpu", "sdpa, is_causal"]
    assert [row.backend for row in rows] == backends * 2
    assert all(row.forward_ms > 0 for row in rows)
    assert rows[0].ratio == rows[3].ratio == 1
    assert "flashgen cpu" in capsys.readouterr().out


def test_ratios_compare_with_the_first_backend() -> None:
    times = {"slow": Times(4.0, 8.0), "fast": Times(1.0, 3.0), "forward only": Times(2.0)}
    slow, fast, forward = table.rows_of("work", times)
    assert (slow.forward_ratio, slow.ratio) == (1, 1)
    assert (fast.forward_ratio, fast.ratio) == (4, 3)
    assert forward.backward_ms is None
    assert (forward.forward_ratio, forward.ratio) == (2, 2)


def test_nothing_is_timed_that_differs() -> None:
    q, k, v = leaves = [torch.ones(3, requires_grad=True) for _ in range(3)]
    attends = {"plain": lambda: q + k + v, "squared": lambda: q * q + k + v}
    with pytest.raises(AssertionError, match="dq of squared differs"):
        check_equal(attends, leaves, torch.ones(3), 1e-6)


def test_a_wrong_number_of_rounds() -> None:
    with pytest.raises(SystemExit):
        bench.main(["cpu", "--rounds", "0"])


@pytest.mark.parametrize("name", MASKS)
def test_masks_as_functions(name: str) -> None:
    data = masks.EXAMPLES[name](60, torch.Generator().manual_seed(0))
    bound = api.Attention(getattr(masks, name)(**data))._program.bind({}, CallText(name, {}))
    mask_mod = mask_functions.mask_function(bound, 60, 60)
    zero, positions = torch.tensor(0), torch.arange(60)
    got = mask_mod(zero, zero, positions[:, None], positions[None, :])
    assert torch.equal(
        got.expand(60, 60), getattr(masks, name).dense(60, 60, q_offset=0, **data)[0, 0]
    )


def test_functions_compare_no_truth_values() -> None:
    """Inductor fails on `==` and `!=` between them."""
    seen = []
    for name in MASKS:
        data = masks.EXAMPLES[name](60, torch.Generator().manual_seed(0))
        mask = (
            api.Attention(getattr(masks, name)(**data))
            ._program.bind({}, CallText(name, {}))
            .spec.mask
        )
        compared = [n for n in walk(mask_functions.spelled_out(mask)) if n.op in ("eq", "ne")]
        assert all(arg.kind != "bool" for node in compared for arg in node.args)
        seen += [n for n in walk(mask) if n.op in ("eq", "ne") and n.args[0].kind == "bool"]
    assert seen


def test_plans_are_shown_as_markdown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(planning, "title", lambda: "where")
    found = ("causal", 64, 0.5, 2**20, "the same")
    rows = [
        planning.PlanRow("causal, S=64", planning.PEER, 4.0, None, 1.0, 1.0, *found),
        planning.PlanRow("causal, S=64", planning.OURS, 1.0, None, 4.0, 4.0, *found),
        planning.PlanRow("odd, S=64", planning.OURS, 2.0, None, 1.0, 1.0, "odd", *found[1:]),
    ]
    planning.show(rows)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == "| `causal` | 64 | 0.5000 | 1.000, 1.00 | 4.000, 1.00 | 4.00 | the same |"
    assert lines[-1].startswith("| `odd` | 64 | 0.5000 | 2.000, 1.00 | fails |  |")
    assert planning.summary(rows).startswith(
        "S = 64: 4.00 times as fast (geometric mean of 1 masks)"
    )


def test_rates_of_decoding_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """2 GB in 0.5 ms are 4 TB/s, as fast as a copy of 4e9 bytes in a ms."""
    monkeypatch.setattr(decode, "title", lambda: "where")
    monkeypatch.setattr(decode, "_captured", lambda work: work)
    monkeypatch.setattr(decode, "medians", lambda works, rounds: {n: w() for n, w in works.items()})
    works = {"SDPA": lambda: 1.0, "flashgen": lambda: 0.5}
    rows = decode._rows("1 x 2", works, 2 * 10**9, 4e9, 1, flops=10**12)
    decode.show([*rows, *table.rows_of("host", {"flashgen": Times(0.25)})])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3:] == [
        "| 1 x 2 | SDPA | 1000.0 | 2.00 | 0.50 | 1000 | 1.00 |",
        "| 1 x 2 | flashgen | 500.0 | 4.00 | 1.00 | 2000 | 2.00 |",
        "| host | flashgen | 250.0 |  |  |  | 1.00 |",
    ]


def test_rates_of_kernels_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """2e12 operations forward in 4 ms are 500 TFLOP/s, 0.8 of a product's 625; 5e12 backward in 20
    are 250."""
    monkeypatch.setattr(gpu, "title", lambda: "where")
    times = {"FlexAttention": Times(8.0, 40.0), "flashgen": Times(4.0, 20.0), "FA3": Times(5.0)}
    rows = list(gpu.rows_with_rates(table.rows_of("D=64 S=8 a", times), 2e12, 625e12))
    gpu.show(rows)
    lines = capsys.readouterr().out.splitlines()
    behind = ("TFLOP/s (of matmul)", "x FlexAttention", "x the best peer")
    assert lines[-5:] == [
        "Backward, milliseconds:",
        "",
        f"| work | FlexAttention | FA3 | flashgen | {' | '.join(behind)} |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| D=64 S=8 a | 40.000 |  | 20.000 | 250 (0.40) | 2.000 | 2.000 |",
    ]
    assert lines[-7] == "| D=64 S=8 a | 8.000 | 5.000 | 4.000 | 500 (0.80) | 2.000 | 1.250 |"


def test_work_is_chosen_by_name() -> None:
    assert len(gpu.works((), (8192,))) == 22
    found = gpu.works(["D=128 S=2048 c"], (2048, 8192))
    assert [str(work) for work in found] == ["D=128 S=2048 causal", "D=128 S=2048 causal document"]
    found = gpu.works(["full$", "causal$"], (2048,))
    assert [work.mask for work in found] == ["full", "causal"] * 3
    assert [work.batch for work in gpu.works(["D=64"], (2048, 65536))][::10] == [16, 1]
    with pytest.raises(FlashgenError, match="no work is called like casual"):
        gpu.works(["casual"], (2048,))
    with pytest.raises(FlashgenError, match="a length of 1000"):
        gpu.works((), (1000,))
    with pytest.raises(SystemExit):
        bench.main(["cpu", "--only", "causal"])
    with pytest.raises(SystemExit):
        bench.main(["gpu", "--documents", "file"])


def test_a_picture_of_ratios(tmp_path: Path) -> None:
    """A bar for each direction of each backend, as long as its ratio says."""
    times = {"slow": Times(4.0, 8.0), "fast": Times(1.0, 4.0), "<forward>": Times(2.0)}
    root = ElementTree.fromstring(picture(table.rows_of("work", times), "a & b"))
    bars = [e for e in root.iter() if e.get("fill-opacity")]
    widths = [float(bar.get("width", "")) for bar in bars]
    # Four times as fast is beyond what is drawn.
    assert [round(w / widths[0], 2) for w in widths] == [1, 1, 3, 2, 2]
    texts = [e.text for e in root.iter() if e.tag.endswith("text")]
    assert {"a & b", "<forward>", "2.00", "… 4.00"} <= set(texts)


def test_what_is_measured_of_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small, and without a GPU: works that are compared agree, and each is timed."""
    small = {"DEVICE": "cpu", "HEADS": 4, "KV_HEADS": 2, "DIM": 16, "WITH_FLEX": (2, 128)}
    small |= {"WINDOW": 64, "PREFILL": (1, 2, 64), "PAGES": (1, 16)}
    for name, value in small.items():
        monkeypatch.setattr(decode, name, value)
    monkeypatch.setattr(decode, "_captured", lambda work: work)
    counted = lambda works, rounds: {n: float(w().numel()) for n, w in works.items()}  # noqa: E731
    monkeypatch.setattr(decode, "medians", counted)
    monkeypatch.setattr(decode, "_flex", lambda *tensors: partial(decode._sdpa, *tensors))

    def cudnn(name: str, causal: bool, *tensors: torch.Tensor) -> torch.Tensor:
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(*tensors, is_causal=causal)

    monkeypatch.setattr(decode, "sdpa", cudnn)
    rows = decode._dense(2, 128, 1.0, 1) + decode._window(1.0, 1)
    rows += decode._uneven(1.0, 1) + decode._prefill(1.0, 1)
    assert [row.backend for row in rows] == [
        *("SDPA", "FlexAttention", "flashgen", "flashgen, pages of 1", "flashgen, pages of 16"),
        *("flashgen, 64 keys", "flashgen, the window"),
        *(f"flashgen, {name} lengths" for name in ("equal", "random", "one long")),
        *("cuDNN", "flashgen"),
    ]
