"""A cluster with this checkout's images and operator, once per session; the same commands as `make demo`.

The cluster stays for the next run (`omni cluster down` ends it). Tests own a namespace each.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from omni_runtime.cli.kubectl import SYSTEM_NAMESPACE, Kube, StepFailed, install_operator, omni, tools

T = TypeVar("T")

OURS = "omni-operator.test/namespace=yes"  # on every namespace that a test makes


@pytest.fixture(scope="session")
def kube() -> Kube:
    """A running cluster with the images of this checkout and the operator installed by the chart."""
    omni("cluster", "up")
    environment = {**os.environ, "KUBECONFIG": omni("cluster", "kubeconfig", quiet=True).strip()}
    omni("models", "prepare")
    omni("image", "build", "all", "--load")
    cluster = tools(environment)
    install_operator(cluster)
    for left in _left_namespaces(cluster):  # of a run that was ended: its pods would keep the node's cores
        _remove(cluster, left)
    return cluster


def _left_namespaces(kube: Kube) -> list[str]:
    return [o["metadata"]["name"] for o in kube.get("namespaces", "-l", OURS)["items"]]


def _remove(kube: Kube, namespace: str) -> None:
    """Pods first: while a namespace has any, its deletion is looked at again only after half of their grace period, which
    is minutes for pods that may drain for that long, even when they end at once."""
    try:
        kube.read("-n", namespace, "delete", "omnipipelines", "--all", "--timeout=60s")
        kube.read("-n", namespace, "wait", "pods", "--all", "--for=delete", "--timeout=120s")
    finally:
        kube.read("delete", "namespace", namespace, "--ignore-not-found", "--timeout=180s")


@pytest.fixture
def namespace(kube: Kube) -> Iterator[str]:
    """A fresh namespace under the restricted Pod Security Standard; deleted, and waited for, at the end."""
    with fresh_namespace(kube) as name:
        yield name


class fresh_namespace:
    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self.name = f"e2e-{uuid.uuid4().hex[:8]}"

    def __enter__(self) -> str:
        self._kube.read("create", "namespace", self.name)
        self._kube.read("label", "namespace", self.name, OURS, "pod-security.kubernetes.io/enforce=restricted")
        return self.name

    def __exit__(self, *_: object) -> None:
        _remove(self._kube, self.name)


def eventually(
    check: Callable[[], T | None], seconds: float, what: str | Callable[[], str], *, pause: float = 0.5
) -> T:
    """The first value of `check` that is not None; past the deadline the test fails and says what it waited for."""
    deadline = time.monotonic() + seconds
    while True:
        value = check()
        if value is not None:
            return value
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds:.0f} s: {what if isinstance(what, str) else what()}")
        time.sleep(pause)


def conditions(pipeline: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {c["type"]: c for c in (pipeline.get("status") or {}).get("conditions") or []}


def pods(kube: Kube, namespace: str, selector: str = "") -> list[dict[str, Any]]:
    """Pods that are not on their way out."""
    arguments = ["-n", namespace, "pods", *(["-l", selector] if selector else [])]
    return [p for p in kube.get(*arguments)["items"] if "deletionTimestamp" not in p["metadata"]]


def objects_of(kube: Kube, namespace: str) -> list[str]:
    """Everything in a namespace that a pipeline could leave behind, as kind/name."""
    kinds = "omnipipelines,omnistages,deployments,replicasets,pods,services,configmaps,serviceaccounts"
    kinds += ",poddisruptionbudgets,networkpolicies,secrets"
    found = json.loads(kube.read("-n", namespace, "get", kinds, "-o", "json"))["items"]
    names = [f"{o['kind']}/{o['metadata']['name']}" for o in found]
    return sorted(n for n in names if n not in {"ConfigMap/kube-root-ca.crt", "ServiceAccount/default"})


__all__ = [
    "SYSTEM_NAMESPACE",
    "StepFailed",
    "conditions",
    "eventually",
    "fresh_namespace",
    "objects_of",
    "pods",
]
