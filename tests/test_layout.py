"""Folding generated lines keeps their meaning and the house's length."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashgen.layout import COLUMNS, fold, tidy

NAMES = st.sampled_from(["b", "q_idx", "kv_idx", "kv_len", "doc_q", "columns_stride_2"])
CALLS = st.sampled_from(["tl.minimum", "tl.load", "floor_div"])


def grow(inner):
    operators = st.sampled_from(["|", "&", "^", "+", "-", "*", "//", "<=", "<"])
    return st.one_of(
        st.builds("({} {} {})".format, inner, operators, inner),
        st.builds("{} {} {}".format, inner, st.sampled_from(["&", "+"]), inner),
        st.builds("{}({}, {})".format, CALLS, inner, inner),
        st.builds("~({})".format, inner),
        st.builds("({}).to(tl.int64)".format, inner),
    )


@given(st.recursive(NAMES, grow, max_leaves=40), st.sampled_from(["x = ", "x += ", "return "]))
def test_folded_code_means_the_same(expression, start):
    line = f"        {start}{expression}"
    folded = fold(line)
    assert all(len(part) <= COLUMNS for part in folded)
    if len(line) <= COLUMNS:
        assert folded == [line]
    wrapper = "def f():\n    if x:\n"
    assert ast.dump(ast.parse(wrapper + "\n".join(folded))) == ast.dump(ast.parse(wrapper + line))


A, B, C = "a" * 40, "b" * 40, "c" * 40


@pytest.mark.parametrize(
    ("line", "folded"),
    [
        (f"x = {A} & {B} & {C}", ["x = (", f"    {A}", f"    & {B}", f"    & {C}", ")"]),
        (f"x = f({A} + {B} + {C})", ["x = f(", f"    {A}", f"    + {B}", f"    + {C}", ")"]),
        (f"x = f({A}, {B}, {C})", ["x = f(", f"    {A}, {B},", f"    {C},", ")"]),
        (
            f"    x = tl.load({A} + {B}).to({C})",
            ["    x = tl.load(", f"        {A} + {B}", f"    ).to({C})"],
        ),
        (f"def f({A}, {B}, {C}):", ["def f(", f"    {A}, {B},", f"    {C},", "):"]),
        (f"#   mask    {A} & {B} & {C}", [f"#   mask    {A} & {B} &", f"#       {C}"]),
        (f'  """{A} {B} {C}"""', [f'  """{A} {B}', f'  {C}"""']),
        ("x" * 120, ["x" * 120]),
    ],
)
def test_where_lines_are_folded(line, folded):
    assert fold(line) == folded


def test_tidy_leaves_blank_lines_that_separate():
    text = "import x  \n\n\n\n\ndef f():\n    a = 1\n\n\n    return a\n\n\n"
    assert tidy(text) == "import x\n\n\ndef f():\n    a = 1\n\n    return a\n"


def test_a_call_that_fits_one_line_is_on_one():
    assert tidy("k = f(\n    a, b\n)\n") == "k = f(a, b)\n"
    assert tidy("g(\n    x=[\n        1\n    ],\n)\n") == "g(\n    x=[1],\n)\n"
    listed = "k = f(\n    a,\n)\n"
    assert tidy(listed) == listed
    assert tidy(f"k = f(\n    {A}, {B}, {C[:10]}\n)\n").count("\n") == 3


def test_tidy_text_stays_as_it_is():
    text = tidy(f"x = {A} & {B} & ({A} | {B} | {C})\n")
    assert tidy(text) == text


def test_a_comment_in_a_function_is_refilled_from_its_first_long_line():
    words = "word " * 25
    text = f"def f():\n    # Short.\n    # {words.strip()}\n    # and on.\n    x = 1\n"
    first, *filled, last = tidy(text).splitlines()[1:]
    assert first == "    # Short."
    assert [len(line) <= COLUMNS and line.startswith("    # w") for line in filled] == [True] * 2
    assert filled[1].endswith(" word and on.")
    assert last == "    x = 1"
    header = f"# {words.strip()}\n# apart\n"
    assert tidy(header).endswith("\n# apart\n")
