"""The package: names, pictures, examples, copies."""

from __future__ import annotations

import copy
import importlib
import pickle
import pkgutil
import re
from pathlib import Path

import pytest
import torch
from cases import CASES

import flashgen as fg
from flashgen import masks

MASK = type(masks.causal)
MASKS = [name for name in masks.__all__ if isinstance(getattr(masks, name), MASK)]
PICTURE = re.compile(r"At N = 10, `([^`]+)`:\n\n((?: +[█·]{10}\n)+)")


def test_a_module_never_shadows_a_mask() -> None:
    modules = [module.name for module in pkgutil.iter_modules(masks.__path__)]
    assert set(modules).isdisjoint(masks.__all__)
    for module in modules:
        importlib.import_module(f"flashgen.masks.{module}")
    assert [name for name in MASKS if not isinstance(getattr(masks, name), MASK)] == []
    from flashgen.masks import causal

    assert causal is masks.causal


def test_all_is_sorted_and_complete() -> None:
    assert list(masks.__all__) == sorted(masks.__all__)
    found = {name for name, value in vars(masks).items() if isinstance(value, MASK)}
    assert found == set(MASKS)


def test_names_of_the_design() -> None:
    named = (
        "causal sliding_window local dilated_window global_window prefix_lm document "
        "causal_document prefix_document padding shared_question causal_blockwise qk_sparse "
        "hash_sparse random_eviction flashmask chunked block_sparse tree shared_prefix "
        "block_diffusion natten sliding_tile flamingo slices bottom_right top_left "
        "from_flashmask from_cu_seqlens from_slices from_dense from_block_mask"
    )
    assert set(named.split()) <= set(masks.__all__)


@pytest.mark.parametrize("name", MASKS)
def test_docstring(name: str) -> None:
    """Formula, source and picture; the picture is the mask of the call above it."""
    doc = getattr(masks, name).__doc__
    assert doc
    assert "Source: " in doc
    assert "llowed iff" in doc or "visible" in doc or name in doc or "`block_diagonal`" in doc
    found = PICTURE.search(doc)
    assert found, "no picture"
    call, picture = found.groups()
    drawn = eval(call, {**vars(masks), "torch": torch}).dense(10, 10)[0, 0]
    rows = ["".join("█" if cell else "·" for cell in row) for row in drawn.tolist()]
    assert picture.split() == rows


@pytest.mark.parametrize("name", sorted(masks.EXAMPLES))
@pytest.mark.parametrize("n", [1, 10, 64, 200])
def test_example(name: str, n: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = getattr(masks, name)(**masks.EXAMPLES[name](n, generator))
    assert mask.dense(n, n).shape[-2:] == (n, n)


def test_every_mask_has_an_example() -> None:
    assert set(MASKS) <= set(masks.EXAMPLES)
    makers = {"natten", "sliding_tile", *(n for n in masks.__all__ if n.startswith("from_"))}
    assert makers - {"from_xformers"} <= set(masks.EXAMPLES)


@pytest.mark.parametrize("name", MASKS)
def test_copies_mean_the_same(name: str, seed: int) -> None:
    """CASES: facebookresearch/xformers#1185, a moved mask turned into its parent class."""
    generator = torch.Generator().manual_seed(seed)
    mask = getattr(masks, name)(**masks.EXAMPLES[name](24, generator))
    dense = mask.dense(24, 24)
    for copied in (pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask), copy.copy(mask)):
        assert copied.name == mask.name
        assert torch.equal(copied.dense(24, 24), dense)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: masks.sliding_window(window=-1), "window must be at least 0"),
        (lambda: masks.sliding_window.dense(4, 4, window=-3), "window must be at least 0"),
        (lambda: masks.local(left=-1, right=0), "left must be at least 0"),
        (lambda: masks.dilated_window(window=2, dilation=0), "dilation must be at least 1"),
        (lambda: masks.strided(dilation=-2), "dilation must be at least 1"),
        (lambda: masks.global_window(window=3, globals=-1), "globals must be at least 0"),
        (lambda: masks.chunked(chunk=0), "chunk must be at least 1"),
        (lambda: masks.block_diffusion(length=0, block=1), "length must be at least 1"),
        (lambda: masks.natten(10, 11), "kernel reaches"),
        (lambda: masks.natten(10, 4, dilation=3), "kernel reaches"),
        (lambda: masks.natten(10, 2, stride=3), "stride 3 is larger"),
        (lambda: masks.natten((4, 4), (3, 3, 3)), "kernel has 3 values"),
        (lambda: masks.natten((2, 2, 2, 2), 1), "4 axes"),
        (lambda: masks.natten((4, 4), 0), "at least 1"),
        (lambda: masks.sliding_tile((8, 9), (4, 3), (4, 2)), "multiples of 2"),
        (lambda: masks.sliding_tile((4, 4), (8, 4), (4, 4)), "larger than height"),
        (lambda: masks.sliding_tile((4, 4), 4, 4, text=-1), "text must be at least 0"),
        (lambda: masks.sliding_tile((4,), 4, 4), "1 axes"),
    ],
)
def test_values_that_make_no_sense(call, problem: str) -> None:
    with pytest.raises(fg.FlashgenError, match=problem) as error:
        call()
    assert "(" in str(error.value)


def test_every_name_is_in_the_docs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "masks.md").read_text(encoding="utf-8")
    assert [name for name in masks.__all__ if f"`{name}" not in text and name != "EXAMPLES"] == []
    cases = {case.id for case in CASES}
    coverage = text.partition("## Coverage")[2]
    named = {n.replace("\\|", "|") for n in re.findall(r"`(from_seqlens-[a-z_-]+)`", coverage)}
    assert named <= cases
