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
    router = channels.serve(zmq.ROUTER, "tcp://127.0.0.1:0")
    taken: list[bytes] = []
    seen_by_others: list[int] = []

    def take(frames: list[bytes]) -> None:
        if not taken:
            asyncio.get_running_loop().call_soon(lambda: seen_by_others.append(len(taken)))
        taken.append(frames[1])

    dealer = channels.dial(zmq.DEALER, f"tcp://127.0.0.1:{bound_port(router)}")
    await dealer.send(b"first")
    await router.recv_multipart()  # connected
    for _ in range(4 * BURST):
        await dealer.send(b"x")
    await asyncio.sleep(0.2)  # let them arrive: what is tested is how many are handed over at once
    mailbox = Mailbox(router, take)
    await eventually(lambda: len(taken) == 4 * BURST)
    assert seen_by_others == [BURST]
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
