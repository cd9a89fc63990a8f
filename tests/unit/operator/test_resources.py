"""Builders: what the pods look like, guarded by a golden file; names and selectors under hostile input."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_crds.v1alpha1.pipeline import OmniPipeline
from omni_crds.v1alpha1.runtimeprofile import OmniRuntimeProfile
from omni_operator.names import child_name, pipeline_label, stage_deployment_name
from omni_operator.resources.child import Scope
from omni_operator.resources.config import build_plan_config_map
from omni_operator.resources.deployment import build_entry_deployment, build_stage_deployment
from omni_operator.resources.network_policy import build_stage_policy
from omni_operator.resources.pod import RUN_AS, container_security
from omni_operator.resources.service import build_entry_control_service, build_stage_service
from omni_operator.resources.stage_pod import SIDECAR_CPU
from omni_runtime.deploy.plan import ResolvedPlan, load_plan
from omni_runtime.deploy.resolve import resolve
from tests.unit.operator.world import a_pipeline, a_profile

GOLDEN = Path(__file__).parent / "golden" / "pod_templates.json"
SCOPE = Scope("p", "ns")


def plan(resource: str | None = None, **spec: Any) -> ResolvedPlan:
    if resource is not None:  # packaged weights are in the CPU image only
        spec = {"model": {"uri": "hf://Qwen/Qwen3-Omni-30B-A3B-Instruct"}, "topology": "qwen3_omni_moe", **spec}
    profile = OmniRuntimeProfile.model_validate(a_profile(resource=resource))
    pipeline = OmniPipeline.model_validate(a_pipeline(**spec))
    return resolve(pipeline, {"cpu": profile}, target="kubernetes")


def stage_pod(resolved: ResolvedPlan, leader: str) -> dict[str, Any]:
    deployment = build_stage_deployment(SCOPE, resolved, resolved.pod_groups()[leader], 1)
    return deployment.body["spec"]["template"]["spec"]  # type: ignore[no-any-return]


VOICE = [
    {"name": "talker", "podGroup": "voice", "accelerator": {"class": "cpu", "count": 1, "memoryFraction": "0.6"}},
    {"name": "code2wav", "podGroup": "voice", "accelerator": {"class": "cpu", "count": 1, "memoryFraction": "0.3"}},
]


def test_pod_templates_are_the_golden_ones() -> None:
    """T10: a change here restarts every pod of every pipeline when the operator is upgraded: only ever on purpose.

    To accept a change: OMNI_UPDATE_GOLDEN=1, and say in the changelog that pods restart.
    """
    resolved = plan()
    made = {
        "stage": build_stage_deployment(SCOPE, resolved, resolved.pod_groups()["talker"], 1).body["spec"]["template"],
        "entry": build_entry_deployment(SCOPE, resolved).body["spec"]["template"],
    }
    text = json.dumps(made, indent=1, sort_keys=True).replace(resolved.revision, "REVISION") + "\n"
    if os.environ.get("OMNI_UPDATE_GOLDEN"):
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_every_container_meets_pod_security_restricted() -> None:
    """T74."""
    resolved = plan(stages=VOICE)
    pods = [stage_pod(resolved, leader) for leader in resolved.pod_groups()]
    pods.append(build_entry_deployment(SCOPE, resolved).body["spec"]["template"]["spec"])
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        assert not any("hostPath" in volume for volume in pod["volumes"])
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            security = container["securityContext"]
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"]
            assert {"name": "HOME", "value": "/tmp"} in container["env"]
            assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("drain", [0, 60, 600])
def test_grace_is_longer_than_the_drain(drain: int) -> None:
    """T45: SIGKILL never comes in the middle of a drain; the entry also waits for endpoints to forget it."""
    resolved = plan(drain={"timeoutSeconds": drain})
    assert stage_pod(resolved, "talker")["terminationGracePeriodSeconds"] > drain
    entry = build_entry_deployment(SCOPE, resolved).body["spec"]["template"]["spec"]
    pause = entry["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert entry["terminationGracePeriodSeconds"] > drain + pause


def test_the_sidecar_is_native_and_holds_the_arena() -> None:
    resolved = plan()
    pod = stage_pod(resolved, "talker")
    (sidecar,) = pod["initContainers"]
    assert sidecar["restartPolicy"] == "Always"
    arena = int(sidecar["args"][sidecar["args"].index("--arena-bytes") + 1])
    shm = next(v for v in pod["volumes"] if v["name"] == "shm")["emptyDir"]
    assert shm["medium"] == "Memory"
    assert int(shm["sizeLimit"]) > arena
    assert int(sidecar["resources"]["limits"]["memory"]) > arena


def test_one_pod_per_group_one_engine_per_stage_one_device() -> None:
    """Stages that share a device: only one container may request it; the others are told whose it is."""
    resolved = plan(resource="nvidia.com/gpu", stages=VOICE)
    pod = stage_pod(resolved, "talker")
    leader, follower = pod["containers"]
    assert (leader["name"], follower["name"]) == ("engine", "engine-code2wav")
    assert leader["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert "nvidia.com/gpu" not in follower["resources"]["limits"]
    env = {e["name"]: e.get("value") for e in follower["env"]}
    assert env["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert env["OMNI_SHARED_DEVICE_OF"] == "talker"
    ports = [c["ports"][0]["containerPort"] for c in pod["containers"]]
    assert len(set(ports)) == 2
    assert len(pod["initContainers"]) == 1


@pytest.mark.parametrize(
    "resource", ["nvidia.com/gpu", "amd.com/gpu", "huawei.com/Ascend910B", "nvidia.com/mig-1g.10gb"]
)
def test_extended_resources_of_every_vendor(resource: str) -> None:
    """T75."""
    stages = [{"name": "thinker", "accelerator": {"class": "cpu", "count": 2}, "parallelism": {"tensor": 2}}]
    pod = stage_pod(plan(resource=resource, stages=stages), "thinker")
    resources = pod["containers"][0]["resources"]
    assert resources["limits"][resource] == resources["requests"][resource] == "2"


def test_more_engines_than_ports_below_the_sidecar() -> None:
    from omni_operator.resources.stage_pod import engine_port

    ports = [engine_port(i) for i in range(16)]
    assert len(set(ports)) == 16
    assert 8089 not in ports


def test_model_volumes() -> None:
    pod = stage_pod(plan(model={"uri": "pvc://weights/qwen"}), "thinker")
    assert {"name": "model", "persistentVolumeClaim": {"claimName": "weights", "readOnly": True}} in pod["volumes"]
    mounts = pod["containers"][0]["volumeMounts"]
    assert {"name": "model", "mountPath": "/models/weights", "readOnly": True} in mounts


NODE_VOLUME = {"name": "node", "hostPath": {"path": "/run/omni", "type": "Directory"}}
NODE_MOUNT = {"name": "node", "mountPath": "/run/omni-node"}


class TestFolderOfTheNode:
    def users(self, leader: str, *, folder: bool = True, **spec: Any) -> list[str]:
        """Containers of the pod that see the folder; the pod has either all of it or nothing of it."""
        body = a_profile()
        if folder:
            body["spec"]["nodeLocalVolume"] = {"hostPath": "/run/omni"}
        pipeline = OmniPipeline.model_validate(a_pipeline(**spec))
        resolved = resolve(pipeline, {"cpu": OmniRuntimeProfile.model_validate(body)}, target="kubernetes")
        pod = stage_pod(resolved, leader)
        containers = [*pod["initContainers"], *pod["containers"]]
        mounted = [c["name"] for c in containers if NODE_MOUNT in c["volumeMounts"]]
        told = [c["name"] for c in containers if "--node-dir" in c["args"]]
        for container in containers:
            args = container["args"]
            assert [args[i + 1] for i, a in enumerate(args) if a == "--node-dir"] in ([], ["/run/omni-node"])
        assert mounted == told
        assert [v for v in pod["volumes"] if "hostPath" in v] == ([NODE_VOLUME] if mounted else [])
        return mounted

    def test_both_ends_of_an_edge_have_it_in_every_container(self) -> None:
        """The kubelet must not make it (type Directory): a folder of root's refuses every pod, and none would say so."""
        assert [self.users(leader) for leader in ("thinker", "talker", "code2wav")] == 3 * [["connector", "engine"]]
        assert self.users("talker", stages=VOICE) == ["connector", "engine", "engine-code2wav"]

    def test_pods_without_such_an_edge_have_nothing(self) -> None:
        """T74: a volume of the node only where it is used; other pods stay within the restricted standard."""
        tcp = [{"from": "thinker", "to": "talker", "connector": {"type": "TCP"}}]
        assert self.users("thinker", edges=tcp) == []
        assert self.users("talker", edges=tcp) == ["connector", "engine"]
        assert self.users("talker", edges=tcp, stages=VOICE) == []
        assert self.users("talker", folder=False) == []


