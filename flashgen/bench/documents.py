"""Lists of documents that fill a row: those of the FlashMask paper, or a file like it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch

from ..errors import FlashgenError

PUBLISHED = Path(__file__).with_name("flashmask_documents.txt")
_LENGTH = re.compile(r"Total length: (\d+)")
_SAMPLE = re.compile(r"Sample \d+.*?(\[[^]]*\])\s*#\s*(\[[^]]*\])")


@dataclass(frozen=True)
class Sample:
    """Documents of one row: the length of each, of its prefix, and whether QK-sparse drops it."""

    lengths: tuple[int, ...]
    prefixes: tuple[int, ...]
    dropped: tuple[bool, ...]

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each document begins, and the end of the row."""
        return tuple(accumulate(self.lengths, initial=0))

    def spread(self, values: Sequence[int]) -> torch.Tensor:
        """[S], int32: a number of each document at all its positions."""
        return torch.tensor(values).repeat_interleave(torch.tensor(self.lengths)).int()


def read_documents(file: Path = PUBLISHED) -> dict[int, list[Sample]]:
    """Samples by the length of a row, from a file in the form of the published list:

        Total length: 8192, Document count range: (2, 6)
        Sample 1, num_docs 3: [(885, 3145), (296, 2203), (528, 2844)]# [0, 1, 0]

    Raises FlashgenError where there is none, or documents don't fill their row."""
    found: dict[int, list[Sample]] = {}
    length = 0
    for line in _text(file).splitlines():
        if match := _LENGTH.match(line):
            length = int(match[1])
        elif match := _SAMPLE.match(line):
            found.setdefault(length, []).append(_sample(match[1], match[2], length, line))
    if not found:
        raise FlashgenError(f"{file} has no samples of documents", write=f"lines as in {PUBLISHED}")
    return found


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise FlashgenError(f"{file} can't be read: {error.strerror}") from None


def _sample(pairs: str, flags: str, length: int, line: str) -> Sample:
    numbers = [int(x) for x in re.findall(r"\d+", pairs)]
    dropped = [x == "1" for x in re.findall(r"\d", flags)]
    prefixes, lengths = tuple(numbers[::2]), tuple(numbers[1::2])
    if sum(lengths) != length or len(lengths) != len(prefixes) or len(dropped) != len(lengths):
        problem = f"documents of {sum(lengths)} positions don't fill a row of {length}: {line}"
        raise FlashgenError(problem, write="(prefix length, document length) and a flag for each")
    return Sample(lengths, prefixes, tuple(dropped))
