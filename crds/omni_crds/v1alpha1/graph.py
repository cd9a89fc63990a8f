"""The parts of a pipeline's graph: what may be said of one stage and of one edge."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import ConfigDict, Field

from omni_crds.v1alpha1.base import (
    NO_CONTROLS,
    DeviceClassName,
    Fraction,
    Identifier,
    LabelValue,
    ObjectName,
    OmniModel,
    PositiveReplicas,
    Quantity,
    Replicas,
    StageName,
)
from omni_crds.v1alpha1.markers import ListAtomic, ListMap, Rule, rules

TAINT_KEY = r"^[-./_A-Za-z0-9]+$"


class AcceleratorSpec(OmniModel):
    """Devices of one replica."""

    class_name: Annotated[DeviceClassName, Field(alias="class")]
    """A device class of the runtime profile, such as nvidia-h100-80gb."""
    count: Annotated[int, Field(ge=1, le=64)] | None = None
    """Devices of one replica. Without it: what the parallelism needs."""
    memory_fraction: Fraction | None = None
    """Share of each device's memory, above 0 up to 1, as a string. Stages of one podGroup may share a device."""
    memory: Quantity | None = None
    """What the stage takes of each device, for models that nobody can read. Without it: worked out from the model."""


class ParallelismSpec(OmniModel):
    """How one replica is spread over its devices."""

    tensor: Annotated[int, Field(ge=1, le=64)] | None = None
    """Tensor-parallel size."""
    pipeline: Annotated[int, Field(ge=1, le=64)] | None = None
    """Pipeline-parallel size."""


class ScalingMode(StrEnum):
    OPERATOR = "Operator"
    EXTERNAL = "External"


class ScalingSpec(OmniModel):
    """Bounds of the replica count; within them it follows the load."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule("self.minReplicas <= self.maxReplicas", "minReplicas must not be above maxReplicas"),
        )
    )

    min_replicas: Replicas
    """Never fewer than this. 0 lets the stage sleep."""
    max_replicas: PositiveReplicas
    """Never more than this."""
    mode: ScalingMode | None = None
    """Who writes the count. Operator: its own autoscaler, from the pipeline's objectives; External: an HPA, KEDA or a
    person, through /scale of the OmniStage. Without it: Operator."""


class ResourcesSpec(OmniModel):
    """CPU and memory of one replica's engine container."""

    cpu: Quantity | None = None
    """CPU request."""
    memory: Quantity | None = None
    """Memory request and limit."""
    shared_memory: Quantity | None = None
    """Size of the connector's arena in /dev/shm. Counts as memory of the pod."""


class TolerationOperator(StrEnum):
    EXISTS = "Exists"
    EQUAL = "Equal"


class TaintEffect(StrEnum):
    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


