"""Sealed frames: whatever the network makes of them, they come as they were sent, or the connection ends."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from omni_runtime.connectors import wire
from omni_runtime.connectors.handshake import Dialler, HandshakeRefused, Listener, Secrets
from omni_runtime.connectors.secure import MAX_FRAME_BODY, Sealed, SecureChannel
from omni_runtime.protocol.channels import CurveKeys, generate_keys
from tests.unit.connectors.kit import until


def agree(keys: CurveKeys, others: CurveKeys | None = None) -> tuple[Secrets, Secrets]:
    dialler, listener = Dialler(keys), Listener(others or keys)
    confirm, ours = dialler.confirm(listener.answer(dialler.hello))
    return ours, listener.accept(confirm)


class End:
    """One end of a connection, and what came there."""

    def __init__(self, sock: socket.socket, secrets: Secrets) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.got: list[tuple[wire._Message, bytes]] = []
        self.lost: list[str] = []
        self.channel = SecureChannel(sock, secrets, self._on_frame, self.lost.append)
        self.channel.start()

    def _on_frame(self, header: bytes, body: Sealed) -> None:
        target = bytearray(len(body))
        body.open_into(memoryview(target))
        assert body.open() == target
        self.got.append((wire.decode_from_producer(header), bytes(target)))


@pytest.fixture
async def ends(tmp_path: Path) -> AsyncIterator[tuple[End, End]]:
    ours, theirs = agree(generate_keys(tmp_path))
    first, second = socket.socketpair()
    for sock in (first, second):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    pair = End(first, ours), End(second, theirs)
    yield pair
    for end in pair:
        end.channel.close("the test is over")


async def test_frames_of_any_size_arrive_in_order(ends: tuple[End, End]) -> None:
    dice = random.Random(1)
    sent: list[tuple[wire._Message, bytes]] = []
    for n in range(60):
        body = dice.randbytes(dice.choice((0, 1, 100, 70_000, MAX_FRAME_BODY)))
        await until(lambda body=body: not body or ends[0].channel.room)  # type: ignore[misc]
        message = wire.Fragment(n, n) if body else wire.Failed(n, "X", "m" * dice.randrange(2000))
        ends[0].channel.send(message, body)
        sent.append((message, body))
    await until(lambda: len(ends[1].got) == 60)
    assert ends[1].got == sent
    assert ends[0].lost == ends[1].lost == []


async def test_control_messages_never_wait_for_room_and_keep_their_place(ends: tuple[End, End]) -> None:
    told: list[int] = []
    ends[0].channel.on_room = lambda: told.append(len(ends[1].got))
    n = 0
    while ends[0].channel.room:
        ends[0].channel.send(wire.Fragment(n, 0), bytes(MAX_FRAME_BODY))
        n += 1
    for late in range(500):
        ends[0].channel.send(wire.Failed(n + late, "X", "m" * 2000))
    await until(lambda: len(ends[1].got) == n + 500)
    assert [message.stream for message, _ in ends[1].got] == list(range(n + 500))  # type: ignore[attr-defined]
    assert told, "whoever waits for room is told"
    assert ends[0].channel.room


async def test_a_peer_that_reads_nothing_is_given_up_before_memory_is(ends: tuple[End, End]) -> None:
    asyncio.get_running_loop().remove_reader(ends[1].sock)
    for n in range(40_000):
        ends[0].channel.send(wire.Failed(n, "X", "m" * 2000))
    await until(lambda: ends[0].lost == ["the other side reads nothing"])


async def test_a_pause_in_mid_frame_keeps_the_frame(ends: tuple[End, End]) -> None:
    """The janitor gives buffers of idle links back, but none that is in use."""
    ends[0].channel.send(wire.Fragment(1, 0), bytes(range(256)) * 2000)
    ends[1].channel._on_readable()
    assert not ends[1].got
    for _ in range(3):
        ends[1].channel.tick(ends[1].channel.heard + 60)
        ends[0].channel.tick(ends[0].channel.heard + 60)
        await asyncio.sleep(0)
    await until(lambda: len(ends[1].got) == 1)
    assert ends[1].got[0][1] == bytes(range(256)) * 2000
    ends[1].channel.tick(ends[1].channel.heard + 60)
    assert len(ends[1].channel._in) == 64 << 10


@pytest.mark.parametrize("mine", ["client", "server"])
def test_both_key_pairs_are_proven(tmp_path: Path, mine: str) -> None:
    right, wrong = generate_keys(tmp_path / "a"), generate_keys(tmp_path / "b")
    if mine == "client":  # knows the server's public key and the client's, but not the client's secret
        keys = CurveKeys(wrong.server_secret, right.server_public, wrong.client_secret, right.client_public)
        with pytest.raises(HandshakeRefused):
            agree(keys, right)
    else:
        keys = CurveKeys(wrong.server_secret, right.server_public, wrong.client_secret, right.client_public)
        with pytest.raises(HandshakeRefused):
            agree(right, keys)


def test_no_two_connections_share_keys(tmp_path: Path) -> None:
    keys = generate_keys(tmp_path)
    first, second = agree(keys), agree(keys)
    assert first[0].send.encrypt(bytes(12), b"x", None) == first[1].receive.encrypt(bytes(12), b"x", None)
    assert first[0].send.encrypt(bytes(12), b"x", None) != second[0].send.encrypt(bytes(12), b"x", None)
    assert first[0].send.encrypt(bytes(12), b"x", None) != first[0].receive.encrypt(bytes(12), b"x", None)
