"""Clusters and pipelines that read as prose. Profiles are those of the Helm chart, so that both stay in step."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from omni_crds.v1alpha1.pipeline import OmniPipeline
from omni_crds.v1alpha1.runtimeprofile import OmniRuntimeProfile
from omni_operator.placement import Catalogue, ClusterView, NodeView, Taint, Verdict, check_placement, stage_paths
from omni_runtime.deploy.load import load_pipeline
from omni_runtime.deploy.plan import ResolvedPlan
from omni_runtime.deploy.resolve import resolve

REPOSITORY = Path(__file__).parents[3]
EXAMPLES = REPOSITORY / "examples"
GIB = 1 << 30
LABELS = {
    "nvidia-h100-80gb": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"},
    "nvidia-h200": {"nvidia.com/gpu.product": "NVIDIA-H200"},
    "nvidia-a100-80gb": {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"},
    "nvidia-a100-40gb": {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB"},
    "nvidia-l40s": {"nvidia.com/gpu.product": "NVIDIA-L40S"},
    "nvidia-l4": {"nvidia.com/gpu.product": "NVIDIA-L4"},
    "amd-mi300x": {"amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM"},
    "ascend-910b": {"accelerator": "huawei-Ascend910"},
}
RESOURCES = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu", "ascend": "huawei.com/Ascend910B"}


@cache
def profiles() -> dict[str, OmniRuntimeProfile]:
    values = yaml.safe_load((REPOSITORY / "charts/omni-operator/values.yaml").read_text())
    found = {}
    for name, spec in values["profiles"].items():
        body = {k: v for k, v in spec.items() if k not in ("enabled", "image")}
        body["images"] = {"runtime": f"registry.example.com/{spec['image']}"}
        found[name] = OmniRuntimeProfile.model_validate({"metadata": {"name": name}, "spec": body})
    return found


@cache
def catalogue() -> Catalogue:
    return Catalogue.of(profiles())


def a_node(
    name: str, device_class: str | None = None, devices: int = 0, *, cpu: float = 64, memory: int = 512, **more: Any
) -> NodeView:
    """cpu in cores, memory in GiB. more: labels, taints, used, schedulable, resources (further allocatable)."""
    allocatable = {"cpu": int(cpu * 1000), "memory": memory * GIB, "pods": 110, **more.pop("resources", {})}
    labels = {"kubernetes.io/hostname": name, **more.pop("labels", {})}
    if device_class:
        labels |= LABELS[device_class]
        allocatable[RESOURCES[device_class.partition("-")[0]]] = devices
    return NodeView(name, labels, allocatable=allocatable, **more)


def a_taint(key: str, value: str = "", effect: str = "NoSchedule") -> Taint:
    return Taint(key, value, effect)


def a_cluster(*nodes: NodeView, **more: Any) -> ClusterView:
    return ClusterView(nodes, **more)


def example(name: str) -> OmniPipeline:
    return load_pipeline(EXAMPLES / f"{name}.pipeline.yaml")


def a_pipeline(spec: str) -> OmniPipeline:
    return OmniPipeline.model_validate({"metadata": {"name": "speaker"}, "spec": yaml.safe_load(spec)})


def a_plan(pipeline: OmniPipeline) -> ResolvedPlan:
    return resolve(pipeline, profiles(), target="kubernetes")


def check(pipeline: OmniPipeline, cluster: ClusterView, **more: Any) -> Verdict:
    paths = stage_paths(pipeline.spec)
    return check_placement(a_plan(pipeline), cluster, catalogue=catalogue(), paths=paths, **more)


QWEN = """
model: {uri: "hf://Qwen/Qwen3-Omni-30B-A3B-Instruct"}
topology: qwen3_omni_moe
"""


def qwen(stages: str = "[]", profile: str = "cuda") -> OmniPipeline:
    """Qwen3-Omni with what the table of its stages changes."""
    return a_pipeline(f"{QWEN}runtimeProfile: {profile}\nstages: {stages}")


def custom(
    stages: str, edges: str = "[]", uri: str = "hf://meta-llama/Llama-3.1-8B-Instruct", more: str = ""
) -> OmniPipeline:
    return a_pipeline(
        f'model: {{uri: "{uri}"}}\ntopology: custom\nruntimeProfile: cuda\nstages: {stages}\nedges: {edges}\n{more}'
    )
