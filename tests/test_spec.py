"""Declarations: names, early binding, copies, and what makes two specs the same."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen import masks
from flashgen.expr import extent
from flashgen.spec import Bound, Mask, Program


def bound(mask: Any, **data: Any) -> Bound:
    return Program(mask=mask).bind(data, "attend(q, k, v)")


def refused(work: Any, *words: str) -> None:
    with pytest.raises(fg.FlashgenError) as caught:
        work()
    for word in (*words, "instead: "):
        assert word in str(caught.value)


@fg.mask
def near(q_idx, kv_idx, reach: int, first: int = 0):
    return (abs(q_idx - kv_idx) < reach) & (kv_idx >= first)


@fg.mask
def same(b, q_idx, kv_idx, doc: fg.Tensor):
    return doc[b, q_idx] == doc[b, kv_idx]


@fg.mask
def open_gate(gate: fg.Tensor):
    return gate > 0


def names(mask: Mask) -> set[str]:
    return {a.name for a in mask.params}


def test_names_left_to_the_call() -> None:
    assert names(near & same) == {"reach", "first", "doc"}
    assert names(near(reach=3) & same) == {"first", "doc"}
    assert names(near(reach=3, first=1)) == set()
    assert names(near | near(reach=3)) == {"reach", "first"}
    assert (near & ~same | near).name == "near & ~same | near"
    assert (~(near & (same | near))).name == "~(near & (same | near))"


def test_binding_is_not_the_calls() -> None:
    """Two windows of one mask, and a third at the call, are three values."""
    three = near(reach=2) | near(reach=6) & ~near(reach=4) | near.rename(reach="wide")
    spec = bound(three, wide=9)
    assert sorted(spec.scalars.values()) == [0, 2, 4, 6, 9]
    left, right = near(reach=2), near(reach=2)
    assert bound(left | ~right).spec.scalars == bound(left).spec.scalars
    # A bound value keeps its own name, also if the call gives another mask's of that name.
    mixed = bound(near(reach=2) | near, reach=7)
    assert mixed.scalars["reach"] == 7
    assert sorted(mixed.scalars.values()) == [0, 2, 7]


def test_binding_twice_is_an_error() -> None:
    refused(lambda: near(reach=3)(reach=4), "nothing here is called reach")
    refused(lambda: near(reach=3, rech=4), "rech", "Did you mean `reach`?")


def test_defaults_may_be_given_and_renamed() -> None:
    assert bound(near, reach=3).scalars == {"reach": 3, "first": 0}
    assert bound(near, reach=3, first=2).scalars == {"reach": 3, "first": 2}
    assert names(near(reach=3)(first=0)) <= {"first"}
    other = near.rename(first="begin")
    assert names(other) == {"reach", "begin"}
    assert bound(other, reach=3, begin=5).scalars == {"reach": 3, "begin": 5}


@pytest.mark.parametrize("name", ["scale", "q_idx", "score", "kv_len", "two words", "lambda", ""])
def test_names_that_no_parameter_may_have(name: str) -> None:
    refused(lambda: near.rename(reach=name), "near:")
    refused(lambda: near.rename(rech="x"), "rech")


def test_the_same_name_is_the_same_argument() -> None:
    shared = bound(near & near.rename(first="reach"), reach=4)
    assert shared.scalars == {"reach": 4, "first": 0}
    with_float = fg.mask(_by_float)
    refused(lambda: near & with_float, "`reach: int` and `reach: float` share a name", ".rename(")
    swapped = near.rename(reach="first", first="reach")
    assert bound(swapped, first=7, reach=2).scalars == bound(near, reach=7, first=2).scalars | {
        "first": 7, "reach": 2,
    }  # fmt: skip


def _by_float(q_idx, reach: float):
    return q_idx < reach


def test_numbers_for_tensors() -> None:
    """A parameter that is data takes a plain number too: a runtime scalar."""
    number, tensor = bound(open_gate, gate=2), bound(open_gate, gate=torch.tensor([2.0]).sum())
    assert (number.spec.mask_scalars, number.spec.mask_tensors) == ({"gate"}, frozenset())
    assert (tensor.spec.mask_scalars, tensor.spec.mask_tensors) == (frozenset(), {"gate"})


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 2.0, True, "3", None, torch.ones(1)])
def test_values_that_are_no_integer(value: Any) -> None:
    refused(lambda: bound(near, reach=value), "attend(q, k, v): reach")


def test_numbers_of_other_libraries() -> None:
    numpy = pytest.importorskip("numpy")
    assert bound(near, reach=numpy.int32(3)).scalars["reach"] == 3
    assert bound(near, reach=torch.tensor(3)).scalars["reach"] == 3
    assert type(bound(fg.mask(_by_float), reach=3).scalars["reach"]) is float


def test_what_a_spec_depends_on() -> None:
    """Not on values, lengths or who wrote the function; on the formula and the kinds of data."""
    doc = torch.zeros(2, 9, dtype=torch.int32)
    digest = bound(near & same, reach=3, doc=doc).spec.digest
    assert digest == bound(near & same, reach=99, doc=doc[:1].repeat(7, 5) + 1).spec.digest
    assert digest != bound(near & same, reach=3, doc=doc.long()).spec.digest
    assert digest != bound(near | same, reach=3, doc=doc).spec.digest
    assert digest != bound(near & same.rename(doc="other"), reach=3, other=doc).spec.digest

    @fg.mask
    def constant(q_idx, kv_idx, reach: fg.Const[int]):
        return q_idx - kv_idx < reach

    assert bound(constant(reach=3)).spec.digest != bound(constant(reach=4)).spec.digest


def test_layers_of_one_mask_share_its_digest() -> None:
    slope = torch.ones(4)

    def warm(score, h, slope: fg.Tensor):
        return score * slope[h]

    plain, scored = fg.Attention(near), fg.Attention(near, score=warm, softcap=3.0)
    first = plain._program.bind({"reach": 2}, "").spec
    second = scored._program.bind({"reach": 2, "slope": slope}, "").spec
    assert first.mask_digest == second.mask_digest
    assert first.digest != second.digest


def test_masks_of_lengths_alone_read_their_data() -> None:
    """A schedule made for one length of data must not serve another."""

    @fg.mask
    def inside(kv_idx, table: fg.Tensor):
        return kv_idx < table.shape[0]

    attend, q = fg.Attention(inside), torch.zeros(1, 1, 40, 8)
    v = torch.eye(40)[None, None]
    for n in (30, 3):
        seen = attend(q, q, v, table=torch.zeros(n))[0, 0, 0] > 0
        assert seen.sum() == n


def test_captured_tensors_of_one_name() -> None:
    def of(data: torch.Tensor) -> Any:
        return lambda b, h, q, k: data[q] == data[k]

    first, second = torch.arange(6) // 2, torch.arange(6) // 3
    both = fg.mask(of(first)) & of(second) & same
    doc = torch.zeros(1, 6, dtype=torch.int64)
    found = bound(both, doc=doc).tensors
    assert len({id(t) for t in found.values()}) == len(found) == 3
    right = (first[:, None] == first) & (second[:, None] == second)
    assert torch.equal(both.dense(6, 6, doc=doc)[0, 0], right)
    part = functools.partial(lambda b, h, q, k, data: data[q] == data[k], data=second)
    assert torch.equal(fg.mask(part).dense(6, 6)[0, 0], second[:, None] == second)


def test_captured_tensors_do_not_leak() -> None:
    """Nothing global holds a closure's data once the user has let go of it."""

    def use() -> weakref.ref[torch.Tensor]:
        data = torch.arange(20)
        attend = fg.Attention(lambda b, h, q, k: data[q] >= data[k])
        q = torch.randn(1, 1, 20, 8)
        attend(q, q, q)
        attend.source(q, q, q)
        return weakref.ref(data)

    dead = use()
    gc.collect()
    assert dead() is None


