"""Between the wire and the state machine: messages of a replica -> events, a bound request -> its Submit. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from omni_runtime.deploy.plan import ResolvedPlan
from omni_runtime.errors import OmniError, by_code
from omni_runtime.orchestrator.calls import Call
from omni_runtime.orchestrator.events import Event, PieceArrived, StageAborted, StageFailed, StageFinished, StageStarted
from omni_runtime.orchestrator.state import RequestState
from omni_runtime.orchestrator.values import (
    AudioPiece,
    CodesPiece,
    Instant,
    ReplicaId,
    StageName,
    StageUsage,
    TextPiece,
)
from omni_runtime.protocol import control

RequestMessage = (
    control.ClientText
    | control.ClientAudio
    | control.ClientCodes
    | control.StageStarted
    | control.StageFinished
    | control.StageFailed
    | control.Aborted
)

MIN_DEADLINE_SECONDS = 0.1


def event_of(stage: StageName, replica: ReplicaId, message: RequestMessage) -> Event:
    match message:
        case control.ClientText():
            return PieceArrived(stage, replica, TextPiece(message.text, message.token_ids))
        case control.ClientAudio():
            return PieceArrived(stage, replica, AudioPiece(message.pcm, message.sample_rate, message.frames))
        case control.ClientCodes():
            return PieceArrived(stage, replica, CodesPiece(message.codes))
        case control.StageStarted():
            return StageStarted(stage, replica, message.queue_seconds, message.transfer_seconds)
        case control.StageFinished():
            return StageFinished(stage, replica, _usage_of(message))
        case control.StageFailed():
            return StageFailed(stage, replica, _error_of(stage, message))
        case control.Aborted():
            return StageAborted(stage, replica)


def build_submit(
    plan: ResolvedPlan,
    state: RequestState,
    call: Call,
    inputs: dict[str, Any],
    stage: StageName,
    hello_of: Callable[..., control.Hello],
    now: Instant,
) -> control.Submit:
    """What one stage needs to know of a bound request: only edges whose both ends take part in it.

    inputs: for the start stage. hello_of(stage, replica): how that replica registered.
    """
    edges = [e for e in plan.edges if e.source in state.stages and e.to in state.stages]
    producers = []
    for edge in edges:
        if edge.to == stage:
            hello = hello_of(edge.source, state.stages[edge.source].replica)
            producers.append(
                control.Producer(edge.name, edge.source, hello.replica, hello.data_endpoint, hello.shared_memory_domain)
            )
    return control.Submit(
        request=state.spec.request,
        params=call.params.as_map(),
        inputs=inputs if stage == state.spec.start else {},
        text_edge=state.spec.text_edge if stage == state.spec.start else "",
        producers=tuple(producers),
        deadline_seconds=max(MIN_DEADLINE_SECONDS, call.deadline_seconds - (now - state.queued_at)),
        emit_codes=call.emit_codes,
        consumers=tuple(e.name for e in edges if e.source == stage),
    )


def _usage_of(message: control.StageFinished) -> StageUsage:
    return StageUsage(
        message.finish_reason,
        message.prompt_tokens,
        message.completion_tokens,
        message.frames,
        message.queue_seconds,
        message.compute_seconds,
        message.transfer_seconds,
    )


def _error_of(stage: StageName, failure: control.StageFailed) -> OmniError:
    error, named = by_code(failure.code), f"stage {stage}"
    told = failure.message.startswith((f"{named}:", f"{named},", f"{named} "))  # the stage's own sentences say it
    message = failure.message if told else f"{named}: {failure.message}"
    try:
        return error(message)
    except TypeError:  # an error class with fields of its own
        return OmniError(f"{named}: {failure.code}: {failure.message}")
