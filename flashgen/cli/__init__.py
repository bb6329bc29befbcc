"""`python -m flashgen`: look at masks, schedules and kernels, and at the installation.

A command's module is imported when the command runs: `--help`, `list` and `cache` don't load torch.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import TypeAlias

from .. import __version__
from ..errors import FlashgenError

_NAME = (
    "a mask of flashgen.masks, a combination as in 'causal & document', or your own: "
    "module:attribute or file.py:attribute"
)
_DTYPES = ("bf16", "fp16", "fp32", "fp64")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 2 where the user has to change something."""
    _speak_utf8()
    try:
        status = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return status or 0
    except FlashgenError as error:
        print(f"flashgen: {error}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "memory" not in str(error):
            raise
        problem = "there isn't enough memory for tensors of this size"
        print(f"flashgen: {problem}\n  instead: a smaller --n, --batch, --heads", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader of a pipe, `head` for one, has seen enough; exiting must not flush once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(arguments: list[str]) -> int | None:
    if arguments[:1] == ["bench"]:
        return _bench(arguments[1:])
    given = parser().parse_args(arguments)
    module, function = given.run.split(":")
    status: int | None = getattr(importlib.import_module(module, __name__), function)(given)
    return status


def _speak_utf8() -> None:
    """Pictures are made of blocks, which a pipe's encoding may not have."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.encoding.lower() != "utf-8":
        sys.stdout.reconfigure(encoding="utf-8")


def parser() -> argparse.ArgumentParser:
    """The command line as argparse sees it."""
    root = argparse.ArgumentParser(prog="flashgen", description="An attention compiler.")
    root.add_argument("--version", action="version", version=f"flashgen {__version__}")
    commands = root.add_subparsers(metavar="COMMAND", required=True)
    _add_list(commands)
    _add_show(commands)
    _add_explain(commands, "explain", "print every stage of a compilation", ".stages:explain")
    _add_explain(commands, "source", "print the generated kernels", ".stages:source")
    _add_gallery(commands)
    _add_cache(commands)
    doctor = commands.add_parser("doctor", help="check the installation")
    doctor.set_defaults(run=".doctor:doctor")
    commands.add_parser("bench", help="measure; `flashgen bench --help` says what", add_help=False)
    return root


_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def _add_list(commands: _Commands) -> None:
    command = commands.add_parser("list", help="list what flashgen.masks has")
    command.add_argument("--names", action="store_true", help="print the names of masks only")
    command.set_defaults(run=".catalogue:list_masks")


def _add_show(commands: _Commands) -> None:
    command = commands.add_parser("show", help="draw a mask and its schedule")
    _add_target(command)
    command.add_argument("--svg", metavar="FILE", help="write the picture to a file as well")
    command.add_argument(
        "--block-size", metavar="QxK", type=_pair, help="a tile's queries and keys, as in 16x16"
    )
    command.add_argument(
        "--planner", choices=("auto", "bounds", "exact"), help="how tiles are classified"
    )
    command.set_defaults(run=".drawing:show")


def _add_explain(commands: _Commands, name: str, words: str, run: str) -> None:
    command = commands.add_parser(name, help=words)
    _add_target(command)
    command.add_argument("--dtype", choices=_DTYPES, default="fp16", help="default: fp16")
    command.add_argument("--head-dim", metavar="D", type=_count, default=64, help="default: 64")
    command.add_argument("--device", default="cpu", help="default: cpu")
    command.add_argument("--backend", default="auto", help="default: auto")
    command.set_defaults(run=run)


def _add_target(command: argparse.ArgumentParser) -> None:
    command.add_argument("name", metavar="NAME", help=_NAME)
    command.add_argument(
        "--n",
        type=_lengths,
        default=(64, 64),
        metavar="N",
        help="queries and keys; QxK where they differ (default: 64)",
    )
    command.add_argument(
        "--param",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="data, as in window=8 or doc=[[0,0,1]]; the rest is example data",
    )
    command.add_argument("--batch", type=_count, metavar="B", help="default: as the data has it")
    command.add_argument("--heads", type=_count, metavar="H", help="query heads")
    command.add_argument("--kv-heads", type=_count, metavar="H", help="heads of keys and values")
    command.add_argument("--seed", type=int, help="of the example data")


def _add_gallery(commands: _Commands) -> None:
    command = commands.add_parser("gallery", help="draw every mask of flashgen.masks into a folder")
    command.add_argument("folder", metavar="DIR")
    command.set_defaults(run=".gallery:gallery")


def _add_cache(commands: _Commands) -> None:
    command = commands.add_parser("cache", help="list or clear the generated kernels")
    command.add_argument("action", choices=("list", "clear", "path"), nargs="?", default="list")
    command.set_defaults(run=".cached:cache")


def _pair(text: str) -> tuple[int, int]:
    parts = text.lower().split("x")
    if not (1 <= len(parts) <= 2 and all(part.isdecimal() for part in parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor like 16x32")
    return int(parts[0]), int(parts[-1])


def _lengths(text: str) -> tuple[int, int]:
    lengths = _pair(text)
    if max(lengths) >= 2**30:
        raise argparse.ArgumentTypeError(f"{text!r}: positions go up to 2^30 - 1")
    return lengths


def _count(text: str) -> int:
    if not (text.isdecimal() and 0 < int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"{text!r} isn't a number from 1")
    return int(text)


def _bench(argv: list[str]) -> int | None:
    try:
        bench = importlib.import_module("flashgen.bench")
    except ModuleNotFoundError as error:
        if error.name != "flashgen.bench":
            raise
        raise FlashgenError("flashgen.bench isn't installed", call="flashgen bench") from None
    status: int | None = bench.main(argv)
    return status
