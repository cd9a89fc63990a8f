"""Real processes that are killed, paused and restarted; what they leave behind is nothing (R11, R12)."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import time

import msgspec
import pytest

from omni_runtime.connectors.api import EdgeFailed
from omni_runtime.connectors.ipc import SOCKET_NAME
from omni_runtime.errors import StreamClosed, UpstreamLost
from tests.unit.connectors.kit import (
    EDGE,
    MIB,
    MODES,
    Site,
    a_chunk,
    a_failure,
    producer,
    rows,
    some_bytes,
    take,
    until,
)
from tests.unit.connectors.pods import ENVIRONMENT, Pod, a_pod, start_sidecar, two_pods


@MODES
async def test_a_killed_producer_is_told_to_the_consumer(site: Site, mode: str) -> None:
    async with two_pods(site, mode) as (first, second), second.engine("talker-0") as down:
        up = await first.engine_process("producer", "r", 3)
        assert up.producer is not None
        await down.open("r", up.producer)
        got = await take(down, 3)
        up.process.kill()
        began = time.monotonic()
        failed = await a_failure(down)
        assert failed.code == "UpstreamLost"
        assert time.monotonic() - began < 6, "told by the kernel or the transport, not by a missed heartbeat"
        assert got[2].payload.tensors["rows"].tobytes() == some_bytes(200_000, 2).tobytes()  # type: ignore[union-attr]
        del got
        await first.nothing_left()
        await second.nothing_left()


@MODES
async def test_a_killed_consumer_frees_what_it_held(site: Site, mode: str) -> None:
    async with two_pods(site, mode) as (first, second), first.engine("thinker-0") as up:
        for n in range(3):
            await up.put("r", EDGE, rows(some_bytes(200_000, n), start=n))
        down = await second.engine_process("consumer", "r", 3, producer(up))
        assert await second.gauge("omni:connector_arena_used_bytes") == 600_000
        down.process.kill()
        with pytest.raises(StreamClosed, match="gone"):
            async with asyncio.timeout(40):
                while True:
                    await up.put("r", EDGE, rows(some_bytes(100), start=9))
        await first.nothing_left()
        await second.nothing_left()


async def test_a_paused_consumer_keeps_its_bytes(site: Site) -> None:
    """Its slabs are not given to another request, however long it sleeps."""
    async with a_pod(site) as pod, pod.engine("thinker-0") as up, pod.engine("talker-0") as other:
        await up.put("r", EDGE, rows(some_bytes(200_000)))
        down = await pod.engine_process("consumer", "r", 1, producer(up))
        down.process.send_signal(signal.SIGSTOP)
        for n in range(30):
            await other.open(f"s{n}", producer(up))
            await up.put(f"s{n}", EDGE, rows(some_bytes(900_000), finished=True))
            await a_chunk(other)
        assert await pod.gauge("omni:connector_arena_used_bytes") >= 200_000
        down.process.kill()
        await up.cleanup("r")
        await pod.nothing_left()


async def test_a_killed_sidecar_fails_its_streams_and_is_found_again(site: Site) -> None:
    pod = await start_sidecar(site, "pod-a")
    async with pod.engine("thinker-0") as up, pod.engine("talker-0") as down:
        await down.open("r", producer(up))
        await up.put("r", EDGE, rows(some_bytes(200_000)))
        kept = await a_chunk(down)
        pod.process.kill()
        await pod.process.wait()
        failed = await a_failure(down)
        assert (failed.code, "sidecar is gone" in failed.message) == ("UpstreamLost", True)
        with pytest.raises(UpstreamLost, match="sidecar is gone"):
            await up.put("r", EDGE, rows(some_bytes(10), start=1))
        assert kept.payload.tensors["rows"].tobytes() == some_bytes(200_000).tobytes(), "its bytes stay readable"
        async with a_pod(site, "pod-a") as again:
            await up.connect(10)
            await down.connect(10)
            await down.open("s", producer(up))
            await up.put("s", EDGE, rows(some_bytes(200_000, 7), finished=True))
            assert (await a_chunk(down)).payload.tensors["rows"].tobytes() == some_bytes(200_000, 7).tobytes()
            await again.until_gauge("omni:connector_arena_used_bytes", 0)
        assert list(site.shm.iterdir()) == []


@pytest.mark.parametrize("victim", ["producer's", "consumer's"])
async def test_a_killed_sidecar_of_one_pod(site: Site, victim: str) -> None:
    async with two_pods(site, "two pods") as (first, second):
        async with first.engine("thinker-0") as up, second.engine("talker-0") as down:
            await down.open("r", producer(up))
            await up.put("r", EDGE, rows(some_bytes(200_000)))
            await a_chunk(down)
            (first if victim == "producer's" else second).process.kill()
            assert (await a_failure(down)).code == "UpstreamLost"
            if victim == "consumer's":
                with pytest.raises(StreamClosed, match="gone"):
                    async with asyncio.timeout(40):
                        while True:
                            await up.put("r", EDGE, rows(some_bytes(100), start=9))
                            await asyncio.sleep(0.01)
            await (second if victim == "producer's" else first).nothing_left()


async def test_sigterm_drains_and_leaves_nothing(site: Site) -> None:
    """The sidecar outlives its engines: what they finished is delivered first."""
    async with two_pods(site, "two pods") as (first, second), second.engine("talker-0") as down:
        async with first.engine("thinker-0") as up:
            upstream = producer(up)
            await up.put("r", EDGE, rows(some_bytes(3 * MIB), finished=True))
            first.process.terminate()
            async with asyncio.timeout(30):
                while (await first.get("/ready")).status_code != 503:  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.01)
            assert (await first.get("/livez")).status_code == 200
        await down.open("r", upstream)
        chunk = await a_chunk(down)
        assert chunk.payload.tensors["rows"].tobytes() == some_bytes(3 * MIB).tobytes()
        assert await asyncio.wait_for(first.process.wait(), 30) == 0
        assert not (first.ipc_dir / SOCKET_NAME).exists()
        assert list(site.shm.iterdir()) == []


async def test_a_drain_ends_at_its_deadline(site: Site) -> None:
    async with a_pod(site, grace_s=0.5) as pod, pod.engine("thinker-0"):
        pod.process.terminate()
        assert await asyncio.wait_for(pod.process.wait(), 30) == 0


async def test_it_is_small(site: Site) -> None:
    async with a_pod(site) as pod, pod.engine("thinker-0") as up, pod.engine("talker-0") as down:
        await down.open("r", producer(up))
        for n in range(50):
            await up.put("r", EDGE, rows(some_bytes(1000), start=n, finished=n == 49))
            assert not isinstance((await take(down, 1))[0], EdgeFailed)
        maps = pod.proc("maps")
        assert pod.resident_kb < 60 * 1024
        assert "torch" not in maps
        assert "numpy" not in maps


@pytest.mark.parametrize("connector", ["TCP", "Mooncake"])
async def test_it_is_small_between_two_pods(site: Site, connector: str) -> None:
    """Mooncake's engine included, with what it has brought over."""
    site.use(connector)
    async with two_pods(site, connector) as (a, b), a.engine("thinker-0") as up, b.engine("talker-0") as down:
        await down.open("r", producer(up))
        for n in range(30):
            await up.put("r", EDGE, rows(some_bytes(600_000), start=n, finished=n == 29))
            assert not isinstance((await take(down, 1))[0], EdgeFailed)
        assert ("engine.so" in a.proc("maps")) == (connector == "Mooncake")
        # A second after the start, what that alone needed leaves.
        await until(lambda: a.resident_kb < 60 * 1024 and b.resident_kb < 60 * 1024)


