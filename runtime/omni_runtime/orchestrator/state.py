"""A request's life as a value: how far it is, in every stage. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

import msgspec
from msgspec.structs import replace

from omni_runtime.errors import OmniError
from omni_runtime.orchestrator.actions import Emit, EmitStageEnd
from omni_runtime.orchestrator.spec import RequestSpec
from omni_runtime.orchestrator.values import Instant, ReplicaId, RequestId, StageName, Value


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


class StageRecord(Value, frozen=True):
    """One stage of one request: where it runs and how far it is. Times let queue, compute and transfer be told apart."""

    replica: ReplicaId
    phase: StagePhase
    submitted_at: Instant
    started_at: Instant | None = None
    ended_at: Instant | None = None
    queue_seconds: float = 0.0  # before its start, as the stage itself measured
    transfer_seconds: float = 0.0  # of its first rows, likewise


class RequestState(Value, frozen=True):
    """One attempt at a request.

    replays_left: how often it may start anew, as another attempt. emitted: the client has had something of it, so that
    a new attempt could tell it twice. withheld: what says nothing to the client by itself (ends of inner stages, text of
    a request for audio alone); it is told with the first output, because a replay takes it back. after: what ended the
    attempt before.
    """

    spec: RequestSpec
    queued_at: Instant
    phase: Phase = Phase.QUEUED
    stages: Mapping[StageName, StageRecord] = msgspec.field(default_factory=lambda: MappingProxyType({}))
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
