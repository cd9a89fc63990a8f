"""The index of nodes: whatever happened, in whatever order, it says what looking at all nodes anew would say."""

from __future__ import annotations

import heapq
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_operator.placement import NodeView
from omni_operator.placement.demand import PodDemand, selects, tolerates
from omni_operator.placement.dra import read_class, read_slice
from omni_operator.placement.fleet import Fleet, fleet_of
from omni_operator.placement.views import cluster_view, node_view
from omni_webhooks.index import NodeIndex, left
from omni_webhooks.nodes import Nodes, read_pod
from tests.unit.placement.dra_objects import a_class, a_device, a_slice

LABELS = frozenset({"pool"})
DEMANDS = (
    PodDemand("gpu", ("gpu",), 1, {"nvidia.com/gpu": 1}, {}, {"pool": "a"}, (), "nvidia.com/gpu"),
    PodDemand("any", (), 1, {"cpu": 100}, {}),
    PodDemand("tolerant", (), 1, {"cpu": 100}, {}, {}, ({"operator": "Exists"},)),
)


def node(name: str, pool: str, cordoned: bool, tainted: bool, gpus: int) -> dict[str, Any]:
    has = {"cpu": "8", "memory": "64Gi", **({"nvidia.com/gpu": str(gpus)} if gpus else {})}
    return {
        "metadata": {"name": name, "labels": {"pool": pool, "kubernetes.io/hostname": name}},
        "spec": {"unschedulable": cordoned, "taints": [{"key": "t", "effect": "NoSchedule"}] if tainted else []},
        "status": {"allocatable": has},
    }


def pod(name: str, at: str, phase: str, gpus: int) -> dict[str, Any]:
    limits = {"nvidia.com/gpu": str(gpus), "memory": f"{gpus + 1}Gi"}
    containers = [{"name": "c", "resources": {"limits": limits}}]
    spec = {"nodeName": at, "containers": containers}
    return {"metadata": {"namespace": "ns", "name": name}, "spec": spec, "status": {"phase": phase}}


def told_apart(fleet: Fleet) -> set[frozenset[str]]:
    return {frozenset(kind.names) for kind in fleet}


def best_of_all(nodes: tuple[NodeView, ...], demand: PodDemand, count: int) -> list[str]:
    device = demand.device_resource or ""
    fit = [n for n in nodes if n.schedulable and selects(demand, n) and tolerates(demand, n.taints)]
    usable = [n for n in fit if not device or device in n.allocatable]
    return [name for *_, name in heapq.nlargest(count, ((left(n, device), left(n, "memory"), n.name) for n in usable))]


NAMES = st.sampled_from(["n0", "n1", "n2", "n3"])
NODE_EVENTS = st.builds(
    lambda name, gone, *rest: ("node", name, None if gone else node(name, *rest)),
    NAMES, st.booleans(), st.sampled_from("ab"), st.booleans(), st.booleans(), st.sampled_from([0, 4, 8]),
)  # fmt: skip
POD_EVENTS = st.builds(
    lambda name, gone, *rest: ("pod", name, None if gone else pod(name, *rest)),
    st.sampled_from("pqrs"), st.booleans(), NAMES, st.sampled_from(["Running", "Failed"]), st.integers(0, 3),
)  # fmt: skip


def without_nothing(node: NodeView) -> NodeView:
    """What is asked for in the amount of 0 is no use."""
    return replace(node, used={name: amount for name, amount in node.used.items() if amount})


SLICE_EVENTS = st.builds(
    lambda name, gone, node, pool, generation, count: (
        "slice", name, None if gone else dra_slice(name, node, pool, generation, count),
    ),
    st.sampled_from("st"), st.booleans(), NAMES, st.sampled_from(["", "shared"]), st.integers(1, 2), st.integers(0, 2),
)  # fmt: skip
CLASS_EVENTS = st.sampled_from([("class", "gpu", None), ("class", "gpu", a_class())])


def dra_slice(name: str, at: str, pool: str, generation: int, count: int) -> dict[str, Any]:
    return a_slice([a_device(f"d{i}") for i in range(count)], at, generation, pool, name)


