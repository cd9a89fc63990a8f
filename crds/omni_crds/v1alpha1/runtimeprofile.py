"""OmniRuntimeProfile: what the platform team fixes per accelerator family. Cluster-scoped."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from omni_crds.v1alpha1.base import ObjectMeta, ObjectName, OmniModel, Quantity
from omni_crds.v1alpha1.conditions import Condition
from omni_crds.v1alpha1.pipeline import ENV_NAME, ConnectorType, SchedulingSpec


class AcceleratorVendor(StrEnum):
    NVIDIA = "nvidia"
    AMD = "amd"
    ASCEND = "ascend"
    INTEL = "intel"
    MOORE_THREADS = "moorethreads"
    CPU = "cpu"


class EngineBackend(StrEnum):
    NATIVE = "native"
    VLLM_OMNI = "vllm-omni"


class ImagePullPolicy(StrEnum):
    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class ImagesSpec(OmniModel):
    runtime: Annotated[str, Field(min_length=1, max_length=512)]
    # The connector sidecar starts without torch; it may run from a smaller image.
    connector: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    entry: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    pull_policy: ImagePullPolicy = ImagePullPolicy.IF_NOT_PRESENT
    pull_secrets: Annotated[list[ObjectName], Field(max_length=8)] | None = None


class DeviceClass(OmniModel):
    """A class of device as nodes advertise it."""

    name: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
    resource_name: Annotated[str, Field(min_length=1, max_length=253)] | None = None  # nvidia.com/gpu, ...; absent for CPU
    memory: Quantity
    node_selector: Annotated[dict[str, Annotated[str, Field(max_length=63)]], Field(max_length=16)] | None = None


class EnvVar(OmniModel):
    name: Annotated[str, Field(min_length=1, max_length=128, pattern=ENV_NAME)]
    value: Annotated[str, Field(max_length=4096)]


class ModelCacheSpec(OmniModel):
    """Where downloaded weights live. Absent: an emptyDir per pod."""

    persistent_volume_claim: ObjectName | None = None
    host_path: Annotated[str, Field(min_length=2, max_length=1024, pattern=r"^/[^\x00]+$")] | None = None
    size_limit: Quantity | None = None


class ProbesSpec(OmniModel):
    startup_timeout_seconds: Annotated[int, Field(ge=1, le=86_400)] = 1200
    period_seconds: Annotated[int, Field(ge=1, le=600)] = 2


class RuntimeProfileSpec(OmniModel):
    vendor: AcceleratorVendor
    backend: EngineBackend = EngineBackend.NATIVE
    images: ImagesSpec
    device_classes: Annotated[list[DeviceClass], Field(min_length=1, max_length=64)]
    default_device_class: Annotated[str, Field(min_length=1, max_length=63)] | None = None
    connectors: Annotated[list[ConnectorType], Field(max_length=8)] | None = None
    env: Annotated[list[EnvVar], Field(max_length=64)] | None = None
    scheduling: SchedulingSpec | None = None
    model_cache: ModelCacheSpec | None = None
    probes: ProbesSpec | None = None


class RuntimeProfileStatus(OmniModel):
    conditions: Annotated[list[Condition], Field(max_length=16)] | None = None
    observed_generation: Annotated[int, Field(ge=0)] | None = None


class OmniRuntimeProfile(OmniModel):
    metadata: ObjectMeta = Field(default_factory=ObjectMeta)
    spec: RuntimeProfileSpec
    status: RuntimeProfileStatus | None = None
