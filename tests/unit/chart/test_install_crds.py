"""The upgrade hook: applies what is older, keeps what is newer, and waits until the API server serves it."""

from __future__ import annotations

from typing import Any

import pytest

from omni_crds.crd import build_crds
from omni_crds.version import SCHEMA_VERSION, SCHEMA_VERSION_ANNOTATION
from omni_operator.install_crds import ESTABLISHED_SECONDS, Crd, NotEstablished, install

NAMES = [crd["metadata"]["name"] for crd in build_crds()]


class FakeCluster:
    """CRDs by name; a new one is served after `delay` looks."""

    def __init__(self, installed: dict[str, Crd] | None = None, delay: int = 2) -> None:
        self.installed = dict(installed or {})
        self.applied: list[str] = []
        self.delay = delay
        self.looks = 0
        self.now = 0.0

    def get(self, name: str) -> Crd | None:
        found = self.installed.get(name)
        if found is None:
            return None
        self.looks += 1
        served = self.looks > self.delay
        return {**found, "status": {"conditions": [{"type": "Established", "status": str(served)}]}}

    def apply(self, crd: Crd) -> None:
        self.applied.append(crd["metadata"]["name"])
        self.installed[crd["metadata"]["name"]] = crd

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def run(self) -> None:
        install(self, build_crds(), clock=lambda: self.now, sleep=self.sleep)


def of_version(version: str | None) -> dict[str, Crd]:
    annotations: dict[str, Any] = {} if version is None else {SCHEMA_VERSION_ANNOTATION: version}
    return {name: {"metadata": {"name": name, "annotations": annotations}} for name in NAMES}


def test_missing_ones_are_installed_and_waited_for() -> None:
    cluster = FakeCluster()
    cluster.run()
    assert cluster.applied == NAMES
    assert cluster.looks > cluster.delay


@pytest.mark.parametrize("version", [None, "", "junk", "0", str(SCHEMA_VERSION)])
def test_older_equal_and_unmarked_ones_are_applied_over(version: str | None) -> None:
    cluster = FakeCluster(of_version(version))
    cluster.run()
    assert cluster.applied == NAMES


def test_newer_ones_are_kept_because_an_older_schema_prunes_stored_fields() -> None:
    cluster = FakeCluster(of_version(str(SCHEMA_VERSION + 1)))
    cluster.run()
    assert cluster.applied == []


def test_the_wait_has_an_end_and_names_the_kind() -> None:
    cluster = FakeCluster(delay=10**9)
    with pytest.raises(NotEstablished, match=NAMES[0]):
        cluster.run()
    assert ESTABLISHED_SECONDS <= cluster.now < ESTABLISHED_SECONDS + 1