@given(
    st.lists(NODE_EVENTS | POD_EVENTS | SLICE_EVENTS | CLASS_EVENTS | st.just(("labels", "", None)), max_size=30),
    st.integers(1, 3),
)
def test_after_any_events_the_index_is_what_a_new_one_would_be(events: list[Any], count: int) -> None:
    nodes, labels = Nodes(), LABELS
    nodes.tell_apart_by(labels)
    there: dict[str, dict[str, Any]] = {"node": {}, "pod": {}, "slice": {}, "class": {}}
    for what, name, body in events:
        if what == "node":
            nodes.node_changed(("", name), None if body is None else node_view(body))
        elif what == "pod":
            nodes.pod_changed(("ns", name), None if body is None else read_pod(body))
        elif what == "slice":
            nodes.slice_changed(("", name), None if body is None else read_slice(body))
        elif what == "class":
            nodes.class_changed(("", name), None if body is None else read_class(body))
        else:
            labels = LABELS if labels != LABELS else LABELS | {"kubernetes.io/hostname"}
            nodes.tell_apart_by(labels)
        if what in there:
            there[what].pop(name, None)
            there[what].update({} if body is None else {name: body})
        index = nodes.index(("ns", "pipeline"))
        assert index is not None
        all_nodes = nodes.view(("ns", "pipeline"), [], domain_label=None, age_seconds=0.0).nodes or ()
        anew = cluster_view(*(there[k].values() for k in ("node", "pod")), slices=there["slice"].values(),
                            device_classes=there["class"].values())  # fmt: skip
        assert {n.name: n for n in all_nodes} == {n.name: without_nothing(n) for n in anew.nodes or ()}
        assert told_apart(index.fleet()) == told_apart(fleet_of(all_nodes, labels))
        for kind in index.fleet():
            assert kind.node.name in kind.names
            (same,) = [k for k in fleet_of(all_nodes, labels) if kind.node.name in k.names]
            assert (kind.node.used, kind.node.allocatable) == (same.node.used, same.node.allocatable)
        for demand in DEMANDS:
            assert [n.name for n in index.best(demand, count)] == best_of_all(all_nodes, demand, count)


def test_nothing_is_kept_of_nodes_and_pods_that_are_gone() -> None:
    nodes = Nodes()
    for i in range(50):
        labelled = pod(f"p{i}", f"n{i}", "Running", 1)
        labelled["metadata"]["labels"] = {"serving.omni.dev/pipeline": f"q{i}"}
        nodes.node_changed(("", f"n{i}"), node_view(node(f"n{i}", "a", False, False, 8)))
        nodes.pod_changed(("ns", f"p{i}"), read_pod(labelled))
        nodes.pod_changed(("ns", f"p{i}"), None)
        nodes.node_changed(("", f"n{i}"), None)
    index = nodes.index(("ns", "q0"))
    assert index is not None
    kept = {**vars(nodes), **vars(index)}
    assert {name: value for name, value in kept.items() if isinstance(value, dict) and value} == {}


@pytest.mark.parametrize("count", [1, 5])
def test_a_pipeline_with_pods_of_its_own_is_not_answered_from_the_index(count: int) -> None:
    """What they hold is left out of its view, and the index has it in."""
    nodes = Nodes()
    nodes.node_changed(("", "n0"), node_view(node("n0", "a", False, False, 8)))
    for i in range(count):
        own = pod(f"p{i}", "n0", "Running", 1)
        own["metadata"]["labels"] = {"serving.omni.dev/pipeline": "mine"}
        nodes.pod_changed(("ns", f"p{i}"), read_pod(own))
    assert nodes.index(("ns", "mine")) is None
    assert nodes.index(("elsewhere", "mine")) is not None


def test_a_rank_is_no_use_of_a_device_that_the_node_has_not() -> None:
    index = NodeIndex(LABELS, [node_view(node("n0", "a", False, False, 0))])
    assert index.best(DEMANDS[0], 3) == []
