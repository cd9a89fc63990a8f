"""The end of a replica, seen from a connection: whatever was led to it is answered, wherever it stands (T53)."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import pytest

from omni_webhooks import listener as tested
from omni_webhooks.certs.rotation import Served
from omni_webhooks.certs.state import Timing, next_step
from omni_webhooks.listener import Listener
from omni_webhooks.server import AdmissionServer
from tests.unit.webhooks.test_site import site

DEADLINE_SECONDS = 60


class Client:
    """TLS by hand, which can stop at each step. Connected at once, without a turn of the loop."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setblocking(False)
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        self._come, self._go = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._come, self._go)

    async def send(self, data: bytes = b"") -> None:
        if data:
            self._tls.write(data)
        await asyncio.get_running_loop().sock_sendall(self._socket, self._go.read())

    async def receive(self) -> None:
        if data := await asyncio.get_running_loop().sock_recv(self._socket, 65536):
            self._come.write(data)
        else:
            self._come.write_eof()

    async def say_hello(self) -> None:
        with pytest.raises(ssl.SSLWantReadError):
            self._tls.do_handshake()
        await self.send()

    async def shake_hands(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
                return await self.send()
            except ssl.SSLWantReadError:
                await self.send()
                await self.receive()

    async def answer(self) -> bytes:
        """The first line of it."""
        while True:
            try:
                return self._tls.read(65536).split(b"\r\n")[0]
            except ssl.SSLWantReadError:
                await self.receive()

    def end(self) -> None:
        self._socket.close()


REQUEST = b"POST /validate HTTP/1.1\r\nHost: webhooks\r\nContent-Length: 2\r\n\r\n{}"
ANSWER = b"HTTP/1.1 400 Bad Request"  # it asks nothing, and is answered so


@asynccontextmanager
async def listening(admission: AdmissionServer) -> AsyncIterator[tuple[Listener, int, asyncio.Event]]:
    """With its port, and what is set when a connection was taken."""
    came, served = asyncio.Event(), Served()
    made = next_step(None, ["127.0.0.1"], datetime.now(UTC), Timing(), installed_for=None)
    assert made is not None
    served.use(made.serving)

    def stir() -> None:
        came.set()
        admission.stir()

    listener = Listener(admission.app(), served.context, stir)
    await listener.start("127.0.0.1", 0)
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            yield listener, listener.addresses[0][1], came
    finally:
        await listener.close()


async def _refused(port: int) -> None:
    """Until nobody listens any more."""
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return
        writer.close()
        await asyncio.sleep(0.01)


async def in_the_kernel(client: Client, came: asyncio.Event) -> None:
    """The listener did not have a turn yet."""


async def accepted(client: Client, came: asyncio.Event) -> None:
    await came.wait()


async def hello_said(client: Client, came: asyncio.Event) -> None:
    await client.say_hello()


async def hello_answered(client: Client, came: asyncio.Event) -> None:
    await client.say_hello()
    await client.receive()


async def hands_shaken(client: Client, came: asyncio.Event) -> None:
    await client.shake_hands()


async def half_asked(client: Client, came: asyncio.Event) -> None:
    await client.shake_hands()
    await client.send(REQUEST[:30])


@pytest.mark.parametrize(
    "stands", [in_the_kernel, accepted, hello_said, hello_answered, hands_shaken, half_asked], ids=lambda s: s.__name__
)
async def test_a_connection_that_came_before_the_end_is_answered(
    stands: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tested, "LAST_SECONDS", float(DEADLINE_SECONDS))  # a loaded machine is no reason to fail here
    monkeypatch.setattr(tested, "TICKS", DEADLINE_SECONDS * 50)
    async with listening(AdmissionServer(site(), (), 75.0)) as (listener, port, came):
        client = Client(port)
        await stands(client, came)  # type: ignore[operator]
        closing = asyncio.create_task(listener.close())
        await _refused(port)
        await client.shake_hands()
        await client.send(REQUEST[30:] if stands is half_asked else REQUEST)
        assert await client.answer() == ANSWER
        client.end()
        await closing


async def test_who_asks_nothing_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested, "LAST_SECONDS", 0.2)
    async with listening(AdmissionServer(site(), (), 75.0)) as (listener, port, came):
        clients = [Client(port), Client(port)]
        await came.wait()
        await clients[0].shake_hands()
        await listener.close()  # within the deadline: neither the handshake's nor that of an idle connection
        for client in clients:
            client.end()


async def test_who_does_not_speak_tls_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested, "LAST_SECONDS", 10.0 * DEADLINE_SECONDS)  # it ends since nothing is open
    async with listening(AdmissionServer(site(), (), 75.0)) as (listener, port, _):
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(said)
            if said:
                await reader.read()
            writer.close()
        await listener.close()


@pytest.mark.parametrize("comes", ["meanwhile", "right after"])
async def test_a_process_that_stood_still_is_not_quiet(comes: str) -> None:
    """The second without a call went by, but nobody looked; and who leads calls here may have stood still, too."""
    admission = AdmissionServer(site(), (), 75.0)
    order: list[str] = []
    async with listening(admission) as (_, port, _), asyncio.timeout(DEADLINE_SECONDS):
        waiting = asyncio.create_task(admission.quiet(0.3))
        waiting.add_done_callback(lambda _: order.append("quiet"))
        await asyncio.sleep(0.1)
        clients = [Client(port)] if comes == "meanwhile" else []
        time.sleep(0.5)  # noqa: ASYNC251 - the process stands still
        if not clients:
            for _ in range(5):
                await asyncio.sleep(0)
            clients = [Client(port)]
        await clients[0].shake_hands()
        await clients[0].send(REQUEST)
        assert await clients[0].answer() == ANSWER
        order.append("answered")
        clients[0].end()
        await waiting
    assert order == ["answered", "quiet"]
