"""Accelerator pipelines on simulated nodes: devices, nodes, images and pod groups of each vendor's example.

KWOK answers for the kubelets of these nodes: pods are scheduled for real and Ready at once, but nothing runs in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from omni_cluster.state import load_state
from omni_runtime.cli.kubectl import REPOSITORY, SYSTEM_NAMESPACE, Kube, StepFailed, omni
from tests.e2e.conftest import conditions, eventually, fresh_namespace, pods
from tests.e2e.witness import by_node, kinds_of_nodes, planned, planned_places

pytestmark = pytest.mark.timeout(300)

PIPELINE = "qwen3-omni"
CLUSTER = "omni"
SIMULATED = ("nvidia.com/gpu=2x8", "amd.com/gpu=1x8", "huawei.com/Ascend910B=1x8")


@dataclass(frozen=True, slots=True)
class Vendor:
    """What one example must turn into."""

    profile: str
    example: str
    resource: str
    nodes: str  # prefix of the simulated nodes' names
    device_class: str
    thinker_devices: int
    visibility: str | None  # lets the second engine of a pod see the first one's devices

    def __str__(self) -> str:
        return self.profile


CUDA = Vendor(
    "cuda", "qwen3-omni", "nvidia.com/gpu", "kwok-nvidia-gpu-", "nvidia-h100-80gb", 2, "NVIDIA_VISIBLE_DEVICES"
)
ROCM = Vendor("rocm", "qwen3-omni.rocm", "amd.com/gpu", "kwok-amd-gpu-", "amd-mi300x", 1, None)
NPU = Vendor(
    "npu", "qwen3-omni.npu", "huawei.com/Ascend910B", "kwok-huawei-ascend910b-", "ascend-910b", 2,
    "ASCEND_VISIBLE_DEVICES",
)  # fmt: skip


@pytest.fixture(scope="module")
def simulated(kube: Kube) -> Iterator[Kube]:
    """The cluster with simulated nodes; afterwards it has those that it had before."""
    state = load_state(CLUSTER)
    if state.provider != "local":
        pytest.skip(f"simulated nodes need the provider local; cluster {CLUSTER!r} is {state.provider}")
    omni("cluster", "up", *_flags(SIMULATED))
    try:
        yield kube
    finally:
        omni("cluster", "up", *_flags(state.kwok_nodes or ("none",)))


def _flags(classes: tuple[str, ...]) -> list[str]:
    return [word for item in classes for word in ("--kwok-nodes", item)]


@dataclass(frozen=True, slots=True)
class Applied:
    """A vendor's example in a namespace of its own, all of its stage pods Ready."""

    kube: Kube
    namespace: str
    vendor: Vendor

    def pipeline(self) -> dict[str, Any]:
        return self.kube.get("-n", self.namespace, "omnipipeline", PIPELINE)

    def stage_pods(self, stage: str) -> list[dict[str, Any]]:
        return pods(self.kube, self.namespace, f"serving.omni.dev/pipeline={PIPELINE},serving.omni.dev/stage={stage}")

    def table(self, kind: str) -> list[dict[str, str]]:
        """`kubectl get`, as a person sees it: one mapping of column to cell per line."""
        header, *lines = self.kube.read("-n", self.namespace, "get", kind).splitlines()
        starts = [i for i, letter in enumerate(header) if letter != " " and (i == 0 or header[i - 1] == " ")]
        ends = [*starts[1:], None]
        names = header.split()
        return [
            {name: line[a:b].strip() for name, a, b in zip(names, starts, ends, strict=True)} for line in lines
        ]  # fmt: skip


@pytest.fixture(scope="module", params=[CUDA, ROCM, NPU], ids=str)
def applied(simulated: Kube, request: pytest.FixtureRequest) -> Iterator[Applied]:
    vendor: Vendor = request.param
    with fresh_namespace(simulated) as namespace:
        simulated.read("-n", namespace, "apply", "-f", f"examples/{vendor.example}.pipeline.yaml")
        found = Applied(simulated, namespace, vendor)
        eventually(lambda: True if stages_ready(found.pipeline()) == "3/3" else None, 60, "all stages ready")
        yield found


