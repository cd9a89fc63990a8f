"""The orchestrator: clients and clocks around the pure core. One asyncio loop, event-driven, no polling per request.

Each event goes through one request's state machine, and the actions that follow are carried out here. `replicas` has
the socket; a slow tick there sends signs of life and notices silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable
from dataclasses import replace

from msgspec import structs

from omni_runtime.deploy.plan import ResolvedPlan
from omni_runtime.errors import InvalidRequest, OmniError, StageUnavailable
from omni_runtime.logs import get_logger
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
)
from omni_runtime.orchestrator.administration import Administration
from omni_runtime.orchestrator.admission import (
    AdmissionRules,
    missing_stages,
    plan_admissions,
    rules_of,
    unavailable,
    waking_seconds,
)
from omni_runtime.orchestrator.advance import advance
from omni_runtime.orchestrator.attempt import Attempt
from omni_runtime.orchestrator.calls import Call, RequestHandle
from omni_runtime.orchestrator.events import (
    Bound,
    CancelRequested,
    DeadlinePassed,
    Event,
    Rejected,
    ReplicaGone,
    SettleExpired,
)
from omni_runtime.orchestrator.inputs import text_input_of
from omni_runtime.orchestrator.messages import build_submit
from omni_runtime.orchestrator.observer import Observer, SilentObserver, Tracer
from omni_runtime.orchestrator.pool import LivenessRules, Policy
from omni_runtime.orchestrator.queue import RequestQueue
from omni_runtime.orchestrator.recent import Recent
from omni_runtime.orchestrator.replicas import ReplicaSide
from omni_runtime.orchestrator.routing import POLICIES
from omni_runtime.orchestrator.spec import build_request_spec
from omni_runtime.orchestrator.state import LIVE, RequestState, StageRecord, next_attempt
from omni_runtime.orchestrator.status import Counts, OrchestratorStatus, observe_status
from omni_runtime.orchestrator.values import AudioPiece, RequestId, StageName
from omni_runtime.protocol import control
from omni_runtime.protocol.channels import Channels

log = get_logger(__name__)

SETTLE_SECONDS = 10.0  # for stages to confirm an abort or an end


class Orchestrator:
    """Runs the requests of one pipeline. Use as an async context manager."""

    def __init__(
        self,
        plan: ResolvedPlan,
        channels: Channels,
        *,
        endpoint: str,
        liveness: LivenessRules | None = None,
        admission: AdmissionRules | None = None,
        policy: Policy | None = None,
        observer: Observer | None = None,
        tracer: Tracer | None = None,
        settle_seconds: float = SETTLE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan = plan
        self.id = uuid.uuid4().hex
        self._channels = channels
        self._endpoint = endpoint
        self._rules = admission or rules_of(plan.entry)
        self._observer: Observer = observer or SilentObserver()
        self._tracer = tracer
        self._settle_seconds = settle_seconds
        self._clock = clock
        self._replicas = ReplicaSide(
            plan=plan,
            name=self.id,
            liveness=liveness or LivenessRules(),
            policy=policy or POLICIES[plan.entry.routing],
            observer=self._observer,
            requests=self,
            clock=clock,
        )
        self._roster = self._replicas.roster
        self._active: dict[RequestId, Attempt] = {}
        self._attempts: dict[RequestId, RequestId] = {}  # of requests that started anew: the client's id -> the present
        self._queue = RequestQueue(self._rules)
        self._waiting_by_stage: dict[StageName, int] = {}
        self._recent = Recent()
        self._draining = False
        self.administration = Administration(self._replicas.power, self._admit)
        self._idle = asyncio.Event()
        self._idle.set()

    # --- life

    async def __aenter__(self) -> Orchestrator:
        self._replicas.open(self._channels, self._endpoint)
        log.info("orchestrator.listening", endpoint=self._endpoint, port=self.port, revision=self.plan.revision)
        return self

    async def __aexit__(self, *_: object) -> None:
        for request in tuple(self._active):
            self.dispatch(request, Rejected(StageUnavailable("the entry is shutting down")))
            self.dispatch(request, CancelRequested("the entry is shutting down"))
        await self._replicas.close()
        for active in self._active.values():
            active.cancel_timers()

    @property
    def port(self) -> int:
        return self._replicas.port

    @property
    def failed(self) -> str | None:
        """Why the loop ended, if it did: the process is useless then and /livez says so."""
        for task in self._replicas.tasks:
            if task.done() and not task.cancelled() and task.exception() is not None:
                return repr(task.exception())
        return None

    @property
    def unfinished(self) -> int:
        return len(self._active)

    async def drain(self, seconds: float) -> None:
        """Take nothing new, let running requests end for at most `seconds`."""
        self._draining = True
        for request in self._queue.requests:
            self.dispatch(request, Rejected(StageUnavailable("the entry is shutting down; ask again")))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)

    # --- clients

    def submit(self, call: Call) -> RequestHandle:
        """Queue a request; it starts when every stage it needs has a place.

        Raises Overloaded (429) when the queue is full, StageUnavailable (503) while draining, InvalidRequest for a
        start stage that cannot take the input, KeyError for a modality that the pipeline does not emit.
        """
        if self._draining:
            raise StageUnavailable("the entry is shutting down; ask again")
        overloaded = self._queue.refusal(call.tenant, self._recent.seconds)
        if overloaded is not None:
            self._observer.request_refused(overloaded.limit)
            raise overloaded
        now = self._clock()
        request = RequestId(uuid.uuid4().hex)
        spec = build_request_spec(
            self.plan,
            request,
            call.modalities,
            code_edges=call.emit_codes,
            start=call.start_stage,
            tenant=call.tenant,
        )
        spec = structs.replace(spec, label=call.label, trace_parent=call.trace_parent)
        text = text_input_of(call.inputs)
        if spec.text_edge and text is None:
            raise InvalidRequest(f"input: stage {spec.start} takes plain text, not messages; send text")
        if displaced := self._queue.to_displace(call.tenant, self._recent.seconds):
            self._observer.request_refused(displaced[1].limit)
            self.dispatch(displaced[0], Rejected(displaced[1]))
        seconds = min(call.deadline_seconds, self._rules.max_seconds)
        handle = RequestHandle(request, now, _cancel=self._cancel, _append=self._append)
        state = RequestState(spec, queued_at=now, replays_left=self._rules.replays)
        self._enqueue(
            Attempt(
                replace(call, deadline_seconds=seconds), state, handle, text, queued_since=now, dispatch=self.dispatch
            )
        )
        self._admit()
        return handle

    def _enqueue(self, active: Attempt) -> None:
        state, seconds = active.state, active.call.deadline_seconds
        self._active[state.spec.request] = active
        self._queue.add(state.spec, again=state.attempt > 1)
        self._idle.clear()
        left = max(0.0, seconds - (active.queued_since - state.queued_at))
        active.after(left, DeadlinePassed(seconds))
        active.expect_input()

    def _start_anew(self, lost: Attempt, error: OmniError, now: float) -> None:
        """The client waits on with the same handle; stages see another request."""
        request = RequestId(uuid.uuid4().hex)
        state = next_attempt(lost.state, request, error)
        self._observer.request_replayed(lost.state, error.code)
        if self._tracer is not None:
            self._tracer.request_ended(lost.state, "replayed", error.code, now)
        self._queue.leave(lost.request)
        self._attempts[lost.handle.request] = request
        self._enqueue(Attempt(lost.call, state, lost.handle, lost.text, queued_since=now, dispatch=self.dispatch))
        log.warning(
            "request.replayed", request=lost.handle.request, attempt=state.attempt, runs_as=request, reason=str(error)
        )
        self._reject_unservable(now)

    def _cancel(self, request: RequestId, reason: str) -> None:
        self.dispatch(self._attempts.get(request, request), CancelRequested(reason))

    def _append(self, request: RequestId, text: str, finished: bool) -> None:
        request = self._attempts.get(request, request)
        active = self._active.get(request)
        if active is None:  # late: the request ended and was forgotten (R4)
            return
        if active.text is None:
            raise InvalidRequest("input: the request had its whole input at its start; start another one")
        message = active.text.append(request, text, finished)
        active.expect_input()
        start = active.state.spec.start
        record = active.state.stages.get(start)
        if record is None or record.phase not in LIVE:  # queued: Submit will hold it; ended: nobody reads it
            return
        if not self._replicas.send(start, record.replica, message):
            self.dispatch(request, ReplicaGone(start, record.replica, "closed its connection before the text came"))

    def status(self) -> OrchestratorStatus:
        counts = Counts(
            running=len(self._active) - len(self._queue),
            waiting=len(self._queue),
            waiting_by_stage=self._waiting_by_stage,
            draining=self._draining,
            paused=self.administration.paused,
        )
        return observe_status(self.plan, self._roster.pools, counts, self._recent.ttfp_p95_ms(), self._clock())

    # --- the state machine and its actions

    def dispatch(self, request: RequestId, event: Event) -> None:
        """One event of one attempt; unknown ids are of requests that have ended."""
        active = self._active.get(request)
        if active is None:  # late: the request ended and was forgotten (R4)
            return
        now = self._clock()
        active.state, actions = advance(active.state, event, now)
        for action in actions:
            self._carry_out(active, action, now)
        if any(isinstance(a, ReleaseStage | Forget) for a in actions):
            self._admit()

    def _carry_out(self, active: Attempt, action: Action, now: float) -> None:
        match action:
            case SubmitStage(stage, replica):
                inputs = active.call.inputs if active.text is None else active.text.as_inputs()
                submit = build_submit(self.plan, active.state, active.call, inputs, stage, self._roster.hello_of, now)
                self._replicas.send(stage, replica, submit)
            case AbortStage(stage, replica, reason):
                self._replicas.send(stage, replica, control.Abort(active.request, reason))
            case ReleaseStage(stage, replica):
                self._roster.pools[stage].release(active.request, replica)
            case Emit(stage, piece):
                if isinstance(piece, AudioPiece):
                    self._note_audio(active, stage, piece, now)
                active.handle.put(action)
            case EmitStageEnd(stage, _, usage):
                self._observer.stage_ended(stage, active.state.stages[stage], usage)
                active.handle.put(action)
            case Complete():
                self._end(active, action, "success", "stop", now)
            case Fail(error):
                self._end(active, action, "failed", error.code, now)
            case Cancelled(reason):
                self._end(active, action, "failed", reason, now)
            case Replay(error):
                self._start_anew(active, error, now)
            case StartSettling():
                active.after(self._settle_seconds, SettleExpired())
            case Forget():
                active.cancel_timers()
                del self._active[active.request]
                self._note_queue()
                if not self._active:
                    self._idle.set()

    def _end(
        self, active: Attempt, terminal: Complete | Fail | Cancelled, outcome: str, reason: str, now: float
    ) -> None:
        state = active.state
        self._queue.leave(state.spec.request)
        self._attempts.pop(active.handle.request, None)
        seconds = now - state.queued_at
        if outcome == "success":
            self._recent.took(seconds)
        self._observer.request_ended(state, outcome, reason, now)
        if self._tracer is not None:
            self._tracer.request_ended(state, outcome, reason, now)
        fields = {"request": active.handle.request, "client_request": active.call.label, "seconds": round(seconds, 3)}
        if isinstance(terminal, Fail):
            log.warning("request.failed", code=terminal.error.code, error=str(terminal.error), **fields)
        else:
            log.info("request.ended", outcome=outcome, reason=reason, **fields)
        active.handle.put(terminal)

    def _note_audio(self, active: Attempt, stage: StageName, piece: AudioPiece, now: float) -> None:
        if not active.first_audio and piece.pcm:  # TTFP is the first chunk, never the last (T32)
            active.first_audio = True
            self._recent.first_packet(now - active.state.queued_at)
        self._observer.audio_piece(active.state, stage, piece, now)

    # --- admission

    def places_changed(self) -> None:
        self._admit()

    def record_of(self, request: RequestId, stage: StageName) -> StageRecord | None:
        active = self._active.get(request)
        return active.state.stages.get(stage) if active is not None else None

    def ticked(self, now: float) -> None:
        self._reject_unservable(now)
        self._admit()
        self._observer.ticked(now)

    def _admit(self) -> None:
        """Bind and start every queued request that can start now."""
        if self.administration.paused:
            self._note_queue()
            return
        if len(self._queue):
            now = self._clock()
            free = self._roster.free(now)
            stuck = self._queue.stuck(free)
            admitted, waiting = ((), stuck) if stuck is not None else plan_admissions(self._queue.in_order(), free)
            self._waiting_by_stage = dict(waiting)
            for request in admitted:
                self._start(request, now)
        else:
            self._waiting_by_stage = {}
        self._note_queue()

    def _start(self, request: RequestId, now: float) -> None:
        active = self._active[request]
        bindings = self._roster.bind(request, active.state.spec.stages, now, active.call.session)
        if bindings is None:  # cannot happen while plan_admissions counts places; it waits on
            return
        self._queue.start(request)
        active.handle.replicas.update(bindings)
        self.dispatch(request, Bound(bindings))

    def _note_queue(self) -> None:
        self.administration.note(running=len(self._active) - len(self._queue))
        self._observer.queue_changed(self._queue.running, len(self._queue), self._waiting_by_stage)

    def _reject_unservable(self, now: float) -> None:
        for request in () if self.administration.paused else self._queue.requests:
            active = self._active[request]
            waited = now - active.queued_since
            # A client whose request lost its replica hears so at once if there is no other. One whose request was only
            # turned away waits like a new one: a stage that lost its sidecar has it again in a moment.
            lost = active.state.attempt > 1 and not isinstance(active.state.after, StageUnavailable)
            if waited < self._rules.unavailable_grace_seconds and not lost:
                continue
            missing = missing_stages(active.state.spec.stages, lambda s: len(self._roster.pools[s].live(now)))
            if any(waited >= waking_seconds(self.plan, s) for s in missing):
                error = unavailable(self.plan.pipeline, missing, waited, lambda s: self._roster.states(s, now))
                self.dispatch(request, Rejected(error))
