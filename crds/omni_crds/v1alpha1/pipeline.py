"""OmniPipeline: what a user writes. One multi-stage omni model as a graph of stages and edges."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from omni_crds.v1alpha1.base import (
    Fraction,
    ObjectMeta,
    ObjectName,
    OmniModel,
    PositiveDecimal,
    Quantity,
    Replicas,
    StageName,
)
from omni_crds.v1alpha1.conditions import Condition

ENV_NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"


class ModelSpec(OmniModel):
    """Where the weights come from: hf://ORG/NAME, pvc://CLAIM/PATH, file:///PATH or packaged://NAME (in the image)."""

    uri: Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^(hf|pvc|file|packaged)://.+$")]
    revision: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    served_name: Annotated[str, Field(min_length=1, max_length=253)] | None = None


class AcceleratorSpec(OmniModel):
    """Devices of one replica. `class` is a device class of the runtime profile, such as nvidia-h100-80gb."""

    class_name: Annotated[str, Field(alias="class", min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
    count: Annotated[int, Field(ge=1, le=64)] | None = None
    memory_fraction: Fraction | None = None


class ParallelismSpec(OmniModel):
    tensor: Annotated[int, Field(ge=1, le=64)] | None = None
    pipeline: Annotated[int, Field(ge=1, le=64)] | None = None


class ScalingSpec(OmniModel):
    min_replicas: Replicas
    max_replicas: Annotated[int, Field(ge=1, le=1000)]


class ResourcesSpec(OmniModel):
    """CPU and RAM of one replica's engine container; requests equal limits for memory."""

    cpu: Quantity | None = None
    memory: Quantity | None = None
    shared_memory: Quantity | None = None  # the connector arena in /dev/shm


class Toleration(OmniModel):
    key: Annotated[str, Field(max_length=317)] | None = None
    operator: Annotated[str, Field(max_length=16, pattern=r"^(Exists|Equal)$")] | None = None
    value: Annotated[str, Field(max_length=63)] | None = None
    effect: Annotated[str, Field(max_length=32, pattern=r"^(NoSchedule|PreferNoSchedule|NoExecute)$")] | None = None


class SchedulingSpec(OmniModel):
    node_selector: Annotated[dict[str, Annotated[str, Field(max_length=63)]], Field(max_length=16)] | None = None
    tolerations: Annotated[list[Toleration], Field(max_length=16)] | None = None
    priority_class_name: ObjectName | None = None


class EngineArg(OmniModel):
    """One engine flag. A list-map, not a map: order does not matter and server-side apply can own single entries."""

    name: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z][a-z0-9_]*$")]
    value: Annotated[str, Field(max_length=1024)]


class StageSpec(OmniModel):
    """One stage. Absent fields come from the topology, then from the runtime profile."""

    name: StageName
    engine: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z][a-z0-9_]*$")] | None = None
    runtime_profile: ObjectName | None = None
    pod_group: StageName | None = None
    accelerator: AcceleratorSpec | None = None
    parallelism: ParallelismSpec | None = None
    replicas: Replicas | None = None  # no default: a default would fight whoever scales (T13)
    scaling: ScalingSpec | None = None
    resources: ResourcesSpec | None = None
    scheduling: SchedulingSpec | None = None
    engine_args: Annotated[list[EngineArg], Field(max_length=64)] | None = None
    max_concurrency: Annotated[int, Field(ge=1, le=4096)] | None = None  # requests in flight in one replica


class EdgeMode(StrEnum):
    ASYNC_CHUNK = "asyncChunk"
    FULL_PAYLOAD = "fullPayload"


class ConnectorType(StrEnum):
    AUTO = "Auto"
    SHARED_MEMORY = "SharedMemory"
    TCP = "TCP"
    MOONCAKE = "Mooncake"


class ConnectorSpec(OmniModel):
    type: ConnectorType = ConnectorType.AUTO


class ChunkSpec(OmniModel):
    """Chunk sizes in codec (or acoustic) frames."""

    initial_frames: Annotated[int, Field(ge=1, le=4096)] | None = None
    frames: Annotated[int, Field(ge=1, le=4096)] | None = None
    left_context_frames: Annotated[int, Field(ge=0, le=4096)] | None = None


