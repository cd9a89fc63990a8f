"""Simulated accelerator nodes. KWOK answers for their kubelets: pods bound to them become Ready by themselves."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from omni_cluster import pki
from omni_cluster.build import KWOK, module_files
from omni_cluster.control_plane import Layout, Ports
from omni_cluster.errors import InvalidArgument
from omni_cluster.kubeconfig import write_kubeconfig
from omni_cluster.kubectl import Kubectl, node_problem
from omni_cluster.network import ClusterNetwork
from omni_cluster.pki import KeyPair, Subject
from omni_cluster.probe import wait_until
from omni_cluster.processes import ProcessSpec, Supervisor, write_atomically
from omni_cluster.progress import step

COMPONENT = "kwok"
NODE_TYPE = "kwok"
_ANNOTATION = "kwok.x-k8s.io/node"
_CLASS = re.compile(r"(?P<resource>[a-z0-9.-]+/[A-Za-z0-9._-]+)=(?P<count>\d+)(?:[x:](?P<devices>\d+))?")

# KWOK's own default behaviour, from its module: nodes and pods become Ready at once, Jobs complete.
_STAGES = (
    "kustomize/stage/node/fast/node-initialize.yaml",
    "kustomize/stage/node/heartbeat-with-lease/node-heartbeat-with-lease.yaml",
    "kustomize/stage/pod/fast/pod-ready.yaml",
    "kustomize/stage/pod/fast/pod-complete.yaml",
    "kustomize/stage/pod/fast/pod-delete.yaml",
)

# What the device plugin or feature discovery of each vendor puts on a real node of a common kind.
_VENDOR_LABELS: Mapping[str, Mapping[str, str]] = {
    "nvidia.com/gpu": {
        "nvidia.com/gpu.present": "true",
        "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
        "nvidia.com/gpu.memory": "81559",
        "nvidia.com/gpu.family": "hopper",
        "nvidia.com/mig.capable": "true",
    },
    "amd.com/gpu": {"amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM", "amd.com/gpu.vram": "192G"},
    "huawei.com/Ascend910": {"accelerator": "huawei-Ascend910", "node.kubernetes.io/npu.chip.name": "910B"},
    "huawei.com/Ascend910B": {"accelerator": "huawei-Ascend910", "node.kubernetes.io/npu.chip.name": "910B"},
}


@dataclass(frozen=True, slots=True)
class NodeClass:
    """Equal simulated nodes: `count` nodes with `devices` of an extended resource each."""

    resource: str
    count: int
    devices: int = 8
    labels: Mapping[str, str] = field(default_factory=dict)
    cpu: str = "192"
    memory: str = "2Ti"
    zone: str = "local-a"


def parse_class(text: str) -> tuple[NodeClass, ...]:
    """`nvidia.com/gpu=4x8` (four nodes of eight), `nvidia.com/gpu=4`, or a YAML file with a list of classes.

    A file holds entries like {resource: nvidia.com/gpu, count: 4, devices: 8, labels: {...}, cpu, memory, zone}.
    Raises InvalidArgument that names what is wrong.
    """
    if found := _CLASS.fullmatch(text):
        return (NodeClass(found["resource"], int(found["count"]), int(found["devices"] or 8)),)
    path = Path(text)
    if not path.is_file():
        raise InvalidArgument(
            "--kwok-nodes", text, "is neither RESOURCE=COUNT[xDEVICES] nor a file", "write e.g. nvidia.com/gpu=4x8"
        )
    entries = yaml.safe_load(path.read_text())
    if not isinstance(entries, list):
        raise InvalidArgument("--kwok-nodes", text, "holds no list", "write one entry a class: - {resource, count}")
    classes = []
    for position, entry in enumerate(entries):
        try:
            classes.append(NodeClass(**entry))
        except TypeError as error:
            raise InvalidArgument(
                f"--kwok-nodes {text}[{position}]", entry, f"is no node class ({error})",
                "use resource, count, devices, labels, cpu, memory, zone",
            ) from error  # fmt: skip
    return tuple(classes)


def build_nodes(classes: tuple[NodeClass, ...]) -> tuple[dict[str, Any], ...]:
    """Node objects of all classes; names are stable, so that a second `up` finds them."""
    counters: dict[str, int] = {}
    built = []
    for item in classes:
        slug = re.sub(r"[^a-z0-9]+", "-", item.resource.lower().replace(".com", "")).strip("-")
        for _ in range(item.count):
            number = counters[slug] = counters.get(slug, -1) + 1
            built.append(_build_node(f"kwok-{slug}-{number}", item))
    return tuple(built)


def _build_node(name: str, item: NodeClass) -> dict[str, Any]:
    amounts = {"cpu": item.cpu, "memory": item.memory, "pods": "256", "ephemeral-storage": "4Ti"}
    amounts[item.resource] = str(item.devices)
    labels = {
        "kubernetes.io/hostname": name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
        "topology.kubernetes.io/region": "local",
        "topology.kubernetes.io/zone": item.zone,
        "node.kubernetes.io/instance-type": f"kwok.{item.resource.replace('/', '-').lower()}.{item.devices}x",
        "type": NODE_TYPE,
        **_VENDOR_LABELS.get(item.resource, {}),
        **({"nvidia.com/gpu.count": str(item.devices)} if item.resource == "nvidia.com/gpu" else {}),
        **item.labels,
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels, "annotations": {_ANNOTATION: "fake"}},
        # Only pods that ask for the device come here: the API server gives those the toleration.
        "spec": {"taints": [{"key": item.resource, "value": "present", "effect": "NoSchedule"}]},
        "status": {"capacity": amounts, "allocatable": amounts},
    }


def plan_nodes(
    wanted: tuple[dict[str, Any], ...], existing: Mapping[str, dict[str, Any]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Steps (`create` or `delete`, node) from what is there to what is wanted; a changed node is replaced."""
    names = {node["metadata"]["name"] for node in wanted}
    for name, node in existing.items():
        if name not in names:
            yield "delete", node
    for node in wanted:
        old = existing.get(node["metadata"]["name"])
        if old is None:
            yield "create", node
        elif not _equal(node, old):
            yield "delete", old
            yield "create", node


