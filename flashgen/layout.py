"""How generated text is laid out: lines of the house's length, blank lines that separate."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence

COLUMNS = 100
_OPEN, _CLOSE = "([{", ")]}"
# Where an expression may be broken, what binds weakest first; a break comes before the operator.
_OPERATORS = (
    (" == ", " != ", " <= ", " < "),
    (" | ",),
    (" ^ ",),
    (" & ",),
    (" + ", " - "),
    (" * ", " // ", " / ", " % "),
)


def tidy(text: str) -> str:
    """No trailing blanks, no doubled blank lines inside functions, no line over 100 columns."""
    text = re.sub(r"[ \t]+\n", "\n", text)
    text = re.sub(r"\n{4,}", "\n\n\n", text)
    text = re.sub(r"\n{3,}(?=[ \t])", "\n\n", text)
    lines = list(_joined(text.splitlines()))
    lines = [folded for line in _refilled(lines) for folded in fold(line)]
    return "\n".join(lines).rstrip("\n") + "\n"


def _joined(lines: list[str]) -> Iterator[str]:
    """Calls over three lines whose middle one doesn't end in a comma, in one where they fit."""
    at = 0
    while at < len(lines):
        count = 3 if lines[at].endswith(tuple(_OPEN[:2])) and _is_call(lines[at : at + 3]) else 1
        joined = lines[at] + "".join(map(str.strip, lines[at + 1 : at + count]))
        yield from [joined] if len(joined) <= COLUMNS else lines[at : at + count]
        at += count


def _is_call(lines: list[str]) -> bool:
    """Whether the third of lines closes what the first opens around the second."""
    if len(lines) < 3:
        return False
    first, inner, last = lines
    indent = first[: len(first) - len(first.lstrip())]
    closes = last.startswith((f"{indent})", f"{indent}]"))
    return closes and inner.startswith(" ") and not inner.endswith((",", " "))


def _refilled(lines: Sequence[str]) -> Iterator[str]:
    """Comments inside functions filled anew, from a line that is too long to their ends."""
    at = 0
    while at < len(lines):
        end = at + 1
        margin = _prose(lines[at]) if len(lines[at]) > COLUMNS else ""
        if margin:
            while end < len(lines) and _prose(lines[end]) == margin:
                end += 1
            words = " ".join(line.removeprefix(margin) for line in lines[at:end])
            yield from _fill(words, margin, margin)
        else:
            yield lines[at]
        at = end


def _prose(line: str) -> str:
    """What a comment inside a function begins with; each line of a header is for itself."""
    found = re.match(r" +# (?=\S)", line)
    return found[0] if found else ""


def fold(line: str) -> list[str]:
    """One line of code or comment as lines of at most 100 columns, where it can be broken."""
    if len(line) <= COLUMNS:
        return [line]
    code = line.strip()
    indent = line[: line.index(code)]
    comment = re.match(r"# *", code)
    if comment is not None:
        return _fill(code, indent, f"{indent}#{' ' * (len(comment[0]) + 3)}")
    if code.startswith('"""'):
        return _fill(code, indent, indent)
    return _fold_code(code, indent)


def _fill(words: str, first: str, others: str) -> list[str]:
    """Lines of words, the first and the others each behind their margin."""
    return textwrap.wrap(
        words,
        COLUMNS,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _fold_code(code: str, indent: str) -> list[str]:
    """A statement, or a piece of one that stands inside brackets."""
    if len(indent) + len(code) <= COLUMNS:
        return [indent + code]
    start, value = _assignment(code)
    parts = _split(value)
    deeper = indent + " " * 4
    if start and len(parts) > 1:
        return [f"{indent}{start}(", *_fold_parts(parts, deeper), f"{indent})"]
    if len(parts) > 1:
        return _fold_parts(parts, indent)
    brackets = _brackets(value)
    if brackets is None:
        return [indent + code]
    first, last = brackets
    inner = _fold_inner(value[first + 1 : last], deeper)
    return [f"{indent}{start}{value[: first + 1]}", *inner, indent + value[last:]]


def _fold_parts(parts: list[str], indent: str) -> list[str]:
    return [line for part in parts for line in _fold_code(part, indent)]


def _fold_inner(inner: str, indent: str) -> list[str]:
    """What stands between brackets: arguments, filled into lines, or one expression."""
    if len(indent) + len(inner) <= COLUMNS:
        return [indent + inner]
    arguments = _split_at(inner, (", ",))
    if len(arguments) == 1:
        return _fold_parts(_split(inner), indent)
    lines: list[str] = []
    for argument in arguments:
        comma = "" if argument.endswith(",") else ","
        if lines and len(indent) + len(lines[-1]) + len(argument + comma) < COLUMNS:
            lines[-1] += f" {argument}{comma}"
        else:
            lines.append(argument + comma)
    return _fold_parts(lines, indent)


def _assignment(code: str) -> tuple[str, str]:
    """`name = ` or `return ` apart from the value."""
    found = re.match(r"\w[\w, ]* [-+|&*/]?= |return ", code)
    return ("", code) if found is None else (found[0], code[found.end() :])


def _brackets(code: str) -> tuple[int, int] | None:
    """The outermost pair of brackets that holds most."""
    pairs, opened = [], []
    for at, letter in enumerate(code):
        if letter in _OPEN:
            opened.append(at)
        elif letter in _CLOSE and opened:
            start = opened.pop()
            pairs += [(start, at)] if not opened else []
    return max(pairs, key=lambda pair: pair[1] - pair[0], default=None)


def _split(code: str) -> list[str]:
    """At the operators outside brackets that bind weakest."""
    for signs in _OPERATORS:
        parts = _split_at(code, signs)
        if len(parts) > 1:
            return parts
    return [code]


def _split_at(code: str, signs: tuple[str, ...]) -> list[str]:
    """Pieces that start with their operators; a comma stays at the end of a piece."""
    parts, depth, start = [], 0, 0
    for at, letter in enumerate(code):
        depth += (letter in _OPEN) - (letter in _CLOSE)
        if not depth and code.startswith(signs, at):
            end = at + (letter == ",")
            parts.append(code[start:end].strip())
            start = end
    return [*parts, code[start:].strip()]
