"""OmniPipeline: what a user writes. One multi-stage omni model as a graph of stages and edges.

`model` and `topology` may change: each makes a new revision, which is rolled out beside the old one, and stages
that the new topology does not have are drained. What one object cannot tell (does the topology exist, do the stages
fit the devices, does a budget hold once the topology's defaults are filled in) is for the resolver and admission.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import ConfigDict, Field

from omni_crds.v1alpha1.base import (
    NO_CONTROLS,
    PRINTABLE,
    Count,
    DeviceClassName,
    DeviceText,
    Fraction,
    Generation,
    Identifier,
    LabelValue,
    Message,
    ObjectMeta,
    ObjectName,
    OmniModel,
    PositiveDecimal,
    PositiveReplicas,
    Quantity,
    Replicas,
    RevisionName,
    StageName,
)
from omni_crds.v1alpha1.conditions import Condition, ConditionStatus
from omni_crds.v1alpha1.markers import ListAtomic, ListMap, Rule, rules

CUSTOM_TOPOLOGY = "custom"
TAINT_KEY = r"^[-./_A-Za-z0-9]+$"

MODEL_URI = (
    r"^(hf://[A-Za-z0-9][-._A-Za-z0-9]*/[A-Za-z0-9][-._A-Za-z0-9]*"
    r"|pvc://[a-z0-9][-.a-z0-9]*(/[!-~]*)?"
    r"|file:///[!-~]+"
    r"|packaged://[A-Za-z0-9][-._A-Za-z0-9]*)$"
)


class ModelSpec(OmniModel):
    """Where the weights come from."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule("!self.uri.contains('..')", "uri must not contain '..': name the folder itself"),
        )
    )

    uri: Annotated[str, Field(max_length=1024, pattern=MODEL_URI)]
    """hf://ORG/NAME (model hub), pvc://CLAIM/PATH (volume), file:///PATH (in the image or on the machine) or
    packaged://NAME (shipped in the image)."""
    revision: Annotated[str, Field(min_length=1, max_length=128, pattern=PRINTABLE)] | None = None
    """Branch, tag or commit on the model hub. Without it: the hub's default branch."""
    served_name: Annotated[str, Field(min_length=1, max_length=253, pattern=PRINTABLE)] | None = None
    """The model name that clients send. Without it: the name of the pipeline."""


class AcceleratorSpec(OmniModel):
    """Devices of one replica."""

    class_name: Annotated[DeviceClassName, Field(alias="class")]
    """A device class of the runtime profile, such as nvidia-h100-80gb."""
    count: Annotated[int, Field(ge=1, le=64)] | None = None
    """Devices of one replica. Without it: what the parallelism needs."""
    memory_fraction: Fraction | None = None
    """Share of each device's memory, above 0 up to 1, as a string. Stages of one podGroup may share a device."""


class ParallelismSpec(OmniModel):
    """How one replica is spread over its devices."""

    tensor: Annotated[int, Field(ge=1, le=64)] | None = None
    """Tensor-parallel size."""
    pipeline: Annotated[int, Field(ge=1, le=64)] | None = None
    """Pipeline-parallel size."""


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


class LatencyObjective(OmniModel):
    """A latency in milliseconds."""

    p95: Annotated[int, Field(ge=1, le=3_600_000)]
    """95 of 100 requests are at least this fast."""


class FactorObjective(OmniModel):
    """A ratio as a string."""

    p95: PositiveDecimal
    """95 of 100 requests stay at or below this, such as "0.8"."""


class QueueDepthObjective(OmniModel):
    """Waiting requests."""

    per_replica: Annotated[int, Field(ge=1, le=10_000)]
    """Requests that wait for one replica."""


class ObjectivesSpec(OmniModel):
    """What users should feel. Scaling works towards it."""

    ttfp_milliseconds: LatencyObjective | None = None
    """Time to first packet: from the request to the first audio packet."""
    real_time_factor: FactorObjective | None = None
    """Synthesis time divided by audio duration; below 1 is faster than speech."""
    queue_depth: QueueDepthObjective | None = None
    """Requests that wait for one replica."""


class BudgetSpec(OmniModel):
    """What the pipeline may use at most."""

    accelerators: Annotated[int, Field(ge=0, le=10_000)]
    """Devices of all stages and replicas together, surge included."""


class RolloutStrategy(StrEnum):
    AUTO = "Auto"
    SURGE = "Surge"
    RECREATE = "Recreate"


class RolloutSpec(OmniModel):
    """How a new revision replaces the old one."""

    strategy: RolloutStrategy = RolloutStrategy.AUTO
    """Surge starts new replicas before it stops old ones; Recreate stops first; Auto surges where devices are free."""
    max_unavailable: Annotated[int, Field(ge=0, le=1000)] | None = None
    """Replicas of a stage that may be missing during a rollout. Without it: 1."""


class DrainSpec(OmniModel):
    """How a replica goes away."""

    timeout_seconds: Annotated[int, Field(ge=0, le=86_400)]
    """Seconds in which a replica that leaves may finish its requests."""


