"""How a stage replica and the orchestrators find each other: the replica dials every address of the entry's headless
Service, says Hello, and heartbeats. Start order never matters, and an orchestrator that restarts is found again.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass

import msgspec
import zmq
import zmq.asyncio

from omni_runtime.logs import get_logger
from omni_runtime.protocol import control
from omni_runtime.protocol.channels import Channels
from omni_runtime.protocol.mailbox import Mailbox

log = get_logger(__name__)

RESOLVE_SECONDS = 2.0
HELLO_SECONDS = 1.0  # until Welcome
REFRESH_SECONDS = 5.0  # Hello again after Welcome: an orchestrator that had dropped us takes us back (R35)
SILENCE_SECONDS = 15.0  # without a word the orchestrator is taken for gone

FAREWELL_MS = 500  # for what was said last to leave a closing socket

Now = Callable[[], float]
Resolve = Callable[[Iterable[str], int], Awaitable[frozenset[str]]]


async def resolve_endpoints(hosts: Iterable[str], port: int) -> frozenset[str]:
    """tcp://address:port of every address behind the names; a name that does not resolve (yet) has none."""
    loop = asyncio.get_running_loop()
    endpoints: set[str] = set()
    for host in hosts:
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError:
            continue
        for family, _, _, _, address in found:
            ip = f"[{address[0]}]" if family == socket.AF_INET6 else str(address[0])
            endpoints.add(f"tcp://{ip}:{port}")
    return frozenset(endpoints)


@dataclass(frozen=True, slots=True)
class RegistrationEvents:
    """What the worker wants to hear. Called in the event loop, must not block."""

    message: Callable[[control.OrchestratorMessage, str], None]  # message, orchestrator id
    lost: Callable[[str], None]  # an orchestrator that will not take any more output
    load: Callable[[str], control.Heartbeat]  # for one orchestrator


class Link:
    """One orchestrator address: a DEALER, its admission, its last sign of life."""

    def __init__(self, endpoint: str, hello: control.Hello, channels: Channels, events: RegistrationEvents) -> None:
        self.endpoint = endpoint
        self.orchestrator: str | None = None  # set by Welcome
        self._hello = hello
        self._channels = channels
        self._events = events
        self._socket: zmq.asyncio.Socket | None = None
        self._mailbox: Mailbox | None = None
        self._heartbeat_seconds = HELLO_SECONDS
        self._heard_at = 0.0
        self._refusal = ""
        self._pinged = 0
        self._leaving = False
        self._held: list[control.StageMessage] | None = None  # what is to leave together
        self._task = asyncio.create_task(self._run(), name=f"link {endpoint}")

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._forget()
        self._close_socket()

    def send(self, message: control.StageMessage) -> None:
        """Queue a message; the socket has no high-water mark, so this neither blocks nor drops while it is open."""
        if self._held is not None:
            self._held.append(message)
        elif self._mailbox is not None:
            self._mailbox.send((control.encode(message),))

    def hold(self) -> None:
        """Until `release`, messages wait for each other."""
        self._held = []

    def release(self) -> None:
        held, self._held = self._held, None
        if held and self._mailbox is not None:
            self._mailbox.send((control.encode_stage_messages(held),))

    def leave(self, reason: str) -> None:
        self._leaving = True
        self.send(control.Leaving(reason=reason))

    def _forget(self) -> None:
        if self.orchestrator is not None:
            gone, self.orchestrator = self.orchestrator, None
            self._events.lost(gone)

    def _close_socket(self) -> None:
        if self._mailbox is not None:
            self._mailbox.close()
            self._mailbox = None
        if self._socket is not None:
            self._channels.release(self._socket, linger_ms=FAREWELL_MS)  # the last messages end requests
            self._socket = None

    async def _run(self) -> None:
        now = asyncio.get_running_loop().time
        while True:
            self._socket = self._channels.dial(zmq.DEALER, self.endpoint)
            self._mailbox = Mailbox(self._socket, self._take)
            self._heard_at = now()
            beats = asyncio.create_task(self._beat(now))
            try:
                await self._until_silent(self._mailbox, now)
            finally:
                beats.cancel()
            if self.orchestrator is not None:
                log.warning("orchestrator.silent", endpoint=self.endpoint, seconds=SILENCE_SECONDS)
            self._forget()
            self._close_socket()

    async def _until_silent(self, mailbox: Mailbox, now: Now) -> None:
        """Until nothing was heard for SILENCE_SECONDS."""
        while True:
            mailbox.drain()  # if it was us who slept, the orchestrator's words wait in the socket
            left = self._heard_at + SILENCE_SECONDS - now()
            if left <= 0:
                return
            await asyncio.sleep(left)

    def _take(self, frames: list[bytes]) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        try:
            message = control.decode_orchestrator_message(frames[-1])
        except msgspec.MsgspecError as error:
            log.warning("orchestrator.undecodable", endpoint=self.endpoint, error=str(error))
            return
        self._handle(message)

    def _handle(self, message: control.OrchestratorMessage) -> None:
        match message:
            case control.Welcome(orchestrator=name, heartbeat_seconds=seconds):
                if self.orchestrator != name:
                    self._forget()  # another process at this address: what the old one asked for is over
                    self._pinged = 0
                    log.info("orchestrator.welcome", endpoint=self.endpoint, orchestrator=name)
                self.orchestrator, self._heartbeat_seconds, self._refusal = name, seconds, ""
                if self._leaving:
                    self.send(control.Leaving(reason="draining"))
            case control.Refused(reason=reason):
                self._forget()
                if reason != self._refusal:  # it is repeated with every Hello; one line is enough
                    log.error("orchestrator.refused", endpoint=self.endpoint, reason=reason)
                self._refusal = reason
            case control.Ping(number=number):
                self._pinged = number
            case _:
                if self.orchestrator is not None:
                    self._events.message(message, self.orchestrator)

    async def _beat(self, now: Now) -> None:
        next_hello = now()
        while True:
            if now() >= next_hello and not (self._leaving and self.orchestrator is not None):
                self.send(self._hello)
                next_hello = now() + (HELLO_SECONDS if self.orchestrator is None else REFRESH_SECONDS)
            if self.orchestrator is not None:
                self.send(msgspec.structs.replace(self._events.load(self.orchestrator), answers=self._pinged))
            await asyncio.sleep(self._heartbeat_seconds)


