"""A whole pipeline of stage workers in one process: real sidecar and sockets, engines that count."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import zmq

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
    StageOutput,
    StageRequest,
    Started,
    TextOut,
)
from omni_runtime.stages.replica import Worker, WorkerConfig
from tests.unit.stages.plans import TALKER_EDGE, THINKER_EDGE, a_plan

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
        self.heartbeat_seconds = 0.2
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
            answer: control.OrchestratorMessage = control.Welcome(
                orchestrator="o1", heartbeat_seconds=self.heartbeat_seconds
            )
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
    root: Path, plan: ResolvedPlan | None = None, *, heartbeat_seconds: float = 0.2, **engines: CountingEngine
) -> AsyncIterator[Pipeline]:
    plan, keys = plan or a_plan(), generate_keys(root / "curve")
    async with AsyncExitStack() as stack:
        sidecar = Sidecar(plan, keys, sidecar_options(root))
        await sidecar.start()
        stack.push_async_callback(sidecar.close)
        pipeline = Pipeline(root, plan, keys, await stack.enter_async_context(Channels(keys)))
        pipeline.sidecar = sidecar
        pipeline.heartbeat_seconds = heartbeat_seconds
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
