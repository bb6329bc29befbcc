"""Pictures: what is drawn, character by character and rectangle by rectangle."""

from __future__ import annotations

import time
from xml.etree import ElementTree

import pytest
import torch

from flashgen.schedule import Schedule
from flashgen.show import explain_text, mask_svg, mask_text, schedule_svg, schedule_text
from flashgen.show.cells import pool, rectangles
from flashgen.show.text import wrap_formula

SVG = "{http://www.w3.org/2000/svg}"


def causal(rows: int, columns: int) -> torch.Tensor:
    return torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)


def schedule_of(
    dense: torch.Tensor, block: tuple[int, int], name: str = "causal", q_offset: int | None = None
) -> Schedule:
    """The exact schedule of dense matrices [B, H, Sq, Skv], tile by tile."""
    counts = (-(-n // size) for n, size in zip(dense.shape[2:], block, strict=True))
    rows = [_row(m, r, block) for b in dense for m in b for r in range(0, m.shape[0], block[0])]
    states = torch.tensor(rows, dtype=torch.int8).reshape(*dense.shape[:2], *counts)
    return Schedule(states, block, *dense.shape[2:], q_offset, None, name, "0" * 16, "exact")


def _row(dense: torch.Tensor, top: int, block: tuple[int, int]) -> list[int]:
    tiles = dense[top : top + block[0]].split(block[1], dim=1)
    return [int(tile.any()) + int(tile.all()) for tile in tiles if tile.numel()]


def lines(*rows: str) -> str:
    return "\n".join(rows)


def test_mask_text_draws_a_character_per_pair() -> None:
    assert mask_text(causal(10, 10)) == lines(
        "█·········",
        "██········",
        "███·······",
        "████······",
        "█████·····",
        "██████····",
        "███████···",
        "████████··",
        "█████████·",
        "██████████",
    )


def test_mask_text_draws_two_queries_in_a_line() -> None:
    drawn = mask_text(causal(33, 33)).splitlines()
    assert len(drawn) == 17
    assert drawn[0] == "█▄" + 31 * "·"
    assert drawn[1] == "███▄" + 29 * "·"
    # An odd last row has nothing below it.
    assert drawn[-1] == 33 * "▀"


def test_mask_text_shades_what_is_larger() -> None:
    drawn = mask_text(causal(384, 384)).splitlines()
    assert [len(line) for line in drawn] == 48 * [96]
    assert drawn[0] == "▓░" + 94 * "·"
    assert drawn[-1] == 94 * "█" + "▓░"


def test_mask_text_never_shades_a_single_pair_away() -> None:
    one = torch.zeros(1000, 1000, dtype=torch.bool)
    one[500, 500] = True
    assert mask_text(one).count("░") == 1
    assert mask_text(~one).count("▓") == 1


@pytest.mark.parametrize("shape", [(0, 0), (0, 7), (7, 0), (1, 1), (1, 200), (200, 1)])
def test_any_shape_is_drawn(shape: tuple[int, int]) -> None:
    dense = torch.ones(shape, dtype=torch.bool)
    assert set(mask_text(dense)) <= set("█▀\n")
    schedule = schedule_of(dense[None, None], (16, 16))
    schedule_text(schedule)
    for svg in (mask_svg(dense), mask_svg(dense, schedule), schedule_svg(schedule)):
        ElementTree.fromstring(svg)


def test_schedule_text() -> None:
    schedule = schedule_of(causal(1024, 1024)[None, None], (128, 128))
    assert schedule_text(schedule) == lines(
        "Schedule(causal, shape=(1, 1, 1024, 1024), tiles 128\u00d7128, planner=exact)",
        "density 56.25 %, 64 tiles: 28 full, 8 partial, 28 empty; 64 bytes",
        "(0, 0)",
        "░░··············",
        "██░░············",
        "████░░··········",
        "██████░░········",
        "████████░░······",
        "██████████░░····",
        "████████████░░··",
        "██████████████░░",
    )


def test_schedule_text_shows_the_first_batches_and_heads() -> None:
    dense = torch.stack([causal(16, 16).repeat(2, 1), ~causal(16, 16).repeat(2, 1)])
    dense[0, 16:], dense[1, 16:] = True, False
    dense = dense.expand(3, 2, 32, 16)
    text = schedule_text(schedule_of(dense, (16, 16)), groups=3)
    first, second = ["░░", "██"], ["░░", "··"]
    drawn = ["(0, 0)", *first, "(0, 1)", *second, "(1, 0)", *first]
    assert text.splitlines()[2:] == [*drawn, "... 3 more (b, h)"]


def test_a_large_grid_is_pooled() -> None:
    states = torch.zeros(100, 100, dtype=torch.int8)
    states[:50] = 2
    states[49, 99] = 1
    cells, factor = pool(states, 25, 50)
    assert factor == 4
    assert cells.shape == (25, 25)
    assert cells[:12].eq(2).all()
    # Rows 48 to 51 hold full and empty tiles.
    assert cells[12].eq(1).all()
    assert cells[13:].eq(0).all()


def test_the_ragged_end_of_a_pooled_grid_counts_as_what_is_there() -> None:
    cells, factor = pool(torch.full((5, 5), 2, dtype=torch.int8), 2, 2)
    assert factor == 3
    assert cells.tolist() == [[2, 2], [2, 2]]
    assert pool(torch.zeros(5, 5, dtype=torch.int8), 2, 2)[0].tolist() == [[0, 0], [0, 0]]


def test_pooled_text_says_so() -> None:
    states = torch.ones(1, 1, 97, 97, dtype=torch.int8)
    schedule = Schedule(states, (16, 16), 1552, 1552, None, None, "m", "0", "auto")
    assert "(0, 0)  a square is 3\u00d73 tiles" in schedule_text(schedule)


def test_rectangles_cover_exactly() -> None:
    member = torch.rand(40, 30) < 0.6
    painted = torch.zeros_like(member, dtype=torch.int64)
    for x, y, width, height in rectangles(member):
        painted[y : y + height, x : x + width] += 1
    assert torch.equal(painted, member.long())
    assert rectangles(torch.ones(5, 4, dtype=torch.bool)) == [(0, 0, 4, 5)]


def test_mask_svg_colours_pairs_by_their_tile() -> None:
    dense = causal(4, 4)
    svg = mask_svg(dense, schedule_of(dense[None, None], (2, 2)), title="a & b", formula="a < b")
    root = ElementTree.fromstring(svg)
    matrix = root.find(f"{SVG}svg")
    assert matrix is not None
    assert matrix.get("viewBox") == "0 0 4 4"
    paths = {path.get("class"): path.get("d") for path in matrix}
    assert paths == {
        "fg-masked": "M1 0h1v1h-1M3 2h1v1h-1",
        "fg-partial": "M0 0h1v1h-1M0 1h2v1h-2M2 2h1v1h-1M2 3h2v1h-2",
        "fg-full": "M0 2h2v2h-2",
    }
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts[:2] == ["a & b", "4\u00d74, 4 tiles of 2\u00d72, 75.0 % visited"]
    assert {"keys (kv_idx)", "queries (q_idx)"} <= set(texts)
    assert texts[-5:] == ["full: 1", "partial: 2", "masked there", "empty: 1", "a < b"]
    assert root.get("aria-label") == "a & b"


def test_mask_svg_without_a_schedule() -> None:
    root = ElementTree.fromstring(mask_svg(causal(3, 5)))
    paths = {path.get("class"): path.get("d") for path in root.iter(f"{SVG}path")}
    assert paths["fg-full"] == "M0 0h3v1h-3M0 1h4v1h-4M0 2h5v1h-5"


def test_axes_show_positions() -> None:
    dense = causal(2, 8)
    svg = mask_svg(dense, schedule_of(dense[None, None], (16, 16)))
    ends = [
        e.text
        for e in ElementTree.fromstring(svg).iter(f"{SVG}text")
        if e.get("text-anchor") == "end"
    ]
    assert ends == ["6", "7"]
    shifted = schedule_of(dense[None, None], (16, 16), q_offset=-1)
    assert 'text-anchor="end">-1<' in mask_svg(dense, shifted)


def test_a_formula_is_escaped_and_wrapped() -> None:
    formula = " & ".join(f"(kv_idx < {i})" for i in range(30))
    root = ElementTree.fromstring(mask_svg(causal(4, 4), formula=formula))
    shown = [e.text or "" for e in root.iter(f"{SVG}text") if "fg-mono" in str(e.get("class"))]
    assert len(shown) > 3
    assert " ".join(line.strip() for line in shown) == formula


def test_a_formula_breaks_where_it_binds_least() -> None:
    formula = "(a < b) & ((c[i & 1] == d) | (e <= f)) | ~(g < h) & (i != j)"
    assert list(wrap_formula(formula, 100)) == [formula]
    assert list(wrap_formula(formula, 40)) == [
        "(a < b) & ((c[i & 1] == d) | (e <= f))",
        "| ~(g < h) & (i != j)",
    ]
    assert list(wrap_formula(formula, 30, indent=2)) == [
        "  (a < b)",
        "      & ((c[i & 1] == d)",
        "          | (e <= f))",
        "  | ~(g < h) & (i != j)",
    ]
    assert list(wrap_formula("a + b <= c", 8)) == ["a + b <=", "    c"]
    assert list(wrap_formula("", 8)) == []


def test_a_million_positions_are_drawn_in_no_time() -> None:
    tiles = torch.arange(4096)
    states = ((tiles <= tiles[:, None]).to(torch.int8) + (tiles < tiles[:, None])).to(torch.int8)
    length = 4096 * 256
    schedule = Schedule(
        states[None, None], (256, 256), length, length, None, None, "causal", "0", "bounds"
    )
    # Of this process, so that others on the machine don't count.
    start = time.process_time()
    svg = schedule_svg(schedule, formula="kv_idx <= q_idx")
    text = schedule_text(schedule)
    assert time.process_time() - start < 4
    assert len(svg) < 20_000
    assert "8,386,560 full, 4,096 partial" in text
    assert ">128K<" in svg
    ElementTree.fromstring(svg)


def test_explain_text() -> None:
    page = explain_text(
        [
            ("spec", "spec causal\n  mask    kv_idx <= q_idx\n"),
            ("nothing", ""),
            ("tile rule", "may attend   " + " & ".join(30 * ["a < b"])),
            ("kernel", "/a/" + 120 * "b" + ".py\n# " + 97 * "c" + " d"),
        ]
    )
    parts = page.split("\n\n")
    assert parts[0] == lines("── spec ".ljust(100, "─"), "spec causal", "  mask    kv_idx <= q_idx")
    rule = parts[1].splitlines()
    assert [len(line) <= 100 for line in rule] == 4 * [True]
    assert all(line.startswith(13 * " ") for line in rule[2:])
    assert parts[2].splitlines()[1] == "/a/" + 120 * "b" + ".py"
    assert parts[2].splitlines()[2:] == ["# " + 97 * "c", "#     d"]
    assert len(parts) == 3
