"""What `benchmarks.transfer` compares: ways for an array to get from one process to another, each behind two functions.

`produce` sends `count` messages of `size` bytes, `consume` takes them and returns (seconds per message, microseconds
on the way of each). A consumer touches the first and the last byte; every way has the same bound of messages in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import zmq

from omni_runtime import eventloop
from omni_runtime.connectors.api import ChunkReceived
from omni_runtime.connectors.client import SidecarEdgeClient
from omni_runtime.connectors.node_folder import NodeFolder
from omni_runtime.connectors.wire import INLINE_BYTES, WINDOW_LARGE, WINDOW_PIECES
from omni_runtime.deploy.plan import ResolvedPlan, load_plan
from omni_runtime.protocol.channels import load_keys
from omni_runtime.protocol.control import Producer
from omni_runtime.protocol.payload import Payload

SETTLE_SECONDS = 0.3
IN_FLIGHT_BYTES = 256 << 20
EDGE = "thinker->talker"


def window(size: int) -> int:
    """Messages that may be under way."""
    return WINDOW_PIECES if size <= INLINE_BYTES else max(2, min(WINDOW_LARGE, IN_FLIGHT_BYTES // size))


@dataclass(frozen=True, slots=True)
class Run:
    """One measurement. `pause_s` between messages: 0 measures throughput, more than a message takes measures latency."""

    name: str
    size: int
    count: int
    pause_s: float = 0.0

    @property
    def warm_up(self) -> int:
        """Messages before those that count: as many as are under way, so that every buffer has been used once."""
        return max(16, window(self.size))

    @property
    def messages(self) -> int:
        return self.count + self.warm_up

    def pause(self, number: int) -> float:
        """Seconds after a message. After the warm-up there is time for what it has set going in the background."""
        return max(self.pause_s, SETTLE_SECONDS if number == self.warm_up - 1 else 0.0)


@dataclass(slots=True)
class Clock:
    """The consumer's notes; `time.monotonic` is one clock for all processes of a machine."""

    warm_up: int
    began_ns: int = 0  # when the first message that counts was sent
    taken: int = 0
    ways: list[float] = field(default_factory=list)

    def note(self, array: np.ndarray, sent_ns: int) -> None:
        assert array.flat[0] == array.flat[-1] == 7
        if self.taken == self.warm_up:
            self.began_ns = sent_ns
        if self.taken >= self.warm_up:
            self.ways.append((time.monotonic_ns() - sent_ns) / 1e3)
        self.taken += 1

    def result(self, count: int) -> tuple[float, float]:
        """(seconds per message, median microseconds on the way)."""
        return (time.monotonic_ns() - self.began_ns) / 1e9 / count, statistics.median(self.ways)


class Transport(Protocol):
    """`root`: a folder of the pair; `link`: what multiprocessing has to hand over at the start of a process."""

    def produce(self, root: Path, link: Any, runs: list[Run], go: Callable[[], None]) -> None: ...
    def consume(self, root: Path, link: Any, runs: list[Run], done: Callable[[tuple[float, float]], None]) -> None: ...


def _source(size: int) -> np.ndarray:
    return np.full(size, 7, np.uint8)


class Queue:
    """multiprocessing.Queue: pickle through a pipe."""

    def produce(self, root: Path, link: Any, runs: list[Run], go: Callable[[], None]) -> None:
        for run in runs:
            array = _source(run.size)
            go()
            for n in range(run.messages):
                link.put((array, time.monotonic_ns()))
                _pause(run, n)

    def consume(self, root: Path, link: Any, runs: list[Run], done: Callable[[tuple[float, float]], None]) -> None:
        for run in runs:
            clock = Clock(run.warm_up)
            for _ in range(run.messages):
                clock.note(*link.get())
            done(clock.result(run.count))


class _Sockets:
    """A PUSH and PULL pair over a unix socket, and one in the other direction for what the consumer grants."""

    def __init__(self, root: Path, producing: bool) -> None:
        self.context = zmq.Context()
        self.data = self.context.socket(zmq.PUSH if producing else zmq.PULL)
        self.back = self.context.socket(zmq.PULL if producing else zmq.PUSH)
        for socket, name in ((self.data, "data"), (self.back, "back")):
            if producing:
                socket.bind(f"ipc://{root}/{name}")
            else:
                socket.connect(f"ipc://{root}/{name}")

    def close(self) -> None:
        self.context.destroy(linger=1000)


class PlainZeroMq:
    """A msgpack header and the array's own memory as a second frame; no copy that can be left out."""

    def produce(self, root: Path, link: Any, runs: list[Run], go: Callable[[], None]) -> None:
        sockets = _Sockets(root, True)
        for run in runs:
            array = _source(run.size)
            go()
            free = window(run.size)
            for n in range(run.messages):
                if not free:
                    free += len(sockets.back.recv())
                free -= 1
                header = msgspec.msgpack.encode((array.dtype.str, array.shape, time.monotonic_ns()))
                sockets.data.send(header, zmq.SNDMORE)
                sockets.data.send(array.data, copy=run.size < 1 << 16)
                _pause(run, n)
            while free < window(run.size):
                free += len(sockets.back.recv())
        sockets.close()

    def consume(self, root: Path, link: Any, runs: list[Run], done: Callable[[tuple[float, float]], None]) -> None:
        sockets = _Sockets(root, False)
        for run in runs:
            clock = Clock(run.warm_up)
            for _ in range(run.messages):
                dtype, shape, sent = msgspec.msgpack.decode(sockets.data.recv())
                frame = sockets.data.recv(copy=False)
                clock.note(np.frombuffer(frame.buffer, dtype).reshape(shape), sent)
                sockets.back.send(b".")
            done(clock.result(run.count))
        sockets.close()


