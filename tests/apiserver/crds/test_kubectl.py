"""What a person and an autoscaler see: columns, /scale, explain, categories, short names."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from omni_crds.crd import KINDS, Kind
from omni_crds.v1alpha1.base import API_VERSION
from tests.apiserver.kube import Kube, Object, Refused

if TYPE_CHECKING:
    from kubernetes.dynamic import DynamicClient

Kubectl = Callable[..., str]
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)


def cr(kind: str, name: str, namespace: str, spec: Object) -> Object:
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": metadata, "spec": spec}


def condition(kind: str, status: str, reason: str) -> Object:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }


def table(text: str) -> list[dict[str, str]]:
    """Rows of `kubectl get` by column; cells are separated by two spaces or more."""
    head, *rows = text.splitlines()
    names = head.split()
    starts = [head.index(f" {n}" if i else n) + bool(i) for i, n in enumerate(names)]
    cells = [[row[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)] for row in rows]
    return [dict(zip(names, row, strict=True)) for row in cells]


@pytest.fixture
def pipeline(kube: Kube, namespace: str) -> Object:
    obj = kube.create(
        cr("OmniPipeline", "qwen3-omni", namespace, {"model": {"uri": "hf://a/b"}, "topology": "qwen3_omni_moe"})
    )
    status = {
        "conditions": [condition("Ready", "False", "StageDown"), condition("Serving", "True", "Serving")],
        "stagesReady": "2/3",
        "ttfpMillisecondsP95": 734,
        "revision": "6f1c2a9b3d",
        "servingRevision": "01ab23cd45",
        "endpoint": "http://qwen3-omni.apps.svc",
    }
    return kube.replace({**obj, "status": status}, subresource="status")


@pytest.fixture
def stage(kube: Kube, namespace: str) -> Object:
    spec = {"pipelineRef": {"name": "qwen3-omni"}, "stageName": "talker", "engine": "qwen3_omni_talker", "replicas": 2}
    obj = kube.create(cr("OmniStage", "qwen3-omni-talker", namespace, spec))
    status = {
        "replicas": 2,
        "readyReplicas": 1,
        "updatedReplicas": 2,
        "selector": "serving.omni.dev/pipeline=qwen3-omni,serving.omni.dev/stage=talker",
        "device": "1 x nvidia-h100-80gb",
        "revision": "6f1c2a9b3d",
    }
    return kube.replace({**obj, "status": status}, subresource="status")


# ------------------------------------------------------------------------------------------ columns


def test_columns_of_a_pipeline(pipeline: Object, kubectl: Kubectl, namespace: str) -> None:
    (row,) = table(kubectl("get", "omp", "-n", namespace))
    assert row.pop("AGE")
    assert row == {
        "NAME": "qwen3-omni",
        "READY": "False",
        "SERVING": "True",
        "STAGES": "2/3",
        "TTFP-P95-MS": "734",
        "REASON": "StageDown",
    }
    (wide,) = table(kubectl("get", "omp", "-n", namespace, "-o", "wide"))
    assert (wide["REVISION"], wide["SERVING-REVISION"], wide["TOPOLOGY"]) == (
        "6f1c2a9b3d",
        "01ab23cd45",
        "qwen3_omni_moe",
    )
    assert wide["ENDPOINT"] == "http://qwen3-omni.apps.svc"


def test_columns_of_a_new_pipeline_are_empty_not_broken(kube: Kube, kubectl: Kubectl, namespace: str) -> None:
    kube.create(cr("OmniPipeline", "new", namespace, {"model": {"uri": "hf://a/b"}, "topology": "smol_omni"}))
    (row,) = table(kubectl("get", "omp", "-n", namespace))
    assert (row["NAME"], row["READY"], row["REASON"]) == ("new", "", "")


def test_columns_of_a_stage(stage: Object, kubectl: Kubectl, namespace: str) -> None:
    (row,) = table(kubectl("get", "oms", "-n", namespace))
    assert row.pop("AGE")
    assert row == {
        "NAME": "qwen3-omni-talker",
        "PIPELINE": "qwen3-omni",
        "STAGE": "talker",
        "DESIRED": "2",
        "READY": "1",
        "DEVICE": "1 x nvidia-h100-80gb",
        "REVISION": "6f1c2a9b3d",
    }
    (wide,) = table(kubectl("get", "oms", "-n", namespace, "-o", "wide"))
    assert (wide["ENGINE"], wide["UPDATED"]) == ("qwen3_omni_talker", "2")


def test_columns_of_the_platform_kinds(kube: Kube, kubectl: Kubectl) -> None:
    profile = {
        "vendor": "nvidia",
        "images": {"runtime": "r/omni-cuda:1"},
        "deviceClasses": [{"name": "nvidia-h100-80gb", "memory": "80Gi"}, {"name": "nvidia-l40s", "memory": "48Gi"}],
    }
    made = [
        kube.create(cr("OmniRuntimeProfile", "columns", "", profile)),
        kube.create(cr("OmniTenant", "columns", "", {"namespaces": ["a", "b"], "weight": 3})),
    ]
    try:
        row = table(kubectl("get", "omrp", "columns"))[0]
        assert (row["VENDOR"], row["BACKEND"]) == ("nvidia", "native")
        assert row["DEVICE-CLASSES"].startswith("nvidia-h100-80gb")
        assert table(kubectl("get", "omt", "columns"))[0]["WEIGHT"] == "3"
    finally:
        for obj in made:
            kube.delete(obj)


def test_category_lists_all_kinds(pipeline: Object, stage: Object, kubectl: Kubectl, namespace: str) -> None:
    listed = set(kubectl("get", "omni", "-n", namespace, "-o", "name").split())
    assert listed >= {"omnipipeline.serving.omni.dev/qwen3-omni", "omnistage.serving.omni.dev/qwen3-omni-talker"}


@kinds
def test_explain_tells_what_each_field_is(kind: Kind, kubectl: Kubectl) -> None:
    text = kubectl("explain", f"{kind.plural}.spec")
    assert "<no description>" not in text
    assert " ".join((kind.model.model_fields["spec"].description or "").split())[:40] in " ".join(text.split())


# ------------------------------------------------------------------------------------------ /scale


def test_scale_has_a_selector(stage: Object, kube: Kube) -> None:
    """An HPA refuses an empty selector (T16)."""
    scale = kube.get(stage, subresource="scale")
    assert scale["spec"] == {"replicas": 2}
    assert scale["status"] == {"replicas": 2, "selector": stage["status"]["selector"]}


def test_scale_before_the_first_count_is_an_error(kube: Kube, namespace: str) -> None:
    """So the operator seeds spec.replicas on every stage that it creates; the schema must not (T13)."""
    bare = kube.create(cr("OmniStage", "bare", namespace, {"pipelineRef": {"name": "p"}, "stageName": "a"}))
    with pytest.raises(Refused) as caught:
        kube.get(bare, subresource="scale")
    assert caught.value.status == 500


def test_kubectl_scale(stage: Object, kube: Kube, kubectl: Kubectl, namespace: str) -> None:
    kubectl("scale", "omnistage/qwen3-omni-talker", "--replicas", "5", "-n", namespace)
    stored = kube.get(stage)
    assert stored["spec"] == {**stage["spec"], "replicas": 5}
    assert stored["metadata"]["generation"] == 2


@pytest.mark.parametrize("replicas", [-1, 1001])
def test_kubectl_scale_keeps_the_bounds(replicas: int, stage: Object, kube: Kube, namespace: str) -> None:
    scale = kube.get(stage, subresource="scale")
    with pytest.raises(Refused):
        kube.request(
            "PUT",
            kube.path(stage, name=stage["metadata"]["name"], subresource="scale"),
            {**scale, "spec": {"replicas": replicas}},
        )
    assert kube.get(stage)["spec"]["replicas"] == 2


def test_scaling_survives_an_apply_that_does_not_name_the_count(
    stage: Object, kube: Kube, kubectl: Kubectl, namespace: str
) -> None:
    """Whoever scales owns the count; the operator's apply leaves it out (T12)."""
    metadata = {"name": stage["metadata"]["name"], "namespace": namespace}
    seeded = {**stage, "metadata": metadata}
    seeded.pop("status")
    kube.apply(seeded, manager="omni-operator")
    kubectl("scale", "oms/qwen3-omni-talker", "--replicas", "7", "-n", namespace)
    kept = {**seeded, "spec": {k: v for k, v in stage["spec"].items() if k != "replicas"}}
    assert kube.apply(kept, manager="omni-operator")["spec"]["replicas"] == 7


