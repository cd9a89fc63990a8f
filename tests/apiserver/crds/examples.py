"""What each CEL rule of the schemas accepts and refuses, and how an object is made that keeps it. A rule without an entry
here fails the tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Node = dict[str, Any]


@dataclass(frozen=True)
class RuleExamples:
    """Nodes are merged onto the smallest valid object at the place of the rule. `repair` makes a random node keep it."""

    accepted: tuple[Node, ...]
    refused: tuple[Node, ...]
    repair: Callable[[Node], Node]
    before: Node | None = None
    """For rules about changes: what was stored."""


def without(*fields: str) -> Callable[[Node], Node]:
    return lambda node: {k: v for k, v in node.items() if k not in fields}


def ordered(low: str, high: str) -> Callable[[Node], Node]:
    def repair(node: Node) -> Node:
        if low in node and high in node and node[low] > node[high]:
            return {**node, low: node[high], high: node[low]}
        return node

    return repair


def _map_list(field: str, change: Callable[[Node], Node]) -> Callable[[Node], Node]:
    return lambda node: {**node, field: [change(item) for item in node[field]]} if field in node else node


def _fit_parallelism(node: Node) -> Node:
    sizes = node.get("parallelism", {})
    needed = sizes.get("tensor", 1) * sizes.get("pipeline", 1)
    if needed > node.get("accelerator", {}).get("count", needed):
        return without("parallelism")(node)
    return node


def _give_engines(node: Node) -> Node:
    return _map_list("stages", lambda s: {"engine": "ar_vllm", **s})(node) if _is_custom(node) else node


def _give_stages(node: Node) -> Node:
    return node if node.get("stages") or not _is_custom(node) else {**node, "topology": "qwen3_omni_moe"}


def _join_known_stages(node: Node) -> Node:
    if not _is_custom(node) or "edges" not in node:
        return node
    names = {s["name"] for s in node.get("stages", ())}
    return {**node, "edges": [e for e in node["edges"] if {e["from"], e["to"]} <= names]}


def _drop_payloads(node: Node) -> Node:
    return node if _is_custom(node) else _map_list("edges", without("payload"))(node)


def _count_once_per_group(node: Node) -> Node:
    """The first stage of a group keeps its count."""
    counted: set[str] = set()

    def change(stage: Node) -> Node:
        group = stage.get("podGroup")
        if group is None or not stage.keys() & {"replicas", "scaling"}:
            return stage
        if group in counted:
            return without("replicas", "scaling")(stage)
        counted.add(group)
        return stage

    return _map_list("stages", change)(node)


def _is_custom(node: Node) -> bool:
    return node.get("topology") == "custom"


def _one_model_cache(node: Node) -> Node:
    return without("hostPath")(node) if "persistentVolumeClaim" in node else node


def _known_default_class(node: Node) -> Node:
    names = {c["name"] for c in node["deviceClasses"]}
    return node if node.get("defaultDeviceClass") in names else without("defaultDeviceClass")(node)


def _no_auto(node: Node) -> Node:
    return {**node, "connectors": [c for c in node["connectors"] if c != "Auto"]} if "connectors" in node else node


def _listed_mooncake(node: Node) -> Node:
    return node if "Mooncake" in node.get("connectors", ()) else without("mooncake")(node)


def _no_rdma_over_tcp(node: Node) -> Node:
    return node if node.get("protocol") == "RDMA" else without("devices", "resource")(node)


def _other_ends(node: Node) -> Node:
    return {**node, "to": node["to"][:30] + "-x"} if node["from"] == node["to"] else node


def _whole_payload_has_no_chunks(node: Node) -> Node:
    return without("chunk")(node) if node.get("mode", "asyncChunk") != "asyncChunk" else node


def _not_itself(node: Node) -> Node:
    return without("colocatedWith")(node) if node.get("colocatedWith") == node["stageName"] else node


def _keyless_toleration_exists(node: Node) -> Node:
    return node if "key" in node else {**without("value")(node), "operator": "Exists"}


def _exists_has_no_value(node: Node) -> Node:
    return without("value")(node) if node.get("operator") == "Exists" else node


A, B = {"name": "a", "engine": "ar_vllm"}, {"name": "b", "engine": "hibari_acoustic"}
EDGE = {"from": "a", "to": "b"}

RULES: dict[str, RuleExamples] = {
    "uri must not contain '..': name the folder itself": RuleExamples(
        accepted=({"uri": "file:///a.b/.c"}, {"uri": "hf://a/b.c"}),
        refused=({"uri": "file:///a/../b"}, {"uri": "pvc://c/.."}),
        repair=lambda node: {**node, "uri": node["uri"].replace("..", "-")},
    ),
    "minReplicas must not be above maxReplicas": RuleExamples(
        accepted=({"minReplicas": 0, "maxReplicas": 1}, {"minReplicas": 3, "maxReplicas": 3}),
        refused=({"minReplicas": 2, "maxReplicas": 1}, {"minReplicas": 1000, "maxReplicas": 999}),
        repair=ordered("minReplicas", "maxReplicas"),
    ),
    "value must be absent with operator Exists": RuleExamples(
        accepted=({"key": "k", "operator": "Exists"}, {"key": "k", "operator": "Equal", "value": "v"}),
        refused=({"key": "k", "operator": "Exists", "value": "v"}, {"operator": "Exists", "value": ""}),
        repair=_exists_has_no_value,
    ),
    "a toleration without a key needs operator Exists": RuleExamples(
        accepted=({"operator": "Exists"}, {"operator": "Equal", "key": "k"}),
        refused=({"operator": "Equal"}, {"operator": "Equal", "value": "v"}),
        repair=_keyless_toleration_exists,
    ),
    "replicas and scaling exclude each other: set replicas for a fixed count, scaling for a range": RuleExamples(
        accepted=({"replicas": 2}, {"scaling": {"minReplicas": 1, "maxReplicas": 2}}, {}),
        refused=({"replicas": 2, "scaling": {"minReplicas": 1, "maxReplicas": 2}},),
        repair=lambda node: without("scaling")(node) if "replicas" in node else node,
    ),
    "parallelism needs tensor * pipeline devices: raise accelerator.count or leave it out": RuleExamples(
        accepted=(
            {"accelerator": {"class": "h100", "count": 4}, "parallelism": {"tensor": 2, "pipeline": 2}},
            {"accelerator": {"class": "h100", "count": 1}, "parallelism": {}},
            {"accelerator": {"class": "h100"}, "parallelism": {"tensor": 8}},
            {"parallelism": {"tensor": 8}},
        ),
        refused=(
            {"accelerator": {"class": "h100", "count": 3}, "parallelism": {"tensor": 2, "pipeline": 2}},
            {"accelerator": {"class": "h100", "count": 1}, "parallelism": {"tensor": 2}},
            {"accelerator": {"class": "h100", "count": 1}, "parallelism": {"pipeline": 2}},
        ),
        repair=_fit_parallelism,
    ),
    "initialFrames must not be above frames: the first chunk is the small one, it sets the TTFP": RuleExamples(
        accepted=({"initialFrames": 4, "frames": 25}, {"initialFrames": 25, "frames": 25}, {"initialFrames": 99}),
        refused=({"initialFrames": 26, "frames": 25},),
        repair=ordered("initialFrames", "frames"),
    ),
    "an edge must join two different stages": RuleExamples(
        accepted=({"from": "a", "to": "b"},), refused=({"from": "a", "to": "a"},), repair=_other_ends
    ),
    "chunk has a meaning only with mode asyncChunk": RuleExamples(
        accepted=({"chunk": {"frames": 1}}, {"chunk": {}, "mode": "asyncChunk"}, {"mode": "fullPayload"}),
        refused=({"chunk": {"frames": 1}, "mode": "fullPayload"},),
        repair=_whole_payload_has_no_chunks,
    ),
    "topology custom needs its stages spelled out": RuleExamples(
        accepted=({"topology": "custom", "stages": [A]}, {"topology": "smol_omni"}),
        refused=({"topology": "custom"}, {"topology": "custom", "stages": []}),
        repair=_give_stages,
    ),
    "topology custom: every stage needs an engine": RuleExamples(
        accepted=({"topology": "custom", "stages": [A, B]}, {"topology": "smol_omni", "stages": [{"name": "a"}]}),
        refused=({"topology": "custom", "stages": [A, {"name": "b"}]},),
        repair=_give_engines,
    ),
    "topology custom: an edge joins stages of spec.stages only": RuleExamples(
        accepted=(
            {"topology": "custom", "stages": [A, B], "edges": [EDGE]},
            {"topology": "smol_omni", "edges": [EDGE]},
        ),
        refused=(
            {"topology": "custom", "stages": [A], "edges": [EDGE]},
            {"topology": "custom", "stages": [B], "edges": [EDGE]},
        ),
        repair=_join_known_stages,
    ),
    "payload is fixed by the topology: leave it out, or use topology custom": RuleExamples(
        accepted=(
            {"topology": "custom", "stages": [A, B], "edges": [{**EDGE, "payload": "text_segments"}]},
            {"topology": "smol_omni", "edges": [EDGE]},
        ),
        refused=({"topology": "smol_omni", "edges": [{**EDGE, "payload": "text_segments"}]},),
        repair=_drop_payloads,
    ),
    "stages of one podGroup share pods: set replicas or scaling on one of them only": RuleExamples(
        accepted=(
            {"stages": [{**A, "podGroup": "g", "replicas": 2}, {**B, "podGroup": "g"}]},
            {"stages": [{**A, "podGroup": "g", "replicas": 2}, {**B, "podGroup": "h", "replicas": 2}]},
            {"stages": [{**A, "replicas": 2}, {**B, "replicas": 2}]},
        ),
        refused=(
            {"stages": [{**A, "podGroup": "g", "replicas": 2}, {**B, "podGroup": "g", "replicas": 2}]},
            {
                "stages": [
                    {**A, "podGroup": "g", "replicas": 2},
                    {**B, "podGroup": "g", "scaling": {"minReplicas": 1, "maxReplicas": 2}},
                ]
            },
        ),
        repair=_count_once_per_group,
    ),
    "pipelineRef cannot change: make another OmniStage": RuleExamples(
        before={"pipelineRef": {"name": "p"}},
        accepted=({"pipelineRef": {"name": "p"}, "replicas": 3},),
        refused=({"pipelineRef": {"name": "q"}},),
        repair=lambda node: node,
    ),
    "stageName cannot change: make another OmniStage": RuleExamples(
        before={"stageName": "thinker"},
        accepted=({"stageName": "thinker", "replicas": 3},),
        refused=({"stageName": "talker"},),
        repair=lambda node: node,
    ),
    "a stage cannot be colocated with itself: leave colocatedWith out for the leader of a pod group": RuleExamples(
        accepted=({"stageName": "a", "colocatedWith": "b"}, {"stageName": "a"}),
        refused=({"stageName": "a", "colocatedWith": "a"},),
        repair=_not_itself,
    ),
    "persistentVolumeClaim and hostPath exclude each other": RuleExamples(
        accepted=({"persistentVolumeClaim": "c"}, {"hostPath": "/m"}, {}),
        refused=({"persistentVolumeClaim": "c", "hostPath": "/m"},),
        repair=_one_model_cache,
    ),
    "defaultDeviceClass must be one of deviceClasses": RuleExamples(
        accepted=(
            {"deviceClasses": [{"name": "cpu", "memory": "8Gi"}], "defaultDeviceClass": "cpu"},
            {"deviceClasses": [{"name": "cpu", "memory": "8Gi"}]},
        ),
        refused=({"deviceClasses": [{"name": "cpu", "memory": "8Gi"}], "defaultDeviceClass": "gpu"},),
        repair=_known_default_class,
    ),
    "connectors lists what exists; Auto is a choice among them": RuleExamples(
        accepted=({"connectors": ["SharedMemory", "TCP"]}, {"connectors": []}),
        refused=({"connectors": ["Auto"]}, {"connectors": ["TCP", "Auto"]}),
        repair=_no_auto,
    ),
    "mooncake is for a connector that is not listed: add Mooncake to connectors, or remove mooncake": RuleExamples(
        accepted=({"connectors": ["TCP", "Mooncake"], "mooncake": {}}, {"connectors": ["Mooncake"]}, {}),
        refused=({"mooncake": {}}, {"connectors": ["TCP"], "mooncake": {"protocol": "RDMA"}}),
        repair=_listed_mooncake,
    ),
    "devices are those of RDMA: set protocol to RDMA, or remove devices": RuleExamples(
        accepted=({"protocol": "RDMA", "devices": ["mlx5_0"]}, {"protocol": "RDMA"}, {"protocol": "TCP"}),
        refused=({"protocol": "TCP", "devices": ["mlx5_0"]},),
        repair=_no_rdma_over_tcp,
    ),
    "resource is what a device plugin offers for RDMA: set protocol to RDMA, or remove resource": RuleExamples(
        accepted=({"protocol": "RDMA", "resource": {"name": "rdma/hca"}}, {"protocol": "TCP"}),
        refused=({"protocol": "TCP", "resource": {"name": "rdma/hca"}},),
        repair=_no_rdma_over_tcp,
    ),
}

# Where the smallest object by required fields alone would break a rule. Keys are ends of paths.
SMALLEST: dict[str, Any] = {
    ".spec.stageName": "z",
    ".spec.connectors[]": "TCP",
    "tolerations[]": {"operator": "Exists"},
    ".spec.edges[]": {"from": "z", "to": "y"},
    ".scaling": {"minReplicas": 0, "maxReplicas": 1000},
    ".spec.mooncake": {"protocol": "RDMA"},
}


def _set(**fields: Any) -> Callable[[Node, Any], None]:
    return lambda parent, value: parent.update(fields)


# What must stand beside a field for it to be legal: path end -> change of the object that holds it.
BESIDE: dict[str, Callable[[Node, Any], None]] = {
    "tolerations[].value": _set(operator="Equal", key="k"),
    "tolerations[].operator": _set(key="k"),
    ".spec.defaultDeviceClass": lambda parent, value: parent["deviceClasses"][0].update(name=value),
}
# The same, for what must stand in spec.
BESIDE_IN_SPEC: dict[str, Node] = {
    "edges[].payload": {"topology": "custom", "stages": [{**A, "name": "z"}, {**B, "name": "y"}]},
    **{
        end: {"connectors": ["Mooncake"]}
        for end in (
            *(".spec.mooncake", ".mooncake.protocol", ".mooncake.devices", ".mooncake.devices[]"),
            *(".mooncake.resource", ".mooncake.resource.name", ".mooncake.resource.count"),
        )
    },
}
