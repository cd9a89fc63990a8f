"""ResolvedPlan: the one frozen answer to "what exactly runs". Operator, webhook and `omni run` read the same value.

It goes into the pipeline's ConfigMap as JSON (`plan.json`) and is mounted into every pod. Torch-free.
"""

from __future__ import annotations

import hashlib

import msgspec

from omni_runtime.topology.types import EngineKind, Modality, PayloadContract

CONTRACT_VERSION = 6  # of the wire protocol; both sides of every handshake compare it

ENTRY_HTTP_PORT = 8000  # OpenAI API, /health, /ready, /metrics
ENTRY_CONTROL_PORT = 5500  # ZeroMQ ROUTER with CURVE: stage replicas register here
SIDECAR_DATA_PORT = 5600  # sealed TCP with the CURVE keys: consumers open edge streams here
MOONCAKE_PORTS = (5610, 5641)  # first and last; each of its engines takes two of them
ENGINE_HTTP_PORT = 8081  # probes and /metrics of an engine; +1 per further engine in the same pod
SIDECAR_HTTP_PORT = 8089  # probes and /metrics of the connector sidecar

PLAN_MOUNT_PATH = "/etc/omni/plan"  # the ConfigMap; the file is plan.json
CURVE_MOUNT_PATH = "/etc/omni/curve"  # the Secret; files server.key, server.pub, client.key, client.pub (Z85 text)
SHM_MOUNT_PATH = "/dev/shm"  # noqa: S108 - a memory volume of the pod, not a shared folder of the machine
IPC_MOUNT_PATH = "/run/omni"  # emptyDir shared by sidecar and engines: unix sockets live here


class ModelRef(msgspec.Struct, frozen=True):
    uri: str
    revision: str | None
    served_name: str


class DevicePlan(msgspec.Struct, frozen=True):
    device_class: str
    count: int
    resource_name: str | None  # None: CPU only
    memory_fraction: float


class RdmaPlan(msgspec.Struct, frozen=True):
    """What the connector of a pod needs for Mooncake by RDMA."""

    devices: tuple[str, ...]  # ascending; empty: Mooncake chooses
    resource_name: str | None  # that a device plugin offers; None: the pod asks for none
    resource_count: int


class StagePlan(msgspec.Struct, frozen=True):
    name: str
    engine: EngineKind
    emits: tuple[Modality, ...]
    required_for: tuple[Modality, ...]  # output modalities that cannot be made without this stage
    pod_group: str  # stages of one group share pods; equals the leader's name; alone: the stage's own name
    profile: str
    image: str
    connector_image: str
    image_pull_policy: str
    image_pull_secrets: tuple[str, ...]
    device: DevicePlan
    tensor_parallel: int
    pipeline_parallel: int
    max_concurrency: int
    cpu: str
    memory: str
    shared_memory: str
    engine_args: tuple[tuple[str, str], ...]
    env: tuple[tuple[str, str], ...]
    node_selector: tuple[tuple[str, str], ...]
    tolerations: tuple[dict[str, str], ...]
    priority_class_name: str | None
    model_cache_claim: str | None
    model_cache_host_path: str | None
    startup_timeout_seconds: int
    probe_period_seconds: int
    node_local_host_path: str | None = None  # folder of the node that the profile allows
    rdma: RdmaPlan | None = None  # None: Mooncake goes over TCP


class ReplicaBounds(msgspec.Struct, frozen=True):
    """Not part of the revision: a change of replicas restarts nothing. Only who may sleep is (`EntryPlan.sleepers`)."""

    requested: int | None  # a fixed count in the spec
    minimum: int
    maximum: int | None

    @property
    def sleeps(self) -> bool:
        return self.requested is None and self.maximum is not None and self.minimum == 0

    @property
    def initial(self) -> int:
        """The count that a new stage pool starts with."""
        return self.minimum if self.requested is None else self.requested


FULL_PAYLOAD_MESSAGE_FRAMES = 1024
"""fullPayload sends nothing before the last frame; then messages of at most so many frames, so that an answer of any
length fits into the arena."""


