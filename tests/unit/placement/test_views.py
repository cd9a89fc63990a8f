"""Kubernetes objects as the API server gives them -> what a check takes."""

from __future__ import annotations

from typing import Any

import pytest

from omni_crds.v1alpha1.tenant import OmniTenant
from omni_operator.placement.demand import amounts, plan_demand, pod_resources
from omni_operator.placement.types import QuotaView, Taint
from omni_operator.placement.views import classes_in_use, cluster_view, node_view, quota_view, tenant_view, usage
from tests.unit.placement.builders import GIB, a_plan, catalogue, example


def a_pod(node: str | None, name: str = "other", phase: str = "Running", **resources: Any) -> dict[str, Any]:
    labels = {"serving.omni.dev/pipeline": name}
    container = {"name": "c", "resources": resources or {"requests": {"cpu": "500m", "memory": "1Gi"}}}
    spec: dict[str, Any] = {"containers": [container]}
    if node:
        spec["nodeName"] = node
    return {"metadata": {"namespace": "ns", "labels": labels}, "spec": spec, "status": {"phase": phase}}


NODE: dict[str, Any] = {
    "metadata": {"name": "n1", "labels": {"a": "b"}},
    "spec": {"taints": [{"key": "gpu", "value": "yes", "effect": "NoSchedule"}]},
    "status": {
        "allocatable": {"cpu": "63500m", "memory": "527432000Ki", "pods": "110", "nvidia.com/gpu": "8", "odd": "-"},
        "conditions": [{"type": "Ready", "status": "True"}],
    },
}


def test_a_node() -> None:
    view = node_view(NODE, {"cpu": 1})
    assert view.taints == (Taint("gpu", "yes", "NoSchedule"),)
    assert view.allocatable == {"cpu": 63_500, "memory": 527_432_000 * 1024, "pods": 110, "nvidia.com/gpu": 8}
    assert view.used == {"cpu": 1}
    assert view.schedulable


@pytest.mark.parametrize("change", ["cordoned", "not ready"])
def test_nodes_that_take_no_pods(change: str) -> None:
    node = {**NODE, "spec": {"unschedulable": True}} if change == "cordoned" else {
        **NODE, "status": {**NODE["status"], "conditions": [{"type": "Ready", "status": "Unknown"}]}
    }  # fmt: skip
    assert not node_view(node).schedulable


def test_usage_counts_pods_that_hold_something() -> None:
    pods = [
        a_pod("n1"),
        a_pod("n1", phase="Succeeded"),
        a_pod("n1", phase="Failed"),
        a_pod(None),
        a_pod("n1", name="mine"),
        {**a_pod("n1"), "metadata": {"namespace": "ns", "labels": {}, "deletionTimestamp": "now"}},
    ]
    assert usage(pods)["n1"] == {"cpu": 1500, "memory": 3 * GIB, "pods": 3}
    assert usage(pods, without=("ns", "mine"))["n1"]["pods"] == 2
    assert usage(pods, without=("elsewhere", "mine"))["n1"]["pods"] == 3


def test_sidecars_add_up_and_init_containers_do_not() -> None:
    spec: dict[str, Any] = {
        "initContainers": [
            {"restartPolicy": "Always", "resources": {"requests": {"cpu": "100m"}}},
            {"resources": {"requests": {"cpu": "3"}}},
        ],
        "containers": [{"resources": {"limits": {"cpu": "1", "nvidia.com/gpu": "2"}}}, {"resources": {"requests": {"cpu": "1"}}}],
        "overhead": {"cpu": "50m"},
    }  # fmt: skip
    assert pod_resources(spec) == {"cpu": 3150, "nvidia.com/gpu": 2, "pods": 1}
    spec["initContainers"] = spec["initContainers"][:1]
    assert pod_resources(spec)["cpu"] == 2150


def test_the_demand_is_that_of_the_pods_which_the_operator_makes() -> None:
    talker = next(d for d in plan_demand(a_plan(example("qwen3-omni")), {}, {}) if d.group == "talker")
    assert talker.stages == ("talker", "code2wav")
    assert talker.requests["nvidia.com/gpu"] == 1, "the stages of a pod share its devices"
    assert talker.requests["cpu"] == 4000 + 2000 + 50
    arena = (1 << 30) + (256 << 20)
    assert talker.requests["memory"] == (32 + 16) * GIB + (192 << 20) + arena
    assert talker.node_selector == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}


def test_a_quota_without_the_pipelines_own_pods() -> None:
    quota = {
        "metadata": {"name": "q"},
        "spec": {"hard": {"requests.cpu": "4", "pods": "10", "limits.memory": "8Gi", "count/pods": "20"}},
        "status": {"used": {"requests.cpu": "1500m", "pods": "3", "limits.memory": "3Gi", "count/pods": "3"}},
    }
    own = [a_pod("n1", "mine", requests={"cpu": "500m"}, limits={"memory": "1Gi"})]
    assert quota_view(quota, own) == QuotaView(
        "q",
        {"requests.cpu": 4000, "pods": 10, "limits.memory": 8 * GIB, "count/pods": 20},
        {"requests.cpu": 1000, "pods": 2, "limits.memory": 2 * GIB, "count/pods": 2},
    )


@pytest.mark.parametrize("scope", [{"scopes": ["BestEffort"]}, {"scopeSelector": {"matchExpressions": []}}])
def test_a_quota_for_some_pods_only_is_left_to_the_api_server(scope: dict[str, Any]) -> None:
    assert quota_view({"metadata": {"name": "q"}, "spec": {"hard": {"pods": "1"}, **scope}}).hard == {}


def test_a_whole_cluster() -> None:
    tenant = OmniTenant.model_validate(
        {
            "metadata": {"name": "acme"},
            "spec": {"namespaces": ["ns"], "acceleratorBudget": [{"class": "h", "count": 4}]},
        }
    )
    view = cluster_view(
        [NODE], [a_pod("n1"), a_pod("n1", "mine")], pipeline=("ns", "mine"), tenant=tenant_view(tenant, {"h": 1})
    )
    assert view.nodes is not None
    assert view.nodes[0].used == {"cpu": 500, "memory": GIB, "pods": 1}
    assert view.tenant is not None
    assert (view.tenant.budget, view.tenant.used) == ({"h": 4}, {"h": 1})


def test_devices_in_use_are_those_of_the_class_whose_nodes_a_pod_selects() -> None:
    h100 = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}

    def holding(namespace: str, selector: dict[str, str], phase: str = "Running") -> dict[str, Any]:
        pod = a_pod("n1", phase=phase, limits={"nvidia.com/gpu": "2"})
        pod["metadata"]["namespace"] = namespace
        pod["spec"]["nodeSelector"] = selector
        return pod

    pods = [
        holding("ours", h100),
        holding("ours too", {**h100, "pool": "x"}),
        holding("theirs", h100),
        holding("ours", h100, phase="Succeeded"),
        holding("ours", {}),  # on no class's nodes in particular
    ]
    devices = catalogue().classes.values()
    assert classes_in_use(pods, ["ours", "ours too"], devices) == {"nvidia-h100-80gb": 4}


def test_amounts_in_their_units() -> None:
    assert amounts({"cpu": "250m", "requests.cpu": "2", "memory": "1G", "x.com/y": "3"}) == {
        "cpu": 250, "requests.cpu": 2000, "memory": 10**9, "x.com/y": 3,
    }  # fmt: skip
