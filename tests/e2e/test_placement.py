"""The placement that the check finds is the one that the real scheduler makes, on simulated nodes of three makers.

Each example is planned against the cluster as it is, accepted by admission, and its pods are looked up afterwards: which
groups share a node, and how many devices they hold there. Equal nodes may change places; nothing else may.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from omni_cluster.state import load_state
from omni_runtime.cli.kubectl import REPOSITORY, Kube, omni
from tests.e2e.conftest import conditions, eventually, fresh_namespace, pods
from tests.e2e.witness import by_node, kinds_of_nodes, planned, planned_places

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]  # test_gpu_nodes.py has the witness of three examples

CLUSTER = "omni"
L4 = {"nvidia.com/gpu.product": "NVIDIA-L4", "nvidia.com/gpu.memory": "23034"}
# So few devices of each kind that nothing fits in two ways.
NODES = [
    {"resource": "nvidia.com/gpu", "count": 2, "devices": 2},
    {"resource": "nvidia.com/gpu", "count": 1, "devices": 1, "labels": L4},
    {"resource": "amd.com/gpu", "count": 1, "devices": 1},
    {"resource": "huawei.com/Ascend910B", "count": 1, "devices": 8},
]
# Words of other makers, which must be neither in a pod nor among the flags of its engine.
FOREIGN = {
    "nvidia.com/gpu": ("ascend", "huawei", "hip_", "rocr", "amd.com"),
    "amd.com/gpu": ("cuda", "nvidia", "ascend", "huawei"),
    "huawei.com/Ascend910B": ("cuda", "nvidia", "hip_", "rocr", "amd.com"),
}


@dataclass(frozen=True, slots=True)
class Example:
    """file: of examples/. devices: group -> devices of its pod."""

    file: str
    devices: Mapping[str, tuple[str, int]]

    def __str__(self) -> str:
        return self.file


EXAMPLES = (
    Example("qwen3-omni", {"thinker": ("nvidia.com/gpu", 2), "talker": ("nvidia.com/gpu", 1)}),
    Example("qwen3-omni.one-mi300x", {"thinker": ("amd.com/gpu", 1)}),
    Example("qwen3-omni.npu", {"thinker": ("huawei.com/Ascend910B", 2), "talker": ("huawei.com/Ascend910B", 1)}),
    Example(
        "qwen3-omni.mixed",
        {"thinker": ("amd.com/gpu", 1), "talker": ("nvidia.com/gpu", 1), "code2wav": ("huawei.com/Ascend910B", 1)},
    ),
)


@pytest.fixture(scope="module")
def simulated(kube: Kube, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kube]:
    """The cluster with these simulated nodes; afterwards it has those that it had before."""
    state = load_state(CLUSTER)
    if state.provider != "local":
        pytest.skip(f"simulated nodes need the provider local; cluster {CLUSTER!r} is {state.provider}")
    classes = tmp_path_factory.mktemp("nodes") / "nodes.yaml"
    classes.write_text(yaml.safe_dump(NODES))
    omni("cluster", "up", "--kwok-nodes", str(classes))
    try:
        yield kube
    finally:
        before = state.kwok_nodes or ("none",)
        omni("cluster", "up", *(word for item in before for word in ("--kwok-nodes", item)))


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_pods_are_where_the_witness_has_them(simulated: Kube, example: Example) -> None:
    with fresh_namespace(simulated) as namespace:
        path = f"examples/{example.file}.pipeline.yaml"
        said = planned(simulated, path)
        simulated.read("-n", namespace, "apply", "-f", path)

        def scheduled() -> dict[str, dict[str, Any]] | None:
            found = {_stage(p): p for p in pods(simulated, namespace) if _stage(p) != "entry"}
            placed = [p for p in found.values() if p["spec"].get("nodeName")]
            return found if len(placed) == len(example.devices) else None

        found = eventually(scheduled, 90, "every pod has a node")
        assert set(found) == set(example.devices)
        assert {stage: _devices(pod) for stage, pod in found.items()} == {
            stage: {resource: count} for stage, (resource, count) in example.devices.items()
        }
        kinds, devices = kinds_of_nodes(simulated), {stage: count for stage, (_, count) in example.devices.items()}
        made = [(stage, pod["spec"]["nodeName"]) for stage, pod in found.items()]
        assert by_node(made, devices, kinds) == by_node(planned_places(said), devices, kinds)
        for stage, pod in found.items():
            (plan,) = [s for s in said["plan"]["stages"] if s["name"] == stage]
            text = json.dumps([pod["spec"]["containers"], pod["spec"]["initContainers"], plan]).lower()
            assert [word for word in FOREIGN[example.devices[stage][0]] if word in text] == [], stage

        def feasible() -> bool | None:
            found = conditions(simulated.get("-n", namespace, "omnipipeline", "qwen3-omni"))
            return True if found.get("PlacementFeasible", {}).get("status") == "True" else None

        eventually(feasible, 60, "PlacementFeasible")


def test_one_l4_is_refused_with_what_is_missing_and_a_fix(simulated: Kube, tmp_path: Path) -> None:
    text = (REPOSITORY / "examples" / "qwen3-omni.pipeline.yaml").read_text()
    manifest = tmp_path / "pipeline.yaml"
    manifest.write_text(text.replace("nvidia-h100-80gb", "nvidia-l4"))
    with fresh_namespace(simulated) as namespace:
        done = subprocess.run(
            [simulated.kubectl, "-n", namespace, "apply", "-f", str(manifest)],
            env=simulated.environment, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode != 0
        said = done.stderr.replace("\n", " ")
        for index, stage in ((0, "thinker"), (1, "talker")):
            (line,) = [part for part in said.split("* ") if part.startswith(f"spec.stages[{index}].accelerator:")]
            assert "GiB are missing" in line
            assert f" of {stage} to " in line
            assert "[DoesNotFitDevice]" in line
        assert simulated.get("-n", namespace, "omnipipelines")["items"] == []


def _stage(pod: Mapping[str, Any]) -> str:
    return str(pod["metadata"]["labels"]["serving.omni.dev/stage"])


def _devices(pod: Mapping[str, Any]) -> dict[str, int]:
    """Extended resources that the containers of a pod hold."""
    total: dict[str, int] = {}
    for container in pod["spec"]["containers"]:
        for name, amount in container["resources"].get("limits", {}).items():
            if "/" in name:
                total[name] = total.get(name, 0) + int(amount)
    return total