def _equal(wanted: dict[str, Any], old: dict[str, Any]) -> bool:
    labels = old["metadata"].get("labels", {})
    capacity = old.get("status", {}).get("capacity", {})
    return all(labels.get(key) == value for key, value in wanted["metadata"]["labels"].items()) and all(
        capacity.get(key) == value for key, value in wanted["status"]["capacity"].items()
    )


def ensure_stages(program: Path) -> tuple[Path, str]:
    """The file of KWOK's default stages, kept beside the program: path and content."""
    path = program.with_name("stages.yaml")
    if not path.exists():
        write_atomically(path, "\n---\n".join(module_files(KWOK, _STAGES)), 0o644)
    return path, path.read_text()


def ensure_kwok(
    texts: tuple[str, ...],
    layout: Layout,
    ports: Ports,
    addresses: ClusterNetwork,
    supervisor: Supervisor,
    kubectl: Kubectl,
    program: Path,
) -> None:
    """Run KWOK and bring its nodes to what `texts` say; with none, remove them and stop it."""
    folder = layout.root / "pki"
    authority = KeyPair(folder / "ca.crt", folder / "ca.key")
    client = pki.ensure_certificate(folder, "kwok", authority, Subject("kwok", ("system:masters",)))
    access = layout.root / "conf" / "kwok.kubeconfig"
    text = write_kubeconfig(access, "kwok", f"https://127.0.0.1:{ports.apiserver}", authority.cert, client)
    stages, stages_text = ensure_stages(program)
    argv = (
        str(program), f"--kubeconfig={access}", f"--config={stages}", "--manage-all-nodes=false",
        f"--manage-nodes-with-annotation-selector={_ANNOTATION}=fake", f"--cidr={addresses.kwok_pod_cidr}",
        f"--node-ip={addresses.host_address}", "--node-lease-duration-seconds=40",
    )  # fmt: skip
    wanted = build_nodes(tuple(item for text_ in texts for item in parse_class(text_)))
    log = layout.root / "logs" / "kwok.log"
    if wanted:
        supervisor.ensure(ProcessSpec(COMPONENT, argv, log, inputs=(text, stages_text)))
    with step(f"{len(wanted)} simulated nodes Ready") as waiting_for:
        listed = kubectl.get("nodes", "-l", f"type={NODE_TYPE}")["items"]
        for action, node in plan_nodes(wanted, {item["metadata"]["name"]: item for item in listed}):
            if action == "delete":
                kubectl.run("delete", "node", node["metadata"]["name"])
            else:
                kubectl.run("create", "-f", "-", stdin=json.dumps(node))

        def problem() -> str | None:
            if wanted:
                supervisor.require_alive(COMPONENT)
            for item in kubectl.get("nodes", "-l", f"type={NODE_TYPE}")["items"]:
                if found := node_problem(item):
                    return f"{item['metadata']['name']}: {found}"
            return None

        wait_until("simulated nodes are Ready", problem, seconds=60, log=log, show=waiting_for)
    if not wanted:
        supervisor.stop(COMPONENT)
