"""scripts/setup.py: what names an environment, and the bytecode of its packages."""

from __future__ import annotations

import os
import sys
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
