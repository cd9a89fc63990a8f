"""What the routers share: one value, built by `entry`, kept in `app.state.context`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from starlette.requests import HTTPConnection

from omni_runtime.deploy.plan import ResolvedPlan
from omni_runtime.orchestrator.calls import Call, RequestHandle
from omni_runtime.orchestrator.status import OrchestratorStatus
from omni_runtime.serving.fetch import MediaFetcher
from omni_runtime.topology.types import Modality


class Requests(Protocol):
    """The part of the orchestrator that the API surfaces use."""

    @property
    def failed(self) -> str | None: ...
    def submit(self, call: Call) -> RequestHandle: ...
    def status(self) -> OrchestratorStatus: ...


class SpeechStreams(Protocol):
    """Counts streams of speech; `metrics.entry` is one. reason: cancelled, closed, engine_dead or error."""

    def speech_stream_completed(self) -> None: ...
    def speech_stream_aborted(self, reason: str) -> None: ...


class Uncounted:
    def speech_stream_completed(self) -> None:
        pass

    def speech_stream_aborted(self, reason: str) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds to wait for a client."""

    send: float = 30.0  # until it takes one piece of an answer
    body_piece: float = 30.0  # until the next piece of a request's body comes
    body: float = 300.0  # until all of it has come
    session_config: float = 10.0  # the first message of a WebSocket
    session_idle: float = 30.0  # the next one, while nothing is left to speak


@dataclass(frozen=True, slots=True)
class ServingContext:
    plan: ResolvedPlan
    requests: Requests
    render_metrics: Callable[[], tuple[bytes, str]]  # body, content type
    inputs: tuple[str, ...]  # kinds of input that the topology takes
    version: str
    fetcher: MediaFetcher = field(default_factory=MediaFetcher)
    patience: Patience = Patience()
    speech_streams: SpeechStreams = field(default_factory=Uncounted)
    started: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_names(self) -> tuple[str, ...]:
        return (self.plan.model.served_name,)

    @property
    def outputs(self) -> frozenset[Modality]:
        return frozenset(m for s in self.plan.stages for m in s.emits)

    def voices(self) -> tuple[str, ...]:
        """What the live replicas can speak with; empty while none has told."""
        return tuple(sorted({v for s in self.requests.status().stages for v in s.voices}))


def context_of(connection: HTTPConnection) -> ServingContext:
    context = connection.app.state.context
    assert isinstance(context, ServingContext)
    return context
