"""Talks to a cluster with its own kubectl."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omni_cluster.errors import StepFailed


@dataclass(frozen=True, slots=True)
class Kubectl:
    """`kubectl` of one cluster."""

    hyper: Path
    kubeconfig: Path

    def run(self, *argv: str, stdin: str | None = None, timeout: float = 60) -> str:
        """Output of a command. Raises StepFailed with what it said."""
        command = [str(self.hyper), "kubectl", "--kubeconfig", str(self.kubeconfig), *argv]
        try:
            done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired as error:
            raise StepFailed(f"kubectl {' '.join(argv)} did not end within {timeout:.0f} s") from error
        if done.returncode != 0:
            raise StepFailed(f"kubectl {' '.join(argv)} failed: {done.stderr.strip()[-800:]}")
        return done.stdout

    def get(self, *argv: str) -> Any:
        """A `kubectl get` as parsed JSON."""
        return json.loads(self.run("get", *argv, "-o", "json"))

    def apply(self, objects: list[dict[str, Any]]) -> None:
        """Server-side apply: repeatable, and changes nothing where nothing differs."""
        document = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        self.run(
            "apply", "--server-side", "--force-conflicts", "--field-manager=omni-cluster", "-f", "-", stdin=document
        )


def node_problem(node: dict[str, Any]) -> str | None:
    """None when a Node object is Ready, else what it says."""
    for condition in node.get("status", {}).get("conditions", []):
        if condition["type"] == "Ready":
            return None if condition["status"] == "True" else str(condition.get("message") or condition.get("reason"))
    return "has not reported its state yet"


def deployment_problem(deployment: dict[str, Any]) -> str | None:
    """None when every replica of the newest generation is available, else how many are."""
    status, want = deployment.get("status", {}), deployment["spec"].get("replicas", 1)
    if status.get("observedGeneration", 0) < deployment["metadata"]["generation"]:
        return "its newest version has not been seen by the controller"
    updated, available = status.get("updatedReplicas", 0), status.get("availableReplicas", 0)
    return None if updated >= want and available >= want else f"{min(updated, available)} of {want} pods are available"
