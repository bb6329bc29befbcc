"""Causal documents, end to end: from a line of Python to a checked kernel.

Sequences are packed with documents, and a query sees the earlier keys of its own document. The
documents are the public lists of the FlashMask paper (data/flashmask_documents.txt). This plans,
draws and computes on the CPU, and runs the generated Triton kernel in Triton's interpreter; where
there is a GPU, it runs and times the kernel there too. The exit status is 1 if an error is larger
than allowed.

    python examples/causal_documents.py [--length 1024]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence

import torch
from document_lists import Document, ids, read
from float64_reference import HEADING, Check, errors, inputs

import flashgen as fg
from flashgen.show import mask_text


@fg.mask
def causal_document(b, q_idx, kv_idx, doc: fg.Tensor):
    return (kv_idx <= q_idx) & (doc[b, q_idx] == doc[b, kv_idx])


attend = fg.Attention(mask=causal_document)

LENGTHS = (8192, 32768, 131072)
HEAD_DIM = 64
# Some units in the last place of numbers around 1; the LSE is always in float32.
ALLOWED = {torch.float32: (1e-5, 1e-5), torch.float16: (2e-3, 1e-5)}


def sample(length: int) -> list[Document]:
    """The last list of a length: the one with the most documents."""
    return read(length)[-1]


def title(text: str) -> None:
    print(f"\n── {text} ".ljust(101, "─"))


def show_mask(doc: torch.Tensor) -> None:
    """The dense matrix of a few positions, evenly spread."""
    step = max(1, doc.shape[1] // 64)
    few = doc[:, ::step]
    lengths = ", ".join(map(str, doc[0].unique(return_counts=True)[1].tolist()))
    title(f"the mask, every {step}th position; documents of {lengths}")
    print(mask_text(causal_document.dense(few.shape[1], few.shape[1], doc=few)[0, 0]))


def show_schedules() -> None:
    """Planning whole lists on the CPU, beside a boolean matrix of all pairs."""
    title("schedules")
    print(
        f"{'length':>8}{'documents':>10}{'empty':>11}{'partial':>8}{'full':>8}"
        f"{'visited':>9}{'allowed':>9}{'memory':>11}{'dense mask':>12}{'planned in':>11}"
    )
    for length in LENGTHS:
        documents = sample(length)
        doc = ids(documents)
        # Planning reads no queries and keys but their shapes.
        q = torch.empty(1).expand(1, 1, length, HEAD_DIM)
        start = time.perf_counter()
        schedule = attend.schedule(q, q, q, doc=doc)
        memory = schedule.states.nbytes + schedule.kv_runs.nbytes
        seconds = time.perf_counter() - start
        empty, partial, full = (int((schedule.to_dense() == state).sum()) for state in range(3))
        allowed = sum(d.length * (d.length + 1) // 2 for d in documents) / length**2
        print(
            f"{length:>8}{len(documents):>10}{empty:>11,}{partial:>8,}{full:>8,}"
            f"{schedule.density:>9.2%}{allowed:>9.2%}{memory / 2**10:>7,.0f} KiB"
            f"{length**2 / 2**20:>8,.0f} MiB{seconds:>9.2f} s"
        )
    print("visited: tiles that aren't empty; allowed: pairs that attend, the least there can be")


def kernel_of(tensors: Sequence[torch.Tensor], doc: torch.Tensor) -> tuple[str, str]:
    """The path of the forward kernel's file, and its text: the first that `source` shows."""
    path, _, rest = attend.source(*tensors, doc=doc).partition("\n")
    return path.removeprefix("# "), rest.partition("\n\n\n# /")[0]


def show_kernel(path: str, text: str) -> None:
    """The kernel's first lines, and its loop over the tiles that the mask cuts."""
    lines = text.splitlines()
    loop = next(n for n, line in enumerate(lines) if "Tiles that the mask cuts" in line)
    end = next(n for n in range(loop, len(lines)) if not lines[n])
    end = next(n for n in range(end + 1, len(lines)) if not lines[n])
    title(f"the generated kernel, {len(lines)} lines")
    print(f"{path}\n")
    print("\n".join([*lines[: lines.index("")], "\n    ...", *lines[loop:end], "    ..."]))


