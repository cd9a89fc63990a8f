"""A stage replica without an engine: real ZeroMQ sockets with CURVE, the real protocol, scripted outputs.

It stands in for `omni_runtime.stages.worker` in tests of the orchestrator and of the API, and nowhere else.
"""

from __future__ import annotations

import asyncio
import struct
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import zmq
import zmq.asyncio

from omni_runtime.deploy.plan import CONTRACT_VERSION, ResolvedPlan
from omni_runtime.protocol import control
from omni_runtime.protocol.channels import Channels

SAMPLE_RATE = 24_000
PATIENCE_SECONDS = 30.0  # ends a hang; a busy machine may be slow


def tone(seconds: float, value: float = 0.25) -> bytes:
    """float32 samples, all of one value."""
    n = round(seconds * SAMPLE_RATE)
    return struct.pack("<f", value) * n


def thinker_script(words: list[str], finish: str = "stop") -> Callable[[str], list[control.StageMessage]]:
    def script(request: str) -> list[control.StageMessage]:
        pieces: list[control.StageMessage] = [
            control.ClientText(request, word, (i,)) for i, word in enumerate(words, start=100)
        ]
        done = control.StageFinished(request, finish, prompt_tokens=7, completion_tokens=len(words))
        return [control.StageStarted(request), *pieces, done]

    return script


def talker_script(frames: int = 4) -> Callable[[str], list[control.StageMessage]]:
    def script(request: str) -> list[control.StageMessage]:
        codes = tuple((i, i + 1) for i in range(frames))
        return [
            control.StageStarted(request),
            control.ClientCodes(request, codes),
            control.StageFinished(request, "stop", frames=frames),
        ]

    return script


def code2wav_script(pieces: int = 3, seconds: float = 0.1) -> Callable[[str], list[control.StageMessage]]:
    def script(request: str) -> list[control.StageMessage]:
        audio: list[control.StageMessage] = [
            control.ClientAudio(request, tone(seconds, 0.1 * (i + 1)), SAMPLE_RATE, 2) for i in range(pieces)
        ]
        return [control.StageStarted(request), *audio, control.StageFinished(request, "stop", frames=2 * pieces)]

    return script


SCRIPTS: dict[str, Callable[[], Callable[[str], list[control.StageMessage]]]] = {
    "thinker": lambda: thinker_script(["Hello", " ", "world", "."]),
    "talker": talker_script,
    "code2wav": code2wav_script,
}


@dataclass(eq=False)
class FakeStage:
    """One replica. `hold_after`: send that many messages of the script, then wait for `go`."""

    plan: ResolvedPlan
    stage: str
    channels: Channels
    port: int
    replica: str = field(default_factory=lambda: uuid.uuid4().hex)
    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex)
    revision: str | None = None
    contract: int = CONTRACT_VERSION
    capacity: int = 4
    script: Callable[[str], list[control.StageMessage]] | None = None
    hold_after: int | None = None
    answers_aborts: bool = True
    reports_requests: bool = True
    voices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.submits: dict[str, control.Submit] = {}
        self.appends: list[control.Append] = []
        self.aborts: dict[str, str] = {}
        self.refused: asyncio.Queue[str] = asyncio.Queue()
        self.welcomed = asyncio.Event()
        self.submitted = asyncio.Event()
        self.aborted = asyncio.Event()
        self.go = asyncio.Event()
        self.held = asyncio.Event()  # some request has sent its first `hold_after` messages
        self.silent = False
        self.asleep = False
        self.problem = ""  # told with heartbeats
        self.power_problem = ""
        self.mute_power = False
        self._socket: zmq.asyncio.Socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._running: dict[str, asyncio.Task[None]] = {}
        self._pinged = 0

    async def __aenter__(self) -> FakeStage:
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def connect(self, wait: bool = True) -> None:
        self._socket = self.channels.dial(zmq.DEALER, f"tcp://127.0.0.1:{self.port}")
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._beat())]
        await self.hello()
        if wait and self.revision is None and self.contract == CONTRACT_VERSION:
            await asyncio.wait_for(self.welcomed.wait(), PATIENCE_SECONDS)

    async def kill(self) -> None:
        """The process is gone: sockets close, nothing is said."""
        for task in (*self._tasks, *self._running.values()):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._running.values(), return_exceptions=True)
        self._running.clear()
        if self._socket is not None:
            self.channels.release(self._socket)
            self._socket = None

    async def hello(self) -> None:
        await self.send(
            control.Hello(
                stage=self.stage,
                replica=self.replica,
                revision=self.plan.revision if self.revision is None else self.revision,
                contract_version=self.contract,
                data_endpoint=f"tcp://127.0.0.1:1{len(self.stage)}",
                shared_memory_domain=f"domain-{self.replica}",
                capacity=self.capacity,
                incarnation=self.incarnation,
                voices=self.voices,
            )
        )

    async def send(self, message: control.StageMessage) -> None:
        assert self._socket is not None
        await self._socket.send(control.encode(message))

    async def send_together(self, messages: Sequence[control.StageMessage]) -> None:
        assert self._socket is not None
        await self._socket.send(control.encode_stage_messages(messages))

    async def leave(self) -> None:
        await self.send(control.Leaving("drain"))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.05)
            if self.welcomed.is_set() and not self.silent:
                held = tuple(r for r in self._running) if self.reports_requests else None
                load = control.StageLoad(running=len(self._running))
                await self.send(
                    control.Heartbeat(
                        load,
                        healthy=not self.problem,
                        detail=self.problem,
                        requests=held,
                        answers=self._pinged,
                        asleep=self.asleep,
                    )
                )

    async def _receive(self) -> None:
        assert self._socket is not None
        while True:
            message = control.decode_orchestrator_message(await self._socket.recv())
            match message:
                case control.Welcome():
                    self.welcomed.set()
                case control.Refused(reason=reason):
                    self.refused.put_nowait(reason)
                case control.Submit(request=request):
                    self.submits[request] = message
                    self._running[request] = asyncio.create_task(self._serve(request))
                    self.submitted.set()
                case control.Append():
                    self.appends.append(message)
                case control.Abort(request=request, reason=reason):
                    self.aborts[request] = reason
                    task = self._running.pop(request, None)
                    if task is not None:
                        task.cancel()
                    if self.answers_aborts:
                        await self.send(control.Aborted(request))
                    self.aborted.set()
                case control.Sleep() | control.Wake():
                    wanted = isinstance(message, control.Sleep)
                    if not self.power_problem:
                        self.asleep = wanted
                    if not self.mute_power:
                        await self.send(control.PowerChanged(self.asleep, self.power_problem))
                case control.Ping(number=number):
                    self._pinged = number

    async def _serve(self, request: str) -> None:
        script = self.script or SCRIPTS[self.stage]()
        for i, message in enumerate(script(request)):
            if self.hold_after is not None and i >= self.hold_after:
                self.held.set()
                await self.go.wait()
            if isinstance(message, control.StageFinished | control.StageFailed):
                self._running.pop(request, None)
            await self.send(message)