class TestRdma:
    RDMA = {"protocol": "RDMA", "devices": ["mlx5_1", "mlx5_0"], "resource": {"name": "rdma/hca", "count": 2}}  # noqa: RUF012

    def sidecar(self, leader: str, mooncake: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
        """The connector's container; no other container of the pod ever has a part in it."""
        body = a_profile()
        body["spec"] |= {"connectors": ["SharedMemory", "TCP", "Mooncake"], "mooncake": mooncake or self.RDMA}
        pipeline = OmniPipeline.model_validate(a_pipeline(**spec))
        resolved = resolve(pipeline, {"cpu": OmniRuntimeProfile.model_validate(body)}, target="kubernetes")
        pod = stage_pod(resolved, leader)
        for engine in pod["containers"]:
            assert engine["securityContext"] == container_security()
            assert not {"rdma/hca"} & {*engine["resources"]["requests"], *engine["resources"]["limits"]}
            assert not any(e["name"].startswith("OMNI_MOONCAKE") for e in engine["env"])
        assert pod["securityContext"]["runAsUser"] == RUN_AS
        (sidecar,) = pod["initContainers"]
        return sidecar  # type: ignore[no-any-return]

    @pytest.mark.parametrize("leader", ["thinker", "talker", "code2wav"])
    def test_the_connector_has_devices_and_may_lock_memory(self, leader: str) -> None:
        """What the sidecar reads (`sidecar.py`), and no more of root than it takes to lock memory."""
        sidecar = self.sidecar(leader)
        env = {e["name"]: e.get("value") for e in sidecar["env"]}
        assert env["OMNI_MOONCAKE_PROTOCOL"] == "rdma"
        assert env["OMNI_MOONCAKE_DEVICE"] == "mlx5_0,mlx5_1"
        resources = sidecar["resources"]
        assert resources["requests"]["rdma/hca"] == resources["limits"]["rdma/hca"] == "2"
        assert resources["requests"]["cpu"] == SIDECAR_CPU
        assert sidecar["securityContext"] == {
            **container_security(),
            "runAsNonRoot": False,
            "runAsUser": 0,
            "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK", "SETUID"]},
        }
        assert sidecar["args"][sidecar["args"].index("--run-as") + 1] == str(RUN_AS)

    def test_what_a_profile_does_not_say_is_left_to_the_nodes(self) -> None:
        sidecar = self.sidecar("talker", {"protocol": "RDMA"})
        names = [e["name"] for e in sidecar["env"]]
        assert "OMNI_MOONCAKE_PROTOCOL" in names
        assert "OMNI_MOONCAKE_DEVICE" not in names
        assert set(sidecar["resources"]["limits"]) == {"memory"}
        assert sidecar["securityContext"]["capabilities"]["add"] == ["IPC_LOCK", "SETUID"]

    def test_pods_that_send_nothing_by_it_are_as_before(self) -> None:
        """T74: they stay within the restricted standard, and take no device from those that need one."""
        tcp = [
            {"from": a, "to": b, "connector": {"type": "TCP"}}
            for a, b in (("thinker", "talker"), ("talker", "code2wav"))
        ]
        plain = self.sidecar("talker", {"protocol": "TCP"})
        assert self.sidecar("thinker", edges=tcp[:1]) == self.sidecar("thinker", {"protocol": "TCP"}, edges=tcp[:1])
        assert self.sidecar("talker", edges=tcp[:1]) != plain, "its other edge is Mooncake's"
        assert self.sidecar("talker", edges=tcp) == plain
        inside = [*tcp[:1], {"from": "talker", "to": "code2wav", "connector": {"type": "Mooncake"}}]
        assert "--run-as" not in self.sidecar("talker", edges=inside, stages=VOICE)["args"]
        assert plain["securityContext"] == container_security()
        assert not any(e["name"].startswith("OMNI_MOONCAKE") for e in plain["env"])