class EntrySpec(OmniModel):
    """The orchestrator and API server."""

    resources: ResourcesSpec | None = None
    """CPU and memory of the entry."""
    port: Annotated[int, Field(ge=1, le=65_535)] | None = None
    """Port of the Service. Without it: 80."""
    max_queue: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Requests that may wait for admission; the next one is answered with 429."""


_CUSTOM = f"self.topology == '{CUSTOM_TOPOLOGY}'"


class PipelineSpec(OmniModel):
    """What the pipeline should be."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                f"!({_CUSTOM}) || (has(self.stages) && size(self.stages) > 0)",
                "topology custom needs its stages spelled out",
            ),
            Rule(
                f"!({_CUSTOM}) || !has(self.stages) || self.stages.all(s, has(s.engine))",
                "topology custom: every stage needs an engine",
            ),
            Rule(
                f"!({_CUSTOM}) || !has(self.edges) || self.edges.all(e, has(self.stages)"
                " && self.stages.exists(s, s.name == e.from) && self.stages.exists(s, s.name == e.to))",
                "topology custom: an edge joins stages of spec.stages only",
            ),
            Rule(
                f"{_CUSTOM} || !has(self.edges) || self.edges.all(e, !has(e.payload))",
                "payload is fixed by the topology: leave it out, or use topology custom",
            ),
            Rule(
                "!has(self.stages) || self.stages.all(s, !has(s.podGroup) || self.stages.filter(t, has(t.podGroup)"
                " && t.podGroup == s.podGroup && (has(t.replicas) || has(t.scaling))).size() <= 1)",
                "stages of one podGroup share pods: set replicas or scaling on one of them only",
            ),
        )
    )

    model: ModelSpec
    """The weights."""
    topology: Identifier
    """Name of a model family, such as qwen3_omni_moe, or custom with stages and edges spelled out."""
    runtime_profile: ObjectName | None = None
    """OmniRuntimeProfile of all stages. Without it: the one named default."""
    stages: Annotated[tuple[StageSpec, ...], Field(max_length=16), ListMap(("name",))] | None = None
    """Stages; each needs only what differs from the topology."""
    edges: Annotated[tuple[EdgeSpec, ...], Field(max_length=32), ListMap(("from", "to"))] | None = None
    """Edges; each needs only what differs from the topology."""
    entry: EntrySpec | None = None
    """The orchestrator and API server."""
    objectives: ObjectivesSpec | None = None
    """What users should feel."""
    budget: BudgetSpec | None = None
    """What the pipeline may use at most."""
    rollout: RolloutSpec | None = None
    """How a new revision replaces the old one."""
    drain: DrainSpec | None = None
    """How a replica goes away."""


class StageStatus(OmniModel):
    """One line per stage: what a person asks first."""

    name: StageName
    """Name of the stage."""
    replicas: Count = 0
    """Pods that exist."""
    desired_replicas: Count = 0
    """Pods that should exist."""
    ready_replicas: Count = 0
    """Pods that serve."""
    updated_replicas: Count = 0
    """Pods of the newest revision."""
    revision: RevisionName | None = None
    """Newest revision of this stage that has a pod."""
    device: DeviceText | None = None
    """Devices of one replica."""
    message: Message | None = None
    """What the stage waits for."""


class EdgeStatus(OmniModel):
    """One line per edge."""

    source: Annotated[StageName, Field(alias="from")]
    """Stage that produces."""
    to: StageName
    """Stage that consumes."""
    connector: ConnectorType
    """The connector that was chosen."""
    ready: ConditionStatus
    """Whether every consumer reaches every producer."""
    reason: Annotated[str, Field(max_length=128)]
    """Why, in one CamelCase word."""


class PipelineStatus(OmniModel):
    """What the pipeline is."""

    conditions: Annotated[tuple[Condition, ...], Field(max_length=16), ListMap(("type",))] | None = None
    """Ready, Serving, Updated, PlacementFeasible, ConnectorsReady, ScalingReady; Reconciling and Stalled while true."""
    observed_generation: Generation | None = None
    """The metadata.generation that this status describes."""
    stages: Annotated[tuple[StageStatus, ...], Field(max_length=16), ListMap(("name",))] | None = None
    """One entry per stage."""
    edges: Annotated[tuple[EdgeStatus, ...], Field(max_length=32), ListMap(("from", "to"))] | None = None
    """One entry per edge."""
    stages_ready: Annotated[str, Field(max_length=16)] | None = None
    """Ready stages of all stages, such as "2/3"."""
    revision: RevisionName | None = None
    """The newest revision."""
    serving_revision: RevisionName | None = None
    """The revision that answers now."""
    plan_config_map: ObjectName | None = None
    """ConfigMap with the resolved plan of the newest revision."""
    endpoint: Annotated[str, Field(max_length=512)] | None = None
    """URL of the OpenAI API inside the cluster."""
    ttfp_milliseconds_p95: Annotated[int, Field(ge=0, le=3_600_000)] | None = None
    """Time to first packet that 95 of 100 recent requests stayed within."""


class OmniPipeline(OmniModel):
    """A multi-stage model, such as thinker, talker and code2wav, served behind one OpenAI API."""

    metadata: ObjectMeta = Field(default_factory=ObjectMeta)
    spec: PipelineSpec
    """What the pipeline should be."""
    status: PipelineStatus | None = None
    """What the pipeline is. Written by the operator."""
