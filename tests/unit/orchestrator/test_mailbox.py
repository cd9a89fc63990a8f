"""ZeroMQ in the loop without futures: nothing is lost, reordered or overlooked, whatever is sent meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq

from omni_runtime.protocol.channels import Channels, bound_port, generate_keys
from omni_runtime.protocol.mailbox import BURST, Mailbox
from tests.unit.orchestrator.conftest import eventually


@pytest.fixture
async def channels(tmp_path: Path) -> AsyncIterator[Channels]:
    async with Channels(generate_keys(tmp_path / "curve")) as channels:
        yield channels


async def test_every_message_once_and_in_order_while_both_sides_send(channels: Channels) -> None:
    """The descriptor announces a change once; a send must not use that announcement up."""
    count = 20 * BURST
    router = channels.serve(zmq.ROUTER, "tcp://127.0.0.1:0")
    heard: list[int] = []
    echoed: list[int] = []

    def echo(frames: list[bytes]) -> None:
        heard.append(int(frames[1]))
        server.send((frames[0], frames[1]))

    server = Mailbox(router, echo)
    dealer = channels.dial(zmq.DEALER, f"tcp://127.0.0.1:{bound_port(router)}")
    client = Mailbox(dealer, lambda frames: echoed.append(int(frames[0])))
    for number in range(count):
        client.send((b"%d" % number,))
        if number % 97 == 0:
            await asyncio.sleep(0)
    await eventually(lambda: len(echoed) == count)
    assert heard == echoed == list(range(count))
    client.close()
    server.close()


async def test_a_burst_leaves_the_loop_to_others(channels: Channels) -> None:
    near, far = channels.plain(zmq.PAIR), channels.plain(zmq.PAIR)
    near.bind("inproc://burst")
    far.connect("inproc://burst")
    for _ in range(8 * BURST):
        await far.send(b"x")  # inproc: it has arrived when this returns
    taken: list[bytes] = []
    seen_by_others: list[int] = []

    def take(frames: list[bytes]) -> None:
        if not taken:
            asyncio.get_running_loop().call_soon(lambda: seen_by_others.append(len(taken)))
        taken.extend(frames)

    mailbox = Mailbox(near, take)
    await eventually(lambda: len(taken) == 8 * BURST)
    assert seen_by_others[0] <= 2 * BURST  # the wake-up and the look that was planned anyway
    mailbox.close()


async def test_a_message_that_cannot_be_handled_does_not_stop_the_others(channels: Channels) -> None:
    router = channels.serve(zmq.ROUTER, "tcp://127.0.0.1:0")
    taken: list[bytes] = []

    def take(frames: list[bytes]) -> None:
        if frames[1] == b"bad":
            raise ValueError("bad")
        taken.append(frames[1])

    mailbox = Mailbox(router, take)
    dealer = channels.dial(zmq.DEALER, f"tcp://127.0.0.1:{bound_port(router)}")
    for text in (b"one", b"bad", b"two"):
        await dealer.send(text)
    await eventually(lambda: taken == [b"one", b"two"])
    mailbox.close()
    await dealer.send(b"three")
    with pytest.raises(TimeoutError):
        await eventually(lambda: len(taken) == 3, seconds=0.2)
