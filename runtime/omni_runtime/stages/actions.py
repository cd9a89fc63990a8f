"""What the request book asks the replica to do."""

from __future__ import annotations

from dataclasses import dataclass

from omni_runtime.protocol import control
from omni_runtime.protocol.payload import Payload
from omni_runtime.stages.engine import StageRequest


@dataclass(frozen=True, slots=True)
class Send:
    """A message for the orchestrator that owns the request."""

    orchestrator: str
    message: control.StageMessage


@dataclass(frozen=True, slots=True)
class StartEngine:
    request: StageRequest


@dataclass(frozen=True, slots=True)
class OpenEdge:
    request: str
    producer: control.Producer


@dataclass(frozen=True, slots=True, eq=False)
class Feed:
    request: str
    edge: str
    payload: Payload


@dataclass(frozen=True, slots=True, eq=False)
class Put:
    request: str
    edge: str
    payload: Payload


@dataclass(frozen=True, slots=True)
class StopEngine:
    """Abort in the engine; `RequestBook.engine_stopped` follows when the engine has let go."""

    request: str


@dataclass(frozen=True, slots=True)
class CleanupEdges:
    """The request is over here: incoming streams go, finished outgoing ones live until they are delivered."""

    request: str


@dataclass(frozen=True, slots=True)
class AbortEdges:
    """Drop every stream, queued chunk and arena slab of the request (R11)."""

    request: str


Action = Send | StartEngine | OpenEdge | Feed | Put | StopEngine | CleanupEdges | AbortEdges
