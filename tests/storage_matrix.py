"""Every way of storing keys, times every shape of a call, for whatever mask is tested."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import dense
import pytest
import stored
import torch
from cases import CASES
from stored import Sequences

import flashgen as fg

PAGES = {f"pages of {size}": size for size in (1, 16, 64, 256)}
STORAGES = ("dense", "packed", *PAGES)
# Latent rows are neither packed nor, under several lengths of queries, in a batch.
LATENT_STORAGES = ("dense", "pages of 64")
# Queries of each sequence: as many as keys, a chunk of them, and those of decoding.
QUERIES: dict[str, int | None] = {
    "prefill": None,
    "chunk": 40,
    "decode 16": 16,
    "decode 3": 3,
    "decode 1": 1,
}
# Packed queries: chunks, and a single query, in one call.
CHUNKS = (40, 100, 1)
# A sequence ends inside a tile, at a tile's end, or has hardly more keys than queries.
KV_LENS = (150, 128, 41)
HEADS, DIM = 2, 16
POSITIONAL = stored.by_position(CASES)
# Slices are of a batch's queries, and of positions where queries are packed.
SLICES = [case for case in POSITIONAL if case.id.endswith("slices")]
OF_ROWS = [case for case in CASES if case not in POSITIONAL or case in SLICES]
# Every head reads the same latent rows, so data of a head of keys doesn't exist.
LATENT = [case for case in POSITIONAL if "h" not in case.varies and case not in SLICES]
PAIRS = [
    (case, storage)
    for case in POSITIONAL
    for storage in STORAGES
    if storage == "packed" or case not in SLICES
]
LATENT_PAIRS = [(case, storage) for case in LATENT for storage in LATENT_STORAGES]


@dataclass(frozen=True)
class Way:
    """Where calls run, in which dtype, and how far outputs and LSEs may be off.

    `heads`: of queries and keys, where masks don't look at heads; `tile`: of the schedules, which
    by default calls make for themselves."""

    backend: str
    device: str
    dtype: torch.dtype
    out: float
    lse: float
    heads: tuple[int, int] = (HEADS, HEADS)
    tile: tuple[int, int] | None = None


def each(pairs: Sequence[tuple[Any, str]]) -> Any:
    """Parametrises a test by a case and a storage."""
    names = [f"{case.id}-{storage}" for case, storage in pairs]
    return pytest.mark.parametrize(("case", "storage"), pairs, ids=names)


@functools.lru_cache(maxsize=1)
def _meaning(case: Any) -> tuple[dict[str, Any], stored.Allowed]:
    """A mask's data, and which keys it shows."""
    batch, longest = len(KV_LENS), max(KV_LENS)
    data = case.build(batch, HEADS, longest, longest, torch.Generator().manual_seed(5))
    return data, _remembered(stored.of_case(case, data, batch, HEADS))


def check(case: Any, storage: str, way: Way, latent: fg.MLA | None = None) -> None:
    """A mask of positions, in sequences of several lengths, against the dense reference."""
    batch, longest = len(KV_LENS), max(KV_LENS)
    data, allowed = _meaning(case)
    attend = _attention(case, data, way.device, heads=latent)
    for name, count in QUERIES.items():
        # Prefill of sequences of several lengths is a call of packed queries.
        alike = count is None and (storage == "dense" or latent is not None)
        kv_lens = [longest] * batch if alike else KV_LENS
        q_lens = [n if count is None else count for n in kv_lens]
        if name == "chunk" and storage == "packed":
            q_lens = list(CHUNKS)
        heads = (HEADS, HEADS) if "h" in case.varies else way.heads
        sequences = _sequences(q_lens, kv_lens, heads, way, latent)
        found = _run(attend, sequences, storage, way, latent)
        for got, right in zip(found, sequences.reference(allowed), strict=True):
            _same(got, right, way, f"{storage}, {name}")


def check_rows(case: Any, way: Way) -> None:
    """A mask of one dense call's rows, against the dense reference; other storages have none."""
    n = max(KV_LENS)
    for name, count in QUERIES.items():
        shape = (1, HEADS, count or n, n)
        data = case.build(*shape, torch.Generator().manual_seed(5))
        q, k, v = (torch.randn(1, HEADS, rows, DIM).to(way.dtype) for rows in (count or n, n, n))
        attend = _attention(case, data, way.device)
        given = (x.to(way.device) for x in (q, k, v))
        got = attend(*given, return_lse=True, backend=way.backend)
        _same(got, dense.attention(q, k, v, case.expected(*shape, data)), way, name)


def _attention(case: Any, data: dict[str, Any], device: str, **options: Any) -> fg.Attention:
    there = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in data.items()}
    return fg.Attention(case.bound(there).to(device), **options)


def _sequences(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    heads: tuple[int, int],
    way: Way,
    latent: fg.MLA | None,
) -> Sequences:
    """Of latent heads, values are the first columns of the one row that all heads read."""
    sizes = (*heads, DIM) if latent is None else (heads[0], 1, latent.rank + latent.rope)
    made = Sequences.random(q_lens, kv_lens, *sizes, None, way.dtype, way.device)
    if latent is None:
        return made
    return replace(made, v=[x[..., : latent.rank] for x in made.k])


def _remembered(allowed: stored.Allowed) -> stored.Allowed:
    """Oracles are slow, and asked for the same positions by each storage."""

    @functools.cache
    def matrix(b: int, i: tuple[int, int], j: tuple[int, int]) -> torch.Tensor:
        return allowed(b, torch.arange(*i)[:, None], torch.arange(*j))

    def ends(x: torch.Tensor) -> tuple[int, int]:
        return int(x.min()), int(x.max()) + 1

    return lambda b, i, j: matrix(b, ends(i), ends(j))


def _run(
    attend: Any, sequences: Sequences, storage: str, way: Way, latent: fg.MLA | None
) -> list[Any]:
    """(out [H, n, D], lse [H, n]) of each sequence. What isn't used is NaN, or no page."""
    q_lens = sequences.q_lens if len(set(sequences.q_lens)) > 1 or storage == "packed" else None
    q = torch.stack(sequences.q) if q_lens is None else stored.join(sequences.q)
    if storage == "packed":
        (_, *keys), arguments = sequences.packed()
    elif storage == "dense":
        keys, arguments = sequences.padded()
    else:
        keys, arguments = sequences.paged(PAGES[storage])
        if q_lens is not None:
            arguments["cu_seqlens_q"] = stored.starts(q_lens, sequences.device)
    if latent is not None:
        keys, arguments["scale"] = keys[:1], q.shape[-1] ** -0.5
    if way.tile is not None:
        arguments["schedule"] = attend.schedule(q, *keys, **arguments, block_size=way.tile)
    results = attend(q, *keys, **arguments, return_lse=True, backend=way.backend)
    return stored.parted(*results, q_lens)


def _same(got: Any, right: Any, way: Way, where: str) -> None:
    out, lse = (x.cpu().double() for x in got)

    def say(text: str) -> str:
        return f"{where}: {text}"

    torch.testing.assert_close(lse, right[1], rtol=way.lse, atol=way.lse, msg=say)
    torch.testing.assert_close(out, right[0], rtol=0, atol=way.out, msg=say)
    assert (out[right[1] == -torch.inf] == 0).all(), where
