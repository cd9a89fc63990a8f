"""What reaches a request's state machine. No I/O, no clock."""

from __future__ import annotations

from omni_runtime.errors import OmniError
from omni_runtime.orchestrator.values import Piece, ReplicaId, StageName, StageUsage, Value


class Bound(Value, frozen=True):
    """The pool chose one replica for every stage of the request, all at once."""

    bindings: tuple[tuple[StageName, ReplicaId], ...]


class StageStarted(Value, frozen=True):
    stage: StageName
    replica: ReplicaId
    queue_seconds: float = 0.0
    transfer_seconds: float = 0.0


class PieceArrived(Value, frozen=True):
    stage: StageName
    replica: ReplicaId
    piece: Piece


class StageFinished(Value, frozen=True):
    stage: StageName
    replica: ReplicaId
    usage: StageUsage


class StageFailed(Value, frozen=True):
    stage: StageName
    replica: ReplicaId
    error: OmniError


class StageAborted(Value, frozen=True):
    stage: StageName
    replica: ReplicaId


class ReplicaGone(Value, frozen=True):
    """The replica is lost, or came back without this request."""

    stage: StageName
    replica: ReplicaId
    reason: str


class Rejected(Value, frozen=True):
    """Admission gives up while the request is still queued (no replica of a stage, shut-down)."""

    error: OmniError


class CancelRequested(Value, frozen=True):
    reason: str


class DeadlinePassed(Value, frozen=True):
    seconds: float


class InputOverdue(Value, frozen=True):
    """The client has not ended its input, and sent nothing for so long."""

    seconds: float


class SettleExpired(Value, frozen=True):
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