LARGE = torch.arange(12).reshape(1, 12) // 5


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_copies(again: Any) -> None:
    mask = near(reach=4) & ~same(doc=LARGE) | masks.causal.rename() & same.rename(doc="segment")
    segment = torch.zeros(1, 12, dtype=torch.int32)
    twin = again(mask)
    assert repr(twin) == repr(mask)
    assert torch.equal(twin.dense(12, 12, segment=segment), mask.dense(12, 12, segment=segment))
    assert again(near) == near
    assert again(near(reach=4)) == near(reach=4) != near(reach=5)


def test_functions_that_cannot_be_found_again() -> None:
    local = fg.mask(lambda q_idx, kv_idx: q_idx > kv_idx)
    refused(lambda: pickle.dumps(local), "can't be pickled", "top level of a module")
    assert copy.deepcopy(local) == local


def test_digests_are_the_same_everywhere() -> None:
    """Also in processes whose hashes of strings differ."""
    program = (
        "import torch; from flashgen import masks; from flashgen.spec import Program;"
        "m = masks.causal & masks.document | masks.sliding_window;"
        "print(Program(mask=m).bind(dict(doc=torch.zeros(1, 4), window=2), '').spec.digest)"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True,
            env={"PYTHONHASHSEED": seed, "PATH": "", "HOME": "/nonexistent"},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(found) == 1


def test_expressions_without_an_end() -> None:
    """Python loops may write more than a kernel can hold; that is no crash and no endless wait."""

    def long(q_idx, kv_idx):
        cases = kv_idx == 0
        for n in range(1000):
            cases = cases | (kv_idx == n) & (q_idx > n)
        return cases

    def doubled(q_idx, kv_idx):
        for _ in range(60):
            kv_idx = (kv_idx * 3 - kv_idx) % 1000
        return kv_idx < q_idx

    def nested(q_idx, kv_idx):
        value = kv_idx
        for n in range(60):
            value = fg.where(q_idx + kv_idx == n, q_idx, value)
        return value <= q_idx

    q = torch.zeros(1, 1, 16, 8)
    for function in (long, doubled):
        refused(lambda f=function: fg.Attention(f)(q, q, q), "operations, nested", "q=[1, 1, 16")
    attend = fg.Attention(nested)
    assert attend(q, q, q).shape == q.shape
    assert len(attend.source(q, q, q)) < 1_000_000
    mask = bound(fg.mask(nested)).spec.mask
    assert mask is not None
    assert extent(mask) == (60 * 7 + 3, 64)