# ------------------------------------------------------------------------------------------ other clients


def test_appliers_own_single_list_entries(kube: Kube, namespace: str) -> None:
    """Stages are a map by name: one applier's engine flags do not remove another's stage."""
    spec: Any = {"model": {"uri": "hf://a/b"}, "topology": "smol_omni", "stages": [{"name": "thinker", "replicas": 1}]}
    kube.apply(cr("OmniPipeline", "shared", namespace, spec), manager="git")
    kube.apply(cr("OmniPipeline", "shared", namespace, {"stages": [{"name": "talker", "replicas": 2}]}), manager="team")
    stored = kube.apply(cr("OmniPipeline", "shared", namespace, spec), manager="git")
    assert {s["name"]: s["replicas"] for s in stored["spec"]["stages"]} == {"thinker": 1, "talker": 2}


def test_official_client_sees_the_kinds(dynamic: DynamicClient, pipeline: Object, namespace: str) -> None:
    api = dynamic.resources.get(api_version=API_VERSION, kind="OmniPipeline")
    assert api.get(name="qwen3-omni", namespace=namespace).status.stagesReady == "2/3"


def test_kubectl_apply_names_the_typo(kubectl: Kubectl, namespace: str) -> None:
    spec = {"model": {"uri": "hf://a/b"}, "topology": "smol_omni", "stages": [{"name": "thinker", "replica": 1}]}
    with pytest.raises(AssertionError, match=r'unknown field "spec.stages\[0\].replica"'):
        kubectl("apply", "-f", "-", stdin=json.dumps(cr("OmniPipeline", "typo", namespace, spec)))
