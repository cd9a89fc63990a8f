"""The orchestrator: sockets and clocks around the pure core. One asyncio loop, event-driven, no polling per request.

A ROUTER with CURVE takes the replicas' messages; each becomes an event of one request's state machine, and the actions
that follow are carried out here. A slow tick sends signs of life and notices silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from omni_runtime.deploy.plan import ResolvedPlan
from omni_runtime.errors import InvalidRequest, StageUnavailable, UpstreamLost
from omni_runtime.logs import get_logger
from omni_runtime.orchestrator.admission import (
    AdmissionRules,
    check_queue,
    missing_stages,
    plan_admissions,
    unavailable,
)
from omni_runtime.orchestrator.advance import advance
from omni_runtime.orchestrator.calls import Call, RequestHandle
from omni_runtime.orchestrator.inputs import TextInput, text_input_of
from omni_runtime.orchestrator.messages import build_submit, event_of
from omni_runtime.orchestrator.observer import Observer, SilentObserver
from omni_runtime.orchestrator.pool import LivenessRules, LostReplica, Policy, least_loaded
from omni_runtime.orchestrator.roster import Roster
from omni_runtime.orchestrator.state import (
    LIVE,
    AbortStage,
    Action,
    AudioPiece,
    Bound,
    Cancelled,
    CancelRequested,
    Complete,
    DeadlinePassed,
    Emit,
    EmitStageEnd,
    Event,
    Fail,
    Forget,
    InputOverdue,
    Phase,
    Rejected,
    ReleaseStage,
    ReplicaGone,
    ReplicaId,
    RequestId,
    RequestState,
    SettleExpired,
    StageName,
    StartSettling,
    SubmitStage,
    build_request_spec,
)
from omni_runtime.orchestrator.status import Counts, OrchestratorStatus, observe_status
from omni_runtime.orchestrator.wire import ControlSocket
from omni_runtime.protocol import control
from omni_runtime.protocol.channels import Channels

log = get_logger(__name__)

SETTLE_SECONDS = 10.0  # for stages to confirm an abort or an end
TTFP_WINDOW = 256


@dataclass(slots=True, eq=False)
class _Active:
    """One request in the loop: its state, its client, its timers."""

    call: Call
    state: RequestState
    handle: RequestHandle
    text: TextInput | None  # of a client that may send more of it
    timers: list[asyncio.TimerHandle] = field(default_factory=list)
    input_timer: asyncio.TimerHandle | None = None
    first_audio: bool = False


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
        policy: Policy = least_loaded,
        observer: Observer | None = None,
        settle_seconds: float = SETTLE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan = plan
        self.id = uuid.uuid4().hex
        self._channels = channels
        self._endpoint = endpoint
        self._liveness = liveness or LivenessRules()
        self._admission = admission or AdmissionRules(max_queue=plan.entry.max_queue)
        self._observer: Observer = observer or SilentObserver()
        self._settle_seconds = settle_seconds
        self._clock = clock
        self._roster = Roster(plan, self._liveness, policy, self._observer)
        self._active: dict[RequestId, _Active] = {}
        self._queue: dict[RequestId, None] = {}  # ordered set of queued requests
        self._waiting_by_stage: dict[StageName, int] = {}
        self._ttfp: deque[float] = deque(maxlen=TTFP_WINDOW)
        self._recent_seconds = 1.0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._socket: ControlSocket
        self._tasks: list[asyncio.Task[None]] = []

    # --- life

    async def __aenter__(self) -> Orchestrator:
        self._socket = ControlSocket(self._channels, self._endpoint)
        self._tasks = [asyncio.create_task(self._socket.receive(self._take)), asyncio.create_task(self._tick())]
        log.info("orchestrator.listening", endpoint=self._endpoint, port=self.port, revision=self.plan.revision)
        return self

    async def __aexit__(self, *_: object) -> None:
        for request in tuple(self._active):
            self._dispatch(request, Rejected(StageUnavailable("the entry is shutting down")))
            self._dispatch(request, CancelRequested("the entry is shutting down"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for active in self._active.values():
            for timer in active.timers:
                timer.cancel()
        self._socket.close()

    @property
    def port(self) -> int:
        return self._socket.port

    @property
    def failed(self) -> str | None:
        """Why the loop ended, if it did: the process is useless then and /livez says so."""
        for task in self._tasks:
            if task.done() and not task.cancelled() and task.exception() is not None:
                return repr(task.exception())
        return None

    @property
    def unfinished(self) -> int:
        return len(self._active)

    async def drain(self, seconds: float) -> None:
        """Take nothing new, let running requests end for at most `seconds`."""
        self._draining = True
        for request in tuple(self._queue):
            self._dispatch(request, Rejected(StageUnavailable("the entry is shutting down; ask again")))
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
        overloaded = check_queue(len(self._queue), self._admission, self._recent_seconds)
        if overloaded is not None:
            raise overloaded
        now = self._clock()
        request = RequestId(uuid.uuid4().hex)
        spec = build_request_spec(
            self.plan, request, call.modalities, code_edges=call.emit_codes, start=call.start_stage
        )
        text = text_input_of(call.inputs)
        if spec.text_edge and text is None:
            raise InvalidRequest(f"input: stage {spec.start} takes plain text, not messages; send text")
        handle = RequestHandle(request, now, _cancel=self._cancel, _append=self._append)
        active = _Active(call, RequestState(spec, queued_at=now), handle, text)
        self._active[request] = active
        self._queue[request] = None
        self._idle.clear()
        self._after(active, call.deadline_seconds, DeadlinePassed(call.deadline_seconds))
        self._expect_input(active)
        self._admit()
        return handle

    def _cancel(self, request: RequestId, reason: str) -> None:
        self._dispatch(request, CancelRequested(reason))

    def _append(self, request: RequestId, text: str, finished: bool) -> None:
        active = self._active.get(request)
        if active is None:  # late: the request ended and was forgotten (R4)
            return
        if active.text is None:
            raise InvalidRequest("input: the request had its whole input at its start; start another one")
        message = active.text.append(request, text, finished)
        self._expect_input(active)
        start = active.state.spec.start
        record = active.state.stages.get(start)
        if record is None or record.phase not in LIVE:  # queued: Submit will hold it; ended: nobody reads it
            return
        if not self._send_to(start, record.replica, message):
            self._dispatch(request, ReplicaGone(start, record.replica, "closed its connection before the text came"))

    def _expect_input(self, active: _Active) -> None:
        """A client that has more to say says it within its input deadline, or loses its places."""
        if active.input_timer is not None:
            active.input_timer.cancel()
            active.timers.remove(active.input_timer)
            active.input_timer = None
        if active.text is not None and not active.text.finished:
            seconds = active.call.input_deadline_seconds
            active.input_timer = self._after(active, seconds, InputOverdue(seconds))

    def status(self) -> OrchestratorStatus:
        counts = Counts(len(self._active) - len(self._queue), len(self._queue), self._waiting_by_stage, self._draining)
        return observe_status(self.plan, self._roster.pools, counts, self._ttfp_p95_ms(), self._clock())

    def _ttfp_p95_ms(self) -> float | None:
        if not self._ttfp:
            return None
        ordered = sorted(self._ttfp)
        return round(1e3 * ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], 1)

    # --- the state machine and its actions

    def _dispatch(self, request: RequestId, event: Event) -> None:
        active = self._active.get(request)
        if active is None:  # late: the request ended and was forgotten (R4)
            return
        now = self._clock()
        active.state, actions = advance(active.state, event, now)
        for action in actions:
            self._carry_out(active, action, now)
        if any(isinstance(a, ReleaseStage | Forget) for a in actions):
            self._admit()

    def _carry_out(self, active: _Active, action: Action, now: float) -> None:
        match action:
            case SubmitStage(stage, replica):
                inputs = active.call.inputs if active.text is None else active.text.as_inputs()
                submit = build_submit(self.plan, active.state, active.call, inputs, stage, self._roster.hello_of, now)
                self._send_to(stage, replica, submit)
            case AbortStage(stage, replica, reason):
                self._send_to(stage, replica, control.Abort(active.state.spec.request, reason))
            case ReleaseStage(stage, replica):
                self._roster.pools[stage].release(active.state.spec.request, replica)
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
            case StartSettling():
                self._after(active, self._settle_seconds, SettleExpired())
            case Forget():
                for timer in active.timers:
                    timer.cancel()
                del self._active[active.state.spec.request]
                self._note_queue()
                if not self._active:
                    self._idle.set()

    def _end(
        self, active: _Active, terminal: Complete | Fail | Cancelled, outcome: str, reason: str, now: float
    ) -> None:
        state = active.state
        self._queue.pop(state.spec.request, None)
        seconds = now - state.queued_at
        if outcome == "success":
            self._recent_seconds += 0.2 * (seconds - self._recent_seconds)
        self._observer.request_ended(state, outcome, reason, now)
        fields = {"request": state.spec.request, "client_request": active.call.label, "seconds": round(seconds, 3)}
        if isinstance(terminal, Fail):
            log.warning("request.failed", code=terminal.error.code, error=str(terminal.error), **fields)
        else:
            log.info("request.ended", outcome=outcome, reason=reason, **fields)
        active.handle.put(terminal)

    def _note_audio(self, active: _Active, stage: StageName, piece: AudioPiece, now: float) -> None:
        if not active.first_audio and piece.pcm:  # TTFP is the first chunk, never the last (T32)
            active.first_audio = True
            self._ttfp.append(now - active.state.queued_at)
        self._observer.audio_piece(active.state, stage, piece, now)

    def _after(self, active: _Active, seconds: float, event: Event) -> asyncio.TimerHandle:
        loop = asyncio.get_running_loop()
        timer = loop.call_later(seconds, self._dispatch, active.state.spec.request, event)
        active.timers.append(timer)
        return timer

    # --- admission

    def _admit(self) -> None:
        """Bind and start every queued request that can start now."""
        if self._queue:
            now = self._clock()
            specs = (self._active[r].state.spec for r in self._queue)
            admitted, waiting = plan_admissions(specs, self._roster.free(now))
            self._waiting_by_stage = dict(waiting)
            for request in admitted:
                self._start(request, now)
        else:
            self._waiting_by_stage = {}
        self._note_queue()

    def _start(self, request: RequestId, now: float) -> None:
        active = self._active[request]
        bindings = self._roster.bind(request, active.state.spec.stages, now)
        if bindings is None:  # cannot happen while plan_admissions counts places; it waits on
            return
        del self._queue[request]
        active.handle.replicas.update(bindings)
        self._dispatch(request, Bound(bindings))

    def _note_queue(self) -> None:
        running = sum(a.state.phase is Phase.RUNNING for a in self._active.values())
        self._observer.queue_changed(running, len(self._queue), self._waiting_by_stage)

    # --- replicas

    def _take(self, peer: bytes, message: control.StageMessage) -> None:
        now = self._clock()
        self._observer.message_received(type(message).__name__)
        if isinstance(message, control.Hello):
            self._welcome(peer, message, now)
            return
        member = self._roster.member_of(peer)
        if member is None:
            self._socket.send(peer, control.Refused("not registered; say hello first"))
        elif isinstance(message, control.Heartbeat):
            if self._roster.heartbeat(member, message, now):
                self._admit()
            self._reconcile(*member, message)
        elif isinstance(message, control.Leaving):
            self._roster.leave(member, message.reason, now)
        else:
            stage, replica = member
            self._roster.pools[stage].heard(replica, now)
            if isinstance(message, control.StageFailed) and message.code == UpstreamLost.code:
                self._blame_upstream(RequestId(message.request), stage)
            self._dispatch(RequestId(message.request), event_of(stage, replica, message))

    def _welcome(self, peer: bytes, hello: control.Hello, now: float) -> None:
        answer = self._roster.welcome(peer, hello, now)
        if isinstance(answer, control.Refused):
            self._socket.send(peer, answer)
            return
        self._socket.send(peer, control.Welcome(self.id, self._liveness.heartbeat_seconds))
        if answer.lost is not None:
            self._fail_lost(answer.lost)
        self._admit()

    def _blame_upstream(self, request: RequestId, stage: StageName) -> None:
        """A consumer notices a dead producer before we do. If the producer is gone, the client hears of that replica,
        not of whoever waited for it."""
        active = self._active.get(request)
        if active is None:
            return
        for source in (e.source for e in self.plan.edges if e.to == stage):
            record = active.state.stages.get(source)
            member = self._roster.get(source, record.replica) if record is not None else None
            if member is not None:
                self._send_to(source, member.id, self._roster.last_ping())
                if member.unreachable_since is not None:
                    self._dispatch(request, ReplicaGone(source, member.id, "closed its connection"))

    def _reconcile(self, stage: StageName, replica: ReplicaId, beat: control.Heartbeat) -> None:
        """Requests that only one side knows of: the replica drops ours that ended, we fail those that it lost."""
        if beat.requests is None:
            return
        for request in beat.requests:
            active = self._active.get(RequestId(request))
            if active is None or active.state.stages.get(stage) is None:
                self._send_to(stage, replica, control.Abort(request, "unknown to this orchestrator"))
        for lost in self._roster.pools[stage].forgotten(replica, beat):
            self._dispatch(lost, ReplicaGone(stage, replica, "no longer knows the request"))

    async def _tick(self) -> None:
        interval = self._liveness.heartbeat_seconds
        before = self._clock()
        while True:
            await asyncio.sleep(interval)
            now = self._clock()
            stall, before = now - before - interval, now
            if stall > interval:  # we slept, not they: their heartbeats wait in our socket
                self._roster.excuse(stall)
            ping = self._roster.next_ping()
            for stage, replica in self._roster.members():
                self._send_to(stage, replica.id, ping)
            for lost in self._roster.expire(now):
                self._fail_lost(lost)
            self._reject_unservable(now)
            self._admit()

    def _reject_unservable(self, now: float) -> None:
        for request in tuple(self._queue):
            state = self._active[request].state
            waited = now - state.queued_at
            if waited < self._admission.unavailable_grace_seconds:
                continue
            missing = missing_stages(state.spec.stages, lambda s: len(self._roster.pools[s].live(now)))
            if missing:
                self._dispatch(request, Rejected(unavailable(self.plan.pipeline, missing, waited)))

    def _fail_lost(self, lost: LostReplica) -> None:
        """Only the requests that were bound to it fail; others go on."""
        for request in lost.requests:
            self._dispatch(request, ReplicaGone(lost.stage, lost.replica, lost.reason))

    # --- sending

    def _send_to(self, stage: StageName, replica: ReplicaId, message: control.OrchestratorMessage) -> bool:
        member = self._roster.get(stage, replica)
        if member is None:
            return False
        if self._socket.send(member.peer, message):
            return True
        self._roster.unreachable(stage, member, self._clock())
        return False
