"""Nodes as the webhooks follow them: what pods use, the pipeline's own pods left out, and large clusters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_crds.v1alpha1.pipeline import OmniPipeline
from omni_operator.names import PIPELINE_LABEL
from omni_operator.placement import ClusterView, Feasible, Infeasible, NodeView, plan_demand
from omni_operator.placement.views import cluster_view, node_view, quota_view
from omni_webhooks.context import FEW_NODES, Context
from omni_webhooks.index import NodeIndex
from omni_webhooks.nodes import Nodes, promising, read_pod
from tests.apiserver.webhooks.corpus import Object, World, cases

GIB = 1 << 30
VIEW: dict[str, Any] = {"domain_label": None, "age_seconds": 0.0}


def node(name: str) -> Object:
    amounts = {"cpu": "64", "memory": "512Gi", "nvidia.com/gpu": "8"}
    return {"metadata": {"name": name, "labels": {"gpu": "yes"}}, "status": {"allocatable": amounts}}


def pod(name: str, at: str = "n0", pipeline: str = "", phase: str = "Running", gpus: int = 1) -> Object:
    labels = {PIPELINE_LABEL: pipeline} if pipeline else {}
    limits = {"nvidia.com/gpu": str(gpus), "memory": "1Gi"}
    return {
        "metadata": {"namespace": "ns", "name": name, "labels": labels},
        "spec": {"nodeName": at, "containers": [{"name": "c", "resources": {"limits": limits}}]},
        "status": {"phase": phase},
    }


def put(nodes: Nodes, body: Object, gone: bool = False) -> None:
    key = ("ns", body["metadata"]["name"])
    nodes.pod_changed(key, None if gone else read_pod(body))


def gpus_used(view: ClusterView) -> dict[str, int]:
    return {n.name: n.used.get("nvidia.com/gpu", 0) for n in view.nodes or ()}


class TestUse:
    def test_pods_come_move_and_go(self) -> None:
        nodes = Nodes()
        put(nodes, pod("early", at="n1"))  # before its node is known
        for name in ("n0", "n1"):
            nodes.node_changed(("", name), node_view(node(name)))
        put(nodes, pod("a", gpus=2))
        put(nodes, pod("waiting", at=""))
        assert gpus_used(nodes.view(("ns", "p"), [], **VIEW)) == {"n0": 2, "n1": 1}
        put(nodes, pod("a", gpus=2, phase="Succeeded"))
        put(nodes, pod("early", at="n1"), gone=True)
        assert gpus_used(nodes.view(("ns", "p"), [], **VIEW)) == {"n0": 0, "n1": 0}

    def test_a_pipeline_that_replaces_another_one_does_not_wait_for_its_pods_to_drain(self) -> None:
        nodes = Nodes()
        nodes.node_changed(("", "n0"), node_view(node("n0")))
        leaving = pod("old", pipeline="q", gpus=8)
        put(nodes, leaving)
        leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        put(nodes, leaving)
        assert gpus_used(nodes.view(("ns", "p"), [], **VIEW)) == {"n0": 0}

    def test_an_edit_is_not_refused_for_the_room_of_its_own_pods(self) -> None:
        nodes = Nodes()
        nodes.node_changed(("", "n0"), node_view(node("n0")))
        put(nodes, pod("own", pipeline="p", gpus=3))
        put(nodes, pod("other", pipeline="q", gpus=2))
        quota = quota_view(
            {"metadata": {"name": "q"}, "spec": {"hard": {"requests.nvidia.com/gpu": "5", "limits.memory": "9Gi"}},
             "status": {"used": {"requests.nvidia.com/gpu": "5", "limits.memory": "2Gi"}}}
        )  # fmt: skip
        view = nodes.view(("ns", "p"), [quota], **VIEW)
        assert gpus_used(view) == {"n0": 2}
        assert view.quotas[0].used == {"requests.nvidia.com/gpu": 2, "limits.memory": GIB}
        assert gpus_used(nodes.view(("elsewhere", "p"), [], **VIEW)) == {"n0": 5}

    @given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["n0", "n1", ""]), st.sampled_from(["p", ""]),
                              st.sampled_from(["Running", "Failed"]), st.booleans()), max_size=20))  # fmt: skip
    def test_event_by_event_is_the_same_as_all_at_once(self, events: list[tuple[str, str, str, str, bool]]) -> None:
        nodes, stored = Nodes(), dict[str, Object]()
        for name in ("n0", "n1"):
            nodes.node_changed(("", name), node_view(node(name)))
        for name, at, pipeline, phase, gone in events:
            body = pod(name, at, pipeline, phase)
            put(nodes, body, gone)
            if gone:
                stored.pop(name, None)
            else:
                stored[name] = body
        expected = cluster_view([node("n0"), node("n1")], stored.values(), pipeline=("ns", "p"))
        assert gpus_used(nodes.view(("ns", "p"), [], **VIEW)) == gpus_used(expected)


def large(free: int, count: int = 600) -> tuple[NodeView, ...]:
    """Nodes of H100 of which only the last has `free` devices left, and the others one at most."""
    labels = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    has = {"cpu": 128_000, "memory": 1024 * GIB, "pods": 110, "nvidia.com/gpu": 8}
    busy = [NodeView(f"n{i}", labels, (), has, {"nvidia.com/gpu": 8 - i % 2, "cpu": i}) for i in range(count)]
    return (*busy, NodeView("last", labels, (), has, {"nvidia.com/gpu": 8 - free}))


class TestLargeClusters:
    def context(self, nodes: tuple[NodeView, ...]) -> Context:
        return replace(World().context(), cluster=lambda _: ClusterView(nodes=nodes))

    def pipeline(self) -> OmniPipeline:
        (case,) = [c for c in cases() if c.name == "two-h100-and-one"]
        return OmniPipeline.model_validate(case.body())

    def test_the_one_place_among_many_is_found(self) -> None:
        assert len(large(3)) > FEW_NODES
        verdict = self.context(large(3)).fits_cluster(self.pipeline(), ("free", "p"), nodes_may_be_added=False)
        assert isinstance(verdict, Feasible)

    def test_a_refusal_speaks_of_all_nodes_and_says_what_helps(self) -> None:
        verdict = self.context(large(1)).fits_cluster(self.pipeline(), ("free", "p"), nodes_may_be_added=False)
        assert isinstance(verdict, Infeasible)
        assert verdict.errors
        assert all(e.fix for e in verdict.errors)

    @pytest.mark.parametrize("free", [0, 1, 2, 3, 8])
    def test_the_short_way_and_the_long_way_agree(self, free: int) -> None:
        pipeline, nodes = self.pipeline(), large(free, 200)
        short = self.context(nodes).fits_cluster(pipeline, ("free", "p"), nodes_may_be_added=False)
        whole = self.context(nodes)._check(pipeline, ClusterView(nodes=nodes))
        assert type(short) is type(whole)

    def test_promising_nodes_are_few_and_the_emptiest(self) -> None:
        context, pipeline = self.context(large(5)), self.pipeline()
        plan = context.resolve(pipeline).plan
        assert plan is not None
        index = NodeIndex(frozenset({"nvidia.com/gpu.product"}), large(5))
        some = promising(ClusterView(nodes=large(5)), index, plan_demand(plan, {}, {}), count=4)
        assert len(some.nodes or ()) <= 4 * 3
        assert "last" in {n.name for n in some.nodes or ()}