class BlockPerMessage:
    """One new shared-memory block per message, copied in and out: how vLLM-Omni describes its SharedMemoryConnector."""

    def produce(self, root: Path, link: Any, runs: list[Run], go: Callable[[], None]) -> None:
        sockets = _Sockets(root, True)
        for run in runs:
            array = _source(run.size)
            go()
            free = window(run.size)
            for n in range(run.messages):
                if not free:
                    free += len(sockets.back.recv())
                free -= 1
                sent = time.monotonic_ns()
                block = shared_memory.SharedMemory(create=True, size=run.size)
                np.frombuffer(block.buf, np.uint8, run.size)[:] = array
                sockets.data.send(msgspec.msgpack.encode((block.name, array.dtype.str, array.shape, sent)))
                with contextlib.suppress(BufferError):
                    block.close()
                _pause(run, n)
            while free < window(run.size):
                free += len(sockets.back.recv())
        sockets.close()

    def consume(self, root: Path, link: Any, runs: list[Run], done: Callable[[tuple[float, float]], None]) -> None:
        sockets = _Sockets(root, False)
        for run in runs:
            clock = Clock(run.warm_up)
            for _ in range(run.messages):
                name, dtype, shape, sent = msgspec.msgpack.decode(sockets.data.recv())
                block = shared_memory.SharedMemory(name=name)
                data = bytes(block.buf[: run.size])
                block.close()
                block.unlink()
                clock.note(np.frombuffer(data, dtype).reshape(shape), sent)
                sockets.back.send(b".")
            done(clock.result(run.count))
        sockets.close()


@dataclass(frozen=True, slots=True)
class Connector:
    """Ours: engine -> sidecar -> engine. `root` holds the plan and a folder per sidecar, named as link says.

    With `reserve`, the producer's arrays are in the arena from the start (a stage computes straight into it).
    """

    reserve: bool = False

    def produce(self, root: Path, link: Any, runs: list[Run], go: Callable[[], None]) -> None:
        eventloop.run(self._produce(root, link, runs, go))

    async def _produce(self, root: Path, link: Any, runs: list[Run], go: Callable[[], None]) -> None:
        async with _client(root / link["up"], root, "thinker") as client:
            link["producer"].put((client.data_endpoint, client.shared_memory_domain))
            for run in runs:
                array = _source(run.size)
                go()
                for n in range(run.messages):
                    last = n == run.messages - 1
                    room = None
                    if self.reserve and run.size > INLINE_BYTES:
                        room = await client.reserve({"rows": ((run.size,), "uint8")})
                    tensors = {"rows": array} if room is None else room.tensors
                    if room is not None:
                        tensors["rows"][[0, -1]] = 7
                    meta = {"sent": time.monotonic_ns()}
                    await client.put(run.name, EDGE, Payload(n, 1, last, tensors, meta), room)
                    del room, tensors
                    if seconds := run.pause(n):
                        await asyncio.sleep(seconds)
            await asyncio.get_running_loop().run_in_executor(None, link["over"].wait)

    def consume(self, root: Path, link: Any, runs: list[Run], done: Callable[[tuple[float, float]], None]) -> None:
        eventloop.run(self._consume(root, link, runs, done))

    async def _consume(
        self, root: Path, link: Any, runs: list[Run], done: Callable[[tuple[float, float]], None]
    ) -> None:
        async with _client(root / link["down"], root, "talker") as client:
            endpoint, domain = await asyncio.get_running_loop().run_in_executor(None, link["producer"].get)
            for run in runs:
                await client.open(run.name, Producer(EDGE, "thinker", "thinker-0", endpoint, domain))
                clock = Clock(run.warm_up)
                events = client.events()
                for _ in range(run.messages):
                    event = await anext(events)
                    assert isinstance(event, ChunkReceived), event
                    sent = event.payload.meta["sent"]
                    assert isinstance(sent, int)
                    clock.note(event.payload.tensors["rows"], sent)
                    del event
                done(clock.result(run.count))
            link["over"].set()


def _pause(run: Run, number: int) -> None:
    if seconds := run.pause(number):
        time.sleep(seconds)


@contextlib.asynccontextmanager
async def _client(ipc_dir: Path, root: Path, stage: str) -> AsyncIterator[SidecarEdgeClient]:
    plan: ResolvedPlan = load_plan((root / "plan.json").read_bytes())
    node = NodeFolder(root / "node", load_keys(root / "curve"))
    client = SidecarEdgeClient(ipc_dir, plan, stage, f"{stage}-0", node=node)
    await client.connect(30)
    eventloop.settle()  # as a stage's process does
    try:
        yield client
    finally:
        await client.close()
