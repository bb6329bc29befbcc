"""Sequences of different lengths, packed and in pages, and what attention over them gives."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import dense
import torch

NAN = float("nan")
# allowed(b, i, j): which of positions i (queries) see j (keys) in sequence b; [H or 1, i, j].
Allowed = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class Sequences:
    """q[b] [Hq, n, D], k[b] [Hkv, m, D], v[b] [Hkv, m, Dv], one for each sequence."""

    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]

    @staticmethod
    def random(
        q_lens: Sequence[int],
        kv_lens: Sequence[int],
        heads: int = 2,
        kv_heads: int = 1,
        dim: int = 16,
        v_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> Sequences:
        def make(lens: Sequence[int], heads: int, dim: int) -> list[torch.Tensor]:
            return [torch.randn(heads, n, dim).to(device, dtype) for n in lens]

        return Sequences(
            make(q_lens, heads, dim),
            make(kv_lens, kv_heads, dim),
            make(kv_lens, kv_heads, v_dim or dim),
        )

    @property
    def q_lens(self) -> list[int]:
        return [x.shape[1] for x in self.q]

    @property
    def kv_lens(self) -> list[int]:
        return [x.shape[1] for x in self.k]

    @property
    def device(self) -> torch.device:
        return self.q[0].device

    def packed(self) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """q, k, v [T, H, D], and what says where sequences begin."""
        tensors = [join(x) for x in (self.q, self.k, self.v)]
        return tensors, {
            "cu_seqlens_q": starts(self.q_lens, self.device),
            "cu_seqlens_kv": starts(self.kv_lens, self.device),
        }

    def padded(self) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """k, v [B, H, longest, D] with NaN beyond the lengths, and `kv_lens`."""
        longest = max(self.kv_lens)
        tensors = []
        for parts in (self.k, self.v):
            rooms = [x.new_full((x.shape[0], longest, x.shape[2]), NAN) for x in parts]
            for room, x in zip(rooms, parts, strict=True):
                room[:, : x.shape[1]] = x
            tensors.append(torch.stack(rooms))
        lens = torch.tensor(self.kv_lens, dtype=torch.int32, device=self.device)
        return tensors, {"kv_lens": lens}

    def paged(
        self, size: int, layout: str = "NHD", spare: int = 2
    ) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """k, v in shuffled pages, and their table. Whatever isn't used is NaN, or no page."""
        used = [-(-n // size) for n in self.kv_lens]
        order = torch.randperm(sum(used) + spare).tolist()
        table = torch.empty(len(used), max(used) + spare, dtype=torch.int32)
        table[:, ::2], table[:, 1::2] = -1, 2**31 - 1
        pools = [
            torch.full((len(order), x[0].shape[0], size, x[0].shape[2]), NAN).to(x[0])
            for x in (self.k, self.v)
        ]
        for b, count in enumerate(used):
            for column in range(count):
                page = order.pop()
                table[b, column] = page
                for pool, x in zip(pools, (self.k[b], self.v[b]), strict=True):
                    part = x[:, column * size : (column + 1) * size]
                    pool[page, :, : part.shape[1]] = part
        if layout == "NHD":
            pools = [pool.transpose(1, 2).contiguous() for pool in pools]
        lens = torch.tensor(self.kv_lens, dtype=torch.int32)
        arguments: dict[str, Any] = {"page_table": table.to(self.device), "page_layout": layout}
        return pools, {**arguments, "kv_lens": lens.to(self.device)}

    def reference(self, allowed: Allowed, **options: Any) -> list[tuple[torch.Tensor, ...]]:
        """(out [Hq, n, Dv], lse [Hq, n]) of each sequence in float64; queries are the last."""
        results = []
        for b, (q, k, v) in enumerate(zip(self.q, self.k, self.v, strict=True)):
            i, j = (torch.arange(*span) for span in self.positions(b))
            given = (x.cpu()[None] for x in (q, k, v))
            out, lse = dense.attention(*given, allowed(b, i[:, None], j), **options)
            results.append((out[0], lse[0]))
        return results

    def positions(self, b: int) -> tuple[tuple[int, int], tuple[int, int]]:
        n, m = self.q_lens[b], self.kv_lens[b]
        return (m - n, m), (0, m)


def join(parts: list[torch.Tensor]) -> torch.Tensor:
    """[H, n, D] each, as [T, H, D]."""
    return torch.cat(parts, 1).transpose(0, 1).contiguous()


def starts(lens: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32, device=device)


def parted(
    out: torch.Tensor, lse: torch.Tensor, lens: Sequence[int] | None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Results by sequence, [Hq, n, Dv] and [Hq, n]: of packed queries, or of a batch."""
    if lens is None:
        return list(zip(out, lse, strict=True))
    outs = torch.split(out.transpose(0, 1), list(lens), 1)
    return list(zip(outs, torch.split(lse, list(lens), 1), strict=True))


def same(
    results: list[tuple[torch.Tensor, torch.Tensor]],
    wanted: list[tuple[torch.Tensor, ...]],
    tolerance: float = 1e-5,
) -> None:
    """Equal up to the tolerance; rows without keys exactly 0 and -inf."""
    for (out, lse), (right, right_lse) in zip(results, wanted, strict=True):
        out, lse = out.detach().cpu().double(), lse.detach().cpu().double()
        torch.testing.assert_close(out, right, rtol=0, atol=tolerance)
        torch.testing.assert_close(lse, right_lse, rtol=tolerance, atol=tolerance)
        empty = right_lse == -torch.inf
        assert (out[empty] == 0).all()


def causal(b: int, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    return j <= i


def every(b: int, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    return (j >= 0).expand(i.shape[0], j.shape[0])


def within(window: int) -> Allowed:
    return lambda b, i, j: (j <= i) & (i - j < window)


# What these masks describe are the rows of one dense call: not positions in a sequence.
_ROWS = ("from_seqlens", "from_cu_seqlens", "from_dense")


def by_position(cases: Sequence[Any]) -> list[Any]:
    """The cases whose mask has a meaning for sequences of several lengths."""
    return [case for case in cases if not case.id.startswith(_ROWS)]


def of_case(case: Any, data: dict[str, Any], batch: int, heads: int) -> Allowed:
    """A mask of cases.py in sequence b: its oracle knows all sequences, and gives that one."""

    def allowed(b: int, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        batches = torch.arange(batch if "b" in case.varies else 1).reshape(-1, 1, 1, 1)
        each = torch.arange(heads if "h" in case.varies else 1).reshape(1, -1, 1, 1)
        found = case.oracle(batches, each, i.reshape(1, 1, -1, 1), j.reshape(1, 1, 1, -1), data)
        whole: torch.Tensor = found.expand(batch, -1, i.shape[0], j.shape[0])
        return whole[b]

    return allowed