class EdgePlan(msgspec.Struct, frozen=True):
    """A tensor stream. Chunk sizes are in frames; all 0 where the producer decides how many rows a chunk has.

    In mode fullPayload only the left context counts: a consumer may decode a long message in pieces.
    """

    source: str
    to: str
    payload: PayloadContract
    mode: str  # asyncChunk | fullPayload
    connector: str  # SharedMemory | TCP | Mooncake, never Auto
    initial_frames: int
    frames: int
    left_context_frames: int
    sizing: str = "fixed"  # fixed | ramp | adaptive: how chunks grow from initial_frames to frames
    near: bool = False  # both profiles allow a folder of the node: SharedMemory where both pods are on one node

    @property
    def name(self) -> str:
        return f"{self.source}->{self.to}"


class EntryPlan(msgspec.Struct, frozen=True):
    image: str
    image_pull_policy: str
    image_pull_secrets: tuple[str, ...]
    cpu: str
    memory: str
    port: int
    max_queue: int
    node_selector: tuple[tuple[str, str], ...]
    tolerations: tuple[dict[str, str], ...]
    max_per_tenant: int | None = None  # running and waiting
    tenant_header: str = "x-omni-tenant"
    request_timeout_seconds: int = 600
    routing: str = "LeastQueue"  # LeastQueue | RoundRobin | PowerOfTwo | SessionAffine
    replays: int = 1  # of a request that has emitted nothing, after the loss of a replica
    admin: str = "Disabled"  # Disabled | Loopback
    otlp_endpoint: str | None = None
    allowed_media_domains: tuple[str, ...] = ()  # hosts whose URLs are followed, exactly
    sleepers: tuple[str, ...] = ()  # stages that their scaling lets have no replica; ascending


class ResolvedPlan(msgspec.Struct, frozen=True):
    pipeline: str
    topology: str
    revision: str  # 10 hex digits of the canonical JSON of everything that pods depend on
    contract_version: int
    model: ModelRef
    stages: tuple[StagePlan, ...]  # in topological order: stage 0 takes the request
    edges: tuple[EdgePlan, ...]
    entry: EntryPlan
    drain_timeout_seconds: int
    replicas: dict[str, ReplicaBounds]
    origins: dict[str, str]  # "stages.talker.cpu" -> "pipeline" | "topology smol_omni" | "profile cpu" | "default"
    # Stage -> what a user says that it takes of each device. For the placement check alone, so not of the revision.
    device_memory: dict[str, str] = {}

    def stage(self, name: str) -> StagePlan:
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(f"stage {name!r} is not in pipeline {self.pipeline!r}; stages: {[s.name for s in self.stages]}")

    def pod_groups(self) -> dict[str, tuple[StagePlan, ...]]:
        """Leader name -> the stages of its pod, leader first."""
        groups: dict[str, list[StagePlan]] = {}
        for stage in self.stages:
            groups.setdefault(stage.pod_group, []).append(stage)
        return {k: tuple(v) for k, v in groups.items()}

    def may_sleep(self, stage: str) -> bool:
        """Whether its autoscaler may leave it without any replica: no replica is then no fault, and requests wake it."""
        return stage in self.entry.sleepers

    def edges_from(self, stage: str) -> tuple[EdgePlan, ...]:
        return tuple(e for e in self.edges if e.source == stage)

    def edges_to(self, stage: str) -> tuple[EdgePlan, ...]:
        return tuple(e for e in self.edges if e.to == stage)

    def stages_for(self, modalities: frozenset[Modality]) -> tuple[StagePlan, ...]:
        """The stages that a request for these output modalities touches; text-only never touches the talker."""
        return tuple(s for s in self.stages if modalities & frozenset(s.required_for))


def canonical_json(plan: ResolvedPlan) -> bytes:
    return msgspec.json.encode(plan, order="sorted")


def load_plan(data: bytes) -> ResolvedPlan:
    return msgspec.json.decode(data, type=ResolvedPlan)


def revision_of(plan: ResolvedPlan) -> str:
    """Hash of what a running pod depends on; replicas, origins, what a user says of memory, and the revision itself are
    left out."""
    stable = msgspec.structs.replace(plan, revision="", replicas={}, origins={}, device_memory={})
    return hashlib.sha256(canonical_json(stable)).hexdigest()[:10]
