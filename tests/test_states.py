"""Merged states against whole attention; shared prefixes against one call over all keys."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import stored
import torch
from stored import Sequences

import flashgen as fg
from flashgen import masks

KEYS = 100
FULL = fg.Attention()


def tensors(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [torch.randn(2, h, n, 16).to(dtype) for h, n in ((4, 30), (2, KEYS), (2, KEYS))]


def parts(q: Any, k: Any, v: Any, cuts: list[int], attend: Any = FULL) -> list[torch.Tensor]:
    """Attention over pieces of the keys: out, lse, out, lse, ..."""
    ends = [0, *cuts, k.shape[2]]
    found: list[torch.Tensor] = []
    for start, end in pairwise(ends):
        found += attend(q, k[:, :, start:end], v[:, :, start:end], return_lse=True)
    return found


@pytest.mark.parametrize("cuts", [[50], [1, 7, 99], [0, 0, 30], [100]], ids=str)
def test_parts_make_the_whole(cuts: list[int]) -> None:
    q, k, v = tensors()
    states = parts(q, k, v, cuts)
    whole = FULL(q, k, v, return_lse=True)
    for got in (fg.merge(*states), fg.merge(states[::2], states[1::2])):
        torch.testing.assert_close(got, whole)


def test_associative() -> None:
    a, b, c = (tuple(x) for x in zip(*[iter(parts(*tensors(), [20, 60]))] * 2, strict=True))
    left = fg.merge(*fg.merge(*a, *b), *c)
    torch.testing.assert_close(left, fg.merge(*a, *fg.merge(*b, *c)))
    torch.testing.assert_close(left, fg.merge(*a, *b, *c))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_empty_states_change_nothing(dtype: torch.dtype) -> None:
    """Bit by bit, and whatever they hold."""
    out, lse = FULL(*tensors(dtype), return_lse=True)
    nothing = torch.full_like(out, stored.NAN), torch.full_like(lse, -torch.inf)
    for states in ((out, lse, *nothing), (*nothing, out, lse), (*nothing, out, lse, *nothing)):
        merged = fg.merge(*states)
        assert merged[0].dtype == dtype
        torch.testing.assert_close(merged, (out, lse), rtol=0, atol=0)
    empty = fg.merge(*nothing, *nothing)
    assert (empty[0] == 0).all()
    assert (empty[1] == -torch.inf).all()


def test_one_row_empty_among_others() -> None:
    """Rows of a causal mask that see no key of a part."""
    q, k, v = tensors()
    first = fg.Attention(masks.causal)(q, k[:, :, :40], v[:, :, :40], q_offset=70, return_lse=True)
    second = fg.Attention(masks.causal)(q, k[:, :, 40:], v[:, :, 40:], q_offset=30, return_lse=True)
    late = fg.Attention(masks.causal)(q, k[:, :, 40:], v[:, :, 40:], q_offset=-10, return_lse=True)
    assert (late[1][:, :, :10] == -torch.inf).all()
    whole = fg.Attention(masks.causal)(q, k, v, return_lse=True)
    torch.testing.assert_close(fg.merge(*first, *second), whole)
    torch.testing.assert_close(fg.merge(*first, *late)[0][:, :, :10], first[0][:, :, :10])


def test_gradients() -> None:
    q, k, v = (x.requires_grad_() for x in tensors())
    whole = FULL(q, k, v, return_lse=True)
    grads = [torch.randn_like(x) for x in whole]
    wanted = torch.autograd.grad(whole, (q, k, v), grads)
    got = torch.autograd.grad(fg.merge(*parts(q, k, v, [0, 30, 70])), (q, k, v), grads)
    torch.testing.assert_close(got, wanted)
    out, lse = (x.detach().requires_grad_() for x in whole)
    nothing = torch.full_like(out, stored.NAN), torch.full_like(lse, -torch.inf).requires_grad_()
    found = torch.autograd.grad(fg.merge(out, lse, *nothing), (out, lse, nothing[1]), grads)
    torch.testing.assert_close(found[:2], tuple(grads))
    assert (found[2] == 0).all()


def test_large_and_far_apart() -> None:
    out = torch.ones(1, 1, 1, 4)
    for low, high in ((-1e30, 1e30), (-3e4, 0.0), (88.0, 89.0)):
        lses = [torch.full((1, 1, 1), x) for x in (low, high)]
        merged, lse = fg.merge(out, lses[0], 3 * out, lses[1])
        share = torch.sigmoid(torch.tensor(low - high, dtype=torch.float64))
        torch.testing.assert_close(merged.double(), (3 - 2 * share) * out.double())
        torch.testing.assert_close(lse, torch.logaddexp(*lses))


def test_packed_states() -> None:
    sequences = Sequences.random([5, 0, 9], [40, 3, 60], 4, 2)
    (q, k, v), arguments = sequences.packed()
    first = Sequences(sequences.q, *([x[:, :2] for x in y] for y in (sequences.k, sequences.v)))
    rest = Sequences(sequences.q, *([x[:, 2:] for x in y] for y in (sequences.k, sequences.v)))
    states: list[torch.Tensor] = []
    for part in (first, rest):
        own, lengths = part.packed()
        states += FULL(*own, **lengths, return_lse=True)
    torch.testing.assert_close(fg.merge(*states), FULL(q, k, v, **arguments, return_lse=True))


BAD: dict[str, tuple[Any, list[str]]] = {
    "an LSE missing": (lambda o, x: fg.merge(o, x, o), ["2 outputs and 1 LSEs"]),
    "nothing": (lambda o, x: fg.merge(), ["0 outputs"]),
    "different shapes": (lambda o, x: fg.merge(o, x, o[:, :, 1:], x), ["outputs' shapes"]),
    "the other way round": (lambda o, x: fg.merge(x, o), ["LSEs' shapes"]),
    "an LSE of another shape": (lambda o, x: fg.merge(o, x[..., None]), ["LSEs' shapes"]),
    "no tensors": (lambda o, x: fg.merge(o, 1.0), ["pair of tensors"]),
    "two devices": (lambda o, x: fg.merge(o, x, o.to("meta"), x), ["states are on cpu, meta"]),
    "integers": (lambda o, x: fg.merge(o.int(), x), ["a state has dtype torch.int32"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_states(name: str) -> None:
    work, words = BAD[name]
    with pytest.raises(fg.FlashgenError) as caught:
        work(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3))
    for word in (*words, "instead: ", "fg.merge("):
        assert word in str(caught.value)


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0, 0.0])], ids=["", "sinks"])
@pytest.mark.parametrize("storage", ["dense", "packed", "paged"])
def test_shared_prefix(storage: str, sinks: torch.Tensor | None) -> None:
    """Each sequence alone over the prefix and its own keys; a sink counts once."""
    lens, queries = [30, 0, 70], [4, 4, 4]
    sequences = Sequences.random(queries, lens, 4, 2)
    prefix = [torch.randn(2, 50, 16) for _ in range(2)]
    attend = fg.Attention(masks.causal, softcap=20.0, sinks=sinks is not None)
    options = {} if sinks is None else {"sinks": sinks}
    q = torch.stack(sequences.q)
    if storage == "packed":
        (q, k, v), arguments = sequences.packed()
    else:
        (k, v), arguments = sequences.paged(16)
    if storage == "dense":
        k, v = (torch.nn.utils.rnn.pad_sequence([x.transpose(0, 1) for x in y], True)
                .transpose(1, 2) for y in (sequences.k, sequences.v))  # fmt: skip
        arguments = {"kv_lens": arguments["kv_lens"]}
    results = fg.shared_prefix_attention(
        attend, q, *prefix, k, v, return_lse=True, scale=0.3, **options, **arguments
    )
    found = stored.parted(*results, queries if storage == "packed" else None)
    for b, (out, lse) in enumerate(found):
        own = [sequences.q[b], *(torch.cat([p, x[b]], 1) for p, x in
                                 zip(prefix, (sequences.k, sequences.v), strict=True))]  # fmt: skip
        # A query without keys of its own still sees the whole prefix.
        i = torch.arange(lens[b] - 4, lens[b])[:, None] + 50
        allowed = torch.arange(50 + lens[b]) <= i.clamp(min=49)
        allowed[:, 50:] &= torch.arange(lens[b]) <= i - 50
        right = stored.dense.attention(
            *(x[None] for x in own), allowed, scale=0.3, softcap=20.0, sinks=sinks
        )
        stored.same([(out, lse)], [(right[0][0], right[1][0])])


def test_shared_prefix_has_gradients() -> None:
    q, k, v = (x.requires_grad_() for x in tensors())
    prefix = [torch.randn(2, 20, 16, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    attend = fg.Attention(masks.causal)
    out = fg.shared_prefix_attention(attend, q, *prefix, k, v)
    longer = [torch.cat([p.expand(2, -1, -1, -1), x], 2) for p, x in
              zip(prefix, (k, v), strict=True)]  # fmt: skip
    whole = attend(q, *longer)
    torch.testing.assert_close(out, whole)
    grad = torch.randn_like(out)
    leaves = (q, k, v, *prefix)
    torch.testing.assert_close(
        torch.autograd.grad(out, leaves, grad), torch.autograd.grad(whole, leaves, grad)
    )


def test_a_shared_prefix_doesn_t_depend_on_the_batch() -> None:
    q, prefix = torch.randn(3, 2, 9, 16), torch.randn(2, 2, 100, 16)
    k, v = torch.randn(2, 3, 2, 12, 16)

    def run(rows: slice) -> torch.Tensor:
        own = (k[rows], v[rows])
        return fg.shared_prefix_attention(
            fg.Attention(masks.causal), q[rows], *prefix, *own, batch_invariant=True
        )

    assert torch.equal(run(slice(0, 3))[:1], run(slice(0, 1)))
    plain = fg.shared_prefix_attention(fg.Attention(masks.causal), q, *prefix, k, v)
    torch.testing.assert_close(run(slice(0, 3)), plain)
    assert run(slice(0, 0)).shape == (0, 2, 9, 16)


def test_a_shared_prefix_under_autocast() -> None:
    q, prefix = torch.randn(3, 2, 9, 16), torch.randn(2, 2, 100, 16).bfloat16()
    k, v = torch.randn(2, 3, 2, 12, 16).bfloat16()
    attend = fg.Attention(masks.causal)
    with torch.autocast("cpu"):
        mixed = fg.shared_prefix_attention(attend, q, *prefix, k, v)
    assert torch.equal(mixed, fg.shared_prefix_attention(attend, q.bfloat16(), *prefix, k, v))


PREFIX = torch.randn(2, 7, 16)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a mask": ({"attend": masks.causal}, "attend is no fg.Attention"),
    "latent heads": ({"attend": fg.Attention(heads=fg.MLA(12, 4))}, "no latent heads"),
    "dropout": ({"dropout_p": 0.5, "seed": 1}, "no positions to drop"),
    "nothing": ({"prefix_k": None}, "prefix_k is a NoneType"),
    "dimensions": ({"prefix_v": PREFIX[None]}, "the prefix has 4 dimensions"),
    "heads": ({"prefix_k": PREFIX[[0, 1, 1]], "prefix_v": PREFIX[[0, 1, 1]]}, "4 query heads"),
    "lengths": ({"prefix_k": PREFIX[:, :5]}, "prefix_k is [2, 5, 16], and prefix_v [2, 7, 16]"),
    "width": (
        {"prefix_k": PREFIX[..., :8]},
        "queries have 16 dimensions, and keys of the prefix 8",
    ),
    "dtype": ({"prefix_k": PREFIX.half()}, "prefix_k of torch.float16"),
    "device": ({"prefix_k": PREFIX.to("meta")}, "prefix_k on meta"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_shared_prefix_can_t_have(name: str) -> None:
    change, problem = REFUSED[name]
    q, (k, v) = torch.randn(1, 4, 3, 16), torch.randn(2, 1, 2, 5, 16)
    given = {"attend": fg.Attention(masks.causal), "q": q, "prefix_k": PREFIX, "prefix_v": PREFIX}
    with pytest.raises(fg.FlashgenError) as caught:
        fg.shared_prefix_attention(**{**given, "k": k, "v": v, **change})
    assert problem in str(caught.value)
    assert str(caught.value).startswith("fg.shared_prefix_attention(")


def test_shared_prefix_refuses_scores() -> None:
    attend = fg.Attention(score=lambda score, b, h, q, k: score + (q - k))
    with pytest.raises(fg.FlashgenError, match="changes scores by position"):
        fg.shared_prefix_attention(attend, *tensors()[:1], *(x[0] for x in tensors()[1:]),
                                   *tensors()[1:])  # fmt: skip
