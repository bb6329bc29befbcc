"""Messages restate the call, show the user's line and say what to write."""

from __future__ import annotations

import functools
import pickle
import textwrap

import pytest
import torch

from flashgen.errors import FlashgenError, SourceLine, did_you_mean, format_call


def test_a_message_has_every_part_in_order():
    error = FlashgenError(
        "a position has no truth value",
        call="attend(q=[2, 8, 128, 64] bf16)",
        line=SourceLine("model.py", 12, "if kv_idx <= q_idx:"),
        write="fg.where(condition, a, b)",
    )
    assert str(error) == textwrap.dedent("""\
        attend(q=[2, 8, 128, 64] bf16): a position has no truth value
          model.py:12: if kv_idx <= q_idx:
          instead: fg.where(condition, a, b)""")


def test_unknown_parts_are_left_out():
    assert str(FlashgenError("scale is NaN")) == "scale is NaN"
    assert str(FlashgenError("scale is NaN", write="a number")).splitlines() == [
        "scale is NaN",
        "  instead: a number",
    ]


def test_the_call_can_be_restated_by_an_outer_function():
    error = FlashgenError("scale is NaN")
    error.call = "attend(scale=nan)"
    assert str(error) == "attend(scale=nan): scale is NaN"


def test_is_a_value_error():
    with pytest.raises(ValueError, match="scale is NaN"):
        raise FlashgenError("scale is NaN")


class PickyError(FlashgenError):
    pass


@pytest.mark.parametrize("kind", [FlashgenError, PickyError])
def test_pickles_whole(kind):
    error = kind("p", call="f()", line=SourceLine("a.py", 3, "x"), write="w")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error)
    assert (copy.problem, copy.call, copy.line, copy.write) == ("p", "f()", error.line, "w")


def test_tensors_are_shown_by_shape_and_dtype():
    q = torch.empty(2, 8, 16, 64, dtype=torch.bfloat16)
    doc = torch.empty(2, 16, dtype=torch.int32)
    shown = format_call("attend", q, doc=doc, scale=0.5, schedule=None)
    assert shown == "attend([2, 8, 16, 64] bf16, doc=[2, 16] int32, scale=0.5)"


def test_long_arguments_are_cut_and_kept_on_one_line():
    shown = format_call("f", "a\nb", list(range(1000)))
    assert "\n" not in shown
    assert len(shown) < 90
    assert "..." in shown


def test_the_closest_name_is_suggested():
    assert did_you_mean("dco", {"slope", "doc"}) == "Did you mean `doc`?"


def test_all_names_are_listed_where_none_is_close():
    assert did_you_mean("window", {"slope", "doc"}) == "There are: `doc`, `slope`."
    assert did_you_mean("window", []) == ""


def fails(x):
    y = x + 1
    return y / 0  # the line


def fails_inside_a_lambda(x):
    divide = lambda y: y / 0  # noqa: E731  # the lambda
    return divide(x)


def calls_a_helper(x):
    return fails(x)  # the call


class Callable:
    def __call__(self, x):
        return x / 0  # the method


@functools.wraps(fails)
def wrapper(x):
    return fails(x)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (fails, "return y / 0  # the line"),
        (wrapper, "return y / 0  # the line"),
        (functools.partial(fails, 1), "return y / 0  # the line"),
        (fails_inside_a_lambda, "divide = lambda y: y / 0  # noqa: E731  # the lambda"),
        (calls_a_helper, "return fails(x)  # the call"),
        (Callable(), "return x / 0  # the method"),
    ],
)
def test_the_line_that_raised_is_found(function, text):
    with pytest.raises(ZeroDivisionError) as caught:
        function() if isinstance(function, functools.partial) else function(1)
    line = SourceLine.of_caller(function, caught.value)
    assert line is not None
    assert line.file == __file__
    assert line.text == text
    assert str(line) == f"{__file__}:{line.number}: {text}"


def test_the_innermost_of_a_recursion_is_found():
    def recurse(n):
        if n == 0:
            raise KeyError(n)  # the deepest
        recurse(n - 1)

    with pytest.raises(KeyError) as caught:
        recurse(3)
    line = SourceLine.of_caller(recurse, caught.value)
    assert line is not None
    assert line.text == "raise KeyError(n)  # the deepest"


def test_the_line_that_is_running_is_found():
    def user():
        return library()  # running

    def library():
        return SourceLine.of_caller(user)

    line = user()
    assert line is not None
    assert line.text == "return library()  # running"


def test_no_line_where_the_function_is_not_running():
    with pytest.raises(ZeroDivisionError) as caught:
        fails(1)
    assert SourceLine.of_caller(calls_a_helper, caught.value) is None
    assert SourceLine.of_caller(fails) is None
    assert SourceLine.of_caller(len) is None


def test_a_line_without_source_is_a_place():
    scope = {}
    exec(compile("def f():\n    return 1 / 0", "<typed>", "exec"), scope)
    with pytest.raises(ZeroDivisionError) as caught:
        scope["f"]()
    assert str(SourceLine.of_caller(scope["f"], caught.value)) == "<typed>:2"