def test_stored_plan_is_what_the_revision_hashes() -> None:
    """The ConfigMap is immutable: replicas and origins, which may change within a revision, stay out."""
    one = plan(stages=[{"name": "talker", "replicas": 1}])
    two = plan(stages=[{"name": "talker", "replicas": 2}])
    assert one.revision == two.revision
    first, second = (build_plan_config_map(SCOPE, p) for p in (one, two))
    assert first.body == second.body
    assert load_plan(first.body["data"]["plan.json"].encode()).revision == one.revision


def test_registration_works_before_readiness() -> None:
    """T73: the entry becomes Ready by the registration of stages, so its control address must resolve before that."""
    assert build_entry_control_service(SCOPE).body["spec"]["publishNotReadyAddresses"] is True


def test_data_port_only_for_consumers() -> None:
    rules = build_stage_policy(SCOPE, "thinker", {"talker"}).body["spec"]["ingress"]
    data = next(r for r in rules if r["ports"] == [{"port": 5600, "protocol": "TCP"}])
    assert data["from"][0]["podSelector"]["matchExpressions"][0]["values"] == ["talker"]
    assert all(p["port"] != 5610 for rule in rules for p in rule["ports"])
    rules = build_stage_policy(SCOPE, "thinker", {"talker", "vocoder"}, {"vocoder"}).body["spec"]["ingress"]
    fetched = next(r for r in rules if r["ports"] == [{"port": 5610, "endPort": 5641, "protocol": "TCP"}])
    assert fetched["from"][0]["podSelector"]["matchExpressions"][0]["values"] == ["vocoder"]
    alone = build_stage_policy(SCOPE, "code2wav", set()).body["spec"]["ingress"]
    assert all(p["port"] != 5600 for rule in alone for p in rule["ports"])


