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
    PRINTABLE,
    Count,
    DeviceText,
    Generation,
    Identifier,
    Message,
    ObjectMeta,
    ObjectName,
    OmniModel,
    PositiveDecimal,
    RevisionName,
    StageName,
)
from omni_crds.v1alpha1.conditions import CAMEL_CASE, TIMESTAMP, Condition, ConditionStatus
from omni_crds.v1alpha1.graph import (
    AcceleratorSpec,
    ChunkSizing,
    ChunkSpec,
    ConnectorSpec,
    ConnectorType,
    EdgeMode,
    EdgeSpec,
    EngineArg,
    ParallelismSpec,
    PayloadKind,
    ResourcesSpec,
    ScalingMode,
    ScalingSpec,
    SchedulingSpec,
    StageSpec,
    TaintEffect,
    Toleration,
    TolerationOperator,
)
from omni_crds.v1alpha1.learned import LearnedCapacity
from omni_crds.v1alpha1.markers import ListAtomic, ListMap, ListSet, Rule, rules

# A pipeline with all its parts; graph.py only keeps this file short.
__all__ = [
    "CUSTOM_TOPOLOGY",
    "MODEL_URI",
    "AcceleratorSpec",
    "AdminSurface",
    "BudgetSpec",
    "ChunkSizing",
    "ChunkSpec",
    "ConnectorSpec",
    "ConnectorType",
    "DrainSpec",
    "EdgeMode",
    "EdgeSpec",
    "EdgeStatus",
    "EngineArg",
    "EntrySpec",
    "FactorObjective",
    "LatencyObjective",
    "ModelSpec",
    "ObjectivesSpec",
    "OmniPipeline",
    "ParallelismSpec",
    "PayloadKind",
    "PipelineSpec",
    "PipelineStatus",
    "QueueDepthObjective",
    "ResourcesSpec",
    "RolloutSpec",
    "RolloutStrategy",
    "RoutingPolicy",
    "ScalingDecision",
    "ScalingMode",
    "ScalingSpec",
    "ScalingTarget",
    "SchedulingSpec",
    "StageSpec",
    "StageStatus",
    "TaintEffect",
    "Toleration",
    "TolerationOperator",
]

CUSTOM_TOPOLOGY = "custom"

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


HEADER_NAME = r"^[a-z][-a-z0-9]*$"
HTTP_URL = r"^https?://[!-~]+$"
HOST_NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"

HostName = Annotated[str, Field(min_length=1, max_length=253, pattern=HOST_NAME)]


class RoutingPolicy(StrEnum):
    LEAST_QUEUE = "LeastQueue"
    ROUND_ROBIN = "RoundRobin"
    POWER_OF_TWO = "PowerOfTwo"
    SESSION_AFFINE = "SessionAffine"


class AdminSurface(StrEnum):
    DISABLED = "Disabled"
    LOOPBACK = "Loopback"


class EntrySpec(OmniModel):
    """The orchestrator and API server."""

    resources: ResourcesSpec | None = None
    """CPU and memory of the entry."""
    port: Annotated[int, Field(ge=1, le=65_535)] | None = None
    """Port of the Service. Without it: 80."""
    max_queue: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Requests that may wait for admission; the next one is answered with 429. A tenant that fills the queue gives way
    to one that has fewer requests in it."""
    max_per_tenant: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Requests of one tenant that may run or wait; its next one is answered with 429. Without it: no limit but the
    queue's. Requests without a tenant count as one tenant."""
    tenant_header: Annotated[str, Field(min_length=1, max_length=64, pattern=HEADER_NAME)] | None = None
    """The HTTP header, in lower case, that names the tenant. Without it: x-omni-tenant. Whatever stands in front of the
    entry must set it: clients are believed."""
    request_timeout_seconds: Annotated[int, Field(ge=1, le=86_400)] | None = None
    """Seconds after which a request fails, whatever a client asks for. Without it: 600."""
    routing: RoutingPolicy | None = None
    """How a replica of each stage is chosen. LeastQueue: the one with the most room; RoundRobin: one after the other;
    PowerOfTwo: the better of two drawn at random; SessionAffine: the same one for the same session (header
    x-omni-session, or the field `user`) while it has room. Without it: LeastQueue."""
    replays: Annotated[int, Field(ge=0, le=3)] | None = None
    """How often a request starts anew when it loses a replica before the client has had anything of it. Without it:
    1."""
    admin: AdminSurface | None = None
    """Whether /v1/omni/pause, resume, sleep and wakeup are served. Loopback: only to clients inside the pod. Without it:
    Disabled."""
    otlp_endpoint: Annotated[str, Field(min_length=8, max_length=512, pattern=HTTP_URL)] | None = None
    """OTLP/HTTP collector that gets a span per stage of each request, such as http://collector:4318. Without it: no
    traces."""
    allowed_media_domains: Annotated[tuple[HostName, ...], Field(max_length=64), ListSet()] | None = None
    """Hosts whose images, audio and videos a request may name by URL, exactly, such as media.example.com; only at public
    addresses. Without it: no URL is followed, and clients send media in the request itself."""


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
    in_use: Annotated[list[ConnectorType] | None, ListSet(), Field(max_length=4)] = None
    """Over which its chunks have gone from the pods of now; none: no chunk has. Others than the chosen one where two pods share
    a node, or where Mooncake does not run."""
    ready: ConditionStatus
    """Whether every consumer reaches every producer."""
    reason: Annotated[str, Field(max_length=128)]
    """Why: Reachable; StageDown, with the stages; Degraded, with what it does without; Backpressured, where streams have waited
    for their consumer for a minute."""


class ScalingTarget(OmniModel):
    """What one stage was given."""

    name: StageName
    """Name of the stage."""
    before: Count = 0
    """Replicas that it had."""
    replicas: Count = 0
    """Replicas that it was given."""
    reason: Annotated[str, Field(max_length=256)] = ""
    """Why."""


class ScalingDecision(OmniModel):
    """One decision of the autoscaler that changed something, or began to say something else."""

    time: Annotated[str, Field(min_length=20, max_length=27, pattern=TIMESTAMP)]
    """When, in UTC."""
    reason: Annotated[str, Field(min_length=1, max_length=128, pattern=CAMEL_CASE)]
    """What kind of decision, in one CamelCase word."""
    message: Message = ""
    """Why, for a person."""
    limiting_stage: StageName | None = None
    """The stage that the objective fails for, or that is closest to its limit."""
    stages: Annotated[tuple[ScalingTarget, ...], Field(max_length=16), ListMap(("name",))] | None = None
    """One entry per stage."""
    inputs: Annotated[str, Field(max_length=1024)] | None = None
    """What was measured, as name=value."""
    candidates: Annotated[str, Field(max_length=1024)] | None = None
    """The sets of replicas that were weighed."""


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
    decisions: Annotated[tuple[ScalingDecision, ...], Field(max_length=10), ListAtomic()] | None = None
    """The last decisions of the autoscaler, newest first."""
    learned: LearnedCapacity | None = None
    """What the autoscaler has measured of a replica of each stage; a restarted operator goes on from there."""


class OmniPipeline(OmniModel):
    """A multi-stage model, such as thinker, talker and code2wav, served behind one OpenAI API."""

    metadata: ObjectMeta = Field(default_factory=ObjectMeta)
    spec: PipelineSpec
    """What the pipeline should be."""
    status: PipelineStatus | None = None
    """What the pipeline is. Written by the operator."""
