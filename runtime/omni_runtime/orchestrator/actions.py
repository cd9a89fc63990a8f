"""What a request's state machine asks for. No I/O, no clock."""

from __future__ import annotations

from omni_runtime.errors import OmniError
from omni_runtime.orchestrator.values import Piece, ReplicaId, StageName, StageUsage, Value
from omni_runtime.topology.types import Modality


class SubmitStage(Value, frozen=True):
    stage: StageName
    replica: ReplicaId


class AbortStage(Value, frozen=True):
    stage: StageName
    replica: ReplicaId
    reason: str


class ReleaseStage(Value, frozen=True):
    """The replica has a free place again."""

    stage: StageName
    replica: ReplicaId


class Emit(Value, frozen=True):
    stage: StageName
    piece: Piece


class EmitStageEnd(Value, frozen=True):
    """A stage reached its end; `modalities` are now complete for the client."""

    stage: StageName
    modalities: frozenset[Modality]
    usage: StageUsage


class Complete(Value, frozen=True):
    pass


class Fail(Value, frozen=True):
    error: OmniError


class Replay(Value, frozen=True):
    """Not an end for the client: the request starts anew, as `next_attempt`. This attempt is only settled."""

    error: OmniError


class Cancelled(Value, frozen=True):
    reason: str


class StartSettling(Value, frozen=True):
    """Send SettleExpired after the settle time."""


class Forget(Value, frozen=True):
    """Nothing of the request is left anywhere."""


Terminal = Complete | Fail | Cancelled
Action = SubmitStage | AbortStage | ReleaseStage | Emit | EmitStageEnd | Terminal | Replay | StartSettling | Forget