NAMES = st.from_regex(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", fullmatch=True)
LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")


@given(pipeline=NAMES, stage=st.from_regex(r"[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?", fullmatch=True))
def test_names_fit_whatever_the_pipeline_is_called(pipeline: str, stage: str) -> None:
    """T4, T5: up to 253 characters, dots, leading digits: every child name is a DNS-1035 label, every label value fits."""
    for name in (
        child_name(pipeline),
        child_name(pipeline, stage),
        stage_deployment_name(pipeline, stage, "0123456789"),
    ):
        assert LABEL.fullmatch(name), name
    assert len(pipeline_label(pipeline)) <= 63
    service = build_stage_service(Scope(pipeline, "ns"), stage, stage, 0)
    assert all(len(v) <= 63 for v in service.body["metadata"]["labels"].values())
    assert service.body["metadata"]["annotations"]["serving.omni.dev/pipeline"] == pipeline


@given(first=NAMES, second=NAMES)
def test_different_pipelines_never_share_a_name(first: str, second: str) -> None:
    if first != second:
        assert child_name(first) != child_name(second)


def test_dots_and_dashes_do_not_meet() -> None:
    assert child_name("a.b") != child_name("a-b") == "a-b"
    assert child_name("a.b").startswith("a-b-")
    assert child_name("1model").startswith("p-1model-")