def on_cpu(doc: torch.Tensor) -> Check:
    """The cpu backend on the whole sequence."""
    tensors = inputs(doc.shape[1], 2, 1, HEAD_DIM)
    start = time.perf_counter()
    out, lse = attend(*tensors, doc=doc, return_lse=True)
    seconds = time.perf_counter() - start
    what = f"cpu backend, float32, S={doc.shape[1]}, {seconds:.2f} s"
    return Check(what, *errors(tensors, doc, out, lse), ALLOWED[out.dtype])


def cut_of(doc: torch.Tensor, length: int = 320) -> torch.Tensor:
    """Some positions around the end of the first document: few enough to interpret."""
    end = int((doc[0] == doc[0, 0]).sum())
    start = max(0, min(end - length // 2, doc.shape[1] - length))
    return doc[:, start : start + length].contiguous()


def interpret(doc: torch.Tensor) -> None:
    """Run the kernel in Triton's interpreter; print its text and its errors as JSON."""
    found = []
    for dtype in (torch.float32, torch.float16):
        tensors = inputs(doc.shape[1], 2, 1, HEAD_DIM, dtype=dtype)
        result = attend(*tensors, doc=doc, return_lse=True, backend="interpret")
        what = f"Triton's interpreter, {str(dtype)[6:]}, S={doc.shape[1]}"
        found.append((what, *errors(tensors, doc, *result), ALLOWED[dtype]))
    print(json.dumps({"text": kernel_of(tensors, doc)[1], "found": found}))


def interpreted(length: int, text: str) -> list[Check]:
    """The kernel of this text, interpreted: that is decided when a process starts."""
    command = [sys.executable, __file__, "--interpret", "--length", str(length)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    result = json.loads(done.stdout)
    if result["text"] != text:
        raise SystemExit("the kernel that was interpreted isn't the one above")
    return [Check(*row) for row in result["found"]]


def on_gpu(doc: torch.Tensor) -> Check:
    """The kernel on a GPU: at most twice the error of PyTorch's own attention."""
    doc = doc.cuda()
    tensors = inputs(doc.shape[1], 2, 2, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    result = attend(*tensors, doc=doc, return_lse=True)
    dense = causal_document.dense(doc.shape[1], doc.shape[1], doc=doc)
    theirs = torch.nn.functional.scaled_dot_product_attention(*tensors, attn_mask=dense)
    allowed = 2 * errors(tensors, doc, theirs, None)[0]
    what = f"GPU, bfloat16, S={doc.shape[1]}"
    return Check(what, *errors(tensors, doc, *result), (allowed, 1e-4))


def time_on_gpu() -> None:
    """Forward times of whole lists; FLOPs of the allowed pairs only."""
    from triton.testing import do_bench

    title(f"forward on {torch.cuda.get_device_name()}, bfloat16, 16 heads, D={HEAD_DIM}")
    for length in LENGTHS:
        documents = sample(length)
        doc = ids(documents, "cuda")
        shape = (3, 1, 16, length, HEAD_DIM)
        tensors = torch.randn(shape, dtype=torch.bfloat16, device="cuda").unbind()
        schedule = attend.schedule(*tensors, doc=doc)
        ms = do_bench(lambda t=tensors, d=doc, s=schedule: attend(*t, doc=d, schedule=s))
        pairs = sum(d.length * (d.length + 1) // 2 for d in documents)
        print(f"{length:>8} {ms:>9.3f} ms {4 * 16 * HEAD_DIM * pairs / ms / 1e9:>7.0f} TFLOP/s")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="causal documents, end to end")
    parser.add_argument("--length", type=int, default=8192, help="positions to compute on, 320 up")
    parser.add_argument("--interpret", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    doc = ids(sample(8192))[:, : given.length]
    if given.interpret:
        interpret(cut_of(doc))
        return 0
    tensors = inputs(doc.shape[1], 2, 1, HEAD_DIM)
    path, text = kernel_of(tensors, doc)
    print(attend.explain(*tensors, doc=doc).partition("\n\n── cost")[0])
    show_mask(doc)
    show_schedules()
    show_kernel(path, text)
    title("largest errors against dense attention in float64")
    print(HEADING)
    checks = [on_cpu(doc), *interpreted(given.length, text)]
    if torch.cuda.is_available():
        checks.append(on_gpu(doc))
    print("\n".join(map(str, checks)))
    if torch.cuda.is_available():
        time_on_gpu()
    return int(not all(check.passes for check in checks))


if __name__ == "__main__":
    sys.exit(main())
