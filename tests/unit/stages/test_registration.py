"""What a replica says at one moment travels as one message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from omni_runtime.deploy.plan import CONTRACT_VERSION
from omni_runtime.protocol import control
from omni_runtime.protocol.channels import Channels, bound_port, generate_keys
from omni_runtime.stages.registration import Registration, RegistrationEvents

HELLO = control.Hello("thinker", "r1", "rev", CONTRACT_VERSION, "tcp://127.0.0.1:1", "here", 4)
PATIENCE_SECONDS = 20.0


class Entry:
    """A socket that welcomes a replica and keeps what it says, message by message; heartbeats are left out."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self.socket = socket
        self.said: asyncio.Queue[tuple[control.StageMessage, ...]] = asyncio.Queue()

    async def serve(self) -> None:
        while True:
            peer, raw = await self.socket.recv_multipart()
            said = control.decode_stage_messages(raw)
            if isinstance(said[0], control.Hello):
                await self.socket.send_multipart([peer, control.encode(control.Welcome("o1", 30.0))])
            elif not isinstance(said[0], control.Heartbeat):
                self.said.put_nowait(said)

    async def next(self) -> tuple[control.StageMessage, ...]:
        return await asyncio.wait_for(self.said.get(), PATIENCE_SECONDS)


@pytest.fixture
async def channels(tmp_path: Path) -> AsyncIterator[Channels]:
    async with Channels(generate_keys(tmp_path / "curve")) as channels:
        yield channels


async def test_what_is_said_together_is_one_message_in_order(channels: Channels) -> None:
    entry = Entry(channels.serve(zmq.ROUTER, "tcp://127.0.0.1:0"))
    serving = asyncio.create_task(entry.serve())
    beat = control.Heartbeat(control.StageLoad())
    registration = Registration(
        hosts=("127.0.0.1",),
        port=bound_port(entry.socket),
        hello=HELLO,
        channels=channels,
        events=RegistrationEvents(message=lambda *_: None, lost=lambda _: None, load=lambda _: beat),
    )
    running = asyncio.create_task(registration.run())
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not registration.admitted:  # noqa: ASYNC110 - the registration has no event for it
            await asyncio.sleep(0.01)
    pieces = tuple(control.ClientText("r", f"word {n}") for n in range(3))
    with registration.together():
        for piece in pieces:
            registration.send("o1", piece)
    registration.send("o1", control.StageFinished("r", "stop"))
    with registration.together():
        pass
    assert await entry.next() == pieces
    assert await entry.next() == (control.StageFinished("r", "stop"),)
    assert entry.said.empty(), "nothing to say is no message"
    for task in (running, serving):
        task.cancel()
    await registration.close()
