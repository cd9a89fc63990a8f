"""Dockerfiles run in restricted namespaces: non-root, read-only root file system, signals reach the process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from omni_image import dockerfile
from omni_image.build import pins_of, requirements_of
from omni_image.plan import KINDS

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILES = sorted((ROOT / "runtime_image").glob("Dockerfile.*"))

GOOD = """\
ARG BASE=debian:12.12-slim
FROM ${BASE} AS environment
RUN true \\
    && true
FROM environment AS application
USER 65532:65532
ENTRYPOINT ["python", "-m", "x"]
"""


def test_every_platform_has_a_dockerfile() -> None:
    assert {path.suffix for path in DOCKERFILES} == {
        ".operator",
        ".connector",
        ".cpu",
        ".cuda",
        ".rocm",
        ".npu",
        ".xpu",
    }


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.suffix[1:])
def test_dockerfile_keeps_the_rules(path: Path) -> None:
    assert dockerfile.lint(dockerfile.parse(path.read_text())) == ()


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.suffix[1:])
def test_what_is_copied_exists(path: Path) -> None:
    file = dockerfile.parse(path.read_text())
    for item in file.of("COPY"):
        source = item.value.split()[0]
        assert (ROOT / source).is_dir(), f"{path.name}:{item.line}: {source}"
    for name in dockerfile.context_files(file.instructions):
        assert (ROOT / name).is_file(), f"{path.name}: {name}"


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_stages_and_sources_are_those_of_the_plan(kind) -> None:
    file = dockerfile.parse((ROOT / kind.dockerfile).read_text())
    assert file.stages == kind.targets
    assert {item.value.split()[0] for item in file.of("COPY")} == set(kind.sources)


def test_a_stage_knows_its_instructions_and_scripts() -> None:
    file = dockerfile.parse(GOOD.replace("RUN true", "RUN --mount=type=bind,target=/context sh /context/a/b.sh x"))
    assert [item.word for item in file.stage("environment")] == ["FROM", "RUN"]
    assert [item.word for item in file.stage("application")] == ["FROM", "USER", "ENTRYPOINT"]
    assert dockerfile.context_files(file.stage("environment")) == ("a/b.sh",)
    alone = dockerfile.parse(dockerfile.single_stage(file, "application"))
    assert [(item.word, item.value) for item in alone.instructions] == [
        ("ARG", "BASE"),
        ("FROM", "${BASE} AS application"),
        ("USER", "65532:65532"),
        ("ENTRYPOINT", '["python", "-m", "x"]'),
    ]
    with pytest.raises(KeyError):
        file.stage("models")


def test_operator_image_names_no_engine() -> None:
    text = (ROOT / "runtime_image/Dockerfile.operator").read_text()
    assert "environment.sh operator\n" in text
    assert "models.sh" not in text


def test_connector_image_keeps_what_its_group_asks_for_and_no_more_than_it_installs() -> None:
    """What `slim.py` is not told of is deleted, so a package that is added to the group has to be named there, too."""
    text = (ROOT / "runtime_image/Dockerfile.connector").read_text().replace("\\\n", " ")
    match = re.search(r"environment\.sh connector && .*slim\.py\s+([-\w ]+)\n", text)
    assert match is not None, "in one RUN: what another one deletes stays in the layer below"
    kept = set(match[1].split())
    assert {re.split(r"[<>=\[]", item)[0] for item in requirements_of("connector")} <= kept
    assert kept <= {pin.partition("==")[0] for pin in pins_of("connector")}
    assert "models.sh" not in text


def test_good_file_has_no_findings() -> None:
    file = dockerfile.parse(GOOD)
    assert file.stages == ("environment", "application")
    assert file.of("RUN")[0].value == "true && true"
    assert dockerfile.lint(file) == ()


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        pytest.param("USER 65532:65532\n", "", "non-root", id="no user"),
        pytest.param("USER 65532:65532", "USER root", "non-root", id="root by name"),
        pytest.param("USER 65532:65532", "USER 0:0", "non-root", id="root by number"),
        pytest.param("USER 65532:65532", "USER omni", "non-root", id="a name cannot be checked by runAsNonRoot"),
        pytest.param('ENTRYPOINT ["python", "-m", "x"]', "ENTRYPOINT python -m x", "signals", id="shell form"),
        pytest.param('ENTRYPOINT ["python", "-m", "x"]\n', "", "signals", id="no entrypoint"),
        pytest.param("RUN true", "ADD https://example.org/x /x\nRUN true", "no-add", id="ADD of a URL"),
        pytest.param("RUN true", "RUN curl -O x", "no-add", id="download in RUN"),
        pytest.param("debian:12.12-slim", "debian", "pinned-base", id="base without a version"),
        pytest.param("debian:12.12-slim", "debian:slim", "pinned-base", id="base with a moving tag"),
        pytest.param("FROM ${BASE}", "FROM debian:12.12", "pinned-base", id="base cannot be chosen"),
        pytest.param("debian:12.12-slim", "debian:latest", "no-latest", id="latest"),
        pytest.param("RUN true", "RUN apt-get install -y vim", "packages", id="packages by hand"),
    ],
)
def test_each_rule_can_fail(old: str, new: str, rule: str) -> None:
    assert old in GOOD
    found = dockerfile.lint(dockerfile.parse(GOOD.replace(old, new)))
    assert rule in {finding.rule for finding in found}


@pytest.mark.parametrize("text", ["FROM\n", "RUN a \\\n", "%%%\n"])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="line 1"):
        dockerfile.parse(text)
