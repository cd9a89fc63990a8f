"""Per-request bookkeeping of a stage replica: sans-io. Messages, chunks, engine outputs and the clock go in, actions come out.

Every input is accepted in every state; one that is late, double or unknown yields no action, so an aborted request
cannot come back (R4) and a replayed id cannot take over a running one (R62). Sockets and threads are in `worker`.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace

from omni_runtime.connectors.api import ChunkReceived, EdgeFailed
from omni_runtime.errors import InputLost
from omni_runtime.protocol import control
from omni_runtime.stages.actions import (
    AbortEdges,
    Action,
    CleanupEdges,
    Feed,
    OpenEdge,
    Put,
    Send,
    StartEngine,
    StopEngine,
)
from omni_runtime.stages.engine import (
    AudioOut,
    CodesOut,
    Done,
    EdgeOut,
    Failed,
    StageOutput,
    StageRequest,
    Started,
    TextOut,
)
from omni_runtime.stages.text_input import TextFeed

REMEMBERED = 4096


@dataclass(slots=True)
class _Edge:
    last_chunk_at: float
    finished: bool = False


@dataclass(slots=True)
class _Active:
    orchestrator: str
    submitted_at: float
    deadline_at: float
    upstream: dict[str, _Edge]
    text_edge: str = ""  # the edge that the client's own text takes the place of
    text: TextFeed | None = None  # of a client that sends its text in pieces
    unstarted: StageRequest | None = None  # an engine that starts when it has all of the text
    pending_puts: dict[str, int] = field(default_factory=dict)
    closed_edges: set[str] = field(default_factory=set)
    first_chunk_at: float | None = None
    taken: bool = False  # by the engine, which may do so before there is anything to compute
    started_at: float | None = None
    transfer_seconds: float = 0.0
    first_transfer_seconds: float = 0.0
    done: Done | None = None  # the engine is ready, but chunks still wait for their consumer
    done_at: float = 0.0

    @property
    def is_ready(self) -> bool:
        """There is something to compute."""
        return self.unstarted is None and (not self.upstream or self.first_chunk_at is not None)

    @property
    def ready_at(self) -> float:
        """When the engine could have started: waiting for upstream is not queueing."""
        return max(self.submitted_at, self.first_chunk_at or 0.0)


@dataclass(slots=True)
class _Stopping:
    """The engine was told to abort; who waits for the answer."""

    orchestrator: str
    answer: bool


class RequestBook:
    """The requests of one replica.

    chunk_deadline_s: how long an open upstream edge may stay silent before the request fails with a reason (R5).
    patient_edges: edges on which silence is normal, because all rows come at the end (mode fullPayload).
    """

    def __init__(self, *, stage: str, capacity: int, chunk_deadline_s: float, patient_edges: frozenset[str]) -> None:
        self._stage = stage
        self._capacity = capacity
        self._chunk_deadline_s = chunk_deadline_s
        self._patient_edges = patient_edges
        self._active: dict[str, _Active] = {}
        self._stopping: dict[str, _Stopping] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()  # the last REMEMBERED ids: none of them starts again
        self._draining = False
        self.asleep = False  # or on its way: nothing new is taken

    @property
    def active(self) -> int:
        return len(self._active)

    @property
    def waiting(self) -> int:
        """Requests whose rows are at hand, and which the engine has not taken."""
        return sum(1 for r in self._active.values() if r.is_ready and not r.taken)

    @property
    def running(self) -> int:
        return self.active - self.waiting

    @property
    def idle(self) -> bool:
        """Nothing left that a drain would cut off."""
        return not self._active and not self._stopping

    def held_for(self, orchestrator: str) -> tuple[str, ...]:
        """The orchestrator's requests that have neither ended nor been aborted; told with every heartbeat (R6)."""
        return tuple(r for r, a in self._active.items() if a.orchestrator == orchestrator)

    def knows(self, request: str) -> bool:
        return request in self._active

    def drain(self) -> None:
        self._draining = True

    # --- from the orchestrator

    def submit(
        self, message: control.Submit, orchestrator: str, now: float, *, no_edges: str | None = None
    ) -> tuple[Action, ...]:
        """`no_edges`: why no stream can go now; a request that needs one is then refused, so that another replica has it."""
        request = message.request
        if request in self._active or request in self._stopping or request in self._ended:
            return ()
        if self._draining:
            return (self._refuse(orchestrator, request, "StageUnavailable", "the replica is draining"),)
        if self.asleep:
            return (self._refuse(orchestrator, request, "StageUnavailable", "the replica sleeps; wake it up first"),)
        if no_edges and (message.producers or message.consumers):
            return (self._refuse(orchestrator, request, "StageUnavailable", no_edges),)
        if len(self._active) >= 4 * self._capacity:  # the orchestrator keeps to the capacity; this is the backstop
            return (
                self._refuse(
                    orchestrator,
                    request,
                    "CapacityExceeded",
                    f"{len(self._active)} requests are in flight, capacity is {self._capacity}",
                ),
            )
        edges = (*(p.edge for p in message.producers), *((message.text_edge,) if message.text_edge else ()))
        active = self._active[request] = _Active(
            orchestrator=orchestrator,
            submitted_at=now,
            deadline_at=now + message.deadline_seconds,
            upstream={edge: _Edge(last_chunk_at=now) for edge in edges},
            text_edge=message.text_edge,
        )
        start = StageRequest(
            request=request,
            params=message.params,
            inputs={} if message.text_edge else message.inputs,
            upstream_edges=edges,
            downstream_edges=message.consumers,
            emit_codes=message.emit_codes,
        )
        opened = tuple(OpenEdge(request, p) for p in message.producers)
        if "text" not in message.inputs:
            return (StartEngine(start), *opened)
        active.text = TextFeed(phrases=bool(message.text_edge))
        if not message.text_edge:
            active.unstarted = start
        started = (StartEngine(start),) if message.text_edge else ()
        text, finished = str(message.inputs["text"]), bool(message.inputs.get("finished", True))
        return (*started, *opened, *self._take_text(request, active, 0, text, finished, now))

    def append(self, message: control.Append, orchestrator: str, now: float) -> tuple[Action, ...]:
        """More of the client's text. An id that is unknown or has ended is dropped (R4)."""
        active = self._active.get(message.request)
        if active is None or active.orchestrator != orchestrator or active.text is None:
            return ()
        return self._take_text(message.request, active, message.seq, message.text, message.finished, now)

    def _take_text(
        self, request: str, active: _Active, seq: int, text: str, finished: bool, now: float
    ) -> tuple[Action, ...]:
        assert active.text is not None
        try:
            payloads = active.text.take(seq, text, finished)
        except InputLost as error:
            return self._fail(request, error.code, f"stage {self._stage}: {error}")
        if edge := active.upstream.get(active.text_edge):
            edge.last_chunk_at, edge.finished = now, active.text.finished
        if payloads and active.first_chunk_at is None:
            active.first_chunk_at = now
        actions: list[Action] = [Feed(request, active.text_edge, p) for p in payloads]
        actions.extend(self._start_if_ready(request, active, now))
        if active.unstarted is not None and active.text.finished:
            inputs = {"messages": [{"role": "user", "content": active.text.text}]}
            actions.append(StartEngine(replace(active.unstarted, inputs=inputs)))
            active.unstarted, active.first_chunk_at = None, now
        return tuple(actions)

    def abort(self, request: str, orchestrator: str) -> tuple[Action, ...]:
        """The answer is `Aborted`, always, so that the caller gets a terminal whatever the state is (R16)."""
        if request in self._active:
            return self._stop(request, answer=True)
        if request in self._stopping:
            self._stopping[request].answer = True
            return ()
        return (AbortEdges(request), Send(orchestrator, control.Aborted(request=request)))

    def orchestrator_lost(self, orchestrator: str) -> tuple[Action, ...]:
        """Nobody is left to receive these requests' outputs."""
        lost = [r for r, a in self._active.items() if a.orchestrator == orchestrator]
        return tuple(action for r in lost for action in self._stop(r, answer=False))

    # --- from the connector

    def chunk(self, event: ChunkReceived, now: float) -> tuple[Action, ...]:
        active = self._active.get(event.request)
        edge = active.upstream.get(event.edge) if active else None
        if active is None or edge is None or edge.finished:
            return ()
        edge.last_chunk_at = now
        edge.finished = event.payload.finished
        active.transfer_seconds += event.transfer_seconds
        if active.first_chunk_at is None:
            active.first_chunk_at, active.first_transfer_seconds = now, event.transfer_seconds
        started = self._start_if_ready(event.request, active, now)
        return (Feed(event.request, event.edge, event.payload), *started)

    def edge_failed(self, event: EdgeFailed) -> tuple[Action, ...]:
        active = self._active.get(event.request)
        if active is None or (event.edge in active.upstream and active.upstream[event.edge].finished):
            return ()
        return self._fail(event.request, event.code, f"stage {self._stage}, edge {event.edge}: {event.message}")

    def put_done(self, request: str, edge: str) -> tuple[Action, ...]:
        active = self._active.get(request)
        if active is None:
            return ()
        active.pending_puts[edge] -= 1
        if active.done is not None and not any(active.pending_puts.values()):
            return self._finish(request, active)
        return ()

    def put_closed(self, request: str, edge: str) -> tuple[Action, ...]:
        """The consumer wants no more. Not an error here: it may be done early, and if it failed, it says so itself."""
        active = self._active.get(request)
        if active is None:
            return ()
        active.closed_edges.add(edge)
        active.pending_puts[edge] = 0
        if active.done is not None and not any(active.pending_puts.values()):
            return self._finish(request, active)
        return ()

    def put_failed(self, request: str, edge: str, code: str, message: str) -> tuple[Action, ...]:
        if request not in self._active:
            return ()
        return self._fail(request, code, f"stage {self._stage}, edge {edge}: {message}")

    # --- from the engine

    def output(self, output: StageOutput, now: float) -> tuple[Action, ...]:
        request = output.request
        active = self._active.get(request)
        if active is None or active.done is not None:
            return ()
        match output:
            case EdgeOut(edge=edge, payload=payload):
                if edge in active.closed_edges:
                    return ()
                active.pending_puts[edge] = active.pending_puts.get(edge, 0) + 1
                return (Put(request, edge, payload),)
            case TextOut(text=text, token_ids=ids):
                return (Send(active.orchestrator, control.ClientText(request=request, text=text, token_ids=ids)),)
            case AudioOut(pcm=pcm, sample_rate=rate, frames=frames):
                audio = control.ClientAudio(request=request, pcm=pcm, sample_rate=rate, frames=frames)
                return (Send(active.orchestrator, audio),)
            case CodesOut(codes=codes):
                return (Send(active.orchestrator, control.ClientCodes(request=request, codes=codes)),)
            case Started():
                active.taken = True
                return self._start_if_ready(request, active, now)
            case Failed(code=code, message=message):
                return self._fail(request, code, f"stage {self._stage}: {message}")
            case Done():
                active.done, active.done_at = output, now
                if any(active.pending_puts.values()):
                    return ()
                return self._finish(request, active)

    def engine_stopped(self, request: str) -> tuple[Action, ...]:
        stopping = self._stopping.pop(request, None)
        if stopping is None:
            return ()
        answer = (Send(stopping.orchestrator, control.Aborted(request=request)),) if stopping.answer else ()
        return (AbortEdges(request), *answer)

    def engine_failed(self, reason: str) -> tuple[Action, ...]:
        """The engine is gone for good: everybody hears why (R8)."""
        return tuple(
            action
            for request in list(self._active)
            for action in self._fail(request, "EngineError", f"stage {self._stage}: {reason}")
        )

    # --- from the clock

    def tick(self, now: float) -> tuple[Action, ...]:
        actions: list[Action] = []
        for request, active in list(self._active.items()):
            if now >= active.deadline_at:
                waits = ", ".join(e for e, s in active.upstream.items() if not s.finished)
                hint = f"; upstream not finished: {waits}" if waits else ""
                seconds = active.deadline_at - active.submitted_at
                message = f"stage {self._stage} was not ready after {seconds:.0f} s{hint}"
                actions.extend(self._fail(request, "DeadlineExceeded", message))
                continue
            for edge, state in active.upstream.items():
                if edge in self._patient_edges or state.finished:
                    continue
                if now - state.last_chunk_at >= self._chunk_deadline_s:
                    what = "text from the client" if edge == active.text_edge else f"chunk on edge {edge}"
                    message = f"stage {self._stage}: no {what} for {now - state.last_chunk_at:.0f} s"
                    actions.extend(self._fail(request, "DeadlineExceeded", message))
                    break
        return tuple(actions)

    # --- helpers

    def _start_if_ready(self, request: str, active: _Active, now: float) -> tuple[Action, ...]:
        """A stage starts when the engine has the request and the request has rows: not when it begins to wait for them."""
        if not active.taken or not active.is_ready or active.started_at is not None:
            return ()
        active.started_at = now
        started = control.StageStarted(request, now - active.ready_at, active.first_transfer_seconds)
        return (Send(active.orchestrator, started),)

    def _finish(self, request: str, active: _Active) -> tuple[Action, ...]:
        assert active.done is not None
        del self._active[request]
        done = active.done
        begun = active.started_at if active.started_at is not None else active.done_at
        finished = control.StageFinished(
            request=request,
            finish_reason=done.finish_reason,
            prompt_tokens=done.prompt_tokens,
            completion_tokens=done.completion_tokens,
            frames=done.frames,
            queue_seconds=max(0.0, begun - active.ready_at),
            compute_seconds=max(0.0, active.done_at - begun),
            transfer_seconds=active.transfer_seconds,
        )
        self._remember(request)
        return (Send(active.orchestrator, finished), CleanupEdges(request))

    def _stop(self, request: str, *, answer: bool) -> tuple[Action, ...]:
        active = self._active.pop(request)
        self._remember(request)
        self._stopping[request] = _Stopping(active.orchestrator, answer)
        return (StopEngine(request),)

    def _fail(self, request: str, code: str, message: str) -> tuple[Action, ...]:
        active = self._active[request]
        failed = control.StageFailed(request=request, code=code, message=message)
        return (Send(active.orchestrator, failed), *self._stop(request, answer=False))

    def _remember(self, request: str) -> None:
        self._ended[request] = None
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def _refuse(self, orchestrator: str, request: str, code: str, message: str) -> Send:
        text = f"stage {self._stage}: {message}"
        return Send(orchestrator, control.StageFailed(request=request, code=code, message=text))
