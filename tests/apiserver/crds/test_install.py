"""The API server takes the CRDs whole: nothing refused, nothing dropped in silence."""

from __future__ import annotations

from typing import Any

import pytest

from omni_crds import schema_is_outdated
from omni_crds.crd import KINDS, Kind, build_crd
from tests.apiserver.kube import Kube, Object


@pytest.fixture(params=KINDS, ids=lambda k: k.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture
def stored(kind: Kind, installed_crds: tuple[Object, ...]) -> Object:
    return next(crd for crd in installed_crds if crd["metadata"]["name"] == kind.crd_name)


def test_every_keyword_was_kept(kind: Kind, stored: Object) -> None:
    """A keyword that the server does not know disappears without an error; so what it stored must hold all we sent."""
    assert difference(build_crd(kind)["spec"], stored["spec"]) == []


def test_structural_and_accepted(stored: Object) -> None:
    status = {c["type"]: (c["status"], c["reason"]) for c in stored["status"]["conditions"]}
    assert status["NamesAccepted"][0] == "True"
    assert status["Established"][0] == "True"
    assert "NonStructuralSchema" not in status


def test_schema_version_is_readable(stored: Object) -> None:
    assert not schema_is_outdated(stored["metadata"]["annotations"])


def test_no_warnings(installer: Kube, installed_crds: tuple[Object, ...]) -> None:
    """Such as "unrecognized format" or an expensive CEL rule."""
    assert installer.warnings == []


def difference(sent: Any, stored: Any, path: str = "") -> list[str]:
    """What is missing or other in `stored`; what the server adds is fine."""
    if isinstance(sent, dict) and isinstance(stored, dict):
        return [d for key, value in sent.items() for d in difference(value, stored.get(key), f"{path}.{key}")]
    if isinstance(sent, list) and isinstance(stored, list) and len(sent) == len(stored):
        return [d for i, pair in enumerate(zip(sent, stored, strict=True)) for d in difference(*pair, f"{path}[{i}]")]
    return [] if sent == stored else [f"{path}: sent {sent!r}, stored {stored!r}"]
