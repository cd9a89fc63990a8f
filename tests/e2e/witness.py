"""What the check says of a pipeline on a running cluster, beside what became of its pods."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from omni_runtime.cli.kubectl import Kube, run

Use = list[tuple[str, list[str], int]]


def planned(kube: Kube, path: str) -> dict[str, Any]:
    """`omni plan` against the cluster as it is now; a refusal would be exit code 3, and fail here."""
    command = [sys.executable, "-m", "omni_runtime.cli", "plan", "-f", path, "--cluster", "--json"]
    said: dict[str, Any] = json.loads(run(*command, quiet=True, environment=kube.environment))
    assert said["placement"]["verdict"] == "Feasible", said["placement"]
    return said


def kinds_of_nodes(kube: Kube) -> dict[str, str]:
    """Node -> what tells it from others: product and number of devices."""
    found = {}
    for node in kube.get("nodes")["items"]:
        has = {k: v for k, v in node["status"]["allocatable"].items() if "/" in k}
        labels = node["metadata"]["labels"]
        found[node["metadata"]["name"]] = f"{has} {labels.get('nvidia.com/gpu.product', '')}"
    return found


def by_node(placed: list[tuple[str, str]], devices: Mapping[str, int], kinds: Mapping[str, str]) -> Use:
    """(kind of node, groups on it, devices that they hold), one entry per node that is used."""
    return sorted(
        (
            kinds[node],
            sorted(group for group, at in placed if at == node),
            sum(devices[group] for group, at in placed if at == node),
        )
        for node in {at for _, at in placed}
    )


def planned_places(said: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(group, node) of the witness, without the entry, which goes anywhere."""
    return [(p["group"], p["node"]) for p in said["placement"]["placements"] if p["group"] != "entry"]
