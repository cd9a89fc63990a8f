"""The world of the corpus on the API server, and the installed webhooks. No kubelet runs: a thread keeps nodes Ready."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.apiserver.kube import MERGE, Kube, Object, Refused
from tests.apiserver.webhooks.corpus import World
from tests.apiserver.webhooks.harness import WebhookProcess, installed_webhooks

HEARTBEAT_SECONDS = 10.0  # the node controller calls a node lost after about 40


@pytest.fixture(scope="module")
def world(kube: Kube, kubeconfig: Path) -> Iterator[World]:
    """All objects of the corpus' cluster, made before the webhooks are there and removed at the end."""
    given = World()
    made: list[Object] = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}} for name in given.namespaces
    ]
    made += [*given.quotas(), *given.profiles(), *given.tenants(), *given.pipelines()]
    for body in made:
        kube.apply(body, manager="world")
    for node in given.nodes():
        add_node(kube, node)
        made.append(node)
    for namespace in given.namespaces:
        _wait_for_account(kube, namespace)
    for pod in given.pods():
        kube.create(pod)
    stop = threading.Event()
    # A client of its own: the test's is not made for threads.
    beating = threading.Thread(target=_beat, args=(Kube(kubeconfig), given, stop), daemon=True)
    beating.start()
    yield given
    stop.set()
    beating.join(30)
    for pod in given.pods():
        path = kube.path(pod, name=pod["metadata"]["name"])
        kube.request("DELETE", path, {"gracePeriodSeconds": 0})
    for body in reversed(made):
        kube.delete(body)


@pytest.fixture(scope="module")
def webhooks(
    kube: Kube, kubeconfig: Path, world: World, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WebhookProcess]:
    """One replica over the world, behind the chart's own configuration."""
    log = tmp_path_factory.mktemp("webhooks") / "log"
    with installed_webhooks(kube, kubeconfig, log) as running:
        yield running


@pytest.fixture
def warned(kube: Kube) -> Callable[[], list[str]]:
    """Warnings of the API server since the test began (the client remembers each text once)."""
    kube.warnings.clear()
    return lambda: list(kube.warnings)


def add_node(kube: Kube, node: Object) -> None:
    kube.apply({k: v for k, v in node.items() if k != "status"}, manager="world")
    _heartbeat(kube, node)
    # The API server taints every new node as not ready; its controller would take that away, in its own time.
    taints = {"spec": {"taints": node["spec"]["taints"]}}
    kube.request("PATCH", f"/api/v1/nodes/{node['metadata']['name']}", taints, content_type=MERGE)


def _heartbeat(kube: Kube, node: Object) -> None:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    conditions = [{**c, "lastHeartbeatTime": now, "lastTransitionTime": now} for c in node["status"]["conditions"]]
    path = f"/api/v1/nodes/{node['metadata']['name']}/status"
    kube.request("PATCH", path, {"status": {**node["status"], "conditions": conditions}}, content_type=MERGE)


def _beat(kube: Kube, world: World, stop: threading.Event) -> None:
    while not stop.wait(HEARTBEAT_SECONDS):
        for node in world.nodes():
            try:
                _heartbeat(kube, node)
            except Refused as error:
                if error.status != 409:
                    raise


def _wait_for_account(kube: Kube, namespace: str) -> None:
    """Pods are refused until the controllers have made the namespace's account."""
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default", "namespace": namespace}}
    for _ in range(600):
        try:
            kube.get(account)
            return
        except Refused as error:
            if error.status != 404:
                raise
        threading.Event().wait(0.1)
    raise AssertionError(f"namespace {namespace} has no default service account")
