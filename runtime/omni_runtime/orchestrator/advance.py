"""One step of a request's life. Pure: no sockets, no clock, no engine.

Every event is accepted in every state; one that is too late, of another replica, or unknown yields no action: an
aborted request cannot be resurrected (R4). Completion is by modality set. A stage that was submitted is either heard
of (finished, failed, aborted, lost) or told to abort, exactly once; if the request ends early, all are told.
"""

from __future__ import annotations

from msgspec.structs import replace

from omni_runtime.errors import (
    DeadlineExceeded,
    InputLost,
    InputTimeout,
    OmniError,
    ReplicaLost,
    StageUnavailable,
    UpstreamLost,
)
from omni_runtime.orchestrator.actions import (
    AbortStage,
    Action,
    Cancelled,
    Complete,
    Emit,
    EmitStageEnd,
    Fail,
    Forget,
    ReleaseStage,
    Replay,
    StartSettling,
    SubmitStage,
    Terminal,
)
from omni_runtime.orchestrator.events import (
    Bound,
    CancelRequested,
    DeadlinePassed,
    Event,
    InputOverdue,
    PieceArrived,
    Rejected,
    ReplicaGone,
    SettleExpired,
    StageAborted,
    StageFailed,
    StageFinished,
    StageStarted,
)
from omni_runtime.orchestrator.state import LIVE, UNSETTLED, Phase, RequestState, StagePhase, StageRecord
from omni_runtime.orchestrator.values import Instant, ReplicaId, StageName, TextPiece
from omni_runtime.topology.types import Modality

# Losses of a replica, or of the way to it: another one may do better. A stage that failed would fail again.
REPLAYABLE = (ReplicaLost, UpstreamLost, InputLost, StageUnavailable)

Step = tuple[RequestState, tuple[Action, ...]]


def advance(state: RequestState, event: Event, now: Instant) -> Step:
    """The state after `event`, and what to do about it, in order."""
    match event:
        case Bound():
            return _bind(state, event, now)
        case Rejected(error):
            return (
                _end_queued(state, Fail(_told_with(state.after, error))) if state.phase is Phase.QUEUED else (state, ())
            )
        case CancelRequested(reason):
            return _end(state, Cancelled(reason), reason, now)
        case DeadlinePassed(seconds):
            return _end(state, Fail(DeadlineExceeded(_where_it_hung(state, seconds))), "deadline", now)
        case InputOverdue(seconds):
            return _end(state, Fail(InputTimeout(_what_is_missing(state, seconds))), "input deadline", now)
        case SettleExpired():
            return _settle_now(state, now)
        case StageStarted(stage, replica, queue_seconds, transfer_seconds):
            record = _record(state, stage, replica)
            if record is None or record.phase is not StagePhase.SUBMITTED:
                return state, ()
            started = replace(
                record,
                phase=StagePhase.STARTED,
                started_at=now,
                queue_seconds=queue_seconds,
                transfer_seconds=transfer_seconds,
            )
            return state.with_stage(stage, started), ()
        case PieceArrived(stage, replica, piece):
            record = _record(state, stage, replica)
            if state.phase is not Phase.RUNNING or record is None or record.phase not in LIVE:
                return state, ()
            if state.emitted:
                return state, (Emit(stage, piece),)
            return _emit_first(state, Emit(stage, piece))
        case StageFinished():
            return _finish_stage(state, event, now)
        case StageFailed(stage, replica, error):
            return _lose_stage(state, stage, replica, StagePhase.FAILED, error, now)
        case ReplicaGone(stage, replica, reason):
            error = ReplicaLost(f"stage {stage}: replica {replica} {reason}")
            return _lose_stage(state, stage, replica, StagePhase.LOST, error, now)
        case StageAborted(stage, replica):
            return _confirm_abort(state, stage, replica, now)


def _record(state: RequestState, stage: StageName, replica: ReplicaId) -> StageRecord | None:
    """The stage's record, if it runs on that very replica: two replicas never share an identity (R37)."""
    record = state.stages.get(stage)
    return record if record is not None and record.replica == replica else None


def _bind(state: RequestState, event: Bound, now: Instant) -> Step:
    if state.phase is not Phase.QUEUED:  # ended while the pool was choosing: give the places back
        return state, tuple(ReleaseStage(s, r) for s, r in event.bindings)
    bound = replace(state, phase=Phase.RUNNING, bound_at=now)
    for stage, replica in event.bindings:
        bound = bound.with_stage(stage, StageRecord(replica, StagePhase.SUBMITTED, submitted_at=now))
    # Consumers first: their streams are open when the first chunk comes. Any order works, this one is fastest.
    return bound, tuple(SubmitStage(s, r) for s, r in reversed(event.bindings))


def _emit_first(state: RequestState, emit: Emit) -> Step:
    """Text of a thinker that is only spoken says nothing to the client: it waits for the audio, so that the request can
    still start anew."""
    text_only = isinstance(emit.piece, TextPiece) and Modality.TEXT not in state.spec.modalities
    if text_only and state.replays_left > 0:
        return replace(state, withheld=(*state.withheld, emit)), ()
    return replace(state, emitted=True, withheld=()), (*state.withheld, emit)


