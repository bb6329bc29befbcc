"""The reader of `data/flashmask_documents.txt`: sequences packed with documents."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

FILE = Path(__file__).with_name("data") / "flashmask_documents.txt"


@dataclass(frozen=True)
class Document:
    """Lengths in positions; `sparse` marks documents of the paper's QK-sparse mask."""

    prefix: int
    length: int
    sparse: bool


def read(length: int) -> list[list[Document]]:
    """The samples of one length (8192, 32768 or 131072): the documents of each, in order."""
    lines = [line for line in FILE.read_text().splitlines() if line and line[0] != "#"]
    rows = (line.split(": ") for line in lines)
    return [[_document(word) for word in words.split()] for n, words in rows if int(n) == length]


def _document(word: str) -> Document:
    prefix, length = word.rstrip("*").split("/")
    return Document(int(prefix), int(length), word.endswith("*"))


def ids(documents: list[Document], device: str | torch.device = "cpu") -> torch.Tensor:
    """The number of the document at each position: int32 [1, S]."""
    lengths = torch.tensor([document.length for document in documents])
    numbers = torch.arange(len(documents), dtype=torch.int32)
    return torch.repeat_interleave(numbers, lengths)[None].to(device)
