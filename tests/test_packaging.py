"""What is installed is what is in the tree, by wheel and editable alike."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import flashgen

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
TOPS = {"flashgen": "flashgen", "masks": "flashgen/masks", "templates": "flashgen/templates"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def folders(top):
    below = (path for path in (ROOT / top).rglob("*") if path.is_dir())
    return [ROOT / top, *(path for path in below if path.name != "__pycache__")]


def files_by_installed_name():
    """Every file of the packages, under the name it has once installed."""
    paths = [path for top in TOPS for folder in folders(top) for path in folder.iterdir()]
    return {
        f"{TOPS[path.relative_to(ROOT).parts[0]]}/{path.relative_to(ROOT / top).as_posix()}": path
        for path in paths
        if path.is_file() and path.suffix != ".pyc"
        for top in [path.relative_to(ROOT).parts[0]]
    }


def test_every_folder_is_a_listed_package():
    found = {
        ".".join([*TOPS[top].split("/"), *folder.relative_to(ROOT / top).parts])
        for top in TOPS
        for folder in folders(top)
    }
    assert found == set(PROJECT["tool"]["setuptools"]["packages"])


def test_every_package_has_an_init():
    """Without one a folder is missing from editable installs."""
    missing = [folder for top in TOPS for folder in folders(top)
               if not (folder / "__init__.py").exists()]  # fmt: skip
    assert missing == []


def test_the_version_is_the_installed_one():
    assert importlib.metadata.version("flashgen") == flashgen.__version__


def test_every_public_name_exists():
    for name in flashgen.__all__:
        assert getattr(flashgen, name) is not None
    assert set(flashgen.__all__) <= set(dir(flashgen))
    with pytest.raises(AttributeError, match="no attribute 'flash'"):
        _ = flashgen.flash


def test_type_checkers_see_the_public_names():
    tree = ast.parse((ROOT / "flashgen" / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {alias.asname: node.module for node in block.body for alias in node.names}
    assert seen == flashgen._HOME


def test_no_public_name_is_hidden_by_a_module():
    """Importing a submodule sets an attribute of the package, whatever was there before."""
    modules = {path.stem for path in (ROOT / "flashgen").iterdir()}
    assert modules & set(flashgen.__all__) == {"config"}


def test_every_pin_is_of_a_named_version():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert len(pins) > 20
    assert [line for line in pins if "==" not in line] == []


def test_core_never_imports_the_masks():
    """Type checkers can't see them in an editable install, and masks are made of the core."""
    guilty = [
        path
        for path in (ROOT / "flashgen").rglob("*.py")
        if path.relative_to(ROOT / "flashgen").parts[0] != "bench"
        for line in path.read_text().splitlines()
        if line.lstrip().startswith(("from flashgen.masks", "import flashgen.masks"))
        or line.lstrip().startswith(("from .masks", "from . import masks", "from ..masks"))
    ]
    assert guilty == []


# Builds


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what is built, as a build writes beside its sources."""
    copy = tmp_path_factory.mktemp("checkout")
    for top in TOPS:
        shutil.copytree(ROOT / top, copy / top, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, copy)
    return copy


def build(checkout, kind, target):
    """Call a hook of the build backend, as pip does with --no-build-isolation; unpack its wheel."""
    code = f"import setuptools.build_meta as b; b.build_{kind}({str(target)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=checkout, check=True, capture_output=True)
    (wheel,) = target.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    wheel.unlink()
    return target


def run_with(folder, code):
    """Run code with an unpacked wheel, and without this environment's own editable install."""
    libraries = sysconfig.get_path("purelib")
    # First come, first served: an editable install finds its packages by a module of fixed name.
    start = f"import site, sys; site.addsitedir({str(folder)!r}); sys.path.append({libraries!r})\n"
    command = [sys.executable, "-S", "-c", start + code]
    environment = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=folder.anchor, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory):
    return build(checkout, "wheel", tmp_path_factory.mktemp("wheel"))


def test_a_wheel_holds_every_file_and_no_other(wheel):
    installed = {
        path.relative_to(wheel).as_posix()
        for path in wheel.rglob("*")
        if path.is_file() and not path.relative_to(wheel).parts[0].endswith(".dist-info")
    }
    assert installed == set(files_by_installed_name())
    assert "flashgen/py.typed" in installed
    assert any(name.startswith("flashgen/templates/") and ".j2" in name for name in installed)
    assert "flashgen/masks/__init__.py" in installed


def test_a_wheel_has_the_licence_and_the_metadata(wheel):
    (info,) = wheel.glob("*.dist-info")
    metadata = Parser().parsestr((info / "METADATA").read_text())
    assert metadata["Version"] == flashgen.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    required = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert "torch>=2.10" in required
    assert not [line for line in required if line.startswith("triton")]
    assert list(info.rglob("LICENSE"))
    assert "flashgen = flashgen.cli:main" in (info / "entry_points.txt").read_text()


def test_a_wheel_works(wheel):
    code = "import flashgen.masks, jinja2; print(flashgen.masks.causal.name, flashgen.__file__)"
    name, file = run_with(wheel, code).split()
    assert name == "causal"
    assert Path(file).is_relative_to(wheel)


def test_an_editable_install_sees_new_files_at_once(checkout, tmp_path):
    installed = build(checkout, "editable", tmp_path)
    (checkout / "masks" / "fresh.py").write_text("VALUE = 7\n")
    (checkout / "templates" / "fresh.j2").write_text("seven\n")
    code = """
import jinja2
from flashgen.masks import fresh
print(fresh.VALUE, jinja2.PackageLoader("flashgen.templates", "").list_templates())
"""
    shown = run_with(installed, code)
    assert shown.startswith("7 ")
    assert "'fresh.j2'" in shown
