"""The FlashMask paper's twelve masks on a GPU, at three lengths, beside FlexAttention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ..errors import FlashgenError
from . import gpu, peers
from .compare import told
from .documents import PUBLISHED, Sample, read_documents
from .flashmask_cases import CASES, case
from .flex import count, flex_attention
from .gpu import GpuRow
from .sides import Side
from .table import Row
from .work import Work, chosen
from .workers import MOST, in_turns

TOKENS, WIDTH = 131072, 4096
LENGTHS, HEAD_DIMS = (8192, 32768, 131072), (128, 64)
# Gigabytes of a GPU that a process may need: tensors of the largest length, gradients, sums.
_GIGABYTES = 12


@dataclass(frozen=True)
class PaperWork(Work):
    """A case at a length and a head dimension: 128K positions in all."""

    @property
    def batch(self) -> int:
        return max(1, TOKENS // self.length)


def title() -> str:
    """What was measured, and on what."""
    shape = f"B={TOKENS} / S, H={WIDTH} / D"
    return f"the FlashMask paper's masks, {shape}, bf16, {gpu.machine()}; schedules reused"


def run(
    rounds: int,
    only: Sequence[str] = (),
    lengths: Sequence[int] = LENGTHS,
    documents: Path = PUBLISHED,
) -> list[GpuRow]:
    """Forward and backward times, each row shown when it is there.

    `only`: work whose name, `D=64 S=8192 causal document`, contains one of these texts;
    `documents`: a file as `read_documents` reads it, whose samples the elements of a batch take
    in turn. Raises Differs where results do, after everything was measured."""
    gpu.need_gpu("flashmask")
    works = chosen(every(lengths), only, lengths)
    samples = {length: samples_of(documents, length) for length in {w.length for w in works}}
    free = torch.cuda.mem_get_info()[0] / 1e9
    most = max(1, min(MOST, int(free / _GIGABYTES)))
    given = partial(prepare, samples=samples)
    found = in_turns(works, given, gpu.measure, rounds, most, alike=gpu.alike)
    return gpu.gather((str(f.work), f.value, f.problem) for f in found)


def show(rows: Sequence[GpuRow]) -> None:
    """Print the rows as Markdown under the title."""
    print(f"{title()}\n")
    gpu.print_rows(rows)


def every(lengths: Sequence[int]) -> list[PaperWork]:
    """All cases at these lengths."""
    shapes = [(head_dim, WIDTH // head_dim, n) for n in lengths for head_dim in HEAD_DIMS]
    return [PaperWork(*shape, name) for shape in shapes for name in CASES]


def samples_of(documents: Path, length: int) -> list[Sample]:
    """A sample for each element of a batch of this length. Raises FlashgenError without any."""
    found = read_documents(documents)
    if length not in found:
        known = ", ".join(map(str, found))
        raise FlashgenError(
            f"{documents} has no documents of {length} positions", write=f"--lengths {known}"
        )
    batch = max(1, TOKENS // length)
    return [found[length][b % len(found[length])] for b in range(batch)]


def prepare(work: PaperWork, samples: dict[int, list[Sample]]) -> gpu.Prepared:
    """Both sides of a case, compiled."""
    tensors, own = work.tensors(), samples[work.length]
    function, ours = case(work.mask, own, work.heads, work.length, work.device)
    counted = count(function, work.batch, work.heads, work.length, work.device)
    sides = {
        peers.TRITON: Side(flex_attention(function, counted)),
        gpu.OURS: Side(gpu.flashgen(ours, tensors)),
    }
    prepared = gpu.Prepared(work, sides, counted)
    prepared.run_once(tensors)
    return prepared


def summary(rows: Sequence[Row]) -> str:
    """How many times as fast as FlexAttention: forward, backward, and both, for each length and for
    all; geometric means, and the least with its name."""
    theirs = {row.work: row for row in rows if row.backend == peers.TRITON}
    mine = [row for row in rows if row.backend == gpu.OURS and row.work in theirs]
    lengths = dict.fromkeys(row.work.split()[1] for row in mine)
    lines = [_told(n, [row for row in mine if row.work.split()[1] == n], theirs) for n in lengths]
    return "\n".join([*lines, _told("all", mine, theirs)] if len(lines) > 1 else lines)


def _told(name: str, mine: Sequence[Row], theirs: dict[str, Row]) -> str:
    forward = [theirs[row.work].forward_ms / row.forward_ms for row in mine]
    backward = [
        (theirs[row.work].backward_ms or 0) / row.backward_ms for row in mine if row.backward_ms
    ]
    both = {row.work: row.ratio for row in mine}
    least = min(both, key=both.__getitem__)
    return (
        f"{name}, {len(mine)} works beside FlexAttention: forward {told(forward)}; "
        f"backward {told(backward)}; both {told(list(both.values()))} ({least})"
    )
