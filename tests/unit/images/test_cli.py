"""What scripts read from `omni image`: names and chart values of this checkout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from omni_image import build
from omni_image.cli import app
from omni_image.content import tree_digest
from omni_image.plan import CPU, Digests


@pytest.fixture(autouse=True)
def fixed_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names as they would be for some content; the real content is gigabytes of models."""
    recipes = dict.fromkeys(("environment", "models", "application"), "r")
    digests = Digests(debian="d", pins="p", recipes=recipes, models="m", sources="s")
    monkeypatch.setattr(build, "observe_digests", lambda *_: digests)


def test_values_name_the_images_that_are_listed() -> None:
    names = json.loads(CliRunner().invoke(app, ["list", "--json"]).stdout)
    values = yaml.safe_load(CliRunner().invoke(app, ["values"]).stdout)
    assert set(names) == {"operator", "connector", "cpu"}
    assert values == {"images": {"pullPolicy": "IfNotPresent", **names}}


def test_lint_of_a_bad_file_names_line_and_fix(tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text("FROM debian:latest\nENTRYPOINT run\n")
    result = CliRunner().invoke(app, ["lint", str(path)])
    assert result.exit_code == 1
    assert f"{path}:2: signals" in result.stdout


def test_save_takes_one_image() -> None:
    result = CliRunner().invoke(app, ["save", "all", "x.tar"])
    assert result.exit_code == 2


def test_recipes_change_with_what_a_stage_runs(tmp_path: Path) -> None:
    """A change of one script renames the tiers that run it, and no lower one: those are gigabytes."""
    for name in ("runtime_image/Dockerfile.cpu", "runtime_image/install"):
        source, target = build.ROOT / name, tmp_path / name
        for relative in [Path(p.name) for p in source.iterdir()] if source.is_dir() else [Path()]:
            (target / relative).parent.mkdir(parents=True, exist_ok=True)
            (target / relative).write_bytes((source / relative).read_bytes()) if (source / relative).is_file() else None
    before = build.observe_recipes(CPU, tmp_path)
    script = tmp_path / "runtime_image/install/application.py"
    script.write_text(script.read_text() + "\n# more\n")
    after = build.observe_recipes(CPU, tmp_path)
    assert {name for name in before if before[name] != after[name]} == {"application"}
    assert before.keys() == set(CPU.targets)
    assert tree_digest(tmp_path, ["runtime_image"]) != tree_digest(build.ROOT, ["runtime_image"])
