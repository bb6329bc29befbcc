"""Functions on symbols: what they may ask for and say, FlexAttention's included."""

from __future__ import annotations
import __future__

import functools
import math
import operator

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

import flashgen as fg
from flashgen.expr import Env, evaluate
from flashgen.functions import __dict__ as vocabulary
from flashgen.spec import Program, as_mask
from flashgen.spec.leaf import Leaf

ROWS, COLUMNS = torch.arange(-3, 12)[:, None], torch.arange(12)[None]


def traced(function, **data):
    """The mask's matrix, and the same from running the function on tensors itself."""
    bound = Program(mask=as_mask(function)).bind(data, "test")
    index = {"q_idx": ROWS, "kv_idx": COLUMNS, "b": torch.zeros(1, 1, dtype=torch.long)}
    index |= {"h": index["b"], "h_kv": index["b"]}
    assert bound.spec.mask is not None
    env = Env(index, dict(bound.scalars), dict(bound.tensors))
    return evaluate(bound.spec.mask, env).expand(15, 12)


WORDS = {
    "sums": lambda q_idx, kv_idx: q_idx + 2 * kv_idx - 5 < -kv_idx,
    "floors": lambda q_idx, kv_idx: (q_idx // 4 == kv_idx // 3) | (q_idx % 5 > kv_idx % 2),
    "negative divisors": lambda q_idx, kv_idx: (q_idx // -4) + (kv_idx % -3) < 0,
    "comparisons": lambda q_idx, kv_idx: (q_idx != kv_idx) & ~(q_idx >= 3) | (kv_idx == 4),
    "bits": lambda q_idx, kv_idx: ((q_idx & 3) ^ (kv_idx | 8)) > ((kv_idx << 1) >> 2),
    "booleans": lambda q_idx, kv_idx: (q_idx > 2) ^ (kv_idx > 5),
    "where": lambda q_idx, kv_idx: fg.where(q_idx > kv_idx, q_idx, 7) > 5,
    "bounds": lambda q_idx, kv_idx: fg.minimum(q_idx, 6) > fg.maximum(kv_idx, fg.abs(q_idx - 4)),
    "floats": lambda q_idx, kv_idx: fg.exp(-kv_idx / 4.0) < fg.tanh(q_idx * 0.1) + 0.5,
    "roots": lambda q_idx, kv_idx: (
        fg.sqrt(kv_idx * 1.0) < fg.log(kv_idx + 2.0) + fg.sin(q_idx * 1.0)
    ),
    "powers": lambda q_idx, kv_idx: q_idx**2 > kv_idx**3 - 2,
    "torch": lambda q_idx, kv_idx: torch.where(q_idx > 2, (q_idx - kv_idx).abs(), kv_idx) < 4,
    "clamps": lambda q_idx, kv_idx: q_idx.clamp(0, 5) >= torch.clamp(kv_idx, min=3),
    "logic": lambda q_idx, kv_idx: torch.logical_and(q_idx > 0, torch.logical_not(kv_idx > 4)),
    "casts": lambda q_idx, kv_idx: (q_idx > 3).to(torch.int32) * 5 > kv_idx.float() - 2.5,
}


@pytest.mark.parametrize("name", WORDS)
def test_vocabulary(name):
    """A symbol answers as a tensor of the same numbers does."""
    assert torch.equal(traced(WORDS[name]), WORDS[name](ROWS, COLUMNS).expand(15, 12))


def test_data_of_any_index_is_clamped():
    table, page = torch.randn(2, 9), torch.randint(0, 9, (5,))

    def through_pages(q_idx, kv_idx, table: fg.Tensor, page: fg.Tensor):
        return table[q_idx % 2, page[kv_idx // 3]] > table[1, q_idx * 2]

    right = table[ROWS % 2, page[(COLUMNS // 3).clamp(0, 4)]] > table[1, (ROWS * 2).clamp(0, 8)]
    assert torch.equal(traced(through_pages, table=table, page=page), right)


def test_flex_functions_as_they_are():
    doc = torch.randint(0, 3, (12,))
    window = 4

    def causal(b, h, q, k):
        return q >= k

    def same(b, h, q, k):
        return doc[q] == doc[k]

    def near(batch, head, q, k, reach):
        return q - k < reach

    here = ROWS.clamp(0)
    parts = {
        "causal": ROWS >= COLUMNS,
        "same": doc[here] == doc[COLUMNS],
        "near": window > ROWS - COLUMNS,
    }
    assert torch.equal(traced(and_masks(causal, same)), parts["causal"] & parts["same"])
    assert torch.equal(traced(or_masks(causal, same)), parts["causal"] | parts["same"])
    assert torch.equal(traced(functools.partial(near, reach=window)), parts["near"])
    assert Program(mask=as_mask(noop_mask)).bind({}, "test").spec.mask is None
    mixed = as_mask(causal) & same | ~as_mask(near_of(window))
    right = parts["causal"] & parts["same"] | ~parts["near"]
    assert torch.equal(traced(mixed), right)


def near_of(window):
    return lambda b, h, q, k: q - k < window


def test_new_closures_have_the_same_spec():
    """Captured tensors are data and captured numbers are baked in."""

    def of(doc, window):
        return lambda b, h, q, k: (doc[q] == doc[k]) & (q - k < window)

    def digest(doc, window):
        return Program(mask=as_mask(of(doc, window))).bind({}, "test").spec.digest

    first = digest(torch.zeros(12, dtype=torch.int32), 3)
    assert first == digest(torch.ones(40, dtype=torch.int32), 3)
    assert first != digest(torch.zeros(12, dtype=torch.int32), 4)


@fg.mask
def within(q_idx, kv_idx, window: int):
    return (kv_idx <= q_idx) & (q_idx - kv_idx < window)


def test_two_windows_of_one_mask():
    both = within(window=2) | (within(window=6) & ~within(window=4))
    away = ROWS - COLUMNS
    right = (away >= 0) & ((away < 2) | ((away < 6) & (away >= 4)))
    assert torch.equal(traced(both), right)
    assert both.params == ()
    assert torch.equal(traced(within.rename(window="reach"), reach=3), (away >= 0) & (away < 3))


def test_defaults_and_constants():
    @fg.mask
    def strided(q_idx, kv_idx, step: fg.Const[int], first: int = 1):
        pairs = [kv_idx % step == r for r in range(step - 1)]
        return functools.reduce(lambda x, y: x | y, pairs) & (kv_idx >= first)

    right = (COLUMNS % 3 < 2) & (COLUMNS >= 1)
    assert torch.equal(traced(strided, step=3), right.expand(15, 12))
    assert torch.equal(
        traced(strided, step=3, first=5), ((COLUMNS % 3 < 2) & (COLUMNS >= 5)).expand(15, 12)
    )


def test_masks_inside_masks():
    @fg.mask
    def causal_or_near(q_idx, kv_idx):
        return within(q_idx, kv_idx, window=3) | (kv_idx == 0)

    away = ROWS - COLUMNS
    assert torch.equal(traced(causal_or_near), (away >= 0) & (away < 3) | (COLUMNS == 0))


SCORES = torch.linspace(-2, 2, 15)[:, None].expand(15, 12)
UNARY = "abs exp exp2 log log2 sqrt rsqrt sin cos tanh sigmoid floor ceil erf isnan".split()
MORE = "neg square reciprocal sign relu logical_not positive".split()
BINARY = "minimum maximum add sub mul div remainder floor_divide lt le gt ge eq ne".split()
BINARY += (
    "subtract multiply true_divide less greater_equal not_equal logical_and logical_or".split()
)
BITS = "bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift".split()


def scored(function):
    """A score function's values, [15, 12] float32."""
    bound = Program(score=Leaf.of(function, "score")).bind({}, "test")
    index = {"q_idx": ROWS, "kv_idx": COLUMNS}
    assert bound.spec.score is not None
    env = Env(index, dict(bound.scalars), dict(bound.tensors), score=SCORES)
    return evaluate(bound.spec.score, env).expand(15, 12)


def same(function):
    """Symbols and tensors of the same numbers give the same."""
    right = function(SCORES, ROWS, COLUMNS)
    mine = scored(lambda score, q_idx, kv_idx: function(score, q_idx, kv_idx))
    right = torch.as_tensor(right).float().expand(15, 12)
    torch.testing.assert_close(mine, right, equal_nan=True)


@pytest.mark.parametrize("name", UNARY + MORE)
def test_words_of_one_operand(name):
    if hasattr(torch, name) and name != "positive":
        same(lambda s, i, j: getattr(torch, name)(s))
        same(lambda s, i, j: getattr(torch, name)(i) * 1.0)
        same(lambda s, i, j: getattr(s, name)())
    if name == "positive":
        same(lambda s, i, j: +s - (+i))
    if name in UNARY:
        same(lambda s, i, j: vocabulary[name](s) + vocabulary[name](j))


@pytest.mark.parametrize("name", BINARY + BITS)
def test_words_of_two_operands(name):
    word = getattr(torch, name)
    same(lambda s, i, j: word(i.clamp(0), j.clamp(1, 9)) * 1.0)
    same(lambda s, i, j: getattr(i, name)(j.clamp(1, 9)) * 1.0)
    if name not in BITS:
        same(lambda s, i, j: word(s, j + 1) * 1.0)
        same(lambda s, i, j: word(j * 1.0, s + 3) * 1.0)


@pytest.mark.parametrize(
    "name",
    [*"add sub mul truediv floordiv mod pow lt le gt ge eq ne".split(), "and_", "or_", "xor"],
)
def test_operators_with_numbers_on_either_side(name):
    word = getattr(operator, name)
    same(lambda s, i, j: word(i, 3) * 1.0)
    same(lambda s, i, j: word(3, j + 1) * 1.0)
    if name not in ("and_", "or_", "xor"):
        same(lambda s, i, j: word(s, 0.75) * 1.0 if name != "pow" else (s + 3) ** 0.75)
        same(lambda s, i, j: word(2.5, s + 3) * 1.0)


OTHERS = {
    "where": lambda s, i, j: torch.where(i > j, s, 0.0) + torch.where(i == j, 1, j),
    "where of numbers": lambda s, i, j: torch.where(i > j, 1.0, -math.inf),
    "clamp": lambda s, i, j: s.clamp(-1, 1) + i.clamp(min=2) - j.clamp(max=5) + s.clip(max=0.5),
    "clamp_min": lambda s, i, j: s.clamp_min(0) + torch.clamp_max(s, 0.25),
    "rounding": lambda s, i, j: (
        torch.div(i, 4, rounding_mode="trunc") + torch.div(i, 4, rounding_mode="floor") * 10
    ),
    "alpha": lambda s, i, j: torch.add(s, j, alpha=3) - torch.sub(i, j, alpha=2),
    "rsub": lambda s, i, j: torch.rsub(s, 3.0),
    "casts": lambda s, i, j: s.to(torch.int32) + i.float() / 2 + j.to(float) + s.int() + s.long(),
    "truth": lambda s, i, j: (i % 3).bool().int() + i.to(torch.bool).float() + (i > 1).to(s.dtype),
    "zeros": lambda s, i, j: i.new_zeros(()) + torch.ones_like(s) + torch.zeros_like(i),
    "filled": lambda s, i, j: s * s.new_full((), 2.5) + j.new_ones((), dtype=torch.int32),
    "shape": lambda s, i, j: s * (2 if i.ndim in (0, 2) else 3),
    "sums of booleans": lambda s, i, j: torch.where((i > j) + (j > 3), s, 1.0),
    "products of booleans": lambda s, i, j: ((i > j) * (j > 3) == True) * s,  # noqa: E712
    "counted": lambda s, i, j: ((i > j).int() + (j > 3)) * s,
    "extremes of booleans": lambda s, i, j: torch.maximum(i > j, torch.minimum(j > 3, i > 5)) * s,
    "integer powers": lambda s, i, j: (2**j + 3**j + i**9 + (-(j % 7)) ** (j % 4)) % 1000 * s,
    "shifts by powers": lambda s, i, j: i // 4**j * s,
    "as another's dtype": lambda s, i, j: (s * 3).to(i) * s,
    "new tensor": lambda s, i, j: s + s.new_tensor(2.0),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_words(name):
    same(OTHERS[name])


def test_captured_tensors_combine_with_symbols_on_either_side():
    factor, place = torch.tensor(2.5), torch.tensor(3)
    table = torch.randn(4, 5)
    same(
        lambda s, i, j: factor * s + s / factor - (factor - s) + (place - i) % 4 + place // (j + 1)
    )
    same(lambda s, i, j: (factor > s) & (place <= i) | (place == j))
    same(lambda s, i, j: table[2, 3] * s + table[-1, -2])
    same(lambda s, i, j: table[i.clamp(0, 3), j.clamp(0, 4)] + table[i.clamp(0, 3), 2])


def test_negative_numbers_count_from_the_end_and_symbols_clamp():
    table = torch.arange(5.0)

    def last(b, h, q, k):
        return table[(q - q) - 1] + table[k * 0 - 1] == 0

    def ended(b, h, q, k, table=table):
        return (table[-1] == 4) & (q >= k)

    assert traced(last).all()
    assert torch.equal(traced(ended), ROWS >= COLUMNS)


def test_lengths_of_data():
    @fg.mask
    def inside(q_idx, kv_idx, table: fg.Tensor):
        return (
            (kv_idx < table.shape[1] - 1)
            & (table.size(0) > 1)
            & (table[-1, kv_idx - 0 * q_idx] > 0)
        )

    table = torch.ones(2, 7)
    assert torch.equal(traced(inside, table=table), (COLUMNS < 6).expand(15, 12))
    assert not traced(inside, table=table[:1]).any()


REFUSED = {
    "slice": (lambda t, q, k: t[q, :] > 0, ["indexed by a slice", "one integer expression"]),
    "None": (lambda t, q, k: t[None, q] > 0, ["indexed by a slice, None"]),
    "float": (lambda t, q, k: t[q, k / 2] > 0, ["which is a float", ".to(int)"]),
    "too many": (lambda t, q, k: t[q, k, 0] > 0, ["has 2 dimensions", "indexed by 3"]),
    "too few": (lambda t, q, k: t[q] > 0, ["1 of them indexed", "one index for each"]),
    "bare": (lambda t, q, k: t > 0, ["0 of them indexed"]),
    "length": (lambda t, q, k: q < len(t), ["len(", ".shape[0]"]),
    "sum": (lambda t, q, k: torch.sum(t[q, k]) > 0, ["`sum`", "element-wise"]),
    "any": (lambda t, q, k: (t[q, k] > 0).all(), [".all", "element-wise"]),
    "iteration": (lambda t, q, k: sum(x > q for x in k), ["can't be iterated"]),
    "in range": (lambda t, q, k: q in range(5), ["true"]),
    "not": (lambda t, q, k: not q > k, ["~ for not"]),
    "max": (lambda t, q, k: max(q, k) > 3, ["fg.minimum for min"]),
    "math": (lambda t, q, k: math.exp(q) > k, ["fg.exp"]),
    "float()": (lambda t, q, k: float(q) > k, ["plain number"]),
    "range()": (lambda t, q, k: len(range(k)) > q, ["plain integer"]),
    "shifted float": (lambda t, q, k: (t[q, k] << 1) > 0, ["`shl`", "booleans and integers"]),
    "and of floats": (lambda t, q, k: t[q, k] & q > 0, ["`and` works on booleans"]),
    "a string": (lambda t, q, k: q > "3", ["can't be run", "TypeError"]),
    "two": (lambda t, q, k: (q > k, k > 3), ["must return a boolean"]),
    "a symbol's item": (lambda t, q, k: q[0] > k, ["can't be indexed"]),
    "an attribute": (lambda t, q, k: k < q.T, [".T"]),
    "int8": (lambda t, q, k: (q * 10).to(torch.int8) >= k, ["int8, in which numbers wrap"]),
    "uint8": (lambda t, q, k: (q - k).type(torch.uint8) < 5, ["uint8", "`x & 255`"]),
    "short": (lambda t, q, k: (q - k).short() < 5, ["int16"]),
    "bf16": (lambda t, q, k: t[q, k].bfloat16() > 0, ["bfloat16", "rounded", "torch.float32"]),
    "fp16": (lambda t, q, k: t[q, k].to(torch.half) > 0, ["float16", "rounded"]),
    "minus": (lambda t, q, k: (q > k) - (k > 3) > 0, ["is a boolean", "~ for not"]),
    "minus one": (lambda t, q, k: -(q > k) < 0, ["is a boolean", ".int() to count"]),
    "fractions": (lambda t, q, k: 2 ** (-k) > 0, ["0 for a negative exponent", "2.0 **"]),
    "reciprocal": (lambda t, q, k: k**-1 > 0, ["power -1 is no integer"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_shows_the_line(name):
    function, words = REFUSED[name]

    @fg.mask
    def wrong(q_idx, kv_idx, table: fg.Tensor):
        return function(table, q_idx, kv_idx)

    with pytest.raises(fg.FlashgenError) as caught:
        traced(wrong, table=torch.ones(3, 3))
    for word in (*words, "test_trace.py:", "instead: "):
        assert word in str(caught.value)


SPELLINGS = {
    "objects": "n: int, c: fg.Const[int], table: fg.Tensor",
    "strings": "n: 'int', c: 'fg.Const[int]', table: 'fg.Tensor'",
    "names of type checkers": "n: 'int', c: 'typed.Const[int]', table: 'typed.Tensor'",
    "torch's tensor": "n: int, c: fg.Const[int], table: torch.Tensor",
}


@pytest.mark.parametrize("postponed", [False, True])
@pytest.mark.parametrize("name", SPELLINGS)
def test_annotations_of_every_spelling(name, postponed):
    scope = {"fg": fg, "torch": torch}
    flags = __future__.annotations.compiler_flag if postponed else 0
    text = f"def odd(q_idx, kv_idx: int, {SPELLINGS[name]}):\n"
    text += "    return (q_idx - kv_idx < n + c) & (table[kv_idx] > 0)\n"
    text += "def flex(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor):\n"
    text += "    return q >= k\n"
    exec(compile(text, "spellings", "exec", flags=flags, dont_inherit=True), scope)
    table = torch.arange(12) - 4
    right = (ROWS - COLUMNS < 3) & (table > 0)
    assert torch.equal(traced(scope["odd"], n=1, table=table, c=2), right)
    assert torch.equal(traced(scope["flex"]), ROWS >= COLUMNS)
