"""The values of a request's life: its state, the events that reach it, the actions that follow. No I/O, no clock.

Instants are seconds of a monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import NewType

from omni_runtime.deploy.plan import ResolvedPlan
from omni_runtime.errors import InvalidRequest, OmniError
from omni_runtime.topology.graph import reachable, successors
from omni_runtime.topology.types import Modality, PayloadContract

RequestId = NewType("RequestId", str)  # ours (uuid4 hex), never the client's (R62)
StageName = str
ReplicaId = str
Instant = float


class Phase(StrEnum):
    QUEUED = "Queued"  # admitted to the queue, bound to no replica yet
    RUNNING = "Running"  # every stage that it needs has it
    SETTLING = "Settling"  # the client has its end; some stages have not confirmed theirs
    DONE = "Done"


class StagePhase(StrEnum):
    SUBMITTED = "Submitted"
    STARTED = "Started"
    FINISHED = "Finished"
    FAILED = "Failed"
    LOST = "Lost"
    ABORTING = "Aborting"  # Abort sent, not confirmed
    ABORTED = "Aborted"


LIVE = frozenset({StagePhase.SUBMITTED, StagePhase.STARTED})
UNSETTLED = LIVE | {StagePhase.ABORTING}


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """What a request needs; fixed at admission.

    stages: in topological order, only those that the modalities need (text-only never touches the talker).
    emits: the client modalities of a stage, restricted to the requested ones.
    final: the stages whose end completes the request (modality-set completion, not "the last stage").
    start: the stage that takes the client's input.
    text_edge: the text_segments edge that plain text of the client takes the place of; "" if the start stage has none.
    tenant: whose request it is; "" = nobody's in particular. label: the client's name for it, for logs and traces.
    trace_parent: the client's own span, as W3C traceparent.
    """

    request: RequestId
    modalities: frozenset[Modality]
    stages: tuple[StageName, ...]
    emits: Mapping[StageName, frozenset[Modality]]
    final: frozenset[StageName]
    start: StageName
    text_edge: str = ""
    tenant: str = ""
    label: str = ""
    trace_parent: str = ""


def build_request_spec(
    plan: ResolvedPlan,
    request: RequestId,
    modalities: frozenset[Modality],
    code_edges: bool = False,
    start: StageName | None = None,
    tenant: str = "",
) -> RequestSpec:
    """Stages, outputs and completion set of a request. With `code_edges` the sources of codec edges must end too, so
    that every code has arrived before the end. `start`: where the client's input goes in; None: the first stage.

    Raises KeyError for a modality that no stage emits, InvalidRequest for a start that cannot take a client's text.
    """
    stages = plan.stages_for(modalities)
    text_edge = ""
    if start is not None:
        text_edge = _text_edge(plan, start)
        downstream = reachable(
            (start,), successors([s.name for s in plan.stages], [(e.source, e.to) for e in plan.edges])
        )
        stages = tuple(s for s in stages if s.name in downstream)
        _check_inputs(plan, start, frozenset(s.name for s in stages))
    emits = {s.name: modalities & frozenset(s.emits) for s in stages if modalities & frozenset(s.emits)}
    missing = modalities - frozenset(m for ms in emits.values() for m in ms)
    if missing or not modalities:
        raise KeyError(f"no stage of {plan.pipeline} emits {sorted(missing)}")
    final = set(emits)
    if code_edges:
        names = {s.name for s in stages}
        final |= {e.source for e in plan.edges if e.payload == "codec_frames" and {e.source, e.to} <= names}
    return RequestSpec(
        request=request,
        modalities=modalities,
        stages=tuple(s.name for s in stages),
        emits=MappingProxyType(emits),
        final=frozenset(final),
        start=start or plan.stages[0].name,
        text_edge=text_edge,
        tenant=tenant,
    )


def _text_edge(plan: ResolvedPlan, start: StageName) -> str:
    """The edge whose place the client's text takes; "" for a stage that nothing feeds."""
    names = [s.name for s in plan.stages]
    if start not in names:
        raise InvalidRequest(f"start stage: {start!r} is not in pipeline {plan.pipeline}; use {', '.join(names)}")
    incoming = plan.edges_to(start)
    for edge in incoming:
        if edge.payload is PayloadContract.TEXT_SEGMENTS:
            return edge.name
    if incoming:
        payloads = ", ".join(f"{e.payload.value} of {e.source}" for e in incoming)
        raise InvalidRequest(f"start stage: {start!r} takes {payloads}, not text; start at {names[0]!r}")
    return ""


def _check_inputs(plan: ResolvedPlan, start: StageName, stages: frozenset[StageName]) -> None:
    """No stage may wait for one that is left out: it would wait until its deadline (R5)."""
    for edge in plan.edges:
        if edge.to in stages and edge.to != start and edge.source not in stages:
            raise InvalidRequest(
                f"start stage: {start!r} leaves out {edge.source!r}, and {edge.to!r} needs its {edge.payload.value}; "
                f"start at {plan.stages[0].name!r}"
            )


@dataclass(frozen=True, slots=True)
class StageRecord:
    """One stage of one request: where it runs and how far it is. Times let queue, compute and transfer be told apart."""

    replica: ReplicaId
    phase: StagePhase
    submitted_at: Instant
    started_at: Instant | None = None
    ended_at: Instant | None = None
    queue_seconds: float = 0.0  # before its start, as the stage itself measured
    transfer_seconds: float = 0.0  # of its first rows, likewise


