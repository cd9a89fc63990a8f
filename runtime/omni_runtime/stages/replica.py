"""One stage replica from start to exit: wires sockets, clock and engine thread together.

What to do with a message, chunk or output is decided in `requests`; this file only carries it out.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import uuid
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass

from omni_runtime.connectors.api import ChunkReceived, EdgeClient, EdgeFailed
from omni_runtime.deploy.plan import CONTRACT_VERSION, ResolvedPlan, StagePlan
from omni_runtime.errors import OmniError
from omni_runtime.eventloop import settle
from omni_runtime.logs import get_logger
from omni_runtime.protocol import control
from omni_runtime.protocol.channels import Channels
from omni_runtime.stages import actions
from omni_runtime.stages import requests as book
from omni_runtime.stages.engine import AudioOut, MeasuredEngine, Speaker, StageEngine
from omni_runtime.stages.metrics import StageMetrics
from omni_runtime.stages.probes import serve_probes
from omni_runtime.stages.pump import Pump
from omni_runtime.stages.registration import Registration, RegistrationEvents
from omni_runtime.stages.runner import (
    EngineDied,
    EngineLoaded,
    EnginePower,
    EngineRunner,
    EngineStopped,
    RunnerEvent,
)

log = get_logger(__name__)

SIDECAR_CONNECT_SECONDS = 60.0
TICK_SECONDS = 0.5
ENGINE_CLOSE_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    plan: ResolvedPlan
    stage: StagePlan
    replica: str
    entry_hosts: tuple[str, ...]
    entry_port: int
    http_port: int
    chunk_deadline_s: float


class Worker:
    """One replica from start to exit. `run` returns the exit code."""

    def __init__(self, config: WorkerConfig, engine: StageEngine, edges: EdgeClient, channels: Channels) -> None:
        self._config = config
        self._edges = edges
        self._channels = channels
        self._book = book.RequestBook(
            stage=config.stage.name,
            capacity=config.stage.max_concurrency,
            chunk_deadline_s=config.chunk_deadline_s,
            patient_edges=frozenset(e.name for e in config.plan.edges_to(config.stage.name) if e.mode == "fullPayload"),
        )
        self._metrics = StageMetrics(
            model_name=config.plan.model.served_name, stage=config.stage.name, replica=config.replica
        )
        if isinstance(engine, MeasuredEngine):
            self._metrics.show(engine.families)
        self._engine = engine
        self._runner = EngineRunner(engine, self._from_engine_thread)
        self._registration: Registration | None = None
        self._pumps: dict[tuple[str, str], Pump] = {}
        outgoing = config.plan.edges_from(config.stage.name)
        self._adaptive = frozenset(e.name for e in outgoing if e.sizing == "adaptive")
        self._background: set[asyncio.Task[None]] = set()
        self._loaded = asyncio.Event()
        self._stop = asyncio.Event()  # drain, then exit
        self._wakers: set[str] = set()  # orchestrators that asked for sleep or waking, and wait for an answer
        self._dead = ""  # why the process must end at once
        self._died = asyncio.Event()
        self._idle = asyncio.Event()  # nothing left that a drain would cut off

    def stop(self) -> None:
        """Drain, then end `run`; what SIGTERM does."""
        self._stop.set()

    @property
    def missing(self) -> str | None:
        """What keeps the replica from being ready; None when it is."""
        return self._missing()

    async def run(self) -> int:
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self.stop)
        probes = await serve_probes(
            self._config.http_port,
            live=lambda: self._dead or None,
            ready=self._missing,
            registry=self._metrics.registry,
        )
        self._metrics.capacity.set(self._config.stage.max_concurrency)
        try:
            self._runner.start()
            await self._edges.connect(SIDECAR_CONNECT_SECONDS)
            await self._first(self._loaded, self._died, self._stop)
            if not self._dead and not self._stop.is_set():
                await self._edges.connect(SIDECAR_CONNECT_SECONDS)  # it may have gone while the engine was loading
                await self._serve()
        except OmniError as error:
            self._die(f"{error.code}: {error}")
        finally:
            await self._close(probes.cleanup)
        if self._dead:
            log.error("worker.failed", reason=self._dead)
            return 1
        log.info("worker.stopped")
        return 0

    async def _serve(self) -> None:
        self._registration = Registration(
            hosts=self._config.entry_hosts,
            port=self._config.entry_port,
            hello=self._hello(),
            channels=self._channels,
            events=RegistrationEvents(message=self._on_message, lost=self._on_lost, load=self._heartbeat),
        )
        for name, coroutine in (
            ("registration", self._registration.run()),
            ("edges", self._receive_chunks()),
            ("clock", self._tick()),
        ):
            task = asyncio.create_task(coroutine, name=name)
            task.add_done_callback(self._on_task_end)
            self._background.add(task)
        log.info("worker.serving", data_endpoint=self._edges.data_endpoint, domain=self._edges.shared_memory_domain)
        await self._first(self._died, self._stop)
        if not self._dead:
            await self._drain()

    async def _drain(self) -> None:
        """Take no new request, finish those that are bound here, within the plan's time."""
        assert self._registration is not None
        self._book.drain()
        self._registration.leave("SIGTERM")
        log.info("worker.draining", requests=self._book.active, seconds=self._config.plan.drain_timeout_seconds)
        self._note_idle()
        seconds = self._config.plan.drain_timeout_seconds
        try:
            await asyncio.wait_for(self._first(self._idle, self._died), seconds)
        except TimeoutError:
            log.warning("worker.drain_timeout", requests=self._book.active)

    async def _close(self, close_probes: Callable[[], object]) -> None:
        for task in (*self._background, *(p.task for p in self._pumps.values())):
            task.cancel()
        if self._registration is not None:
            await self._registration.close()
        if not await asyncio.to_thread(self._runner.close, ENGINE_CLOSE_SECONDS):
            log.warning("engine.close_timeout", seconds=ENGINE_CLOSE_SECONDS)
        with contextlib.suppress(OmniError):
            await self._edges.close()
        closing = close_probes()
        if asyncio.iscoroutine(closing):
            await closing

    # --- what comes in

    def _on_message(self, message: control.OrchestratorMessage, orchestrator: str) -> None:
        match message:
            case control.Submit():
                now, no_edges = self._loop.time(), self._edges.missing
                if no_edges:  # said before the refusal: the next attempt then waits, and /ready tells the same
                    self._send(orchestrator, self._heartbeat(orchestrator))
                self._perform(self._book.submit(message, orchestrator, now, no_edges=no_edges))
            case control.Append():
                self._perform(self._book.append(message, orchestrator, self._loop.time()))
            case control.Abort(request=request):
                self._perform(self._book.abort(request, orchestrator))
            case control.Sleep():
                self._sleep(orchestrator)
            case control.Wake():
                self._wakers.add(orchestrator)
                self._runner.wake_up()
            case _:
                log.warning("orchestrator.unexpected", message=type(message).__name__)

    def _sleep(self, orchestrator: str) -> None:
        if not self._book.idle:
            problem = f"{self._book.active} requests are in flight; pause, and wait for their end"
            self._send(orchestrator, control.PowerChanged(asleep=False, problem=problem))
            return
        self._book.asleep = True  # nothing is taken from here on
        self._wakers.add(orchestrator)
        self._runner.sleep()

    def _on_power(self, event: EnginePower) -> None:
        self._book.asleep = event.asleep
        log.info("engine.power", asleep=event.asleep, problem=event.problem)
        for orchestrator in self._wakers:
            self._send(orchestrator, control.PowerChanged(event.asleep, event.problem))
        self._wakers.clear()

    def _on_lost(self, orchestrator: str) -> None:
        self._perform(self._book.orchestrator_lost(orchestrator))

    def _from_engine_thread(self, events: Sequence[RunnerEvent]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
            self._loop.call_soon_threadsafe(self._on_engine_events, tuple(events))

    def _on_engine_events(self, events: tuple[RunnerEvent, ...]) -> None:
        with self._registration.together() if self._registration else contextlib.nullcontext():
            for event in events:
                self._on_engine_event(event)

    def _on_engine_event(self, event: RunnerEvent) -> None:
        match event:
            case EngineLoaded():
                settle()
                self._loaded.set()
            case EngineStopped(request=request):
                self._perform(self._book.engine_stopped(request))
            case EnginePower():
                self._on_power(event)
            case EngineDied(reason=reason):
                self._perform(self._book.engine_failed(reason))
                self._die(f"engine: {reason}")
            case _:
                if isinstance(event, AudioOut):
                    self._metrics.audio_frames.inc(event.frames)
                self._perform(self._book.output(event, self._loop.time()))

    async def _receive_chunks(self) -> None:
        async for event in self._edges.events():
            if isinstance(event, ChunkReceived):
                self._perform(self._book.chunk(event, self._loop.time()))
            else:
                self._perform(self._book.edge_failed(event))

    async def _tick(self) -> None:
        while True:
            self._perform(self._book.tick(self._loop.time()))
            self._metrics.waiting.set(self._book.waiting)
            self._metrics.running.set(self._book.running)
            self._metrics.orchestrators.set(len(self._registration.admitted) if self._registration else 0)
            await asyncio.sleep(TICK_SECONDS)

    # --- what goes out

    def _perform(self, todo: Iterable[actions.Action]) -> None:
        for action in todo:
            match action:
                case actions.Send(orchestrator=orchestrator, message=message):
                    self._count(message)
                    self._send(orchestrator, message)
                case actions.StartEngine(request=request):
                    self._runner.submit(request)
                case actions.Feed(request=request_id, edge=edge, payload=payload):
                    self._runner.feed(request_id, edge, payload)
                case actions.StopEngine(request=request_id):
                    self._runner.abort(request_id)
                case actions.OpenEdge(request=request_id, producer=producer):
                    self._spawn(self._open(request_id, producer))
                case actions.Put(request=request_id, edge=edge, payload=payload):
                    self._pump(request_id, edge).add(payload)
                case actions.CleanupEdges(request=request_id):
                    self._spawn(self._edges.cleanup(request_id))
                case actions.AbortEdges(request=request_id):
                    for key in [k for k in self._pumps if k[0] == request_id]:
                        self._pumps.pop(key).task.cancel()
                    self._spawn(self._edges.abort(request_id))

        self._note_idle()

    def _note_idle(self) -> None:
        if self._stop.is_set() and self._book.idle:
            self._idle.set()

    def _send(self, orchestrator: str, message: control.StageMessage) -> None:
        if self._registration is not None:
            self._registration.send(orchestrator, message)

    def _count(self, message: control.StageMessage) -> None:
        match message:
            case control.StageFinished():
                self._metrics.ended(message.finish_reason)
                self._metrics.tokens.inc(message.completion_tokens)
                self._metrics.queue_seconds.observe(message.queue_seconds)
                self._metrics.compute_seconds.observe(message.compute_seconds)
                self._metrics.transfer_seconds.observe(message.transfer_seconds)
            case control.StageFailed(code=code, request=request, message=text):
                self._metrics.ended(code)
                log.warning("request.failed", request=request, code=code, reason=text)
            case _:
                pass

    async def _open(self, request: str, producer: control.Producer) -> None:
        try:
            await self._edges.open(request, producer)
        except OmniError as error:
            failed = EdgeFailed(request=request, edge=producer.edge, code=error.code, message=str(error))
            self._perform(self._book.edge_failed(failed))

    def _pump(self, request: str, edge: str) -> Pump:
        key = (request, edge)
        if key not in self._pumps:
            self._pumps[key] = Pump(self._edges, request, edge, self._on_put, self._on_put_closed, self._on_put_failed)
            self._pumps[key].task.add_done_callback(lambda _: self._pumps.pop(key, None))
        return self._pumps[key]

    def _on_put(self, request: str, edge: str) -> None:
        if edge in self._adaptive and (pump := self._pumps.get((request, edge))):
            self._runner.taken(request, edge, pump.waiting)
        self._perform(self._book.put_done(request, edge))

    def _on_put_closed(self, request: str, edge: str) -> None:
        self._perform(self._book.put_closed(request, edge))

    def _on_put_failed(self, request: str, edge: str, code: str, message: str) -> None:
        self._perform(self._book.put_failed(request, edge, code, message))

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._on_task_end)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if task.cancelled():
            return
        if error := task.exception():
            self._die(f"{task.get_name()}: {type(error).__name__}: {error}")
        elif task.get_name() == "edges" and not self._stop.is_set():
            self._die("the connector sidecar closed the data path")

    # --- state

    def _missing(self) -> str | None:
        if not self._loaded.is_set():
            return "the engine is loading"
        if self._stop.is_set():
            return "draining"
        if self._registration is None or not self._registration.admitted:
            return f"no orchestrator of {', '.join(self._config.entry_hosts)} has admitted this replica"
        return self._dead or self._edges.missing

    def _heartbeat(self, orchestrator: str) -> control.Heartbeat:
        load = control.StageLoad(waiting=self._book.waiting, running=self._book.running)
        held = self._book.held_for(orchestrator)
        problem = self._dead or self._edges.missing or ""
        return control.Heartbeat(
            load=load, healthy=not problem, detail=problem, requests=held, asleep=self._book.asleep
        )

    def _hello(self) -> control.Hello:
        return control.Hello(
            stage=self._config.stage.name,
            replica=self._config.replica,
            revision=self._config.plan.revision,
            contract_version=CONTRACT_VERSION,
            data_endpoint=self._edges.data_endpoint,
            shared_memory_domain=self._edges.shared_memory_domain,
            capacity=self._config.stage.max_concurrency,
            incarnation=uuid.uuid4().hex,
            voices=self._engine.voices() if isinstance(self._engine, Speaker) else (),
        )

    def _die(self, reason: str) -> None:
        self._dead = self._dead or reason
        self._died.set()

    async def _first(self, *events: asyncio.Event) -> None:
        waits = [asyncio.create_task(e.wait()) for e in events]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