def stages_ready(pipeline: Mapping[str, Any]) -> str | None:
    text: str | None = (pipeline.get("status") or {}).get("stagesReady")
    return text


def devices_of(container: Mapping[str, Any]) -> dict[str, str]:
    """Extended resources of a container; requests and limits must agree, or the API server would have refused it."""
    return {name: amount for name, amount in container["resources"].get("limits", {}).items() if "/" in name}


def environment(container: Mapping[str, Any]) -> dict[str, str]:
    return {e["name"]: e["value"] for e in container.get("env", []) if "value" in e}


def test_the_thinker_holds_its_devices_on_a_node_of_its_vendor(applied: Applied) -> None:
    vendor = applied.vendor
    (pod,) = applied.stage_pods("thinker")
    (engine,) = pod["spec"]["containers"]
    assert devices_of(engine) == {vendor.resource: str(vendor.thinker_devices)}
    assert pod["spec"]["nodeName"].startswith(vendor.nodes)
    assert "OMNI_SHARED_DEVICE_OF" not in environment(engine)


def test_talker_and_code2wav_share_one_pod_and_its_device(applied: Applied) -> None:
    """Only one of the two asks the device plugin; the other is told whose device it is to use."""
    vendor = applied.vendor
    assert applied.stage_pods("code2wav") == []
    (pod,) = applied.stage_pods("talker")
    talker, code2wav = pod["spec"]["containers"]
    assert (talker["name"], code2wav["name"]) == ("engine", "engine-code2wav")
    assert devices_of(talker) == {vendor.resource: "1"}
    assert devices_of(code2wav) == {}
    told = environment(code2wav)
    assert told["OMNI_SHARED_DEVICE_OF"] == "talker"
    if vendor.visibility:
        assert told[vendor.visibility] == "all"
    assert pod["spec"]["nodeName"].startswith(vendor.nodes)


def test_pods_are_on_the_nodes_that_the_check_would_give_them(applied: Applied) -> None:
    """Of two equal nodes the scheduler may choose; test_placement.py leaves it no choice."""
    devices = {"thinker": applied.vendor.thinker_devices, "talker": 1}
    made = [(stage, pod["spec"]["nodeName"]) for stage in devices for pod in applied.stage_pods(stage)]
    kinds = kinds_of_nodes(applied.kube)
    places = planned_places(planned(applied.kube, f"examples/{applied.vendor.example}.pipeline.yaml"))
    assert {(group, kinds[node]) for group, node in made} == {(group, kinds[node]) for group, node in places}
    if applied.vendor is not CUDA:
        assert by_node(made, devices, kinds) == by_node(places, devices, kinds)


@pytest.mark.parametrize("stage", ["thinker", "talker"])
def test_pods_follow_the_profile(applied: Applied, stage: str) -> None:
    """Images, node selector and tolerations are the profile's, not the pipeline's; the connector asks for no device."""
    profile = applied.kube.get("omniruntimeprofile", applied.vendor.profile)["spec"]
    (device,) = [d for d in profile["deviceClasses"] if d["name"] == applied.vendor.device_class]
    (pod,) = applied.stage_pods(stage)
    (connector,) = pod["spec"]["initContainers"]
    assert (connector["name"], connector["restartPolicy"]) == ("connector", "Always")
    assert devices_of(connector) == {}
    assert connector["image"] == profile["images"]["connector"]
    assert {c["image"] for c in pod["spec"]["containers"]} == {profile["images"]["runtime"]}
    assert pod["spec"]["nodeSelector"] == device["nodeSelector"]
    node = applied.kube.get("node", pod["spec"]["nodeName"])
    assert device["nodeSelector"].items() <= node["metadata"]["labels"].items()
    tolerated = {t.get("key") for t in pod["spec"]["tolerations"]}
    assert {taint["key"] for taint in node["spec"]["taints"]} <= tolerated


