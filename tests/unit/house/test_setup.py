"""scripts/setup.py: what names an environment, and the bytecode of its packages."""

from __future__ import annotations

import csv
import os
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from scripts import setup

PYPROJECT = '[project]\ndependencies = ["a"]\n[project.optional-dependencies]\ndev = ["b"]\n'


def an_environment(folder: Path) -> Path:
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    packages = setup.site_packages(folder)
    (packages / "good" / "tests").mkdir(parents=True)
    (packages / "good" / "__init__.py").write_text("value = 1\n")
    (packages / "good" / "tests" / "test_good.py").write_text("")
    (packages / "template.py").write_text("class {{ name }}:\n")
    return packages


def compiled(packages: Path) -> set[str]:
    return {path.name.split(".")[0] for path in packages.rglob("*.pyc")}


def test_bytecode_is_made_once_and_a_template_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    packages = an_environment(tmp_path)
    setup.ensure_bytecode(tmp_path)
    assert compiled(packages) == {"__init__"}
    assert "SyntaxError" not in "".join(capfd.readouterr())

    (packages / "later.py").write_text("")
    setup.ensure_bytecode(tmp_path)
    assert "later" not in compiled(packages), "the marker of the first run is enough"


def test_a_compiler_that_dies_leaves_no_marker(tmp_path: Path) -> None:
    an_environment(tmp_path)
    python = tmp_path / "bin" / "python"
    python.unlink()
    python.write_text("#!/bin/sh\nkill -9 $$\n")
    python.chmod(0o755)
    with pytest.raises(setup.SetupError, match="compileall"):
        setup.ensure_bytecode(tmp_path)
    assert not (tmp_path / setup.COMPILED).exists()


def test_only_what_changes_the_result_names_another_environment() -> None:
    def named(constraints: str = "a==1\nb==2\n", pyproject: str = PYPROJECT) -> str:
        return setup.environment_hash(constraints, "", pyproject, "cpython-311")

    assert named() == named("# why\nb==2\n\na==1  # because\n")
    assert named() == named(pyproject=PYPROJECT + "[tool.ruff]\nline-length = 1\n")
    assert named() != named("a==1\nb==3\n")
    assert named() != named(pyproject=PYPROJECT.replace('"b"', '"c"'))


def test_the_extras_of_images_are_no_part_of_a_checkout() -> None:
    extras = setup.extras((setup.ROOT / "pyproject.toml").read_text())
    assert {"cpu", "dev", "demo"} <= set(extras)
    assert not extras.keys() & setup.FOR_IMAGES
    cuda = '[project]\ndependencies = ["a"]\n[project.optional-dependencies]\ndev = ["b"]\ncuda = ["c"]\n'
    assert setup.dependency_tables(cuda) == setup.dependency_tables(PYPROJECT)


def test_no_file_of_the_environment_belongs_to_two_packages() -> None:
    """The one installed last would win, now this one and now the other: a build of Mooncake for CUDA did."""
    import numpy

    packages = Path(numpy.__file__).parent.parent
    owners: defaultdict[str, set[str]] = defaultdict(set)
    for record in packages.glob("*.dist-info/RECORD"):
        with record.open(newline="") as lines:
            for path, *_ in csv.reader(lines):
                if not path.endswith(".pyc"):
                    owners[path].add(record.parent.name)
    assert len(owners) > 10_000
    assert not {path: names for path, names in owners.items() if len(names) > 1}


def missing_library(monkeypatch: pytest.MonkeyPatch, *, root: bool) -> list[list[str]]:
    ran: list[list[str]] = []
    monkeypatch.setattr(
        setup, "LIBRARIES", {"libnosuch.so.1": ("libnosuch1", "an engine"), "libc.so.6": ("libc6", "all")}
    )
    monkeypatch.setattr(setup, "run", lambda command, **_: ran.append(command))
    monkeypatch.setattr(setup.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(setup.os, "geteuid", lambda: 0 if root else 1000)
    setup.ensure_libraries()
    return ran


def test_a_missing_library_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    update, install = missing_library(monkeypatch, root=True)
    assert update[:2] == ["apt-get", "update"]
    assert install[:2] == ["apt-get", "install"] and install[-1] == "libnosuch1" and "libc6" not in install


def test_who_may_not_install_a_library_is_told_how(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert missing_library(monkeypatch, root=False) == []
    told = capsys.readouterr().out
    assert "an engine cannot be loaded without libnosuch1" in told and "sudo apt-get install libnosuch1" in told
