"""OmniRuntimeProfile: what the platform team fixes per accelerator family. Cluster-scoped."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import ConfigDict, Field

from omni_crds.v1alpha1.base import (
    ENV_NAME,
    NO_CONTROLS,
    DeviceClassName,
    Generation,
    ImageName,
    LabelValue,
    ObjectMeta,
    ObjectName,
    OmniModel,
    Quantity,
)
from omni_crds.v1alpha1.conditions import Condition
from omni_crds.v1alpha1.graph import ConnectorType, SchedulingSpec
from omni_crds.v1alpha1.markers import ListMap, ListSet, Rule, rules

ABSOLUTE_PATH = r"^/[!-~]+$"
HostPath = Annotated[str, Field(min_length=2, max_length=1024, pattern=ABSOLUTE_PATH)]
RESOURCE_NAME = r"^[a-z0-9][-.a-z0-9]*/[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?$"
ResourceName = Annotated[str, Field(min_length=3, max_length=253, pattern=RESOURCE_NAME)]
# As the kernel names them (mlx5_0, rocep1s0f0), of at most 63 characters. Without a comma, which separates several.
RDMA_DEVICE = r"^[A-Za-z0-9][-._A-Za-z0-9]*$"
RdmaDevice = Annotated[str, Field(min_length=1, max_length=63, pattern=RDMA_DEVICE)]


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


class NumberType(StrEnum):
    """Types that a device computes in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FP8 = "fp8"
    FP4 = "fp4"
    INT8 = "int8"


class MissingNodesPolicy(StrEnum):
    """What becomes of a pipeline for which the cluster has too little of the right nodes."""

    REJECT = "Reject"
    WARN = "Warn"
    IGNORE = "Ignore"


class MooncakeProtocol(StrEnum):
    """What Mooncake's transfer engine sends by."""

    TCP = "TCP"
    RDMA = "RDMA"


class ImagePullPolicy(StrEnum):
    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class ImagesSpec(OmniModel):
    """Container images."""

    runtime: ImageName
    """Image of the engines."""
    # The connector sidecar starts without torch; it may run from a smaller image.
    connector: ImageName | None = None
    """Image of the connector sidecar. Without it: the runtime image."""
    entry: ImageName | None = None
    """Image of the orchestrator and API server. Without it: the runtime image."""
    pull_policy: ImagePullPolicy = ImagePullPolicy.IF_NOT_PRESENT
    """When nodes pull the images."""
    pull_secrets: Annotated[tuple[ObjectName, ...], Field(max_length=8), ListSet()] | None = None
    """Secrets with registry credentials, in the namespace of each pipeline."""


class DeviceClass(OmniModel):
    """A class of device as nodes advertise it."""

    name: DeviceClassName
    """Name that pipelines use in accelerator.class."""
    resource_name: ResourceName | None = None
    """Extended resource that a pod asks for, such as nvidia.com/gpu. Absent for CPUs."""
    memory: Quantity
    """Memory of one device."""
    node_selector: Annotated[dict[str, LabelValue], Field(max_length=16)] | None = None
    """Labels of the nodes that have such devices."""
    usable_memory: Quantity | None = None
    """What a process can allocate of one device. Without it: as measured for known devices, else a little less."""
    number_types: Annotated[tuple[NumberType, ...], Field(min_length=1, max_length=16), ListSet()] | None = None
    """Types that the device computes in. Without it: those of the known device."""


class EnvVar(OmniModel):
    """An environment variable with a plain value."""

    name: Annotated[str, Field(min_length=1, max_length=128, pattern=ENV_NAME)]
    """Name of the variable."""
    value: Annotated[str, Field(max_length=4096, pattern=NO_CONTROLS)]
    """Value of the variable. Not for secrets."""


class ModelCacheSpec(OmniModel):
    """Where downloaded weights live. Without one: an emptyDir per pod."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "!(has(self.persistentVolumeClaim) && has(self.hostPath))",
                "persistentVolumeClaim and hostPath exclude each other",
            ),
        )
    )

    persistent_volume_claim: ObjectName | None = None
    """Claim in the namespace of each pipeline, shared by its pods."""
    host_path: HostPath | None = None
    """Folder on each node."""
    size_limit: Quantity | None = None
    """Size limit of the emptyDir."""


class NodeLocalVolumeSpec(OmniModel):
    """A folder of each node through which pods on one node share memory."""

    # Pods of all pipelines and tenants that use the profile meet in it, so that none may see what others put there.
    host_path: HostPath
    """Folder that exists on every node of the profile. Pods must be able to create files in it and not to list it (mode 1733)."""


class RdmaResource(OmniModel):
    """What a device plugin hands out: the connector's container requests it, and finds its devices under /dev/infiniband."""

    name: ResourceName
    """Extended resource, such as rdma/hca_shared_devices_a."""
    count: Annotated[int, Field(ge=1, le=64)] = 1
    """So many for each pod."""


