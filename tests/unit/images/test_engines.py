"""Which tool builds images, and what happens on a machine that has none."""

from __future__ import annotations

import pytest

from omni_cluster import prerequisites
from omni_cluster.errors import MissingPrerequisite
from omni_image import engines
from omni_image.engines import Buildah, find_engine


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine without Docker and Buildah; what apt is asked for is there afterwards."""
    found: list[str] = []
    monkeypatch.setattr(engines.process, "capture", lambda *_, **__: None)
    monkeypatch.setattr(prerequisites, "is_present", lambda witness: witness in found)
    monkeypatch.setattr(prerequisites, "_install", found.extend)
    return found


def test_buildah_is_installed_where_there_is_no_engine(installed: list[str]) -> None:
    assert isinstance(find_engine(), Buildah)
    assert installed == ["buildah"]


def test_what_is_there_is_not_installed(installed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    installed.append("buildah")
    monkeypatch.setattr(prerequisites, "_install", lambda _: pytest.fail("nothing is missing"))
    assert isinstance(find_engine("buildah"), Buildah)


def test_who_asks_for_docker_gets_no_other_engine(installed: list[str]) -> None:
    with pytest.raises(MissingPrerequisite, match="'docker' does not work here"):
        find_engine("docker")
    assert installed == []


@pytest.mark.parametrize(
    ("root", "apt", "said"),
    [(False, True, "sudo apt-get install -y --no-install-recommends buildah"), (True, False, "are needed: buildah")],
)
def test_who_cannot_install_it_is_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch, root: bool, apt: bool, said: str
) -> None:
    monkeypatch.setattr(engines.process, "capture", lambda *_, **__: None)
    monkeypatch.setattr(prerequisites, "is_present", lambda _: False)
    monkeypatch.setattr(prerequisites.os, "geteuid", lambda: 0 if root else 1000)
    monkeypatch.setattr(prerequisites.shutil, "which", lambda name: f"/usr/bin/{name}" if apt else None)
    with pytest.raises(MissingPrerequisite, match="start Docker, or install Buildah") as refused:
        find_engine()
    assert said in str(refused.value)
