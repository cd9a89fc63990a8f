"""The leak matrix: whoever dies or hangs, after whichever chunk, over whichever connector, leaves nothing behind.

Afterwards the arenas are empty, no file is left, no other stream is harmed, and the side that is left alone has been
told within its deadline (R5, R11, R12).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from omni_runtime.connectors.api import ChunkReceived
from omni_runtime.connectors.client import ClientLimits, SidecarEdgeClient
from omni_runtime.errors import OmniError
from tests.unit.connectors.engine_process import FULL
from tests.unit.connectors.kit import EDGE, Site, a_chunk, has_line, producer, rows, some_bytes, until
from tests.unit.connectors.pods import Engine, Pod, a_pod

CHUNKS = 5
LIMITS = ClientLimits(put_deadline_s=3, chunk_deadline_s=3)
TOLD_SECONDS = 30  # deadlines of 3 s, on a busy machine
FAULTY = "tests.unit.connectors.faulty_sidecar"  # until it gets a signal it is as any other
VICTIMS = ("producer", "consumer", "producer's sidecar", "consumer's sidecar")
ENDS = ("killed", "paused", "exception", "slow")
CONNECTORS = ("SharedMemory", "Line", "TCP", "FarLine", "Mooncake", "Near")
SHARED = ("SharedMemory", "Line")  # in one pod; Near: shared memory between two pods of one node
LINES = ("Line", "FarLine")  # chunks so small that they go past the sidecars
SIGNALS = {"killed": signal.SIGKILL, "paused": signal.SIGSTOP, "exception": signal.SIGUSR1}
SMALL, LARGE = 2_000, 300_000
WHOLE = [
    case
    for case in itertools.product(VICTIMS, ENDS, range(CHUNKS + 1), CONNECTORS)
    if not (case[0] == "consumer's sidecar" and case[3] in SHARED)  # it is the producer's
]
SLICE = [
    ("producer", "killed", 3, "SharedMemory"),
    ("consumer", "killed", 2, "Mooncake"),
    ("producer's sidecar", "killed", 2, "Mooncake"),
    ("consumer's sidecar", "paused", 1, "TCP"),
    ("producer", "killed", 3, "Line"),
    ("consumer", "killed", 3, "Line"),
    ("producer's sidecar", "killed", 3, "Line"),
    ("producer", "killed", 3, "FarLine"),
    ("consumer", "killed", 2, "FarLine"),
    ("producer's sidecar", "killed", 3, "FarLine"),
    ("consumer's sidecar", "paused", 2, "FarLine"),
    ("producer", "exception", 3, "TCP"),
    ("consumer", "exception", 2, "SharedMemory"),
    ("producer's sidecar", "exception", 2, "FarLine"),
    ("producer", "slow", 2, "Mooncake"),
    ("consumer", "slow", 2, "Line"),
    ("consumer's sidecar", "slow", 3, "TCP"),
    ("producer", "killed", 3, "Near"),
    ("consumer", "killed", 2, "Near"),
    ("producer's sidecar", "killed", 2, "Near"),
]


@asynccontextmanager
async def pods(site: Site, connector: str) -> AsyncIterator[tuple[Pod, Pod]]:
    async with AsyncExitStack() as stack:
        if connector == "Near":
            site.node_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="node-")))
            site.use("TCP", near=True)
        else:
            site.use("SharedMemory" if connector in SHARED else "TCP" if connector == "FarLine" else connector)
        first = await stack.enter_async_context(a_pod(site, "pod-a", module=FAULTY))
        second = first
        if connector not in SHARED:
            second = await stack.enter_async_context(a_pod(site, "pod-b", module=FAULTY))
        yield first, second


async def put_until_told(client: SidecarEdgeClient, request: str, size: int) -> str:
    """The code of the error that ends a producer whose other side is gone."""
    try:
        while True:
            await client.put(request, EDGE, rows(some_bytes(size), start=99))
    except OmniError as error:
        return error.code


async def take_until_told(client: SidecarEdgeClient) -> str:
    async for event in client.events():
        if not isinstance(event, ChunkReceived):
            return event.code
    raise AssertionError("events ended")


async def another_stream(up: SidecarEdgeClient, down: SidecarEdgeClient, request: str) -> None:
    await down.open(request, producer(up, "bystander"))
    await up.put(request, EDGE, rows(some_bytes(400_000, 3), finished=True))
    assert (await a_chunk(down)).payload.tensors["rows"].tobytes() == some_bytes(400_000, 3).tobytes()


async def run_case(site: Site, victim: str, end: str, after: int, connector: str) -> None:
    if end == "slow":
        await run_slow_case(site, victim, after, connector)
        return
    size = SMALL if connector in LINES else LARGE
    async with pods(site, connector) as (first, second), AsyncExitStack() as stack:
        bystander = await stack.enter_async_context(first.engine("bystander"))
        watcher = await stack.enter_async_context(second.engine("watcher"))
        await another_stream(bystander, watcher, "before")
        hit: Engine | Pod
        if victim == "producer":
            down = await stack.enter_async_context(second.engine("talker-0", LIMITS))
            hit = await first.engine_process("line" if connector in LINES else "producer", "r", after)
            assert hit.producer is not None
            await down.open("r", hit.producer)
            for n in range(after):
                assert (await a_chunk(down)).seq == n
            told = take_until_told(down)
        elif victim == "consumer":
            up = await stack.enter_async_context(first.engine("thinker-0", LIMITS))
            for n in range(after if connector not in LINES else min(after, 1)):
                await up.put("r", EDGE, rows(some_bytes(size, n), start=n))
            consuming = asyncio.create_task(second.engine_process("consumer", "r", after, producer(up)))
            if connector in LINES and after > 1:
                await until(lambda: has_line(up, "r"), 60)
                for n in range(1, after):
                    await up.put("r", EDGE, rows(some_bytes(size, n), start=n))
            hit = await consuming
            told = put_until_told(up, "r", size)
        else:
            up = await stack.enter_async_context(first.engine("thinker-0", LIMITS))
            down = await stack.enter_async_context(second.engine("talker-0", LIMITS))
            await down.open("r", producer(up))
            for n in range(after):
                await up.put("r", EDGE, rows(some_bytes(size, n), start=n))
                assert (await a_chunk(down)).seq == n
                if connector in LINES:
                    await until(lambda: has_line(up, "r"))
            hit = first if victim == "producer's sidecar" else second
            told = take_until_told(down)
        hit.process.send_signal(SIGNALS[end])
        if end == "exception" and isinstance(hit, Pod):  # it goes on, without the engine whose frame it was
            await asyncio.gather(*(engine.health() for engine in (up, down)))
        code = await asyncio.wait_for(told, TOLD_SECONDS)
        assert code in ("UpstreamLost", "StreamClosed", "DeadlineExceeded")
        survivors = {id(pod): pod for pod in (first, second) if pod is not hit or end == "exception"}
        if len(survivors) == len({id(first), id(second)}):
            await another_stream(bystander, watcher, "after")
        if end != "exception":
            with contextlib.suppress(ProcessLookupError):
                hit.process.kill()
        if victim in ("producer's sidecar", "consumer's sidecar"):
            await put_until_told_or_done(up)
        if victim != "producer":
            await up.abort("r")
        if victim != "consumer":
            await down.abort("r")
        for pod in survivors.values():
            await pod.nothing_left()
        assert list(site.shm.iterdir()) == []


async def run_slow_case(site: Site, victim: str, after: int, connector: str) -> None:
    """Who has a tenth of the time holds the stream up, within the others' deadlines: it comes whole, and nothing is left."""
    size = SMALL if connector in LINES else LARGE
    limits = ClientLimits(put_deadline_s=TOLD_SECONDS, chunk_deadline_s=TOLD_SECONDS)
    async with pods(site, connector) as (first, second), AsyncExitStack() as stack:
        if victim == "producer":
            down = await stack.enter_async_context(second.engine("talker-0", limits))
            slow = await first.engine_process("steady", "r", after, size=size)
            assert slow.producer is not None and slow.process.stdin is not None
            await down.open("r", slow.producer)
            with slowed(slow.process):
                slow.process.stdin.write(b"go\n")
                await whole(down, size)
        elif victim == "consumer":
            up = await stack.enter_async_context(first.engine("thinker-0", limits))
            feeding = asyncio.create_task(feed(up, size))
            slow = await second.engine_process("reader", "r", after, producer(up), size=size)
            assert slow.process.stdout is not None
            with slowed(slow.process):
                said = await asyncio.wait_for(slow.process.stdout.readline(), 2 * TOLD_SECONDS)
                assert said == b"took %d\n" % FULL
                await feeding
            slow.process.kill()
        else:
            up = await stack.enter_async_context(first.engine("thinker-0", limits))
            down = await stack.enter_async_context(second.engine("talker-0", limits))
            await down.open("r", producer(up))
            with slowed((first if victim == "producer's sidecar" else second).process):
                feeding = asyncio.create_task(feed(up, size))
                await whole(down, size)
                await feeding
        gc.collect()
        for pod in {id(pod): pod for pod in (first, second)}.values():
            await pod.nothing_left()
        assert list(site.shm.iterdir()) == []