def test_the_pipeline_is_ready_exactly_where_its_entry_can_run(applied: Applied) -> None:
    """The entry asks for no device, so it may land on a real node; there the image is missing, and Ready must say so."""
    (entry,) = applied.stage_pods("entry")
    assert devices_of(entry["spec"]["containers"][0]) == {}
    simulated = entry["spec"]["nodeName"].startswith("kwok-")

    def settled() -> dict[str, dict[str, Any]] | None:
        found = conditions(applied.pipeline())
        over = found["Ready"]["status"] == "True" if simulated else found["Ready"]["message"].startswith("entry:")
        return found if over else None

    found = eventually(settled, 60, "Ready, or a Ready condition that speaks of the entry")
    assert found["Ready"]["status"] == found["Serving"]["status"] == str(simulated)
    assert found["Ready"]["reason"] in {"AllStagesReady", "ImagePullFailed"}
    assert found["PlacementFeasible"]["status"] == "True"
    assert found["ConnectorsReady"]["status"] == "True"


def test_kubectl_get_reads_well(applied: Applied) -> None:
    (pipeline,) = applied.table("omnipipelines")
    assert (pipeline["NAME"], pipeline["STAGES"]) == (PIPELINE, "3/3")
    stages = {line["STAGE"]: line for line in applied.table("omnistages")}
    assert list(stages) == ["code2wav", "talker", "thinker"]
    assert {(line["DESIRED"], line["READY"]) for line in stages.values()} == {("1", "1")}
    vendor = applied.vendor
    assert stages["thinker"]["DEVICE"].startswith(f"{vendor.thinker_devices} x {vendor.device_class}")
    assert stages["code2wav"]["DEVICE"].startswith(f"1 x {vendor.device_class}")


def test_four_thinkers_spread_over_both_nodes(simulated: Kube) -> None:
    with fresh_namespace(simulated) as namespace:
        simulated.read("-n", namespace, "apply", "-f", f"examples/{CUDA.example}.pipeline.yaml")
        applied = Applied(simulated, namespace, CUDA)
        eventually(lambda: True if stages_ready(applied.pipeline()) == "3/3" else None, 60, "all stages ready")
        simulated.read("-n", namespace, "scale", f"omnistage/{PIPELINE}-thinker", "--replicas=4")

        def four() -> list[dict[str, Any]] | None:
            stage = simulated.get("-n", namespace, "omnistage", f"{PIPELINE}-thinker")
            return applied.stage_pods("thinker") if stage["status"].get("readyReplicas") == 4 else None

        nodes = [pod["spec"]["nodeName"] for pod in eventually(four, 60, "four ready thinkers")]
        assert sorted(nodes.count(node) for node in set(nodes)) == [2, 2]


def test_a_device_that_no_node_has_is_refused_and_named(simulated: Kube, tmp_path: Path) -> None:
    """Refused at apply. The world changes afterwards, too: then the condition quotes the scheduler."""
    text = (REPOSITORY / "examples" / f"{CUDA.example}.pipeline.yaml").read_text()
    manifest = tmp_path / "pipeline.yaml"
    manifest.write_text(text.replace(CUDA.device_class, "nvidia-h200"))
    with fresh_namespace(simulated) as namespace:
        with pytest.raises(StepFailed):
            simulated.read("-n", namespace, "apply", "-f", str(manifest))
        # Past admission, as if the nodes had gone since.
        operator = f"system:serviceaccount:{SYSTEM_NAMESPACE}:omni-operator"
        unasked = ("--as", operator, "--as-group", "system:masters")
        simulated.read("-n", namespace, "apply", "-f", str(manifest), *unasked)
        applied = Applied(simulated, namespace, CUDA)

        def unplaced() -> dict[str, Any] | None:
            found = conditions(applied.pipeline()).get("PlacementFeasible")
            return found if found and found["status"] == "False" else None

        found = eventually(unplaced, 60, "PlacementFeasible=False")
        assert found["reason"] == "Unschedulable"
        assert "thinker" in found["message"] and "node" in found["message"]

        def shown() -> bool | None:
            (line,) = applied.table("omnipipelines")
            return True if (line["READY"], line["REASON"]) == ("False", "Unschedulable") else None

        eventually(shown, 30, "kubectl get says that it is unschedulable")
