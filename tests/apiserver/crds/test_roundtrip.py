"""Every valid model is accepted with strict field validation and reads back equal; what is unknown is refused."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from omni_crds.crd import KINDS, Kind
from tests.apiserver.crds.constraints import smallest_object
from tests.apiserver.crds.strategies import objects
from tests.apiserver.kube import Kube, Object, Refused

kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
# The namespace is the same for all examples of a test: every object has a name of its own.
relaxed = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
# No shrinking: over HTTP it takes minutes, and the objects are small as they are.
phases = [Phase.explicit, Phase.reuse, Phase.generate, Phase.target]
many = settings(max_examples=100, deadline=None, suppress_health_check=relaxed, phases=phases)
some = settings(max_examples=30, deadline=None, suppress_health_check=relaxed, phases=phases)


def named(obj: Object, namespace: str) -> Object:
    return {**obj, "metadata": {"name": f"x-{uuid.uuid4().hex}", "namespace": namespace}}


def parsed(kind: Kind, obj: Object, part: str = "spec") -> Any:
    return getattr(kind.model.model_validate(obj), part)


@kinds
@many
@given(data=st.data())
def test_every_valid_model_is_accepted(kind: Kind, data: st.DataObject, kube: Kube, namespace: str) -> None:
    obj = data.draw(objects(kind))
    model = kind.model.model_validate(obj)
    sent = {**obj, "spec": model.model_dump(mode="json", by_alias=True, exclude_none=True)["spec"]}
    answer = kube.create(named(sent, namespace), dry_run=True)
    assert parsed(kind, answer) == model.spec  # type: ignore[attr-defined]


@kinds
@some
@given(data=st.data())
def test_what_is_stored_reads_back_equal(kind: Kind, data: st.DataObject, kube: Kube, namespace: str) -> None:
    obj = named(data.draw(objects(kind)), namespace)
    kube.create(obj)
    try:
        assert parsed(kind, kube.get(obj)) == parsed(kind, obj)
        again = kube.apply(obj)  # the same by server-side apply, over an object that exists
        assert parsed(kind, again) == parsed(kind, obj)
    finally:
        kube.delete(obj)


@kinds
@some
@given(data=st.data())
def test_status_reads_back_equal(kind: Kind, data: st.DataObject, kube: Kube, namespace: str) -> None:
    obj = kube.create(named(smallest_object(kind), namespace))
    try:
        status = data.draw(objects(kind, "status"))
        model = kind.model.model_validate({**obj, "status": status})
        dumped = model.model_dump(mode="json", by_alias=True, exclude_none=True)["status"]
        kube.replace({**obj, "status": dumped}, subresource="status")
        stored = kube.get(obj)
        assert stored["status"] == dumped, "the server adds and drops nothing: an equal status is not written again"
        assert parsed(kind, stored, "status") == model.status  # type: ignore[attr-defined]
        assert stored["metadata"]["generation"] == obj["metadata"]["generation"], "status is no new generation"
    finally:
        kube.delete(obj)


@kinds
@pytest.mark.parametrize("path", ["", "spec"])
def test_unknown_field_is_refused_by_name(kind: Kind, path: str, kube: Kube, namespace: str) -> None:
    obj = named(smallest_object(kind), namespace)
    (obj[path] if path else obj)["replicsa"] = 3
    with pytest.raises(Refused, match=r'unknown field "(spec\.)?replicsa"'):
        kube.create(obj, dry_run=True)


@kinds
def test_unknown_field_is_pruned_where_nobody_is_strict(kind: Kind, kube: Kube, namespace: str) -> None:
    obj = named(smallest_object(kind), namespace)
    obj["spec"]["replicsa"] = 3
    assert "replicsa" not in kube.create(obj, dry_run=True, strict=False)["spec"]


@kinds
def test_unknown_field_deep_in_a_list_is_refused(kind: Kind, kube: Kube, namespace: str) -> None:
    if kind.name != "OmniPipeline":
        pytest.skip("the pipeline has the deepest lists")
    obj = named(smallest_object(kind), namespace)
    obj["spec"]["stages"] = [{"name": "a"}, {"name": "b", "resources": {"gpus": "1"}}]
    with pytest.raises(Refused, match=r'unknown field "spec\.stages\[1\]\.resources\.gpus"'):
        kube.create(obj, dry_run=True)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("a" * 253, id="253 characters"),
        pytest.param("a.b.c", id="dots"),
        pytest.param(".".join(["a" * 60] * 4), id="dots and 243 characters"),
        pytest.param("0", id="one digit"),
    ],
)
@kinds
def test_long_and_dotted_names_are_legal(kind: Kind, name: str, kube: Kube, namespace: str) -> None:
    """Children get hashed names of 63 characters; the object itself may be called what Kubernetes allows (T4, T5)."""
    obj = smallest_object(kind)
    obj["metadata"] = {"name": name, "namespace": namespace}
    kube.create(obj)
    try:
        assert kube.get(obj)["metadata"]["name"] == name
        assert kind.model.model_validate(kube.get(obj)).metadata.name == name  # type: ignore[attr-defined]
    finally:
        kube.delete(obj)


@pytest.mark.parametrize("name", ["A", "a_b", "a..b", "-a", "a" * 254])
def test_names_that_kubernetes_refuses(name: str, kube: Kube, namespace: str) -> None:
    obj = smallest_object(KINDS[0])
    obj["metadata"] = {"name": name, "namespace": namespace}
    with pytest.raises(Refused, match=r"metadata\.name"):
        kube.create(obj, dry_run=True)


def test_nonsense_and_back(kube: Kube, namespace: str) -> None:
    """An update to nonsense is refused as a whole; the stored object stays what it was."""
    good = kube.create(named(smallest_object(KINDS[0]), namespace))
    for spec in ({}, {"model": 7, "topology": []}, {**good["spec"], "stages": [{"name": "a"}, {"name": "a"}]}):
        with pytest.raises(Refused) as caught:
            kube.replace({**good, "spec": spec})
        assert caught.value.reason == "Invalid"
    assert kube.get(good)["spec"] == good["spec"]
    assert kube.get(good)["metadata"]["generation"] == 1