@dataclass(frozen=True, slots=True)
class RequestState:
    """One attempt at a request.

    replays_left: how often it may start anew, as another attempt. emitted: the client has had something of it, so that
    a new attempt could tell it twice. withheld: what says nothing to the client by itself (ends of inner stages, text of
    a request for audio alone); it is told with the first output, because a replay takes it back. after: what ended the
    attempt before.
    """

    spec: RequestSpec
    queued_at: Instant
    phase: Phase = Phase.QUEUED
    stages: Mapping[StageName, StageRecord] = field(default_factory=lambda: MappingProxyType({}))
    bound_at: Instant | None = None
    attempt: int = 1
    replays_left: int = 0
    emitted: bool = False
    withheld: tuple[Emit | EmitStageEnd, ...] = ()
    after: OmniError | None = None

    def with_stage(self, name: StageName, record: StageRecord) -> RequestState:
        return replace(self, stages=MappingProxyType({**self.stages, name: record}))

    def in_phase(self, *phases: StagePhase) -> tuple[StageName, ...]:
        return tuple(n for n, r in self.stages.items() if r.phase in phases)

    @property
    def settled(self) -> bool:
        return all(r.phase not in UNSETTLED for r in self.stages.values())


def next_attempt(state: RequestState, request: RequestId, after: OmniError) -> RequestState:
    """The same request from its start, under an id of its own: nothing late of the old attempt can reach it."""
    spec = replace(state.spec, request=request)
    return RequestState(
        spec, state.queued_at, attempt=state.attempt + 1, replays_left=state.replays_left - 1, after=after
    )


# --- what stages send to the client


@dataclass(frozen=True, slots=True)
class TextPiece:
    text: str
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class AudioPiece:
    """float32 little-endian mono."""

    pcm: bytes
    sample_rate: int
    frames: int

    @property
    def seconds(self) -> float:
        return len(self.pcm) / 4 / self.sample_rate


@dataclass(frozen=True, slots=True)
class CodesPiece:
    """frames x quantizers"""

    codes: tuple[tuple[int, ...], ...]


Piece = TextPiece | AudioPiece | CodesPiece


@dataclass(frozen=True, slots=True)
class StageUsage:
    finish_reason: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    frames: int = 0
    queue_seconds: float = 0.0
    compute_seconds: float = 0.0
    transfer_seconds: float = 0.0


# --- events


@dataclass(frozen=True, slots=True)
class Bound:
    """The pool chose one replica for every stage of the request, all at once."""

    bindings: tuple[tuple[StageName, ReplicaId], ...]


@dataclass(frozen=True, slots=True)
class StageStarted:
    stage: StageName
    replica: ReplicaId
    queue_seconds: float = 0.0
    transfer_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PieceArrived:
    stage: StageName
    replica: ReplicaId
    piece: Piece


@dataclass(frozen=True, slots=True)
class StageFinished:
    stage: StageName
    replica: ReplicaId
    usage: StageUsage


@dataclass(frozen=True, slots=True)
class StageFailed:
    stage: StageName
    replica: ReplicaId
    error: OmniError


@dataclass(frozen=True, slots=True)
class StageAborted:
    stage: StageName
    replica: ReplicaId


@dataclass(frozen=True, slots=True)
class ReplicaGone:
    """The replica is lost, or came back without this request."""

    stage: StageName
    replica: ReplicaId
    reason: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """Admission gives up while the request is still queued (no replica of a stage, shut-down)."""

    error: OmniError


@dataclass(frozen=True, slots=True)
class CancelRequested:
    reason: str


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    seconds: float


@dataclass(frozen=True, slots=True)
class InputOverdue:
    """The client has not ended its input, and sent nothing for so long."""

    seconds: float


@dataclass(frozen=True, slots=True)
class SettleExpired:
    """Stages had their time to confirm the end."""


Event = (
    Bound
    | StageStarted
    | PieceArrived
    | StageFinished
    | StageFailed
    | StageAborted
    | ReplicaGone
    | Rejected
    | CancelRequested
    | DeadlinePassed
    | InputOverdue
    | SettleExpired
)


# --- actions


@dataclass(frozen=True, slots=True)
class SubmitStage:
    stage: StageName
    replica: ReplicaId


@dataclass(frozen=True, slots=True)
class AbortStage:
    stage: StageName
    replica: ReplicaId
    reason: str


@dataclass(frozen=True, slots=True)
class ReleaseStage:
    """The replica has a free place again."""

    stage: StageName
    replica: ReplicaId


@dataclass(frozen=True, slots=True)
class Emit:
    stage: StageName
    piece: Piece


@dataclass(frozen=True, slots=True)
class EmitStageEnd:
    """A stage reached its end; `modalities` are now complete for the client."""

    stage: StageName
    modalities: frozenset[Modality]
    usage: StageUsage


@dataclass(frozen=True, slots=True)
class Complete:
    pass


@dataclass(frozen=True, slots=True)
class Fail:
    error: OmniError


@dataclass(frozen=True, slots=True)
class Replay:
    """Not an end for the client: the request starts anew, as `next_attempt`. This attempt is only settled."""

    error: OmniError


@dataclass(frozen=True, slots=True)
class Cancelled:
    reason: str


@dataclass(frozen=True, slots=True)
class StartSettling:
    """Send SettleExpired after the settle time."""


@dataclass(frozen=True, slots=True)
class Forget:
    """Nothing of the request is left anywhere."""


Terminal = Complete | Fail | Cancelled
Action = SubmitStage | AbortStage | ReleaseStage | Emit | EmitStageEnd | Terminal | Replay | StartSettling | Forget