class EdgeSpec(OmniModel):
    """A tensor stream between two stages."""

    source: StageName = Field(alias="from")
    to: StageName
    mode: EdgeMode | None = None
    chunk: ChunkSpec | None = None
    connector: ConnectorSpec | None = None


class LatencyObjective(OmniModel):
    p95: Annotated[int, Field(ge=1, le=3_600_000)]


class FactorObjective(OmniModel):
    p95: PositiveDecimal


class QueueDepthObjective(OmniModel):
    per_replica: Annotated[int, Field(ge=1, le=10_000)]


class ObjectivesSpec(OmniModel):
    ttfp_milliseconds: LatencyObjective | None = None
    real_time_factor: FactorObjective | None = None
    queue_depth: QueueDepthObjective | None = None


class BudgetSpec(OmniModel):
    accelerators: Annotated[int, Field(ge=0, le=10_000)]


class RolloutStrategy(StrEnum):
    AUTO = "Auto"  # surge where devices are free, else replace
    SURGE = "Surge"
    RECREATE = "Recreate"


class RolloutSpec(OmniModel):
    strategy: RolloutStrategy = RolloutStrategy.AUTO
    max_unavailable: Annotated[int, Field(ge=0, le=1000)] | None = None


class DrainSpec(OmniModel):
    timeout_seconds: Annotated[int, Field(ge=0, le=86_400)]


class EntrySpec(OmniModel):
    """The orchestrator and API server."""

    resources: ResourcesSpec | None = None
    port: Annotated[int, Field(ge=1, le=65_535)] | None = None
    max_queue: Annotated[int, Field(ge=1, le=100_000)] | None = None  # requests waiting for admission before 429


class PipelineSpec(OmniModel):
    model: ModelSpec
    topology: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z][a-z0-9_]*$")]
    runtime_profile: ObjectName | None = None
    stages: Annotated[list[StageSpec], Field(max_length=16)] | None = None
    edges: Annotated[list[EdgeSpec], Field(max_length=32)] | None = None
    entry: EntrySpec | None = None
    objectives: ObjectivesSpec | None = None
    budget: BudgetSpec | None = None
    rollout: RolloutSpec | None = None
    drain: DrainSpec | None = None


class StageStatus(OmniModel):
    """One line per stage: what a person asks first."""

    name: StageName
    replicas: Annotated[int, Field(ge=0)] = 0  # pods that exist
    desired_replicas: Annotated[int, Field(ge=0)] = 0
    ready_replicas: Annotated[int, Field(ge=0)] = 0
    updated_replicas: Annotated[int, Field(ge=0)] = 0
    revision: Annotated[str, Field(max_length=63)] | None = None
    device: Annotated[str, Field(max_length=128)] | None = None
    message: Annotated[str, Field(max_length=1024)] | None = None


class EdgeStatus(OmniModel):
    source: StageName = Field(alias="from")
    to: StageName
    connector: ConnectorType
    ready: Annotated[str, Field(max_length=16, pattern=r"^(True|False|Unknown)$")]
    reason: Annotated[str, Field(max_length=128)]


class PipelineStatus(OmniModel):
    conditions: Annotated[list[Condition], Field(max_length=16)] | None = None
    observed_generation: Annotated[int, Field(ge=0)] | None = None
    stages: Annotated[list[StageStatus], Field(max_length=16)] | None = None
    edges: Annotated[list[EdgeStatus], Field(max_length=32)] | None = None
    stages_ready: Annotated[str, Field(max_length=16)] | None = None  # "2/3", for the printer column
    revision: Annotated[str, Field(max_length=63)] | None = None  # the newest
    serving_revision: Annotated[str, Field(max_length=63)] | None = None  # the one that answers now
    plan_config_map: ObjectName | None = None
    endpoint: Annotated[str, Field(max_length=512)] | None = None
    ttfp_milliseconds_p95: Annotated[int, Field(ge=0)] | None = None


class OmniPipeline(OmniModel):
    metadata: ObjectMeta = Field(default_factory=ObjectMeta)
    spec: PipelineSpec
    status: PipelineStatus | None = None