class Registration:
    """All links of a replica."""

    def __init__(
        self,
        *,
        hosts: tuple[str, ...],
        port: int,
        hello: control.Hello,
        channels: Channels,
        events: RegistrationEvents,
        resolve: Resolve = resolve_endpoints,
    ) -> None:
        self._hosts, self._port = hosts, port
        self._hello, self._channels, self._events, self._resolve = hello, channels, events, resolve
        self._links: dict[str, Link] = {}
        self._missing: dict[str, int] = {}

    @property
    def admitted(self) -> tuple[str, ...]:
        """Ids of the orchestrators that have said Welcome."""
        return tuple(link.orchestrator for link in self._links.values() if link.orchestrator is not None)

    def send(self, orchestrator: str, message: control.StageMessage) -> None:
        for link in self._links.values():
            if link.orchestrator == orchestrator:
                link.send(message)
                return

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What is sent inside leaves as one message to each orchestrator. Without a pause: nobody else may send."""
        links = tuple(self._links.values())
        for link in links:
            link.hold()
        try:
            yield
        finally:
            for link in links:
                link.release()

    def leave(self, reason: str) -> None:
        for link in self._links.values():
            link.leave(reason)

    async def run(self) -> None:
        """Follow the Service: dial new addresses, drop those that have been gone for three looks."""
        while True:
            wanted = await self._resolve(self._hosts, self._port)
            for endpoint in wanted:
                self._missing.pop(endpoint, None)
                if endpoint not in self._links:
                    self._links[endpoint] = Link(endpoint, self._hello, self._channels, self._events)
            for endpoint in [e for e in self._links if e not in wanted]:
                self._missing[endpoint] = self._missing.get(endpoint, 0) + 1
                if self._missing[endpoint] >= 3 and self._links[endpoint].orchestrator is None:
                    await self._links.pop(endpoint).close()
                    del self._missing[endpoint]
            await asyncio.sleep(RESOLVE_SECONDS)

    async def close(self) -> None:
        for link in self._links.values():
            await link.close()
        self._links.clear()
