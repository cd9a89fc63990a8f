"""The worker over real sockets: a real sidecar, a real CURVE ROUTER as orchestrator, engines that only count."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import zmq
from msgspec.structs import replace

from omni_runtime.connectors.client import SidecarEdgeClient
from omni_runtime.connectors.sidecar import Sidecar, SidecarOptions
from omni_runtime.deploy.plan import ResolvedPlan
from omni_runtime.errors import InvalidRequest
from omni_runtime.protocol import control
from omni_runtime.protocol.channels import Channels, CurveKeys, bound_port, generate_keys
from omni_runtime.protocol.payload import Payload
from omni_runtime.stages.engine import (
    AudioOut,
    Done,
    EdgeOut,
    EngineStats,
    Failed,
    StageOutput,
    StageRequest,
    Started,
    TextOut,
)
from omni_runtime.stages.replica import Worker, WorkerConfig
from tests.unit.stages.plans import TALKER_EDGE, THINKER_EDGE, a_plan

pytestmark = pytest.mark.timeout(90)

CHUNKS = 5
DEADLINE = 30.0


class CountingEngine:
    """thinker: gives CHUNKS chunks; others pass chunks on, code2wav as audio. `hold` keeps a thinker from ending."""

    def __init__(self, stage: str, *, hold: bool = False) -> None:
        self.stage, self.hold = stage, hold
        self.requests: dict[str, StageRequest] = {}
        self.outputs: deque[StageOutput] = deque()
        self.problem: str | None = None
        self.threads: set[int] = set()
        self._awake = threading.Event()

    def load(self) -> None:
        self.threads.add(threading.get_ident())

    def submit(self, request: StageRequest) -> None:
        if request.params.get("bad"):
            raise InvalidRequest("temperature: 'hot' is no number; use 0.7")
        self.requests[request.request] = request
        self.outputs.append(Started(request.request))
        if self.stage == "thinker":
            for i in range(CHUNKS):
                last = i == CHUNKS - 1
                if last and self.hold:
                    return
                self.outputs.append(TextOut(request.request, f"t{i}"))
                if THINKER_EDGE in request.downstream_edges:
                    rows = {"utf8": np.full(4, i, np.uint8)}
                    self.outputs.append(EdgeOut(request.request, THINKER_EDGE, Payload(4 * i, 4, last, rows)))
            self.outputs.append(Done(request.request, "stop", prompt_tokens=3, completion_tokens=CHUNKS))

    def feed(self, request: str, edge: str, payload: Payload) -> None:
        if request not in self.requests:
            return
        if self.stage == "talker":
            self.outputs.append(EdgeOut(request, TALKER_EDGE, payload))
        else:
            pcm = np.asarray(payload.tensors["utf8"]).astype("<f4").tobytes() if payload.rows else b""
            self.outputs.append(AudioOut(request, pcm, 24_000, payload.rows))
        if payload.finished:
            self.outputs.append(Done(request, "stop", frames=payload.start + payload.rows))

    def poll(self, timeout_s: float) -> Sequence[StageOutput]:
        self.threads.add(threading.get_ident())
        if not self.outputs:
            self._awake.wait(timeout_s)
            self._awake.clear()
        outputs = list(self.outputs)
        self.outputs.clear()
        return outputs

    def wake(self) -> None:
        self._awake.set()

    def abort(self, request: str) -> None:
        self.requests.pop(request, None)
        self.outputs = deque(o for o in self.outputs if o.request != request)

    def health(self) -> str | None:
        return self.problem

    def stats(self) -> EngineStats:
        return EngineStats(0, len(self.requests), 8)

    def close(self) -> None:
        pass


class Pipeline:
    """One orchestrator socket, one sidecar, three workers."""

    def __init__(self, root: Path, plan: ResolvedPlan, keys: CurveKeys, channels: Channels) -> None:
        self.root, self.plan, self.keys, self.channels = root, plan, keys, channels
        self.router = channels.serve(zmq.ROUTER, "tcp://127.0.0.1:0")
        self.peers: dict[str, bytes] = {}
        self.hellos: dict[str, control.Hello] = {}
        self.received: list[tuple[str, control.StageMessage]] = []
        self.refuse = ""
        self.beats: dict[str, control.Heartbeat] = {}
        self.sidecar: Sidecar
        self.workers: dict[str, Worker] = {}
        self.runs: dict[str, asyncio.Task[int]] = {}
        self.engines: dict[str, CountingEngine] = {}

    async def serve(self) -> None:
        names: dict[bytes, str] = {}
        while True:
            peer, raw = await self.router.recv_multipart()
            for message in control.decode_stage_messages(raw):
                await self.hear(peer, message, names)

    async def hear(self, peer: bytes, message: control.StageMessage, names: dict[bytes, str]) -> None:
        if isinstance(message, control.Hello):
            names[peer] = message.stage
            self.peers[message.stage], self.hellos[message.stage] = peer, message
            answer: control.OrchestratorMessage = control.Welcome(orchestrator="o1", heartbeat_seconds=0.2)
            if self.refuse:
                answer = control.Refused(reason=self.refuse)
            await self.router.send_multipart([peer, control.encode(answer)])
        elif isinstance(message, control.Heartbeat):
            self.beats[names[peer]] = message
            await self.router.send_multipart([peer, control.encode(control.Ping())])
        else:
            self.received.append((names[peer], message))

    def start(self, stage: str, engine: CountingEngine) -> None:
        config = WorkerConfig(
            plan=self.plan,
            stage=self.plan.stage(stage),
            replica=f"{stage}-0",
            entry_hosts=("127.0.0.1",),
            entry_port=bound_port(self.router),
            http_port=0,
            chunk_deadline_s=1.0 if stage == "code2wav" else 60.0,
        )
        client = SidecarEdgeClient(self.root / "ipc", self.plan, stage, f"{stage}-0")
        self.engines[stage] = engine
        self.workers[stage] = Worker(config, engine, client, self.channels)
        self.runs[stage] = asyncio.create_task(self.workers[stage].run())

    async def submit(
        self, request: str, stages: Sequence[str] = ("thinker", "talker", "code2wav"), **params: object
    ) -> None:
        for stage in stages:
            producers = tuple(
                control.Producer(
                    edge.name,
                    edge.source,
                    f"{edge.source}-0",
                    self.hellos[edge.source].data_endpoint,
                    self.hellos[edge.source].shared_memory_domain,
                )
                for edge in self.plan.edges_to(stage)
            )
            consumers = tuple(e.name for e in self.plan.edges_from(stage) if len(stages) > 1)
            submit = control.Submit(
                request=request, params=dict(params), producers=producers, consumers=consumers, deadline_seconds=60
            )
            await self.send(stage, submit)

    async def send(self, stage: str, message: control.OrchestratorMessage) -> None:
        await self.router.send_multipart([self.peers[stage], control.encode(message)])

    def of(self, kind: type, stage: str | None = None) -> list[control.StageMessage]:
        return [m for s, m in self.received if isinstance(m, kind) and stage in (None, s)]


async def until(condition: Callable[[], bool], what: str) -> None:
    for _ in range(int(DEADLINE / 0.02)):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"not within {DEADLINE:.0f} s: {what}")


def sidecar_options(root: Path) -> SidecarOptions:
    shm = root / "shm"
    shm.mkdir(exist_ok=True)
    return SidecarOptions(
        ipc_dir=root / "ipc",
        shm_dir=shm,
        arena_bytes=16 << 20,
        advertise_host="127.0.0.1",
        domain="pod",
        data_host="127.0.0.1",
        data_port=0,
        http_host="127.0.0.1",
        http_port=0,
    )


@asynccontextmanager
async def a_pipeline(
    root: Path, plan: ResolvedPlan | None = None, **engines: CountingEngine
) -> AsyncIterator[Pipeline]:
    plan, keys = plan or a_plan(), generate_keys(root / "curve")
    async with AsyncExitStack() as stack:
        sidecar = Sidecar(plan, keys, sidecar_options(root))
        await sidecar.start()
        stack.push_async_callback(sidecar.close)
        pipeline = Pipeline(root, plan, keys, await stack.enter_async_context(Channels(keys)))
        pipeline.sidecar = sidecar
        serving = asyncio.create_task(pipeline.serve())
        for stage in ("thinker", "talker", "code2wav"):
            pipeline.start(stage, engines.get(stage) or CountingEngine(stage))
        await until(lambda: all(w.missing is None for w in pipeline.workers.values()), "all replicas ready")
        try:
            yield pipeline
        finally:
            for worker in pipeline.workers.values():
                worker.stop()
            await asyncio.gather(*pipeline.runs.values())
            serving.cancel()


async def test_a_request_runs_through_all_stages(tmp_path: Path) -> None:
    async with a_pipeline(tmp_path) as p:
        await p.submit("r1")
        await until(lambda: len(p.of(control.StageFinished)) == 3, "three stages finished")
        pcm = b"".join(m.pcm for m in p.of(control.ClientAudio) if isinstance(m, control.ClientAudio))
        expected = np.repeat(np.arange(CHUNKS), 4).astype("<f4")
        assert np.array_equal(np.frombuffer(pcm, "<f4"), expected), "every chunk once, in order"
        assert [m.text for m in p.of(control.ClientText) if isinstance(m, control.ClientText)] == [
            f"t{i}" for i in range(CHUNKS)
        ]
        (thinker,) = p.of(control.StageFinished, "thinker")
        assert isinstance(thinker, control.StageFinished)
        assert (thinker.prompt_tokens, thinker.completion_tokens) == (3, CHUNKS)
        (vocoder,) = p.of(control.StageFinished, "code2wav")
        assert isinstance(vocoder, control.StageFinished)
        assert vocoder.frames == 4 * CHUNKS
        for engine in p.engines.values():
            assert len(engine.threads) == 1, "all engine calls come from one thread"
            assert threading.get_ident() not in engine.threads


async def test_a_clients_own_text_is_fed_where_a_thinkers_would_be(tmp_path: Path) -> None:
    async with a_pipeline(tmp_path) as p:
        await p.submit("r1", stages=("code2wav",))
        inputs = {"text": "It was a dark night. The ", "finished": False}
        submit = control.Submit("r1", params={}, inputs=inputs, text_edge=THINKER_EDGE, consumers=(TALKER_EDGE,))
        await p.send("talker", submit)
        await p.send("talker", control.Append("r1", 1, "wind blew.", finished=True))
        await until(lambda: len(p.of(control.StageFinished)) == 2, "talker and code2wav finished")
        pcm = b"".join(m.pcm for m in p.of(control.ClientAudio) if isinstance(m, control.ClientAudio))
        assert bytes(np.frombuffer(pcm, "<f4").astype(np.uint8)) == b"It was a dark night.The wind blew."


async def test_text_only_needs_no_consumer(tmp_path: Path) -> None:
    async with a_pipeline(tmp_path) as p:
        await p.submit("r1", stages=("thinker",))
        await until(lambda: len(p.of(control.StageFinished)) == 1, "the thinker finished alone")
        assert len(p.of(control.ClientText)) == CHUNKS


async def test_abort_frees_everything_and_is_answered_r11_r16(tmp_path: Path) -> None:
    async with a_pipeline(tmp_path, thinker=CountingEngine("thinker", hold=True)) as p:
        await p.submit("r1")
        await until(lambda: len(p.of(control.ClientAudio)) == CHUNKS - 1, "audio of all chunks but the last")
        for stage in p.plan.stages:
            await p.send(stage.name, control.Abort(request="r1", reason="client left"))
        await until(lambda: len(p.of(control.Aborted)) == 3, "three answers")
        assert p.of(control.StageFailed) == []
        assert all(not e.requests for e in p.engines.values())
        await until(lambda: p.sidecar.hub.ledger.bytes == 0, "no arena byte is held")
        await p.submit("r2", stages=("thinker",))
        await until(lambda: bool(p.of(control.StageStarted, "thinker")), "others go on")
    assert os.listdir(tmp_path / "shm") == [], "the arena went with its sidecar"


async def test_a_tail_that_nobody_comes_for_goes_with_an_abort_r11(tmp_path: Path) -> None:
    """The talker has ended; its chunks wait at the connector for a consumer that died before it opened the stream."""
    async with a_pipeline(tmp_path) as p:
        await p.submit("r1", stages=("thinker", "talker"))
        await until(lambda: len(p.of(control.StageFinished)) == 2, "both ended")
        assert len(p.sidecar.hub.table) == 1, "the tail waits for its consumer"
        await p.send("talker", control.Abort("r1", "ReplicaLost in stage code2wav"))
        await until(lambda: len(p.of(control.Aborted)) == 1, "answered")
        await until(lambda: len(p.sidecar.hub.table) == 0, "the tail is gone")


async def test_a_silent_upstream_is_an_error_that_names_the_edge_r5(tmp_path: Path) -> None:
    async with a_pipeline(tmp_path) as p:
        await p.submit("r1", stages=("talker", "code2wav"))
        await until(lambda: bool(p.of(control.StageFailed, "code2wav")), "the vocoder gave up")
        (failed,) = p.of(control.StageFailed, "code2wav")
        assert isinstance(failed, control.StageFailed)
        assert failed.code == "DeadlineExceeded"
        assert TALKER_EDGE in failed.message


async def test_bad_input_fails_one_request_only(tmp_path: Path) -> None:
    async with a_pipeline(tmp_path) as p:
        await p.submit("bad", stages=("thinker",), bad=True)
        await p.submit("good", stages=("thinker",))
        await until(lambda: bool(p.of(control.StageFinished)) and bool(p.of(control.StageFailed)), "both ended")
        (failed,) = p.of(control.StageFailed)
        assert isinstance(failed, control.StageFailed)
        assert (failed.request, failed.code) == ("bad", "InvalidRequest")
        assert "use 0.7" in failed.message


async def test_a_refused_replica_is_not_ready_and_comes_back(tmp_path: Path) -> None:
    async with a_pipeline(tmp_path) as p:
        p.refuse = "revision 0 is not 1"
        await until(lambda: all(w.missing is not None for w in p.workers.values()), "nobody is ready")
        assert "no orchestrator" in str(p.workers["thinker"].missing)
        p.refuse = ""
        await until(lambda: all(w.missing is None for w in p.workers.values()), "all ready again (R35)")


async def test_drain_says_leaving_finishes_and_exits_zero(tmp_path: Path) -> None:
    async with a_pipeline(tmp_path, thinker=CountingEngine("thinker", hold=True)) as p:
        await p.submit("r1", stages=("thinker",))
        await until(lambda: bool(p.of(control.StageStarted)), "started")
        p.workers["thinker"].stop()
        await until(lambda: bool(p.of(control.Leaving, "thinker")), "Leaving")
        await p.submit("r2", stages=("thinker",))
        await until(lambda: bool(p.of(control.StageFailed)), "a new request is refused")
        assert not p.runs["thinker"].done(), "waits for the running one"
        engine = p.engines["thinker"]
        engine.outputs.append(Done("r1", "stop"))
        engine.wake()
        assert await asyncio.wait_for(p.runs["thinker"], DEADLINE) == 0
        assert [m.request for m in p.of(control.StageFinished) if isinstance(m, control.StageFinished)] == ["r1"]


class PacedCountingEngine(CountingEngine):
    """Wants to know how its consumer keeps up."""

    def __init__(self, stage: str) -> None:
        super().__init__(stage)
        self.heard: list[tuple[str, str, int]] = []

    def taken(self, request: str, edge: str, waiting: int) -> None:
        self.heard.append((request, edge, waiting))


@pytest.mark.parametrize("sizing", ["adaptive", "fixed"])
async def test_the_producer_of_adaptive_chunks_hears_of_each_that_its_consumer_takes(
    tmp_path: Path, sizing: str
) -> None:
    plan = a_plan()
    plan = replace(plan, edges=(plan.edges[0], replace(plan.edges[1], sizing=sizing)))
    async with a_pipeline(tmp_path, plan, talker=PacedCountingEngine("talker")) as p:
        engine = p.engines["talker"]
        assert isinstance(engine, PacedCountingEngine)
        await p.submit("r1")
        await until(lambda: len(p.of(control.StageFinished)) == 3, "finished")
        await until(lambda: len(engine.heard) == (CHUNKS if sizing == "adaptive" else 0), "heard")
        assert {heard[:2] for heard in engine.heard} <= {("r1", TALKER_EDGE)}
        assert all(0 <= waiting < CHUNKS for _, _, waiting in engine.heard)


class DrowsyEngine(CountingEngine):
    """Can sleep; what it was called is in `calls`."""

    def __init__(self, stage: str, *, hold: bool = False) -> None:
        super().__init__(stage, hold=hold)
        self.calls: list[str] = []

    def sleep(self) -> None:
        assert not self.requests
        self.calls.append("sleep")

    def wake_up(self) -> None:
        self.calls.append("wake_up")

    def poll(self, timeout_s: float) -> Sequence[StageOutput]:
        assert self.calls[-1:] != ["sleep"], "an engine that sleeps is not polled"
        return super().poll(timeout_s)


async def test_sleep_and_wake(tmp_path: Path) -> None:
    async with a_pipeline(tmp_path, thinker=DrowsyEngine("thinker", hold=True)) as p:
        engine = p.engines["thinker"]
        assert isinstance(engine, DrowsyEngine)
        await p.submit("r1", stages=("thinker",))
        await until(lambda: bool(p.of(control.StageStarted)), "started")
        await p.send("thinker", control.Sleep())
        await until(lambda: len(p.of(control.PowerChanged)) == 1, "refused")
        assert p.of(control.PowerChanged) == [
            control.PowerChanged(False, "1 requests are in flight; pause, and wait for their end")
        ]
        engine.outputs.append(Done("r1", "stop"))
        engine.requests.clear()
        engine.wake()
        await until(lambda: bool(p.of(control.StageFinished)), "finished")
        await p.send("thinker", control.Sleep())
        await p.submit("r2", stages=("thinker",))
        await until(lambda: len(p.of(control.PowerChanged)) == 2 and bool(p.of(control.StageFailed)), "asleep")
        (refused,) = p.of(control.StageFailed)
        assert isinstance(refused, control.StageFailed)
        assert (refused.request, refused.code, "wake it up" in refused.message) == ("r2", "StageUnavailable", True)
        await p.send("thinker", control.Wake())
        await until(lambda: len(p.of(control.PowerChanged)) == 3, "awake")
        assert p.of(control.PowerChanged)[1:] == [control.PowerChanged(True), control.PowerChanged(False)]
        assert engine.calls == ["sleep", "wake_up"]
        await p.submit("r3", stages=("thinker",))
        await until(lambda: len(p.of(control.StageStarted)) == 2, "serves again")


async def test_an_engine_that_cannot_sleep_says_so(tmp_path: Path) -> None:
    async with a_pipeline(tmp_path) as p:
        await p.send("talker", control.Sleep())
        await until(lambda: bool(p.of(control.PowerChanged)), "answered")
        assert p.of(control.PowerChanged) == [
            control.PowerChanged(False, "CountingEngine has nothing that sleep would give back")
        ]
        await p.submit("r1")
        await until(lambda: len(p.of(control.StageFinished)) == 3, "and serves on")


async def test_a_broken_engine_ends_the_process_with_a_reason_r8(tmp_path: Path) -> None:
    async with a_pipeline(tmp_path, thinker=CountingEngine("thinker", hold=True)) as p:
        await p.submit("r1", stages=("thinker",))
        await until(lambda: bool(p.of(control.StageStarted)), "started")
        p.engines["thinker"].problem = "out of memory"
        p.engines["thinker"].wake()
        await until(lambda: bool(p.of(control.StageFailed)), "the request fails")
        (failed,) = p.of(control.StageFailed)
        assert isinstance(failed, control.StageFailed)
        assert (failed.code, "out of memory" in failed.message) == ("EngineError", True)
        assert await asyncio.wait_for(p.runs["thinker"], DEADLINE) == 1


async def test_an_engines_own_failure_is_passed_on(tmp_path: Path) -> None:
    async with a_pipeline(tmp_path, thinker=CountingEngine("thinker", hold=True)) as p:
        await p.submit("r1", stages=("thinker",))
        await until(lambda: bool(p.of(control.StageStarted)), "started")
        p.engines["thinker"].outputs.append(Failed("r1", "CapacityExceeded", "too long"))
        p.engines["thinker"].wake()
        await until(lambda: bool(p.of(control.StageFailed)), "failed")
        assert not p.runs["thinker"].done()