async def feed(up: SidecarEdgeClient, size: int) -> None:
    for n in range(FULL):
        await up.put("r", EDGE, rows(some_bytes(size, n), start=n, finished=n == FULL - 1))


async def whole(down: SidecarEdgeClient, size: int) -> None:
    for n in range(FULL):
        chunk = await a_chunk(down, 2 * TOLD_SECONDS)
        assert (chunk.seq, chunk.payload.tensors["rows"].tobytes()) == (n, some_bytes(size, n).tobytes())
        del chunk


@contextlib.contextmanager
def slowed(process: asyncio.subprocess.Process) -> Iterator[None]:
    """It runs for a tenth of the time, a moment at once."""

    async def pulse() -> None:
        while True:
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(0.09)
            process.send_signal(signal.SIGCONT)
            await asyncio.sleep(0.01)

    pulsing = asyncio.create_task(pulse())
    try:
        yield
    finally:
        assert not pulsing.done()
        pulsing.cancel()
        process.send_signal(signal.SIGCONT)


async def put_until_told_or_done(up: SidecarEdgeClient) -> None:
    with contextlib.suppress(OmniError):
        await up.put("r", EDGE, rows(some_bytes(10), start=100))


def name(case: tuple[str, str, int, str]) -> str:
    return "-".join(str(part).replace(" ", "_") for part in case)


@pytest.mark.parametrize("case", SLICE, ids=name)
async def test_nothing_is_left(site: Site, case: tuple[str, str, int, str]) -> None:
    await run_case(site, *case)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", WHOLE, ids=name)
async def test_nothing_is_left_in_any_case(site: Site, case: tuple[str, str, int, str]) -> None:
    await run_case(site, *case)
