"""CURVE sockets for every process of the runtime: entry, sidecar, engine. Torch-free.

A pipeline has two key pairs. Whoever binds proves itself with the server pair and lets in only holders of the client
pair (ZAP allow-list); whoever dials pins the server's public key. The keys come as four files, so that a Kubernetes
Secret mount and a private temporary folder look the same.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import zmq
import zmq.asyncio
import zmq.auth.asyncio
from zmq.utils import z85

from omni_runtime.errors import OmniError
from omni_runtime.logs import get_logger

log = get_logger(__name__)

ZAP_DOMAIN = "omni"
MAX_MESSAGE_BYTES = 256 << 20  # a peer that announces more is cut off
TRANSPORT_HEARTBEAT_MS = 2_000  # ZMTP pings: a peer that vanished without FIN is noticed by the socket
TRANSPORT_TIMEOUT_MS = 10_000

KEY_FILES = ("server.key", "server.pub", "client.key", "client.pub")


class KeysMissing(OmniError):
    """The folder does not hold the pipeline's CURVE keys."""

    code = "KeysMissing"


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """Z85 text, 40 bytes each."""

    server_secret: bytes = field(repr=False)
    server_public: bytes
    client_secret: bytes = field(repr=False)
    client_public: bytes


def load_keys(directory: Path) -> CurveKeys:
    """Read the four key files. Raises KeysMissing, which names the file."""

    def read(name: str) -> bytes:
        path = directory / name
        try:
            value = path.read_bytes().strip()
        except OSError as error:
            raise KeysMissing(
                f"CURVE key {path} cannot be read ({error.strerror}); mount the pipeline's keys there"
            ) from error
        try:
            valid = len(value) == 40 and len(z85.decode(value)) == 32
        except (ValueError, KeyError, IndexError):
            valid = False
        if not valid:
            raise KeysMissing(f"CURVE key {path} is not 40 characters of Z85")
        return value

    return CurveKeys(*(read(name) for name in KEY_FILES))


def generate_keys(directory: Path) -> CurveKeys:
    """Write two new key pairs into `directory` (mode 0700, files 0600) and return them."""
    server_public, server_secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    values = (server_secret, server_public, client_secret, client_public)
    for name, value in zip(KEY_FILES, values, strict=True):
        descriptor = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(value)
    return CurveKeys(*values)


@dataclass(frozen=True, slots=True)
class _AllowList:
    """ZAP: only the pipeline's client key gets in; anybody else ends in the handshake."""

    client_public: bytes

    def callback(self, domain: str, key: bytes) -> bool:
        if key == self.client_public:
            return True
        log.warning("channel.refused", domain=domain, key=key.decode("ascii", "replace"))
        return False


class Channels:
    """The ZeroMQ context of a process, its ZAP handler and its sockets. Everything closes together, without linger.

    async with Channels(load_keys(path)) as channels:
        router = channels.serve(zmq.ROUTER, "tcp://0.0.0.0:5500")
        dealer = channels.dial(zmq.DEALER, "tcp://entry:5500")
    """

    def __init__(self, keys: CurveKeys) -> None:
        self._keys = keys
        self._context = zmq.asyncio.Context()
        self._authenticator: zmq.auth.asyncio.AsyncioAuthenticator | None = None
        self._sockets: list[zmq.asyncio.Socket] = []

    async def __aenter__(self) -> Channels:
        authenticator = zmq.auth.asyncio.AsyncioAuthenticator(self._context)
        authenticator.start()
        authenticator.configure_curve_callback(ZAP_DOMAIN, _AllowList(self._keys.client_public))
        self._authenticator = authenticator
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)
        self._sockets.clear()
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        self._context.destroy(linger=0)

    def serve(self, kind: int, endpoint: str, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> zmq.asyncio.Socket:
        """A bound socket that lets in only the pipeline's clients. Port 0 (`tcp://host:0`) picks a free one.

        A ROUTER reports a vanished peer (EHOSTUNREACH) instead of dropping what is sent to it.
        """
        if self._authenticator is None:
            raise RuntimeError("Channels.serve needs the ZAP handler: use `async with Channels(...)` first")
        socket = self._socket(kind, max_message_bytes)
        socket.curve_server = True
        socket.curve_secretkey = self._keys.server_secret
        socket.zap_domain = ZAP_DOMAIN.encode()
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.bind(endpoint)
        return socket

    def dial(self, kind: int, endpoint: str, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> zmq.asyncio.Socket:
        """A connecting socket that trusts only the pipeline's servers. It reconnects by itself."""
        socket = self._socket(kind, max_message_bytes)
        socket.curve_serverkey = self._keys.server_public
        socket.curve_publickey = self._keys.client_public
        socket.curve_secretkey = self._keys.client_secret
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2_000)
        socket.connect(endpoint)
        return socket

    def plain(self, kind: int) -> zmq.asyncio.Socket:
        """A socket without CURVE, for ipc:// inside a pod's private folder and inproc://."""
        return self._socket(kind)

    def release(self, socket: zmq.asyncio.Socket, linger_ms: int = 0) -> None:
        """Close one socket before the others. What it still has to send may take `linger_ms`, in the background."""
        if socket in self._sockets:
            self._sockets.remove(socket)
        socket.close(linger=linger_ms)

    def _socket(self, kind: int, max_message_bytes: int = MAX_MESSAGE_BYTES) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)  # bounded by what is admitted, not by silently dropping or blocking a loop
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.HEARTBEAT_IVL, TRANSPORT_HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, TRANSPORT_TIMEOUT_MS)
        self._sockets.append(socket)
        return socket


def bound_port(socket: zmq.asyncio.Socket) -> int:
    """The TCP port of a bound socket."""
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return int(endpoint.decode().rstrip("\0").rsplit(":", 1)[1])