class Toleration(OmniModel):
    """A node taint that pods of the stage put up with."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "!has(self.operator) || self.operator != 'Exists' || !has(self.value)",
                "value must be absent with operator Exists",
            ),
            Rule(
                "has(self.key) || (has(self.operator) && self.operator == 'Exists')",
                "a toleration without a key needs operator Exists",
            ),
        )
    )

    key: Annotated[str, Field(min_length=1, max_length=317, pattern=TAINT_KEY)] | None = None
    """Key of the taint. Without it: every key."""
    operator: TolerationOperator | None = None
    """Exists or Equal. Without it: Equal."""
    value: LabelValue | None = None
    """Value of the taint."""
    effect: TaintEffect | None = None
    """Effect of the taint. Without it: every effect."""


class SchedulingSpec(OmniModel):
    """Which nodes the pods of a stage may use."""

    node_selector: Annotated[dict[str, LabelValue], Field(max_length=16)] | None = None
    """Labels that a node must have."""
    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=16), ListAtomic()] | None = None
    """Taints that the pods put up with."""
    priority_class_name: ObjectName | None = None
    """PriorityClass of the pods."""


class EngineArg(OmniModel):
    """One engine flag. A list by name, not a map: appliers can own single entries."""

    name: Identifier
    """Name of the flag, with underscores, such as max_model_len."""
    value: Annotated[str, Field(max_length=1024, pattern=NO_CONTROLS)]
    """Value of the flag, as it would stand on the command line."""


class StageSpec(OmniModel):
    """One stage. Absent fields come from the topology, then from the runtime profile."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "!(has(self.replicas) && has(self.scaling))",
                "replicas and scaling exclude each other: set replicas for a fixed count, scaling for a range",
            ),
            Rule(
                "!has(self.accelerator) || !has(self.accelerator.count) || !has(self.parallelism)"
                " || (has(self.parallelism.tensor) ? self.parallelism.tensor : 1)"
                " * (has(self.parallelism.pipeline) ? self.parallelism.pipeline : 1) <= self.accelerator.count",
                "parallelism needs tensor * pipeline devices: raise accelerator.count or leave it out",
            ),
        )
    )

    name: StageName
    """Name of the stage in the topology."""
    engine: Identifier | None = None
    """Engine that runs the stage. Required for topology custom."""
    runtime_profile: ObjectName | None = None
    """OmniRuntimeProfile of this stage. Without it: the one of the pipeline."""
    pod_group: StageName | None = None
    """Stages with the same podGroup share pods: for edges over shared memory and for a shared device."""
    accelerator: AcceleratorSpec | None = None
    """Devices of one replica."""
    parallelism: ParallelismSpec | None = None
    """How one replica is spread over its devices."""
    # No default: a default would be applied again with every manifest and fight whoever scales (T13).
    replicas: Replicas | None = None
    """Fixed number of replicas. A change is applied once; afterwards whoever scales the OmniStage owns the count."""
    scaling: ScalingSpec | None = None
    """Range of the number of replicas. Excludes replicas."""
    resources: ResourcesSpec | None = None
    """CPU and memory of one replica."""
    scheduling: SchedulingSpec | None = None
    """Which nodes the pods may use."""
    engine_args: Annotated[tuple[EngineArg, ...], Field(max_length=64), ListMap(("name",))] | None = None
    """Flags of the engine."""
    max_concurrency: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Requests in flight in one replica."""


class EdgeMode(StrEnum):
    ASYNC_CHUNK = "asyncChunk"
    FULL_PAYLOAD = "fullPayload"


class ChunkSizing(StrEnum):
    FIXED = "fixed"
    RAMP = "ramp"
    ADAPTIVE = "adaptive"


class ConnectorType(StrEnum):
    AUTO = "Auto"
    SHARED_MEMORY = "SharedMemory"
    TCP = "TCP"
    MOONCAKE = "Mooncake"


class PayloadKind(StrEnum):
    """What the rows of an edge are; the names are those of the runtime's payload contracts."""

    THINKER_HIDDEN = "thinker_hidden"
    CODEC_FRAMES = "codec_frames"
    TEXT_SEGMENTS = "text_segments"
    ACOUSTIC_FRAMES = "acoustic_frames"
    KV_CACHE = "kv_cache"


class ConnectorSpec(OmniModel):
    """What carries the tensors of an edge."""

    type: ConnectorType = ConnectorType.AUTO
    """Auto takes shared memory within a pod and the best transport of the profile between pods."""


class ChunkSpec(OmniModel):
    """Chunk sizes in frames of the edge's payload."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "!has(self.initialFrames) || !has(self.frames) || self.initialFrames <= self.frames",
                "initialFrames must not be above frames: the first chunk is the small one, it sets the TTFP",
            ),
        )
    )

    initial_frames: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Frames of the first chunk. Small for a short time to first packet."""
    frames: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Frames of every further chunk."""
    left_context_frames: Annotated[int, Field(ge=0, le=4096)] | None = None
    """Frames before a chunk that its decoder sees again."""
    sizing: ChunkSizing | None = None
    """How chunks go from initialFrames to frames. fixed (default): at once. ramp: each chunk is twice the one before.
    adaptive: small while the consumer waits for work, larger while chunks wait for the consumer."""


class EdgeSpec(OmniModel):
    """A tensor stream between two stages."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule("self.from != self.to", "an edge must join two different stages"),
            Rule(
                "!has(self.chunk) || !has(self.mode) || self.mode == 'asyncChunk'",
                "chunk has a meaning only with mode asyncChunk",
            ),
        )
    )

    source: Annotated[StageName, Field(alias="from")]
    """Stage that produces."""
    to: StageName
    """Stage that consumes."""
    payload: PayloadKind | None = None
    """What flows. For topology custom, where the two engines can exchange more than one kind."""
    mode: EdgeMode | None = None
    """asyncChunk: the consumer works while the producer still makes. fullPayload: it waits for all of it."""
    chunk: ChunkSpec | None = None
    """Chunk sizes."""
    connector: ConnectorSpec | None = None
    """What carries the tensors."""