class MooncakeSpec(OmniModel):
    """What the connector Mooncake sends by."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "self.protocol == 'RDMA' || !has(self.devices)",
                "devices are those of RDMA: set protocol to RDMA, or remove devices",
            ),
            Rule(
                "self.protocol == 'RDMA' || !has(self.resource)",
                "resource is what a device plugin offers for RDMA: set protocol to RDMA, or remove resource",
            ),
        )
    )

    protocol: MooncakeProtocol = MooncakeProtocol.TCP
    """With RDMA, pods that use Mooncake run their connector with the capability to lock memory, which Pod Security standards above privileged refuse."""
    devices: Annotated[tuple[RdmaDevice, ...], Field(min_length=1, max_length=16), ListSet()] | None = None
    """RDMA devices that may be used, such as mlx5_0. Without it: Mooncake chooses among those that it finds."""
    resource: RdmaResource | None = None
    """What the connector's container requests to be given RDMA devices. Without it: nothing, where nodes give them in another way."""


class ProbesSpec(OmniModel):
    """How long engines may take."""

    startup_timeout_seconds: Annotated[int, Field(ge=1, le=86_400)] = 1200
    """Seconds that an engine may take to load before it is restarted."""
    period_seconds: Annotated[int, Field(ge=1, le=600)] = 2
    """Seconds between two readiness probes."""


class RuntimeProfileSpec(OmniModel):
    """What pods on one family of accelerators are made of."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "!has(self.defaultDeviceClass) || self.deviceClasses.exists(c, c.name == self.defaultDeviceClass)",
                "defaultDeviceClass must be one of deviceClasses",
            ),
            Rule(
                "!has(self.connectors) || !self.connectors.exists(c, c == 'Auto')",
                "connectors lists what exists; Auto is a choice among them",
            ),
            Rule(
                "!has(self.mooncake) || (has(self.connectors) && self.connectors.exists(c, c == 'Mooncake'))",
                "mooncake is for a connector that is not listed: add Mooncake to connectors, or remove mooncake",
            ),
        )
    )

    vendor: AcceleratorVendor
    """Maker of the accelerators."""
    backend: EngineBackend = EngineBackend.NATIVE
    """native: the engines of this project. vllm-omni: pods of that project."""
    images: ImagesSpec
    """Container images."""
    device_classes: Annotated[tuple[DeviceClass, ...], Field(min_length=1, max_length=64), ListMap(("name",))]
    """Classes of devices that pipelines may ask for."""
    default_device_class: DeviceClassName | None = None
    """Class of stages that name none. Without it: the first one."""
    missing_nodes: MissingNodesPolicy | None = None
    """A pipeline that the present nodes cannot hold: Reject it, Warn where an autoscaler may add nodes, or Ignore the nodes. Without it: Reject."""
    connectors: Annotated[tuple[ConnectorType, ...], Field(max_length=8), ListSet()] | None = None
    """Connectors that work here. Without it: SharedMemory and TCP."""
    env: Annotated[tuple[EnvVar, ...], Field(max_length=64), ListMap(("name",))] | None = None
    """Environment of every engine."""
    scheduling: SchedulingSpec | None = None
    """Which nodes the pods may use."""
    model_cache: ModelCacheSpec | None = None
    """Where downloaded weights live."""
    node_local_volume: NodeLocalVolumeSpec | None = None
    """Lets connectors of type Auto share memory between pods on one node. Without it: the network."""
    mooncake: MooncakeSpec | None = None
    """What the connector Mooncake sends by. Without it: TCP."""
    probes: ProbesSpec | None = None
    """How long engines may take."""


class RuntimeProfileStatus(OmniModel):
    """What became of the profile."""

    conditions: Annotated[tuple[Condition, ...], Field(max_length=16), ListMap(("type",))] | None = None
    """Ready and what stands in its way."""
    observed_generation: Generation | None = None
    """The metadata.generation that this status describes."""


class OmniRuntimeProfile(OmniModel):
    """Images, devices and connectors of one accelerator family, fixed by the platform team."""

    metadata: ObjectMeta = Field(default_factory=ObjectMeta)
    spec: RuntimeProfileSpec
    """What pods on this family of accelerators are made of."""
    status: RuntimeProfileStatus | None = None
    """What became of the profile. Written by the operator."""
