"""Pipelines and profiles that read as prose. Everything is written as YAML would be, and parsed like it."""

from __future__ import annotations

from typing import Any

import yaml

from omni_crds.v1alpha1.pipeline import OmniPipeline
from omni_crds.v1alpha1.runtimeprofile import OmniRuntimeProfile
from omni_runtime.deploy.model import Target
from omni_runtime.deploy.plan import ResolvedPlan
from omni_runtime.deploy.resolve import resolve
from omni_runtime.errors import FieldError, InvalidPipeline


def a_profile(name: str, spec: str) -> OmniRuntimeProfile:
    return OmniRuntimeProfile.model_validate({"metadata": {"name": name}, "spec": yaml.safe_load(spec)})


PROFILES = {
    p.metadata.name: p
    for p in (
        a_profile("cpu", "{vendor: cpu, images: {runtime: omni-cpu}, deviceClasses: [{name: cpu, memory: 8Gi}]}"),
        a_profile(
            "cuda",
            """
            vendor: nvidia
            images: {runtime: omni-cuda, connector: omni-connector, entry: omni-entry, pullSecrets: [registry]}
            defaultDeviceClass: nvidia-h100-80gb
            deviceClasses:
            - {name: nvidia-l4, resourceName: nvidia.com/gpu, memory: 24Gi, nodeSelector: {gpu: l4}}
            - {name: nvidia-h100-80gb, resourceName: nvidia.com/gpu, memory: 80Gi, nodeSelector: {gpu: h100}}
            env: [{name: B, value: "2"}, {name: A, value: "1"}]
            scheduling: {nodeSelector: {pool: serving}, tolerations: [{key: nvidia.com/gpu, operator: Exists}]}
            """,
        ),
        a_profile(
            "tcp-only",
            """
            {vendor: cpu, images: {runtime: omni-cpu}, deviceClasses: [{name: cpu, memory: 8Gi}], connectors: [TCP]}
            """,
        ),
        a_profile(
            "rdma",
            """
            {vendor: nvidia, images: {runtime: omni-cuda}, connectors: [SharedMemory, TCP, Mooncake],
             deviceClasses: [{name: nvidia-h100-80gb, resourceName: nvidia.com/gpu, memory: 80Gi}]}
            """,
        ),
        *(
            a_profile(
                name,
                "{vendor: nvidia, images: {runtime: omni-cuda}, connectors: [SharedMemory, TCP, Mooncake], "
                f"mooncake: {{{mooncake}}}, "
                "deviceClasses: [{name: nvidia-h100-80gb, resourceName: nvidia.com/gpu, memory: 80Gi}]}",
            )
            for name, mooncake in (
                ("ib", "protocol: RDMA, devices: [mlx5_1, mlx5_0], resource: {name: rdma/hca, count: 2}"),
                ("ib-reordered", "protocol: RDMA, devices: [mlx5_0, mlx5_1], resource: {name: rdma/hca, count: 2}"),
                ("ib-other", "protocol: RDMA, resource: {name: rdma/hca_b}"),
                ("ib-bare", "protocol: RDMA"),
                ("mooncake-tcp", "protocol: TCP"),
            )
        ),
        *(
            a_profile(
                name,
                f"{{vendor: nvidia, images: {{runtime: omni-cuda}}, nodeLocalVolume: {{hostPath: {folder}}}, "
                f"connectors: [{connectors}], "
                "deviceClasses: [{name: nvidia-h100-80gb, resourceName: nvidia.com/gpu, memory: 80Gi}]}",
            )
            for name, folder, connectors in (
                ("near", "/run/omni", "SharedMemory, TCP"),
                ("near-rdma", "/run/omni", "SharedMemory, TCP, Mooncake"),
                ("near-elsewhere", "/dev/shm/omni", "SharedMemory, TCP"),
                ("near-tcp-only", "/run/omni", "TCP"),
            )
        ),
        a_profile(
            "upstream",
            """
            {vendor: nvidia, backend: vllm-omni, images: {runtime: x},
             deviceClasses: [{name: nvidia-l4, resourceName: nvidia.com/gpu, memory: 24Gi}]}
            """,
        ),
    )
}

HUB = 'model: {uri: "hf://Qwen/Qwen3-Omni-30B-A3B-Instruct"}'
QWEN = f"{HUB}\ntopology: qwen3_omni_moe\nruntimeProfile: cuda\n"
SMOL = 'model: {uri: "packaged://smol-omni"}\ntopology: smol_omni\nruntimeProfile: cpu\n'
CUSTOM = f"{HUB}\ntopology: custom\nruntimeProfile: cuda\n"


def a_pipeline(spec: str | dict[str, Any], name: str = "speaker") -> OmniPipeline:
    content = yaml.safe_load(spec) if isinstance(spec, str) else spec
    return OmniPipeline.model_validate({"metadata": {"name": name}, "spec": content})


def resolved(spec: str | dict[str, Any], *, name: str = "speaker", target: Target = "kubernetes") -> ResolvedPlan:
    return resolve(a_pipeline(spec, name), PROFILES, target=target)


def errors_of(
    spec: str | dict[str, Any], *, target: Target = "kubernetes", default: str | None = None
) -> tuple[FieldError, ...]:
    try:
        resolve(a_pipeline(spec), PROFILES, target=target, default_profile=default)
    except InvalidPipeline as invalid:
        return invalid.errors
    return ()
