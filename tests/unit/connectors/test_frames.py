"""Frames on the unix socket: whole and in order, though some leave at once and others at the end of a turn of the loop."""

from __future__ import annotations

import asyncio
import random
import socket

import pytest

from omni_runtime import eventloop
from omni_runtime.connectors import wire
from omni_runtime.connectors.ipc import FrameChannel

COUNT = 3_000


async def exchange(seed: int) -> None:
    """A writer with a small socket buffer, a reader that rests now and then."""
    dice = random.Random(seed)
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for sock in (here, there):
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)
    loop = asyncio.get_running_loop()
    got: list[tuple[int, int]] = []
    whole = asyncio.Event()

    def take(header: bytes, body: bytes) -> None:
        message = wire.decode_from_engine(header)
        assert isinstance(message, wire.Bind)
        assert body == bytes([message.stream % 251]) * len(body)
        got.append((message.stream, len(body)))
        if len(got) == COUNT:
            whole.set()

    lost: list[str] = []
    writer, reader = FrameChannel(lambda *_: None, lost.append), FrameChannel(take, lost.append)
    await loop.create_unix_connection(lambda: writer, sock=here)
    transport, _ = await loop.create_unix_connection(lambda: reader, sock=there)
    sent = []
    transport.pause_reading()  # so that the socket takes a part of a frame, sooner or later
    for n in range(COUNT):
        size = dice.choice((0, 0, 10, 2_000, 30_000, 60_000)) if n > 10 else 20_000
        if n <= 10:
            await asyncio.sleep(0)
        elif n == 11:
            transport.resume_reading()
        writer.send(wire.Bind(n, "edge", "request"), bytes([n % 251]) * size)
        sent.append((n, size))
        if dice.random() < 0.3:
            await asyncio.sleep(0)
        if dice.random() < 0.02:
            transport.pause_reading()
            loop.call_later(0.002, transport.resume_reading)
        await writer.writable()
    await asyncio.wait_for(whole.wait(), 60)
    assert got == sent
    assert not lost
    writer.close("over")
    reader.close("over")


@pytest.mark.parametrize("own", [True, False], ids=["runtime's loop", "asyncio's loop"])
def test_frames_keep_their_order_whatever_the_socket_takes(own: bool) -> None:
    """R18."""
    with asyncio.Runner(loop_factory=eventloop.new_loop if own else asyncio.new_event_loop) as runner:
        runner.run(exchange(1))