@pytest.mark.parametrize("connector", ["TCP", "Mooncake"])
async def test_its_image_has_all_that_it_imports(site: Site, connector: str) -> None:
    """From start to drain; whatever else this machine has is refused, so that a new import fails here and not in a pod."""
    site.use(connector)
    async with two_pods(site, connector, module="tests.unit.connectors.image_sidecar") as (a, b):
        async with a.engine("thinker-0") as up, b.engine("talker-0") as down:
            await down.open("r", producer(up))
            await up.put("r", EDGE, rows(some_bytes(600_000), finished=True))
            assert (await a_chunk(down)).payload.tensors["rows"].tobytes() == some_bytes(600_000).tobytes()
            assert ("engine.so" in a.proc("maps")) == (connector == "Mooncake")
            assert (await a.get("/metrics")).status_code == 200
        for pod in (a, b):
            pod.process.terminate()
            assert await asyncio.wait_for(pod.process.wait(), 30) == 0


async def strangers(pod: Pod, count: int) -> None:
    """`count` connections that begin a handshake and never end it, some hundred at a time."""
    port = int(pod.proc("cmdline").split("--data-port\0")[1].split("\0")[0])
    sockets: list[socket.socket] = []
    loop = asyncio.get_running_loop()
    for n in range(count):
        sock = socket.socket()
        sock.setblocking(False)
        await loop.sock_connect(sock, ("127.0.0.1", port))
        with contextlib.suppress(ConnectionError):
            await loop.sock_sendall(sock, b"omni-edge"[: 1 + n % 9])
        sockets.append(sock)
        if len(sockets) == 400:
            for old in sockets[:300]:
                old.close()
            del sockets[:300]
    for sock in sockets:
        sock.close()


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.timeout(300)])])
async def test_strangers_cost_bounded_memory_and_no_outage(site: Site, count: int) -> None:
    async with two_pods(site, "two pods") as (first, second):
        async with first.engine("thinker-0") as up, second.engine("talker-0") as down:
            await down.open("r", producer(up))
            await up.put("r", EDGE, rows(some_bytes(1000)))
            await a_chunk(down)
            before = first.resident_kb
            knocking = asyncio.create_task(strangers(first, count))
            for n in range(1, 21):
                await up.put("r", EDGE, rows(some_bytes(1000, n), start=n, finished=n == 20))
                assert (await a_chunk(down)).seq == n, "a stream that is open goes on"
            await knocking
            assert first.resident_kb - before < 16 * 1024
            await down.open("s", producer(up))
            await up.put("s", EDGE, rows(some_bytes(9), finished=True))
            assert (await a_chunk(down)).request == "s"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("--arena-bytes", "1000"), "too small"),
        (("--arena-bytes", str(1 << 60)), "does not fit into"),
        (("--curve", "/nonexistent"), "CURVE key"),
        (("--plan", "/nonexistent"), "No such file"),
    ],
)
async def test_it_says_why_it_cannot_start(site: Site, change: tuple[str, str], says: str) -> None:
    flags = {
        "--plan": str(site.root / "plan.json"),
        "--curve": str(site.root / "curve"),
        "--ipc-dir": str(site.root / "pod"),
        "--shm-dir": str(site.shm),
        "--arena-bytes": str(MIB),
        "--advertise-host": "127.0.0.1",
        "--domain": "d",
        "--data-port": "0",
        "--http-port": "0",
        **dict([change]),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "omni_runtime.connectors.sidecar"),
        *(word for pair in flags.items() for word in pair),
        stderr=asyncio.subprocess.PIPE,
        env=ENVIRONMENT,
    )
    _, error = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 1
    line = msgspec.json.decode(error.splitlines()[-1])
    assert line["event"] == "sidecar.cannot_start"
    assert says in line["reason"]
