"""What can be wrong with a call: one error each, which restates it and says what to write."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import flashgen as fg
from flashgen import masks

B, H, S, D = 2, 4, 64, 16


def tensors(batch=B, heads=H, kv_heads=2, q_len=S, kv_len=S, dim=D, v_dim=D, dtype=torch.float32):
    shapes = ((batch, heads, q_len, dim), (batch, kv_heads, kv_len, dim))
    return [torch.zeros(s, dtype=dtype) for s in (*shapes, (batch, kv_heads, kv_len, v_dim))]


def refused(work, *words: str) -> None:
    """The call fails with one message that has all these words, and advice."""
    with pytest.raises(fg.FlashgenError) as caught:
        work()
    message = str(caught.value)
    for word in (*words, "instead: "):
        assert word in message, message


DOC = torch.zeros(B, S, dtype=torch.int64)
LATENT = fg.Attention(heads=fg.MLA(rank=8, rope=8))


def latent(columns):
    return torch.zeros(1, 2, 8, columns), torch.zeros(1, 1, 8, columns)


CALLS = {
    "heads": (lambda: fg.Attention()(*tensors(heads=3)), ["3 query heads", "q=[2, 3, 64, 16]"]),
    "dtypes": (
        lambda: fg.Attention()(tensors()[0].half(), *tensors()[1:]),
        ["k has dtype torch.float32, and q torch.float16"],
    ),
    "integers": (lambda: fg.Attention()(*tensors(dtype=torch.int32)), ["dtype torch.int32"]),
    "rank": (lambda: fg.Attention()(tensors()[0][0], *tensors()[1:]), ["q has 3 dimensions"]),
    "lengths": (
        lambda: fg.Attention()(*tensors()[:2], tensors(kv_len=S + 1)[2]),
        ["don't fit together"],
    ),
    "head dim": (lambda: fg.Attention()(*tensors(dim=257)), ["head dimension is 257", "1 to 256"]),
    "value dim": (lambda: fg.Attention()(*tensors(v_dim=300)), ["300"]),
    "no value": (lambda: fg.Attention()(*tensors()[:2]), ["no value tensor"]),
    "NaN scale": (lambda: fg.Attention()(*tensors(), scale=math.nan), ["scale is nan"]),
    "tensor scale": (
        lambda: fg.Attention()(*tensors(), scale=torch.ones(())),
        ["scale is", "score function"],
    ),
    "negative window": (
        lambda: fg.Attention(masks.sliding_window)(*tensors(), window=-1),
        ["window", "-1"],
    ),
    "negative window, bound": (lambda: masks.sliding_window(window=-3), ["window", "-3"]),
    "missing data": (lambda: fg.Attention(masks.document)(*tensors()), ["needs doc: fg.Tensor"]),
    "unknown data": (
        lambda: fg.Attention(masks.document)(*tensors(), dox=DOC),
        ["nothing here is called dox", "Did you mean `doc`?"],
    ),
    "an argument of calls": (
        lambda: fg.Attention(masks.document).schedule(*tensors(), doc=DOC, scale=0.3),
        ["scale is an argument of calls", "no scale here"],
    ),
    "data too short": (
        lambda: fg.Attention(masks.document)(*tensors(), doc=DOC[:, :40]),
        ["doc has shape [2, 40]", "at least 64"],
    ),
    "data of another batch": (
        lambda: fg.Attention(masks.document)(*tensors(), doc=DOC.repeat(2, 1)),
        ["doc has shape [4, 64]", "2 or 1"],
    ),
    "data of wrong rank": (
        lambda: fg.Attention(masks.document)(*tensors(), doc=DOC[0]),
        ["doc has 1 dimensions and is indexed by 2"],
    ),
    "data of wrong dtype": (
        lambda: fg.Attention(masks.document)(*tensors(), doc=DOC.to(torch.complex64)),
        ["doc is a", "complex64"],
    ),
    "data on another device": (
        lambda: fg.Attention(masks.document)(*tensors(), doc=DOC.to("meta")),
        ["doc is on meta, and the queries are on cpu"],
    ),
    "data that is no tensor": (
        lambda: fg.Attention(masks.document)(*tensors(), doc=[0] * S),
        ["doc must be a tensor, and is a list"],
    ),
    "scalar of wrong kind": (
        lambda: fg.Attention(masks.sliding_window)(*tensors(), window=2.5),
        ["window must be a Python int, and is 2.5"],
    ),
    "q_offset": (lambda: fg.Attention()(*tensors(), q_offset=1.5), ["q_offset is a float"]),
    "q_offset of another batch": (
        lambda: fg.Attention()(*tensors(), q_offset=torch.zeros(3, dtype=torch.int32)),
        ["q_offset has shape [3]"],
    ),
    "kv_lens": (
        lambda: fg.Attention()(*tensors(), kv_lens=torch.tensor([1, 99])),
        ["kv_lens holds [1, 99]", "from 0 to 64"],
    ),
    "sinks": (lambda: fg.Attention(sinks=True)(*tensors()), ["no sinks are given"]),
    "sinks nobody declared": (
        lambda: fg.Attention()(*tensors(), sinks=torch.zeros(H)),
        ["were not declared"],
    ),
    "sinks of wrong shape": (
        lambda: fg.Attention(sinks=True)(*tensors(), sinks=torch.zeros(H + 1)),
        ["sinks has shape [5]"],
    ),
    "softcap": (lambda: fg.Attention(softcap=-1.0), ["softcap is -1.0"]),
    "a flag for softcap": (lambda: fg.Attention(softcap=True), ["softcap is True"]),
    "backend": (
        lambda: fg.Attention()(*tensors(), backend="cuda"),
        ["there is no backend 'cuda'"],
    ),
    "hopper": (lambda: fg.Attention()(*tensors(), backend="hopper"), ["hopper"]),
    "portable without a GPU": (
        lambda: fg.Attention()(*tensors(), backend="portable"),
        ["tensors are on the CPU"],
    ),
    "interpret without the interpreter": (
        lambda: fg.Attention()(*tensors(), backend="interpret"),
        ["TRITON_INTERPRET=1"],
    ),
    "block size": (lambda: fg.Attention().schedule(*tensors(), block_size=40), ["block_size is"]),
    "planner": (
        lambda: fg.Attention(masks.causal).schedule(*tensors(), planner="fast"),
        ["no planner 'fast'"],
    ),
    "latent heads": (lambda: fg.Attention(heads="mla"), ["heads is 'mla'", "fg.MLA("]),
    "a value of latent heads": (
        lambda: LATENT(tensors()[0], *tensors()[:2], scale=1.0),
        ["MLA(rank=8, rope=8) has no value tensor", "first 8 columns"],
    ),
    "no scale of latent heads": (
        lambda: LATENT(*latent(16)),
        ["needs its scale", "(nope + rope)**-0.5", "never 16**-0.5"],
    ),
    "latent rows": (lambda: LATENT(*latent(24), scale=1.0), ["kv is [1, 1, 8, 24]", "Skv, 16]"]),
    "heads of latent rows": (
        lambda: LATENT(latent(16)[0], latent(16)[0], scale=1.0),
        ["kv is [1, 2, 8, 16]", "[B, 1, Skv, 16]"],
    ),
    "latent sizes": (lambda: fg.MLA(rank=0, rope=64), ["rank must be a positive integer"]),
    "FlexAttention's positions": (
        lambda: fg.Attention(lambda b, h, q, k: q >= k)(*tensors(q_len=5)),
        ["FlexAttention function", "q_offset=0"],
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(name):
    work, words = CALLS[name]
    refused(work, *words)


def plain_if(q_idx, kv_idx):
    return kv_idx <= q_idx if q_idx > 3 else kv_idx == 0


def python_and(q_idx, kv_idx):
    return kv_idx <= q_idx and q_idx > 3


def chained(q_idx, kv_idx):
    return 0 <= q_idx - kv_idx < 4


def not_boolean(q_idx, kv_idx):
    return q_idx - kv_idx


def no_return(q_idx, kv_idx):
    kv_idx <= q_idx  # noqa: B015


def by_numpy(q_idx, kv_idx):
    return np.maximum(q_idx, kv_idx) > 3


def by_math(q_idx, kv_idx):
    return math.sqrt(q_idx) > kv_idx


def by_item(q_idx, kv_idx):
    return q_idx.item() > kv_idx


def by_list(q_idx, kv_idx):
    return [1, 2, 3][q_idx] > kv_idx


def reduced(q_idx, kv_idx):
    return (q_idx > kv_idx).any()


def by_zero(q_idx, kv_idx):
    return q_idx // 0 == kv_idx


def stranger(q_idx, kv_idx, doc):
    return doc[q_idx] == doc[kv_idx]


FUNCTIONS = {
    plain_if: ["Python asks whether a symbol is true", "if q_idx > 3"],
    python_and: ["Python asks whether", "& for and"],
    chained: ["Python asks whether", "(a <= x) & (x < b)"],
    not_boolean: ["must return a boolean", "q_idx - kv_idx"],
    no_return: ["must return a boolean", "None"],
    by_numpy: ["by_numpy", "np.maximum"],
    by_math: ["plain number", "fg.sqrt"],
    by_item: [".item"],
    by_list: ["plain integer", "fg.Tensor"],
    reduced: [".any", "element-wise"],
    by_zero: ["divisor is zero", "q_idx // 0"],
    stranger: ["nothing says what the parameter doc of this mask is", "fg.Tensor"],
}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_functions_that_cannot_be_compiled(function):
    """The message shows the line of this file."""
    work = lambda: fg.Attention(mask=function)(*tensors())  # noqa: E731
    refused(work, *FUNCTIONS[function], "test_bad_input.py:")


def test_a_schedule_that_does_not_fit():
    attend = fg.Attention(masks.sliding_window)
    made = attend.schedule(*tensors(), window=8)
    other = fg.Attention(masks.causal).schedule(*tensors())
    for work, words in (
        (lambda: attend(*tensors(q_len=32), window=8, schedule=made), ["Sq = 64", "32"]),
        (lambda: attend(*tensors(), window=9, schedule=made), ["{'window': 8}", "{'window': 9}"]),
        (lambda: attend(*tensors(), window=8, schedule=other), ["made for the mask causal"]),
        (lambda: attend(*tensors(), window=8, schedule=made, q_offset=3), ["q_offset"]),
        (lambda: attend(*tensors(), window=8, schedule="all"), ["schedule is a str"]),
    ):
        refused(work, *words, "attend.schedule(q, k, v, ...)")


def test_names_that_collide():
    @fg.mask
    def by_number(q_idx, kv_idx, doc: int):
        return q_idx - kv_idx < doc

    refused(lambda: masks.document & by_number, "share a name", ".rename(doc=")
    mixed = masks.document.rename(doc="segment") & by_number
    assert {a.name for a in mixed.params} == {"segment", "doc"}
    refused(lambda: fg.mask(lambda q_idx, kv_idx, *rest: True), "*rest")

    def reserved(q_idx, scale: float):
        return q_idx < scale

    refused(lambda: fg.mask(reserved), "scale is a name of the call's own arguments")


def test_one_sequence_asks_for_data_of_one():
    doc = DOC.repeat(2, 1)
    one = [x[:1] for x in tensors()]
    for work, write in (
        (lambda: masks.document.dense(S, S, doc=doc), "instead: batch=4, or doc with 1 element "),
        (lambda: fg.Attention(masks.document)(*one, doc=doc), "instead: doc with 1 element along"),
    ):
        refused(work, "doc has shape [4, 64]", "needs a length of 1\n", write)


@pytest.mark.parametrize(
    ("function", "problem", "write"),
    [
        (lambda b, h, i, j: no_such_name < i, "NameError", "a name that is defined"),  # noqa: F821
        (lambda b, h, i, j: i < 1 // 0, "ZeroDivisionError", "Python stopped it"),
        (lambda b, h, i, j: i.detach() < j, "no `.detach`: it is one number", "element-wise"),
    ],
)
def test_what_stops_a_function(function, problem, write):
    refused(lambda: fg.Attention(function)(*tensors()), "(q=[2, 4, 64, 16]", problem, write)