def _finish_stage(state: RequestState, event: StageFinished, now: Instant) -> Step:
    record = _record(state, event.stage, event.replica)
    if record is None or record.phase not in UNSETTLED:
        return state, ()
    state = state.with_stage(event.stage, replace(record, phase=StagePhase.FINISHED, ended_at=now))
    actions: list[Action] = [ReleaseStage(event.stage, event.replica)]
    if state.phase is Phase.RUNNING:
        end = EmitStageEnd(event.stage, state.spec.emits.get(event.stage, frozenset()), event.usage)
        complete = all(state.stages[s].phase is StagePhase.FINISHED for s in state.spec.final)
        if not (state.emitted or complete or end.modalities):
            return replace(state, withheld=(*state.withheld, end)), tuple(actions)
        actions += [*state.withheld, end]
        state = replace(state, emitted=True, withheld=())
        if complete:
            actions.append(Complete())
            return _start_settling(state, actions)
    return _done_if_settled(state, actions)


def _lose_stage(
    state: RequestState, stage: StageName, replica: ReplicaId, phase: StagePhase, error: OmniError, now: Instant
) -> Step:
    record = _record(state, stage, replica)
    if record is None or record.phase not in UNSETTLED:
        return state, ()
    state = state.with_stage(stage, replace(record, phase=phase, ended_at=now))
    actions: list[Action] = [ReleaseStage(stage, replica)]
    if state.phase is Phase.RUNNING:
        again = state.replays_left > 0 and not state.emitted and isinstance(error, REPLAYABLE)
        terminal = Replay(error) if again else Fail(_told_with(state.after, error, "the next attempt"))
        state, aborts = _abort_all(state, f"{error.code} in stage {stage}")
        # The old attempt is told to end before the new one starts.
        return _start_settling(state, [*actions, *aborts, terminal] if again else [*actions, terminal, *aborts])
    return _done_if_settled(state, actions)


def _told_with(first: OmniError | None, then: OmniError, when: str = "it could not start anew") -> OmniError:
    """The loss that began it names stage and replica; what came after explains why a replay did not help."""
    if first is None:
        return then
    told = type(first)()
    told.args = (f"{first}; {when}: {then}",)
    return told


def _confirm_abort(state: RequestState, stage: StageName, replica: ReplicaId, now: Instant) -> Step:
    record = _record(state, stage, replica)
    if record is None or record.phase not in UNSETTLED:
        return state, ()
    if record.phase in LIVE:  # a stage that dropped a request that nobody aborted has failed it
        return _lose_stage(
            state, stage, replica, StagePhase.FAILED, OmniError(f"stage {stage} dropped the request"), now
        )
    state = state.with_stage(stage, replace(record, phase=StagePhase.ABORTED, ended_at=now))
    return _done_if_settled(state, [ReleaseStage(stage, replica)])


def _end(state: RequestState, terminal: Terminal, reason: str, now: Instant) -> Step:
    """The client's end comes before the stages' end: whoever left or timed out waits for nobody."""
    if state.phase is Phase.QUEUED:
        return _end_queued(state, terminal)
    if state.phase is not Phase.RUNNING:
        return state, ()
    state, aborts = _abort_all(state, reason)
    return _start_settling(state, [terminal, *aborts])


def _end_queued(state: RequestState, terminal: Terminal) -> Step:
    return replace(state, phase=Phase.DONE), (terminal, Forget())


def _abort_live(state: RequestState, reason: str) -> Step:
    actions: list[Action] = []
    for stage in state.in_phase(*LIVE):
        record = state.stages[stage]
        state = state.with_stage(stage, replace(record, phase=StagePhase.ABORTING))
        actions.append(AbortStage(stage, record.replica, reason))
    return state, tuple(actions)


def _abort_all(state: RequestState, reason: str) -> Step:
    """As _abort_live, and stages that have ended: the tail of what they made may wait for a consumer that will never
    come for it (R11)."""
    ended = state.in_phase(StagePhase.FINISHED)
    state, aborts = _abort_live(state, reason)
    return state, (*aborts, *(AbortStage(stage, state.stages[stage].replica, reason) for stage in ended))


def _start_settling(state: RequestState, actions: list[Action]) -> Step:
    state = replace(state, phase=Phase.SETTLING)
    if state.settled:
        return _done_if_settled(state, actions)
    return state, (*actions, StartSettling())


def _settle_now(state: RequestState, now: Instant) -> Step:
    """Time is up: abort what still runs, and take places back from replicas that never answered an abort."""
    if state.phase is not Phase.SETTLING:
        return state, ()
    unanswered = state.in_phase(StagePhase.ABORTING)
    state, aborts = _abort_live(state, "request ended")
    actions: list[Action] = list(aborts)
    for stage in unanswered:
        record = state.stages[stage]
        state = state.with_stage(stage, replace(record, phase=StagePhase.ABORTED, ended_at=now))
        actions.append(ReleaseStage(stage, record.replica))
    if state.settled:
        return _done_if_settled(state, actions)
    return state, (*actions, StartSettling())


def _done_if_settled(state: RequestState, actions: list[Action]) -> Step:
    if state.phase is Phase.SETTLING and state.settled:
        return replace(state, phase=Phase.DONE), (*actions, Forget())
    return state, tuple(actions)


def _where_it_hung(state: RequestState, seconds: float) -> str:
    """Which stages had not ended: the message of a deadline must say what to look at (R5)."""
    waiting = [f"{n} on replica {r.replica} ({r.phase.value})" for n, r in state.stages.items() if r.phase in LIVE]
    detail = f"still running: {', '.join(waiting)}" if waiting else "still queued: every replica is busy"
    if state.after is not None:
        detail += f"; it had started anew after: {state.after}"
    return f"the request did not end within {seconds:g} s; {detail}"


def _what_is_missing(state: RequestState, seconds: float) -> str:
    """A client that never ends its input must not hold places for ever."""
    return (
        f"no text came for {seconds:g} s and the input was not ended; stage {state.spec.start} waited for it: "
        "send the rest sooner, or end the input"
    )
