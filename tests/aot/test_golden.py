"""The text of generated kernels, kept as files: a change shows as a diff.

`pytest tests/aot/test_golden.py --snapshot-update` writes them anew; read the diff before a commit.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
from golden_kernels import GOLDEN, HOPPER, HOPPER_BACKWARD, PLANS
from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode

from flashgen import plan
from flashgen.launch import hopper_forward as launch_hopper

COLUMNS = 100


class KernelFile(SingleFileSnapshotExtension):
    """One Python file for each kernel: `forward_causal.py`."""

    _write_mode = WriteMode.TEXT
    file_extension = "py"

    @classmethod
    def get_snapshot_name(cls, *, test_location, index=0):
        words = re.findall(r"\w+", test_location.snapshot_name)
        return "_".join(words).removeprefix("test_")


@pytest.fixture
def kernel_file(snapshot):
    return snapshot.use_extension(KernelFile)


@pytest.mark.parametrize("name", GOLDEN)
def test_forward(name, kernel_file):
    assert GOLDEN[name].forward().text == kernel_file


@pytest.mark.parametrize("name", HOPPER)
def test_hopper_forward(name, kernel_file):
    assert GOLDEN[name].hopper()[0].text == kernel_file


def test_hopper_forward_of_pages(kernel_file):
    golden = GOLDEN["lengths_and_offsets"]
    variant = replace(golden.variant(), keys="paged")
    text = launch_hopper.generate(golden.spec(), variant)[0].text
    assert max(map(len, text.splitlines())) <= 100
    assert text == kernel_file


@pytest.mark.parametrize("name", HOPPER_BACKWARD)
def test_hopper_backward(name, kernel_file):
    assert GOLDEN[name].hopper_backward(name == "causal").text == kernel_file


def test_repair(kernel_file):
    assert GOLDEN["causal_document"].hopper()[1].text == kernel_file


@pytest.mark.parametrize("name", PLANS)
def test_plan(name, kernel_file):
    assert GOLDEN[name].planning().generated.text == kernel_file


def test_compaction(kernel_file):
    assert plan.compaction().text == kernel_file


def every_text():
    texts = {f"forward {name}": golden.forward().text for name, golden in GOLDEN.items()}
    texts |= {f"hopper {name}": GOLDEN[name].hopper()[0].text for name in HOPPER}
    texts |= {
        f"hopper backward {name}": GOLDEN[name].hopper_backward(name == "causal").text
        for name in HOPPER_BACKWARD
    }
    texts |= {"repair": GOLDEN["causal_document"].hopper()[1].text}
    texts |= {f"plan {name}": GOLDEN[name].planning().generated.text for name in PLANS}
    return texts | {"compaction": plan.compaction().text}


@pytest.fixture(scope="module", params=every_text())
def text(request):
    return every_text()[request.param]


def test_lines_are_short(text):
    long = [line for line in text.splitlines() if len(line) > COLUMNS]
    assert not long


def test_blank_lines_separate(text):
    """Two between functions, one inside them, none doubled, no trailing blanks."""
    assert not re.search(r"[ \t]\n", text)
    assert not re.search(r"\n{4}", text)
    assert not re.search(r"\n\n\n(?=[ ])", text), "two blank lines inside a function"
    assert not re.search(r"[(\[:,]\n\n", text), "a blank line after an opening"
    assert text.endswith("\n")
    assert not text.endswith("\n\n")


@pytest.mark.skipif(shutil.which("ruff", path=sys.prefix + "/bin") is None, reason="needs ruff")
def test_a_linter_finds_nothing(text):
    """No unused or unknown names; `l` is what the papers call the softmax's denominator."""
    ruff = shutil.which("ruff", path=sys.prefix + "/bin")
    command = [ruff, "check", "--isolated", "--select=E,F,W", "--ignore=E741", "--quiet"]
    command += [f"--line-length={COLUMNS}", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
