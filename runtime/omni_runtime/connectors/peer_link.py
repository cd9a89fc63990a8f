"""One connection to a producer's sidecar, and the streams that go over it. What becomes of their bytes is in `links`."""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from omni_runtime.connectors import secure, wire
from omni_runtime.connectors.handshake import HandshakeRefused
from omni_runtime.connectors.hub import Hub
from omni_runtime.connectors.outbound import PING_SECONDS, SILENCE_SECONDS
from omni_runtime.connectors.secure import Sealed, SecureChannel
from omni_runtime.connectors.streams import Port
from omni_runtime.connectors.tensors import ProtocolError
from omni_runtime.connectors.wire import Put, Slab
from omni_runtime.protocol.channels import CurveKeys

CONNECT_SECONDS: Final = 10.0
_ENDPOINT = re.compile(r"tcp://(\[[0-9A-Fa-f:.%a-z]+\]|[A-Za-z0-9.-]{1,253}):([0-9]{1,5})")


@dataclass(slots=True)
class Incoming:
    """One stream from another sidecar to an engine here."""

    port: Port
    opened: wire.Open
    link: PeerLink
    put: Put | None = None  # the piece that is coming in
    slab: Slab | None = None
    got: int = 0  # bytes of it that are stored or forwarded
    unacknowledged: int = 0  # fragments of it
    began: float = 0.0
    spilling: bool = False
    fetching: bool = False  # a thread reads a piece out of the producer's arena
    finishing: bool = False  # the chunk that is coming in is the last one
    seq: int = -1
    pieces_out: int = 0  # of the chunk, as the engine counts them
    surplus: int = 0  # credits that the engine will grant for pieces which the producer never sent
    waiting: deque[tuple[Put | wire.Fragment, bytes]] = field(default_factory=deque)
    waiting_since: float = 0.0


class Owner(Protocol):
    """What a link needs of PeerLinks."""

    @property
    def hub(self) -> Hub: ...
    @property
    def keys(self) -> CurveKeys: ...
    def accept(self, stream: Incoming, message: Put | wire.Fragment, body: Sealed) -> None: ...
    def fetch(self, stream: Incoming, message: wire.Remote) -> None: ...
    def bound(self, stream: Incoming, producer: int) -> None: ...
    def fail(self, stream: Incoming, code: str, message: str) -> None: ...
    def drop_link(self, link: PeerLink, streams: list[Incoming], reason: str) -> None: ...


def parse_address(endpoint: str) -> tuple[str, int] | None:
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None or not 0 < int(match[2]) < 65536:
        return None
    return match[1].strip("[]"), int(match[2])


class PeerLink:
    """Connection to one producer's sidecar. It lives as long as that: after a loss a new link is made."""

    def __init__(self, owner: Owner, endpoint: str, host: str, port: int) -> None:
        self.endpoint = endpoint
        self.address = host, port
        self._owner = owner
        self._streams: dict[int, Incoming] = {}
        self._numbers: dict[Port, int] = {}
        self._born = self._pinged = time.monotonic()
        self._why_not = "no answer yet"
        self._channel: SecureChannel | None = None
        self._waiting: list[wire._Message] = []  # for the connection
        self._closed = False
        self._task = asyncio.get_running_loop().create_task(self._connect(host, port))

    def open(self, number: int, stream: Incoming) -> None:
        self._streams[number] = stream
        self._numbers[stream.port] = number
        message = stream.opened
        self._send(
            wire.Open(
                number,
                message.edge,
                message.request,
                message.producer,
                message.consumer,
                message.endpoint,
                message.domain,
                message.revision,
                message.contract_version,
                message.credits,
                self._owner.hub.can_fetch(message.edge),
                message.token,
            )
        )

    def send_for(self, stream: Incoming, build: Callable[[int], wire._Message]) -> None:
        number = self._numbers.get(stream.port)
        if number is not None:
            self._send(build(number))

    def forget(self, stream: Incoming) -> None:
        number = self._numbers.pop(stream.port, None)
        if number is not None:
            del self._streams[number]

    def number(self, stream: Incoming) -> int | None:
        """What the stream is called on this link; None once it is forgotten."""
        return self._numbers.get(stream.port)

    def acknowledge(self, number: int, fragments: int) -> None:
        if not self._closed:
            self._send(wire.Acknowledge(number, fragments))

    def answer(self, number: int, *, done: bool, later: bool, reason: str) -> None:
        if not self._closed:
            self._send(wire.Fetched(number, done, later, reason))

    def broken(self, stream: Incoming, error: ProtocolError) -> None:
        """One stream breaks the rules: it ends, the link goes on."""
        self.send_for(stream, lambda number: wire.Cancel(number, str(error)[:2000]))
        self._owner.fail(stream, "ProtocolError", f"{stream.opened.edge}: {error}")

    def _send(self, message: wire._Message) -> None:
        if self._channel is not None:
            self._channel.send(message)
        else:
            self._waiting.append(message)

    async def _connect(self, host: str, port: int) -> None:
        """Until it works or the time is up (`tick`): the other sidecar may start later than this one."""
        pause = 0.05
        while True:
            try:
                sock, secrets = await secure.dial(host, port, self._owner.keys)
            except HandshakeRefused as refused:
                self.close(f"{self.endpoint}: {refused}; both need the CURVE keys of one pipeline")
                return
            except (OSError, TimeoutError) as error:
                self._why_not = str(error) or type(error).__name__
                await asyncio.sleep(pause)
                pause = min(1.0, 2 * pause)
            else:
                break
        self._channel = SecureChannel(sock, secrets, self._on_frame, self._on_lost)
        self._channel.start()
        for message in (wire.Ping(), *self._waiting):
            self._channel.send(message)
        self._waiting.clear()

    def _on_lost(self, reason: str) -> None:
        self.close(f"{self.endpoint}: {reason}")

    def _on_frame(self, header: bytes, body: Sealed) -> None:
        message = wire.decode_from_producer(header)
        if isinstance(message, wire.Pong):
            return
        stream = self._streams.get(message.stream)
        if stream is None:
            if isinstance(message, wire.Remote):
                self._send(wire.Fetched(message.stream, True, True))
            return  # late: cancelled or finished here
        if isinstance(message, wire.Failed):
            self._owner.fail(stream, message.code, message.message)
            return
        if isinstance(message, wire.Bound):
            self._owner.bound(stream, message.session)
            return
        try:
            if isinstance(message, wire.Remote):
                self._owner.fetch(stream, message)
                return
            if isinstance(message, Put) and message.slab is not None:
                raise ProtocolError("a slab of another pod")
            self._owner.accept(stream, message, body)
        except ProtocolError as error:
            self.broken(stream, error)

    def tick(self) -> None:
        now, channel = time.monotonic(), self._channel
        if channel is None:
            if now - self._born > CONNECT_SECONDS:
                self.close(
                    f"no answer from the producer's sidecar at {self.endpoint} within {CONNECT_SECONDS:g} s"
                    f" ({self._why_not}): it is down, blocked by a network policy, or holds other CURVE keys"
                )
            return
        channel.tick(now)
        if now - channel.heard > SILENCE_SECONDS:
            self.close(f"nothing heard from {self.endpoint} for {SILENCE_SECONDS:g} s")
        elif now - self._pinged > PING_SECONDS:
            self._pinged = now
            self._send(wire.Ping())

    def close(self, reason: str) -> None:
        if self._closed:
            return
        self._closed = True
        if self._task is not asyncio.current_task():
            self._task.cancel()
        if self._channel is not None:
            self._channel.close(reason)
        self._owner.drop_link(self, list(self._streams.values()), reason)
