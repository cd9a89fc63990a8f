"""Attaching to a sidecar that is not well: what comes at once with its answer, what breaks at once, what stays away."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from omni_runtime.connectors import ipc, wire
from omni_runtime.connectors.client import ClientLimits, SidecarEdgeClient
from omni_runtime.connectors.ipc import SOCKET_NAME
from omni_runtime.errors import DeadlineExceeded, UpstreamLost
from tests.unit.connectors.kit import EDGE, MIB, Site, producer, rows, some_bytes, until

Then = Callable[[socket.socket], Awaitable[None]]


@asynccontextmanager
async def a_false_sidecar(folder: Path, after: Then) -> AsyncIterator[list[socket.socket]]:
    """Attaches whoever comes and then does `after`; yields the connections so far."""
    os.mkdir(folder)
    taken: list[socket.socket] = []
    arena = os.memfd_create("arena")
    os.ftruncate(arena, MIB)
    line, writing = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as listener:
        listener.bind(str(folder / SOCKET_NAME))
        listener.listen()

        async def serve() -> None:
            loop = asyncio.get_running_loop()
            while True:
                sock, _ = await loop.sock_accept(listener)
                taken.append(sock)
                await loop.sock_recv(sock, 4096)
                answer = ipc.frame(wire.Attached(1, MIB, "tcp://127.0.0.1:1", "pod-a"))[0]
                # In one packet with what follows, as a busy sidecar's answer may arrive.
                socket.send_fds(sock, [answer, ipc.frame(wire.Squeeze())[0]], [arena, line.fileno()])
                await after(sock)

        serving = asyncio.create_task(serve())
        try:
            yield taken
        finally:
            serving.cancel()
            for sock in taken:
                sock.close()
            os.close(arena)
            line.close()
            writing.close()


async def answer_ping(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    assert await loop.sock_recv(sock, 4096) == ipc.frame(wire.Ping())[0]
    await loop.sock_sendall(sock, ipc.frame(wire.Pong())[0])


async def hang_up(sock: socket.socket) -> None:
    sock.close()


async def test_what_comes_right_behind_the_answer_is_not_lost_and_breaks_nothing(site: Site) -> None:
    async with a_false_sidecar(site.root / "pod-a", answer_ping) as taken:
        client = SidecarEdgeClient(site.root / "pod-a", site.plan, "stage", "thinker-0")
        await client.connect(20)
        assert len(taken) == 1, "the first attachment holds"
        await client.close()


async def test_a_link_that_breaks_at_once_is_not_an_attachment(site: Site) -> None:
    """R35: it is tried again at a pace that a sidecar survives, and `connect` says why it did not work."""
    async with a_false_sidecar(site.root / "pod-a", hang_up) as taken:
        client = SidecarEdgeClient(site.root / "pod-a", site.plan, "stage", "thinker-0")
        with pytest.raises(DeadlineExceeded, match="connection lost"):
            await client.connect(0.7)
        assert "connection lost" in str(client.missing)
        assert 1 <= len(taken) <= 7, "pauses of 0.05, 0.1, 0.2 and 0.5 s"
        await client.close()


async def test_a_stream_waits_seconds_for_a_sidecar_and_not_a_minute(site: Site) -> None:
    limits = ClientLimits(attach_wait_s=0.2)
    async with site.sidecar() as host:
        client = SidecarEdgeClient(host.options.ipc_dir, site.plan, "stage", "thinker-0", limits)
        await client.connect(20)
        upstream = producer(client)
    await until(lambda: client.missing is not None)
    with pytest.raises(UpstreamLost, match="no connector sidecar"):
        await client.put("r", EDGE, rows(some_bytes(10)))
    with pytest.raises(UpstreamLost, match="no connector sidecar"):
        await client.open("r", upstream)
    async with site.sidecar():
        await client.connect(20)
        await client.put("s", EDGE, rows(some_bytes(10)))
    await client.close()
