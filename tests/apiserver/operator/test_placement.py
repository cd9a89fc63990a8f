"""PlacementFeasible on a real API server: nodes and quota as it serves them, through the permissions of the operator."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from omni_operator.fleet import FleetReader
from tests.apiserver.kube import MERGE
from tests.apiserver.operator.harness import Site

LABEL = "placement.test/pool"


@pytest.fixture
def small_node(site: Site) -> Iterator[str]:
    """A node that one stage and the entry fit on, in a pool of its own; nothing is ever scheduled to it."""
    name = f"small-{site.namespace}"
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {LABEL: site.namespace}}}
    site.test.request("POST", "/api/v1/nodes", node)
    amounts = {"cpu": "500m", "memory": "16Gi", "pods": "110"}
    ready = {"type": "Ready", "status": "True", "reason": "Test", "message": "", "lastTransitionTime": None}
    status = {"status": {"allocatable": amounts, "capacity": amounts, "conditions": [ready]}}
    site.test.request("PATCH", f"/api/v1/nodes/{name}/status", status, content_type=MERGE)
    # A new node is tainted as not ready until the controller manager has seen that it is.
    deadline = time.monotonic() + 30
    while taints := site.test.request("GET", f"/api/v1/nodes/{name}")["spec"].get("taints"):
        assert time.monotonic() < deadline, f"still tainted: {taints}"
        time.sleep(0.1)
    yield name
    site.test.request("DELETE", f"/api/v1/nodes/{name}")


async def test_the_condition_says_what_would_help_and_then_rests(site: Site, small_node: str) -> None:
    """T38, T7: the pods stay without a node, and nobody writes a word more."""
    selector = {"scheduling": {"nodeSelector": {LABEL: site.namespace}}}
    site.apply(stages=[{"name": name, **selector} for name in ("thinker", "talker", "code2wav")])
    site.cluster.fleet = FleetReader(site.api)
    # The harness's kubelet makes pods Ready that nobody scheduled; so all else comes to rest.
    await site.converge(until=lambda: (site.truth("Ready"), site.truth("PlacementFeasible")) == ("True", "False"))
    await site.reconcile()
    found = site.condition("PlacementFeasible")
    assert found["reason"] == "Unschedulable"
    assert "0.5 CPUs left" in found["message"]
    assert f"fix: add a node like {small_node}" in found["message"]
    site.api.writes.clear()
    before = site.everything()
    for _ in range(10):
        requeue = await site.reconcile()
        assert requeue.after is not None, "nodes are not watched, so it looks again by itself"
    assert site.api.writes == []
    assert site.everything() == before


async def test_a_quota_of_the_real_server_is_understood(site: Site, small_node: str) -> None:
    """T65: before the first pod is refused."""
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "few", "namespace": site.namespace},
        "spec": {"hard": {"requests.cpu": "300m", "pods": "50"}},
    }
    site.test.apply(quota)
    site.apply()
    site.cluster.fleet = FleetReader(site.api)
    await site.converge(until=lambda: site.condition("PlacementFeasible").get("reason") == "QuotaExceeded")
    assert "ResourceQuota few allows 0.3 CPUs" in site.condition("PlacementFeasible")["message"]
