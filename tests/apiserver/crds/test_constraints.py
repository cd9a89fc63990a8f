"""For every constraint of every CRD: the server takes what just keeps it, and refuses what just breaks it, for that reason.

The models must agree: what the server stores must be readable, and what it refuses must not slip through `omni run`.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from omni_crds.crd import KINDS, Kind
from tests.apiserver.crds.constraints import SERVER_ONLY, Constraint, all_constraints, smallest_object
from tests.apiserver.crds.examples import RULES
from tests.apiserver.crds.patterns import PATTERNS
from tests.apiserver.kube import Kube, Object, Refused

CONSTRAINTS = all_constraints()
Attempt = Callable[[Object], Object]


@pytest.fixture(scope="module")
def stored(kube: Kube) -> Iterator[dict[str, Object]]:
    """One real object per kind, whose status can be written."""
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": f"constraints-{uuid.uuid4().hex[:8]}"}}
    kube.create(space)
    objects = {kind.name: kube.create(_named(smallest_object(kind), space["metadata"]["name"])) for kind in KINDS}
    yield objects
    for obj in objects.values():
        kube.delete(obj)
    kube.delete(space)


def _named(obj: Object, namespace: str) -> Object:
    return {**obj, "metadata": {"name": f"x-{uuid.uuid4().hex[:8]}", "namespace": namespace}}


@pytest.mark.parametrize("constraint", [pytest.param(c, id=c.name) for c in CONSTRAINTS])
def test_constraint(constraint: Constraint, kube: Kube, stored: dict[str, Object]) -> None:
    attempt = _attempt(constraint, kube, stored[constraint.kind.name])
    assert constraint.accepted
    assert constraint.refused
    for obj in constraint.accepted:
        attempt(obj)
        constraint.kind.model.model_validate(obj)
    for obj in constraint.refused:
        with pytest.raises(Refused) as caught:
            attempt(obj)
        assert caught.value.reason == "Invalid", caught.value
        found = [(c.field, c.message) for c in caught.value.causes]
        assert any(f == constraint.field and constraint.complaint in m for f, m in found), (obj, found)
        if constraint.keyword.split()[0] not in SERVER_ONLY:
            with pytest.raises(ValidationError):
                constraint.kind.model.model_validate(obj)


def _attempt(constraint: Constraint, kube: Kube, stored: Object) -> Attempt:
    """Create, update or write the status, without leaving anything behind."""
    metadata = stored["metadata"]
    if constraint.in_status:
        return lambda obj: kube.replace({**stored, "status": obj["status"]}, subresource="status", dry_run=True)
    if constraint.before is None:
        return lambda obj: kube.create(_named(obj, metadata.get("namespace", "default")), dry_run=True)

    def update(obj: Object) -> Object:
        assert constraint.before is not None
        before = kube.create(_named(constraint.before, metadata["namespace"]))
        try:
            return kube.replace({**before, "spec": obj["spec"]}, dry_run=True)
        finally:
            kube.delete(before)

    return update


def test_no_example_without_a_use() -> None:
    """An entry of examples.py that no schema uses any more is dead."""
    text = repr(
        [c.kind.model.model_json_schema() for c in CONSTRAINTS[:0]] + [k.model.model_json_schema() for k in KINDS]
    )
    assert [p for p in PATTERNS if repr(p)[1:-1] not in text] == []
    rules = {c.complaint for c in CONSTRAINTS if c.keyword.startswith("x-kubernetes-validations")}
    assert sorted(RULES.keys() - rules) == []


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_defaults_are_filled_in(kind: Kind, kube: Kube, namespace: str) -> None:
    """A default of the model is a default of the server: both see the same object."""
    obj = _named(smallest_object(kind), namespace)
    if kind.name == "OmniPipeline":
        obj["spec"].update(rollout={}, edges=[{"from": "a", "to": "b", "connector": {}}])
    if kind.name == "OmniRuntimeProfile":
        obj["spec"].update(probes={})
    answer: Any = kube.create(obj, dry_run=True)
    dumped = kind.model.model_validate(obj).model_dump(mode="json", by_alias=True, exclude_none=True)
    assert answer["spec"] == dumped["spec"]
